#include "quern/core/tensor_view.h"

#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"

namespace quern {
namespace {

TEST(TensorViewTest, AddressesByStrides) {
  std::vector<int32_t> data(40);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<int32_t>(i);
  const TensorView<int32_t, 3> view(data.data(), {2, 3, 4}, {20, 6, 1});
  EXPECT_EQ(view.size(), 24);
  EXPECT_EQ(*view.At(0, 0, 0), 0);
  EXPECT_EQ(*view.At(1, 2, 3), 20 + 12 + 3);
  EXPECT_FALSE(view.dense());
  EXPECT_FALSE(view.empty());
  EXPECT_EQ(view.extent(1), 3);
  EXPECT_EQ(view.stride(0), 20);
  *view.At(1, 0, 0) = -1;
  EXPECT_EQ(data[20], -1);
}

TEST(TensorViewTest, RowsMayBePadded) {
  const float data[] = {1, 2, 0, 3, 4};
  const MatrixView<const float> m(data, {2, 2}, {3, 1});
  EXPECT_EQ(m.Row(1)[0], 3);
  EXPECT_EQ(m.Row(1)[1], 4);
}

TEST(TensorViewTest, DenseTensorsHaveRowMajorStrides) {
  float data[24];
  const auto t = DenseTensor(data, std::array<int64_t, 3>{2, 3, 4});
  EXPECT_EQ(t.stride(0), 12);
  EXPECT_EQ(t.stride(1), 4);
  EXPECT_EQ(t.stride(2), 1);
  EXPECT_TRUE(t.dense());
  EXPECT_TRUE(DenseMatrix(data, 4, 6).dense());
  EXPECT_TRUE(DenseVector(data, 24).dense());
  // The stride of an extent of 1 means nothing.
  EXPECT_TRUE((MatrixView<float>(data, {1, 6}, {99, 1}).dense()));
}

TEST(TensorViewTest, MayBeEmpty) {
  const MatrixView<float> none;
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_TRUE(DenseMatrix<float>(nullptr, 0, 7).empty());
  EXPECT_TRUE(DenseMatrix<float>(nullptr, 7, 0).empty());
}

TEST(TensorViewTest, BecomesReadOnlyButNotBack) {
  using Mutable = MatrixView<float>;
  using Const = MatrixView<const float>;
  static_assert(std::is_convertible_v<Mutable, Const>);
  static_assert(!std::is_convertible_v<Const, Mutable>);
  float data[6] = {};
  const Const view = DenseMatrix(data, 2, 3);
  EXPECT_EQ(view.data(), data);
  EXPECT_EQ(view.extent(1), 3);
}

TEST(AnyTensorViewTest, RemembersTypeShapeAndAccess) {
  BFloat16 data[12];
  const MatrixView<BFloat16> m(data, {2, 3}, {6, 1});
  const AnyTensorView any = m;
  EXPECT_EQ(any.dtype(), DType::kBF16);
  EXPECT_EQ(any.rank(), 2);
  EXPECT_EQ(any.extent(1), 3);
  EXPECT_EQ(any.stride(0), 6);
  EXPECT_TRUE(any.writable());
  EXPECT_EQ(any.mutable_data(), data);
  const auto back = any.As<BFloat16, 2>();
  EXPECT_EQ(back.data(), data);
  EXPECT_EQ(back.extents(), m.extents());
  EXPECT_EQ(back.strides(), m.strides());

  const AnyTensorView read_only = MatrixView<const BFloat16>(m);
  EXPECT_FALSE(read_only.writable());
  EXPECT_EQ(read_only.data(), data);
  EXPECT_EQ(read_only.mutable_data(), nullptr);
  EXPECT_EQ((read_only.As<const BFloat16, 2>().data()), data);
}

TEST(AnyTensorViewTest, IsMadeAtRunTimeToo) {
  int8_t data[10] = {};
  const AnyTensorView::Dims extents = {10}, strides = {1};
  const AnyTensorView writable(DType::kI8, data, 1, extents, strides);
  EXPECT_EQ(writable.mutable_data(), data);
  const AnyTensorView constant(DType::kI8, static_cast<const void*>(data), 1,
                               extents, strides);
  EXPECT_FALSE(constant.writable());
  EXPECT_EQ((constant.As<const int8_t, 1>().extent(0)), 10);
}

// What CheckInput and CheckOutput let pass.
TEST(AnyTensorViewTest, IsTypedWhereAStrideOrMemoryIsNotUsed) {
  float data[16] = {};
  // A column of a column-major matrix, and one element.
  const AnyTensorView column(DType::kF32, static_cast<void*>(data), 2, {4, 1},
                             {1, 4});
  EXPECT_EQ((column.As<float, 2>().strides()), (std::array<int64_t, 2>{1, 1}));
  EXPECT_EQ((column.As<const float, 2>().At(3, 0)), data + 3);
  const AnyTensorView one(DType::kF32, static_cast<void*>(data), 1, {1}, {2});
  EXPECT_EQ((one.As<float, 1>().stride(0)), 1);
  const AnyTensorView none(DType::kF32, static_cast<const void*>(data), 2,
                           {0, 4}, {4, 1});
  EXPECT_TRUE((none.As<float, 2>().empty()));
}

// Also where a view with more dimensions was in its place.
TEST(AnyTensorViewTest, HasZerosFromItsRankOn) {
  float data[24] = {};
  AnyTensorView view = DenseTensor<float, 3>(data, {2, 3, 4});
  const auto expect_zeros = [](const AnyTensorView& v) {
    for (int d = v.rank(); d < AnyTensorView::kMaxRank; ++d) {
      EXPECT_EQ(v.extent(d), 0) << d;
      EXPECT_EQ(v.stride(d), 0) << d;
    }
  };
  expect_zeros(view);
  view = DenseVector<const float>(data, 5);
  expect_zeros(view);
  view = AnyTensorView(DType::kF32, static_cast<const void*>(data), 2,
                       {2, 3, 7, 7, 7}, {3, 1, 7, 7, 7});
  expect_zeros(view);
  EXPECT_EQ(view.extent(1), 3);
  view = AnyTensorView();
  expect_zeros(view);
  EXPECT_EQ(view.rank(), 0);
  EXPECT_EQ(view.data(), nullptr);
  EXPECT_FALSE(view.writable());
}

// What lies behind the arrays of the view is not a dimension.
TEST(AnyTensorViewTest, HasNoDimensionBeyondItsLargestRank) {
  float data[4] = {};
  const AnyTensorView view(DType::kF32, static_cast<const void*>(data), 6,
                           {1, 1, 1, 1, 4}, {7, 7, 7, 7, 1});
  EXPECT_EQ(view.rank(), 6);
  for (const int d : {-1, 5, 6, 100}) {
    EXPECT_EQ(view.extent(d), -1) << d;
    EXPECT_EQ(view.stride(d), -1) << d;
  }
}

TEST(TensorViewDeathTest, ChecksWhatCreateProvedInDebugBuilds) {
  float data[6] = {};
  const auto m = DenseMatrix(data, 2, 3);
  (void)m;  // in release builds, where nothing below is compiled in
#ifndef NDEBUG
  EXPECT_DEATH((void)m.Row(2), "check failed");
  EXPECT_DEATH((void)m.At(0, 3), "check failed");
  EXPECT_DEATH(((void)AnyTensorView(m).As<int32_t, 2>()), "check failed");
  EXPECT_DEATH((MatrixView<float>(data, {2, 3}, {1, 2})), "check failed");
  const AnyTensorView read_only = MatrixView<const float>(m);
  EXPECT_DEATH(((void)read_only.As<float, 2>()), "check failed");
#else
  GTEST_SKIP() << "QUERN_DCHECK is off";
#endif
}

}  // namespace
}  // namespace quern
