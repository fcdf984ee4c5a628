#include "quern/packing/vnni_layout.h"

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"

namespace quern {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

TEST(VnniLayoutTest, DefaultHoldsNothing) {
  const VnniLayout layout;
  EXPECT_EQ(layout.panels(), 0);
  EXPECT_EQ(layout.lines(), 0);
  EXPECT_EQ(layout.bytes(), 0);
  EXPECT_EQ(PackedView().layout(), layout);
}

TEST(VnniLayoutTest, RoundsUpToPanelsAndLines) {
  struct Case {
    DType dtype;
    int64_t k, n, lines, panels, last_cols;
  };
  for (const Case& c :
       {Case{DType::kBF16, 1, 1, 1, 1, 1}, Case{DType::kBF16, 2, 16, 1, 1, 16},
        Case{DType::kF16, 3, 17, 2, 2, 1}, Case{DType::kI8, 4, 31, 1, 2, 15},
        Case{DType::kI8, 5, 32, 2, 2, 16}, Case{DType::kF32, 5, 18, 5, 2, 2},
        Case{DType::kI8, 4099, 1061, 1025, 67, 5}}) {
    const auto layout = VnniLayout::Create(c.dtype, c.k, c.n);
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_EQ(layout->k(), c.k);
    EXPECT_EQ(layout->n(), c.n);
    EXPECT_EQ(layout->v(), c.dtype == DType::kI8    ? 4
                           : c.dtype == DType::kF32 ? 1
                                                    : 2);
    EXPECT_EQ(layout->lines(), c.lines);
    EXPECT_EQ(layout->panels(), c.panels);
    EXPECT_EQ(layout->cols(c.panels - 1), c.last_cols);
    EXPECT_EQ(layout->panel_bytes(), c.lines * 64);
    EXPECT_EQ(layout->bytes(), c.panels * c.lines * 64);
  }
}

TEST(VnniLayoutTest, EqualsOnlyTheSameShapeAndType) {
  const auto layout = VnniLayout::Create(DType::kBF16, 4, 16);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(*layout, *VnniLayout::Create(DType::kBF16, 4, 16));
  EXPECT_NE(*layout, *VnniLayout::Create(DType::kF16, 4, 16));
  EXPECT_NE(*layout, *VnniLayout::Create(DType::kBF16, 3, 16));  // same bytes()
  EXPECT_NE(*layout, *VnniLayout::Create(DType::kBF16, 4, 15));
  EXPECT_NE(*layout, VnniLayout());
}

TEST(VnniLayoutTest, RefusesWhatItCannotHold) {
  struct Case {
    DType dtype;
    int64_t k, n;
    absl::StatusCode code;
    const char* words;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  for (const Case& c : {
           Case{DType::kI8, 0, 8, kInvalid, "b[k=0, n=8]; need k >= 1"},
           Case{DType::kI8, 8, 0, kInvalid, "b[k=8, n=0]; need k >= 1"},
           Case{DType::kBF16, -1, 8, kInvalid, "b[k=-1, n=8]"},
           Case{DType::kBF16, int64_t{1} << 40, int64_t{1} << 40, kInvalid,
                "need a packed size that fits in int64"},
           Case{DType::kI8, kHuge, 1, kInvalid, "fits in int64"},
           Case{DType::kI8, 1, kHuge, kInvalid, "fits in int64"},
           Case{DType::kBF16, kHuge, kHuge, kInvalid, "fits in int64"},
           Case{DType::kU8, 8, 8, kUnimplemented,
                "vnni_layout: dtype=u8; need bf16, f16, f32 or i8"},
       }) {
    const absl::Status status = VnniLayout::Create(c.dtype, c.k, c.n).status();
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_NE(std::string(status.message()).find(c.words), std::string::npos)
        << status;
  }
}

TEST(PackedViewTest, PanelsAreContiguous) {
  const auto layout = VnniLayout::Create(DType::kI8, 9, 33);
  ASSERT_TRUE(layout.ok()) << layout.status();
  alignas(64) int8_t data[3 * 3 * 64] = {};
  ASSERT_EQ(layout->bytes(), static_cast<int64_t>(sizeof(data)));
  const PackedView packed(*layout, data);
  EXPECT_EQ(packed.Panel<int8_t>(0), data);
  EXPECT_EQ(packed.Panel<int8_t>(2), data + 2 * 3 * 64);
}

}  // namespace
}  // namespace quern
