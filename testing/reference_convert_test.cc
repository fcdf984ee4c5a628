#include "quern/testing/reference_convert.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"

namespace quern {
namespace {

TEST(ReferenceConvertTest, DecodesKnownCodes) {
  EXPECT_EQ(ToDouble(FromBits<BFloat16>(0x3f80)), 1.0);
  EXPECT_EQ(ToDouble(FromBits<BFloat16>(0xc049)), -3.140625);
  EXPECT_EQ(ToDouble(FromBits<Float16>(0x3c00)), 1.0);
  EXPECT_EQ(ToDouble(FromBits<Float16>(0x7bff)), 65504.0);
  EXPECT_EQ(ToDouble(FromBits<Float16>(0x0001)), std::ldexp(1.0, -24));
  EXPECT_EQ(ToDouble(FromBits<Float8E4M3>(0x7e)), 448.0);
  EXPECT_EQ(ToDouble(FromBits<Float8E4M3>(0x01)), std::ldexp(1.0, -9));
  EXPECT_TRUE(std::isnan(ToDouble(FromBits<Float8E4M3>(0x7f))));
  EXPECT_TRUE(std::isnan(ToDouble(FromBits<Float8E4M3>(0xff))));
  EXPECT_EQ(ToDouble(FromBits<Float8E5M2>(0x7b)), 57344.0);
  EXPECT_EQ(ToDouble(FromBits<Float8E5M2>(0xfc)), -INFINITY);
  EXPECT_TRUE(std::isnan(ToDouble(FromBits<Float8E5M2>(0x7d))));
  EXPECT_EQ(ToDouble(int8_t{-128}), -128.0);
}

template <typename T>
class StorageTest : public testing::Test {};
using StorageTypes = testing::Types<BFloat16, Float16, Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(StorageTest, StorageTypes);

TYPED_TEST(StorageTest, EveryCodeComesBack) {
  for (uint32_t code = 0; code < 1u << (8 * sizeof(TypeParam)); ++code) {
    const double value = ToDouble(FromBits<TypeParam>(code));
    const uint32_t back = BitsOf(FromDouble<TypeParam>(value));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(ToDouble(FromBits<TypeParam>(back))));
      ASSERT_EQ(std::signbit(value),
                (back & FormatOf<TypeParam>().sign_bit()) != 0);
    } else {
      ASSERT_EQ(back, code) << value;
    }
  }
}

// Compares with the neighbours instead of arithmetic: between two adjacent
// codes, everything below the middle goes down, above it up, the middle to the
// even one.
TYPED_TEST(StorageTest, RoundsToTheNearestAndTiesToEven) {
  constexpr FloatFormat f = FormatOf<TypeParam>();
  for (uint32_t code = 0; code < f.max_finite(); ++code) {
    const double low = Decode(f, code), high = Decode(f, code + 1);
    ASSERT_LT(low, high);
    const double middle = low + (high - low) / 2;
    ASSERT_EQ(Encode(f, middle), code % 2 == 0 ? code : code + 1) << middle;
    ASSERT_EQ(Encode(f, std::nextafter(middle, 0.0)), code);
    ASSERT_EQ(Encode(f, std::nextafter(middle, INFINITY)), code + 1);
    ASSERT_EQ(Encode(f, -std::nextafter(middle, INFINITY)),
              (code + 1) | f.sign_bit());
    ASSERT_LE(middle - low, RoundingBound<TypeParam>(middle));
  }
}

TYPED_TEST(StorageTest, OverflowsAsAsked) {
  constexpr FloatFormat f = FormatOf<TypeParam>();
  const double max = Decode(f, f.max_finite());
  const double step = max - Decode(f, f.max_finite() - 1);
  const uint32_t beyond = f.has_infinity ? f.infinity() : f.nan();
  // The middle between the largest value and the one that would follow goes to
  // the even code: up where the largest is odd, as IEEE 754 has it.
  const uint32_t at_middle = f.max_finite() % 2 == 1 ? beyond : f.max_finite();
  EXPECT_EQ(Encode(f, std::nextafter(max + step / 2, 0)), f.max_finite());
  EXPECT_EQ(Encode(f, max + step / 2), at_middle);
  EXPECT_EQ(Encode(f, std::nextafter(max + step / 2, INFINITY)), beyond);
  for (const double x : {max + step, 1e300, double{INFINITY}}) {
    EXPECT_EQ(Encode(f, x), beyond);
    EXPECT_EQ(Encode(f, -x), beyond | f.sign_bit());
    EXPECT_EQ(Encode(f, x, Overflow::kSaturate), f.max_finite());
    EXPECT_EQ(Encode(f, -x, Overflow::kSaturate),
              f.max_finite() | f.sign_bit());
  }
}

TEST(ReferenceConvertTest, AgreesWithTheCompilerOnFloat) {
  for (const double x :
       {0.0, -0.0, 0.1, -1e-40, 1e-46, 7e-46, 3.4028235677973366e38, 1e300,
        1.0 + std::ldexp(1.0, -24), 1.0 + std::ldexp(3.0, -24)}) {
    const auto expected = static_cast<float>(x);
    EXPECT_EQ(BitsOf(FromDouble<float>(x)), BitsOf(expected)) << x;
    EXPECT_EQ(ToDouble(expected), static_cast<double>(expected)) << x;
  }
}

TEST(ReferenceConvertTest, SaturatesIntegers) {
  EXPECT_EQ(FromDouble<int8_t>(127.6), 127);
  EXPECT_EQ(FromDouble<int8_t>(-1e9), -128);
  EXPECT_EQ(FromDouble<uint8_t>(-3), 0);
  EXPECT_EQ(FromDouble<uint8_t>(2.5), 2);
  EXPECT_EQ(FromDouble<int32_t>(1e10), std::numeric_limits<int32_t>::max());
  EXPECT_EQ(FromDouble<int32_t>(NAN), 0);
}

TEST(ReferenceConvertTest, KnowsTheUnitRoundoff) {
  EXPECT_EQ(UnitRoundoff<float>(), std::ldexp(1.0, -24));
  EXPECT_EQ(UnitRoundoff<BFloat16>(), std::ldexp(1.0, -8));
  EXPECT_EQ(UnitRoundoff<Float16>(), std::ldexp(1.0, -11));
  EXPECT_EQ(UnitRoundoff<int32_t>(), 0.0);
}

}  // namespace
}  // namespace quern
