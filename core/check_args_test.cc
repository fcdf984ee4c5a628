#include "quern/core/check_args.h"

#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

using View3 = TensorView<const int8_t, 3>;

std::set<const void*> Addresses(const View3& v) {
  std::set<const void*> addresses;
  for (int64_t i = 0; i < v.extent(0); ++i) {
    for (int64_t j = 0; j < v.extent(1); ++j) {
      for (int64_t k = 0; k < v.extent(2); ++k) addresses.insert(v.At(i, j, k));
    }
  }
  return addresses;
}

bool Share(const View3& a, const View3& b) {
  const std::set<const void*> in_a = Addresses(a);
  for (const void* address : Addresses(b)) {
    if (in_a.count(address) > 0) return true;
  }
  return false;
}

// Whether the rows of v have no holes.
bool Dense(const View3& v) {
  return v.extent(1) <= 1 || v.stride(1) == v.extent(2);
}

TEST(MayOverlapTest, NeverMissesASharedElementAndIsExactForColumnRanges) {
  std::vector<int8_t> memory(400);
  std::mt19937 random(20261121);
  const auto pick = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto view = [&](int64_t stride) {
    const int64_t width = pick(1, 4), heads = pick(0, 3);
    return View3(memory.data() + pick(0, 40), {pick(0, 4), heads, width},
                 {stride, width + (pick(0, 3) == 0 ? pick(0, 2) : 0), 1});
  };
  int interleaved = 0, shared = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const int64_t stride = pick(12, 30);
    const View3 a = view(stride);
    const View3 b = view(pick(0, 4) == 0 ? pick(12, 30) : stride);
    const bool truth = Share(a, b);
    if (truth) {
      ++shared;
      EXPECT_TRUE(MayOverlap(a, b)) << "trial " << trial;
    } else if (a.extent(0) > 1 && b.extent(0) > 1 &&
               a.stride(0) == b.stride(0) && Dense(a) && Dense(b)) {
      ++interleaved;
      EXPECT_FALSE(MayOverlap(a, b)) << "trial " << trial;
    }
    EXPECT_EQ(MayOverlap(a, b), MayOverlap(b, a)) << "trial " << trial;
  }
  EXPECT_GT(interleaved, 500);
  EXPECT_GT(shared, 500);
}

TEST(MayOverlapTest, CountsBytesNotElements) {
  alignas(8) static uint8_t memory[256] = {};
  using Bytes = TensorView<const uint8_t, 2>;
  const TensorView<const float, 2> floats(reinterpret_cast<float*>(memory),
                                          {3, 2}, {4, 1});
  // Columns 8 to 15 of rows of 16 bytes are free.
  EXPECT_FALSE(MayOverlap(floats, Bytes(memory + 8, {3, 8}, {16, 1})));
  EXPECT_TRUE(MayOverlap(floats, Bytes(memory + 7, {3, 8}, {16, 1})));
  EXPECT_TRUE(MayOverlap(floats, Bytes(memory + 8, {3, 9}, {17, 1})));
  // Two bytes into the next float: no multiple of its size.
  const TensorView<const BFloat16, 2> halves(
      reinterpret_cast<BFloat16*>(memory + 6), {3, 4}, {8, 1});
  EXPECT_TRUE(MayOverlap(floats, halves));
}

