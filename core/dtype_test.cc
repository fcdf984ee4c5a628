#include "quern/core/dtype.h"

#include <cstdint>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

constexpr DType kAll[] = {DType::kF32,    DType::kBF16,   DType::kF16,
                          DType::kF8E4M3, DType::kF8E5M2, DType::kI32,
                          DType::kI8,     DType::kU8,     DType::kI64};

template <typename T>
void ExpectIs(DType dtype, const char* name) {
  EXPECT_EQ(DTypeOf<T>, dtype);
  EXPECT_EQ(DTypeOf<const T>, dtype);
  EXPECT_EQ(SizeOf(dtype), sizeof(T));
  EXPECT_EQ(DTypeName(dtype), name);
}

TEST(DTypeTest, MapsTypesSizesAndNames) {
  ExpectIs<float>(DType::kF32, "f32");
  ExpectIs<BFloat16>(DType::kBF16, "bf16");
  ExpectIs<Float16>(DType::kF16, "f16");
  ExpectIs<Float8E4M3>(DType::kF8E4M3, "f8e4m3");
  ExpectIs<Float8E5M2>(DType::kF8E5M2, "f8e5m2");
  ExpectIs<int32_t>(DType::kI32, "i32");
  ExpectIs<int8_t>(DType::kI8, "i8");
  ExpectIs<uint8_t>(DType::kU8, "u8");
  ExpectIs<int64_t>(DType::kI64, "i64");
}

TEST(DTypeTest, CodesOfOneByteHaveALargestMagnitude) {
  EXPECT_EQ(MaxCodeOf(DType::kI8), 127.0f);
  EXPECT_EQ(MaxCodeOf(DType::kF8E4M3), 448.0f);
  EXPECT_EQ(MaxCodeOf(DType::kF8E5M2), 57344.0f);
  for (const DType dtype : kFloatDTypes) EXPECT_EQ(MaxCodeOf(dtype), 0.0f);
}

TEST(DTypeTest, NamesComeBack) {
  std::set<std::string> names;
  for (const DType dtype : kAll) {
    names.emplace(DTypeName(dtype));
    const auto parsed = ParseDType(DTypeName(dtype));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, dtype);
  }
  EXPECT_EQ(names.size(), std::size(kAll));
}

TEST(DTypeTest, RefusesAnUnknownName) {
  for (const char* name : {"", "f64", "F32", "bf16 "}) {
    const auto parsed = ParseDType(name);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(parsed.status().message(),
              "dtype '" + std::string(name) +
                  "' is unknown; need one of f32, bf16, f16, f8e4m3, f8e5m2, "
                  "i32, i8, u8, i64");
  }
}

TEST(DTypeTest, AnEnumeratorOutOfRangeHasNoSize) {
  const auto invalid = static_cast<DType>(200);
  EXPECT_EQ(DTypeName(invalid), "invalid dtype");
  EXPECT_EQ(SizeOf(invalid), 0u);
}

TEST(DTypeTest, EightBitFloatsCompareBits) {
  EXPECT_TRUE(Float8E4M3{0x7f} == Float8E4M3{0x7f});
  EXPECT_FALSE(Float8E4M3{0x00} == Float8E4M3{0x80});
  EXPECT_TRUE(Float8E5M2{0x01} == Float8E5M2{0x01});
}

}  // namespace
}  // namespace quern
