#include "quern/testing/guard_buffer.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/testing/compare.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

// Keeps the compiler from dropping or foreseeing an access.
template <typename T>
void Write(T* p, T value) {
  *const_cast<volatile T*>(p) = value;
}

TEST(GuardBufferDeathTest, EndsTheProcessAtTheGuardedEdge) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  GuardBuffer<float> end(5);
  GuardBuffer<float> begin(5, Edge::kBegin);
  EXPECT_DEATH(Write(end.data() + 5, 0.0f), "");
  EXPECT_DEATH(Write(begin.data() - 1, 0.0f), "");
}

TEST(GuardBufferDeathTest, GuardsAnEmptyBuffer) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  GuardBuffer<uint8_t> empty(0);
  EXPECT_DEATH(Write(empty.data(), uint8_t{0}), "");
}

TEST(GuardBufferTest, ReportsAWriteOnTheOtherSide) {
  GuardBuffer<float> end(5);
  EXPECT_TRUE(end.CanariesIntact());
  const uint8_t canary = *reinterpret_cast<uint8_t*>(end.data() - 1);
  Write(end.data() - 1, 0.0f);
  EXPECT_FALSE(end.CanariesIntact());
  uint8_t* before = reinterpret_cast<uint8_t*>(end.data() - 1);
  for (size_t i = 0; i < sizeof(float); ++i) Write(before + i, canary);
  EXPECT_TRUE(end.CanariesIntact());
}

TEST(GuardBufferTest, TheDestructorFailsTheTest) {
  EXPECT_NONFATAL_FAILURE(
      {
        GuardBuffer<int8_t> buffer(3, Edge::kBegin);
        Write(buffer.data() + 3, int8_t{0});
      },
      "write 1 bytes past the last element");
  EXPECT_NONFATAL_FAILURE(
      {
        GuardBuffer<int8_t> buffer(3, Edge::kEnd, /*shift=*/2);
        Write(buffer.data() + 4, int8_t{0});
      },
      "write 2 bytes past the last element");
}

template <typename T>
class PoisonTest : public testing::Test {};
using ElementTypes = testing::Types<float, BFloat16, Float16, Float8E4M3,
                                    Float8E5M2, int32_t, int8_t, uint8_t>;
TYPED_TEST_SUITE(PoisonTest, ElementTypes);

TYPED_TEST(PoisonTest, FillsEveryElement) {
  GuardBuffer<TypeParam> buffer(1001, Edge::kEnd, 3);
  for (int64_t i = 0; i < buffer.size(); ++i) {
    ASSERT_TRUE(IsPoison(buffer[i]));
    if (IsFloatStorage<TypeParam>) {
      ASSERT_TRUE(std::isnan(ToDouble(buffer[i])));
    }
  }
  buffer[7] = TypeParam{};
  EXPECT_FALSE(IsPoison(buffer[7]));
}

TEST(GuardBufferTest, ShiftsTheBase) {
  for (int64_t shift = 0; shift < 64; ++shift) {
    const GuardBuffer<uint8_t> buffer(100, Edge::kBegin, shift);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64,
              static_cast<uintptr_t>(shift));
  }
}

TEST(GuardBufferTest, HoldsWhatItWasMadeFrom) {
  const std::vector<int32_t> values = {3, 1, 4, 1, 5};
  const GuardBuffer<int32_t> buffer(values);
  EXPECT_EQ(buffer.ToVector(), values);
  EXPECT_TRUE(AllEqual(buffer.view(), values));
}

TEST(StridedMatrixTest, PadsWithPoison) {
  StridedMatrix<float> m({1, 2, 3, 4, 5, 6}, 3, 2, 4);
  EXPECT_EQ(m.ToDense(), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(m.view().stride(0), 4);
  EXPECT_TRUE(std::isnan(m.view().Row(0)[2]));
  EXPECT_TRUE(std::isnan(m.view().Row(1)[3]));
  EXPECT_TRUE(m.PaddingIntact());
}

TEST(StridedMatrixTest, ReportsAWriteIntoThePadding) {
  EXPECT_NONFATAL_FAILURE(
      {
        StridedMatrix<uint8_t> m(3, 2, 4);
        Write(m.view().Row(1) + 3, uint8_t{0});
      },
      "write into the padding of row 1, at column 3");
}

TEST(StridedMatrixDeathTest, GuardsTheLastElement) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  StridedMatrix<uint8_t> m(3, 2, 4);
  EXPECT_DEATH(Write(m.view().Row(2) + 2, uint8_t{0}), "");
}

TEST(StridedMatrixTest, MayBeEmpty) {
  const StridedMatrix<float> no_rows(0, 5, 7);
  const StridedMatrix<float> no_cols(5, 0, 2);
  EXPECT_TRUE(no_rows.ToDense().empty());
  EXPECT_TRUE(no_cols.ToDense().empty());
}

}  // namespace
}  // namespace quern