// What SameElements allows to be written in place: an index that both views
// have lies at one address, and no element of one view lies where another index
// of the other does. Views of equal shape are refused for the first reason
// alone.
TEST(SameElementsTest, IsExactForRandomViews) {
  std::vector<int8_t> memory(2000);
  std::mt19937 random(20261127);
  const auto pick = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto view = [&](int64_t outer, int64_t inner) {
    return View3(memory.data(), {pick(1, 4), pick(1, 3), pick(1, 10)},
                 {outer, inner, 1});
  };
  using Index = std::array<int64_t, 3>;
  const auto for_each = [](const View3& v, const auto& fn) {
    for (int64_t i = 0; i < v.extent(0); ++i) {
      for (int64_t j = 0; j < v.extent(1); ++j) {
        for (int64_t k = 0; k < v.extent(2); ++k) {
          fn(Index{i, j, k}, v.At(i, j, k));
        }
      }
    }
  };
  int same = 0, moved_views = 0, clashes = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const int64_t inner = pick(1, 12), outer = pick(1, 40);
    const View3 a = view(outer, inner);
    View3 b = view(pick(0, 3) == 0 ? pick(1, 40) : outer,
                   pick(0, 3) == 0 ? pick(1, 12) : inner);
    if (pick(0, 3) == 0) b = View3(b.data(), a.extents(), b.strides());
    bool moved = false, clash = false;
    for_each(a, [&](const Index& p, const int8_t* at) {
      for_each(b, [&](const Index& q, const int8_t* other) {
        moved = moved || (p == q && at != other);
        clash = clash || (p != q && at == other);
      });
    });
    const bool got = SameElements(a, b);
    EXPECT_EQ(got, SameElements(b, a)) << "trial " << trial;
    EXPECT_FALSE(got && moved) << "trial " << trial;
    if (a.extents() == b.extents()) {
      // CheckOutput of the view that is written keeps its elements apart.
      EXPECT_EQ(got, !moved) << "trial " << trial;
    } else {
      EXPECT_FALSE(got && clash) << "trial " << trial;
      clashes += !moved && clash ? 1 : 0;
    }
    same += got ? 1 : 0;
    moved_views += moved ? 1 : 0;
  }
  EXPECT_GT(same, 300);
  EXPECT_GT(moved_views, 300);
  EXPECT_GT(clashes, 300);
}

TEST(SameElementsTest, ARowIsNotTheMatrixThatItsEndReachesInto) {
  float x[40] = {};
  const MatrixView<float> matrix(x, {4, 5}, {5, 1});
  const MatrixView<const float> row(x, {1, 10}, {10, 1});
  EXPECT_FALSE(SameElements(row, matrix));
  EXPECT_FALSE(SameElements(matrix, row));
  EXPECT_EQ(CheckInPlaceOrApart("op", "x", row, "out", matrix).message(),
            "op: out overlaps x; need the same elements or none in common");
  // A row of the matrix, and columns of wider rows.
  const MatrixView<const float> first(x, {1, 5}, {10, 1});
  EXPECT_TRUE(SameElements(first, matrix));
  const MatrixView<const float> wide(x, {4, 10}, {10, 1});
  EXPECT_TRUE(SameElements(wide, MatrixView<float>(x, {4, 5}, {10, 1})));
}

TEST(MayOverlapTest, EmptyViewsTouchNothing) {
  float x[4] = {};
  const MatrixView<float> full = DenseMatrix<float>(x, 2, 2);
  EXPECT_FALSE(MayOverlap(full, DenseMatrix<float>(x, 0, 2)));
  EXPECT_FALSE(MayOverlap(DenseMatrix<float>(x, 2, 0), full));
  EXPECT_TRUE(MayOverlap(full, full));
}

// MatrixView's memory of bytes as seen by CheckInput and CheckOutput.
absl::Status CheckBoth(const MatrixView<float>& v) {
  const absl::Status input =
      CheckInput("op", "x", v, DType::kF32, {kAnyExtent, kAnyExtent});
  const absl::Status output =
      CheckOutput("op", "x", v, DType::kF32, {kAnyExtent, kAnyExtent});
  EXPECT_EQ(input, output);
  return input;
}

TEST(CheckInputTest, RefusesASpanOf2To63BytesAndIgnoresUnusedStrides) {
  float x[4] = {};
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const auto rows = [&x](int64_t count, int64_t stride) {
    return MatrixView<float>(x, {count, 4}, {stride, 1});
  };
  for (const auto& v : {rows(3, kMax / 2), rows(2, kMax), rows(2, kMax / 4)}) {
    const absl::Status status = CheckBoth(v);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("need fewer than 2^63 bytes"),
              std::string::npos)
        << status;
  }
  EXPECT_EQ(CheckBoth(rows(2, kMax / 8)), absl::OkStatus());
  for (const int64_t unused : {kMax, -kMax, int64_t{0}}) {
    EXPECT_EQ(CheckBoth(rows(1, unused)), absl::OkStatus()) << unused;
    EXPECT_EQ(CheckBoth(rows(0, unused)), absl::OkStatus()) << unused;
  }
}

TEST(CheckInputTest, RefusesMemoryThatIsNotAlignedToItsElements) {
  alignas(8) char memory[64] = {};
  const auto at = [&memory](DType dtype, int offset, int64_t rows) {
    return AnyTensorView(dtype, static_cast<void*>(memory + offset), 2,
                         {rows, 3}, {3, 1});
  };
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kI32, DType::kI8}) {
    const int size = static_cast<int>(SizeOf(dtype));
    for (int offset = 0; offset < 8; ++offset) {
      const auto check = [&](int64_t rows) {
        return CheckOutput("op", "x", at(dtype, offset, rows), dtype,
                           {kAnyExtent, 3});
      };
      EXPECT_EQ(check(0), absl::OkStatus());
      if (offset % size == 0) {
        EXPECT_EQ(check(2), absl::OkStatus()) << DTypeName(dtype) << offset;
        continue;
      }
      EXPECT_EQ(check(2), absl::InvalidArgumentError(
                              "op: x is not aligned to its elements of " +
                              std::to_string(size) + " bytes"))
          << offset;
    }
  }
}

// All or one of the dimensions, with a stride that is one too small.
TEST(CheckElementsApartTest, NamesTheDimensionAndWhatItMustStepOver) {
  float x[256] = {};
  struct Case {
    std::vector<int64_t> strides;
    int first;
    const char* refusal;
  };
  const Case cases[] = {
      {{24, 6, 1}, 0, ""},
      {{31, 8, 1}, 0, ""},
      {{29, 8, 1},
       0,
       "op: x has stride 29 in dimension 0; need 30 or more, as its elements "
       "must not overlap"},
      {{29, 8, 1}, 1, ""},
      {{0, 8, 1}, 1, ""},
      {{24, 5, 1},
       1,
       "op: x has stride 5 in dimension 1; need 6 or more, as its elements "
       "must not overlap"},
      {{24, 0, 1}, 0, "op: x has stride 0 in dimension 1; need 6 or more"},
  };
  for (const Case& c : cases) {
    const AnyTensorView view(DType::kF32, static_cast<const void*>(x), 3,
                             {2, 4, 6},
                             {c.strides[0], c.strides[1], c.strides[2]});
    const absl::Status status = CheckElementsApart("op", "x", view, c.first);
    EXPECT_EQ(status.ok(), c.refusal[0] == '\0') << status;
    EXPECT_NE(status.message().find(c.refusal), absl::string_view::npos)
        << status << "\nlacks: " << c.refusal;
  }
  // One row, or none, has no stride to refuse.
  for (const int64_t rows : {0, 1}) {
    const MatrixView<float> v(x, {rows, 6}, {0, 1});
    EXPECT_EQ(CheckElementsApart("op", "x", v), absl::OkStatus());
  }
}

TEST(CheckInputTest, RefusesARankThatNoViewHas) {
  float data[4] = {};
  const struct {
    int rank;
    const char* refusal;
  } kCases[] = {
      {6, "op: x has rank 6; need 1 <= rank <= 5"},
      {std::numeric_limits<int>::max(),
       "op: x has rank 2147483647; need 1 <= rank <= 5"},
      {-1, "op: x has rank -1; need 1 <= rank <= 5"},
  };
  for (const auto& c : kCases) {
    // The stride behind the extents is 4, which a sixth dimension may have.
    const AnyTensorView view(DType::kF32, static_cast<void*>(data), c.rank,
                             {1, 1, 1, 1, 4}, {4, 4, 4, 4, 1});
    for (const std::vector<int64_t>& want :
         {std::vector<int64_t>{4}, {1, 1, 1, 1, 4}, {1, 1, 1, 1, 4, 4}}) {
      for (const absl::Status& status :
           {CheckInput("op", "x", view, DType::kF32, want),
            CheckOutput("op", "x", view, DType::kF32, want)}) {
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_EQ(status.message(), c.refusal);
      }
    }
  }
}

TEST(CheckFiniteTest, NamesTheNumberAndWhatItMustBe) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(CheckFinite("op", "x", -1).ok());
  EXPECT_TRUE(CheckNotNegative("op", "x", 0).ok());
  EXPECT_TRUE(CheckPositive("op", "x", 1e-300).ok());
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    EXPECT_FALSE(CheckFinite("op", "x", bad).ok()) << bad;
    EXPECT_FALSE(CheckNotNegative("op", "x", bad).ok()) << bad;
    EXPECT_FALSE(CheckPositive("op", "x", bad).ok()) << bad;
  }
  EXPECT_EQ(CheckFinite("op", "x", kNan),
            absl::InvalidArgumentError("op: x=nan; need a finite number"));
  EXPECT_EQ(
      CheckNotNegative("op", "x", -0.5f),
      absl::InvalidArgumentError("op: x=-0.5; need a finite number >= 0"));
  EXPECT_EQ(CheckPositive("op", "x", 0, "finite x"),
            absl::InvalidArgumentError("op: x=0; need finite x > 0"));
}

TEST(IsEmptyTest, IsWithoutElements) {
  float x[6] = {};
  EXPECT_TRUE(IsEmpty(AnyTensorView()));
  EXPECT_TRUE(IsEmpty(DenseVector(x, 0)));
  EXPECT_TRUE(IsEmpty(DenseMatrix(x, 0, 3)));
  EXPECT_TRUE(IsEmpty(DenseMatrix(x, 3, 0)));
  EXPECT_FALSE(IsEmpty(DenseVector(x, 1)));
  EXPECT_FALSE(IsEmpty(DenseMatrix(x, 2, 3)));
}

TEST(MayOverlapTest, DoesNotOverflow) {
  float x[16] = {};
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const MatrixView<float> wide(x, {3, 4}, {kMax / 2, 1});
  const MatrixView<float> row(x, {1, 4}, {kMax, 1});
  const MatrixView<float> next(x + 4, {1, 4}, {kMax, 1});
  const MatrixView<float> far(x, {2, 4}, {kMax / 8, 1});
  EXPECT_TRUE(MayOverlap(wide, row));
  EXPECT_TRUE(MayOverlap(row, wide));
  EXPECT_TRUE(MayOverlap(row, row));
  EXPECT_FALSE(MayOverlap(row, next));
  EXPECT_FALSE(MayOverlap(next, row));
  EXPECT_TRUE(MayOverlap(far, row));
  EXPECT_FALSE(MayOverlap(far, next));
  EXPECT_FALSE(MayOverlap(next, far));
}

// vLLM's cache: one tensor [pages, heads, 2 * page, dim], whose halves in
// dimension 2 are keys and values.
TEST(MayOverlapTest, RangesOfAnyDimensionLieApart) {
  float x[2 * 3 * 8 * 2 + 1] = {};
  const auto half = [&](int64_t from) {
    return AnyTensorView(DType::kF32, static_cast<void*>(x + from), 4,
                         {2, 3, 4, 2}, {48, 16, 2, 1});
  };
  const AnyTensorView keys = half(0), values = half(8);
  EXPECT_FALSE(MayOverlap(keys, values));
  EXPECT_FALSE(MayOverlap(values, keys));
  EXPECT_TRUE(MayOverlap(keys, half(7)));
  EXPECT_TRUE(MayOverlap(half(7), keys));
  EXPECT_TRUE(MayOverlap(keys, half(9)));
}

// Against the bytes themselves: no is never wrong.
TEST(MayOverlapTest, ANoIsANo) {
  std::mt19937 engine(1);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(engine);
  };
  int64_t nos = 0, yeses = 0;
  for (int i = 0; i < 20000; ++i) {
    alignas(8) uint8_t memory[4096];
    std::vector<AnyTensorView> views;
    std::vector<std::set<int64_t>> bytes(2);
    for (size_t v = 0; v < 2; ++v) {
      const DType dtype = draw(0, 1) == 0 ? DType::kF32 : DType::kI8;
      const auto size = static_cast<int64_t>(SizeOf(dtype));
      const auto rank = static_cast<int>(draw(1, 4));
      AnyTensorView::Dims extents{}, strides{};
      int64_t inner = 1;
      for (int d = rank; d-- > 0;) {
        const auto at = static_cast<size_t>(d);
        extents[at] = draw(1, 3);
        strides[at] = inner * draw(1, 2);
        inner = strides[at] * (draw(0, 1) == 0 ? 2 : extents[at]);
      }
      const int64_t from = draw(0, 12) * 4;
      views.emplace_back(dtype, static_cast<void*>(memory + from), rank,
                         extents, strides);
      for (int64_t e = 0; e < 81; ++e) {
        int64_t left = e, place = 0;
        for (int d = 0; d < rank; ++d) {
          const auto at = static_cast<size_t>(d);
          place += left % extents[at] * strides[at];
          left /= extents[at];
        }
        for (int64_t b = 0; b < size; ++b) {
          bytes[v].insert(from + place * size + b);
        }
      }
    }
    bool common = false;
    for (const int64_t b : bytes[0]) common = common || bytes[1].count(b) > 0;
    const bool may = MayOverlap(views[0], views[1]);
    ASSERT_TRUE(may || !common) << i;
    ASSERT_EQ(may, MayOverlap(views[1], views[0])) << i;
    (may ? yeses : nos) += common ? 0 : 1;
  }
  EXPECT_GT(nos, 1000) << "of views that lie apart; " << yeses << " had a yes";
}

// The registry asks before an operator has refused such strides.
TEST(MayOverlapTest, TakesAnyStride) {
  float x[16] = {};
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  const auto view = [](float* data, int64_t rows, int64_t stride) {
    return AnyTensorView(DType::kF32, static_cast<void*>(data), 2, {rows, 2},
                         {stride, 1});
  };
  const AnyTensorView upward = view(x, 2, 4);          // x[0] to x[5]
  const AnyTensorView downward = view(x + 12, 2, -4);  // x[8] to x[13]
  EXPECT_TRUE(MayOverlap(downward, view(x + 8, 1, 0)));
  EXPECT_TRUE(MayOverlap(view(x + 13, 1, 0), downward));
  EXPECT_FALSE(MayOverlap(downward, view(x + 14, 1, 0)));
  EXPECT_FALSE(MayOverlap(downward, upward));
  EXPECT_TRUE(MayOverlap(downward, downward));
  EXPECT_TRUE(MayOverlap(upward, view(x, 2, 0)));
  EXPECT_TRUE(MayOverlap(upward, view(x, 2, kMin)));
  EXPECT_TRUE(MayOverlap(view(x, 3, kMin / 16), view(x, 1, kMin)));
  EXPECT_FALSE(MayOverlap(upward, view(nullptr, 2, 2)));
  // Rows nearly 2^63 bytes apart, the second view beginning below the first.
  int8_t bytes[16] = {};
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const AnyTensorView far(DType::kI8, static_cast<void*>(bytes + 1), 2, {2, 1},
                          {kMax - 1, 1});
  const AnyTensorView below(DType::kI8, static_cast<void*>(bytes), 2, {1, 10},
                            {0, 1});
  EXPECT_TRUE(MayOverlap(far, below));
  EXPECT_TRUE(MayOverlap(below, far));
}

}  // namespace
}  // namespace quern
