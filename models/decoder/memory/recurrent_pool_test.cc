#include "quern/models/decoder/memory/recurrent_pool.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

// Two rows of 3 channels, and two states of 2 x 5, in 4 slots.
RecurrentPoolSpec SmallSpec() {
  RecurrentPoolSpec spec;
  spec.layers = 2;
  spec.slots = 4;
  spec.window_dtype = DType::kBF16;
  spec.window = 2;
  spec.channels = 3;
  spec.heads = 2;
  spec.rows = 2;
  spec.cols = 5;
  return spec;
}

uint8_t* SlotOf(const AnyTensorView& view, int64_t slot) {
  return static_cast<uint8_t*>(view.mutable_data()) +
         slot * view.stride(0) * static_cast<int64_t>(SizeOf(view.dtype()));
}

int64_t SlotBytes(const AnyTensorView& view) {
  return view.stride(0) * static_cast<int64_t>(SizeOf(view.dtype()));
}

std::vector<uint8_t> Contents(const AnyTensorView& view, int64_t slot) {
  const uint8_t* first = SlotOf(view, slot);
  return std::vector<uint8_t>(first, first + SlotBytes(view));
}

TEST(RecurrentPoolTest, AForkCopiesOneSlotOfEveryLayer) {
  auto made = RecurrentPool::Create(SmallSpec());
  ASSERT_TRUE(made.ok()) << made.status();
  RecurrentPool pool = *std::move(made);  // its memory stays where it is
  std::vector<AnyTensorView> views;
  for (const int64_t layer : {0, 1}) {
    views.push_back(pool.Windows(layer));
    views.push_back(pool.States(layer));
  }
  EXPECT_EQ(views[0].dtype(), DType::kBF16);
  EXPECT_EQ(SlotBytes(views[0]), 2 * 3 * 2);
  EXPECT_EQ(views[1].dtype(), DType::kF32);
  EXPECT_EQ(SlotBytes(views[1]), 2 * 2 * 5 * 4);
  uint8_t next = 0;
  for (const AnyTensorView& view : views) {
    for (int64_t slot = 0; slot < 4; ++slot) {
      for (int64_t i = 0; i < SlotBytes(view); ++i) {
        SlotOf(view, slot)[i] = next++;
      }
    }
  }
  std::vector<std::vector<uint8_t>> before;
  for (const AnyTensorView& view : views) {
    for (int64_t slot = 0; slot < 4; ++slot) {
      before.push_back(Contents(view, slot));
    }
  }
  pool.Fork(1, 3);
  for (size_t v = 0; v < views.size(); ++v) {
    for (size_t slot = 0; slot < 4; ++slot) {
      EXPECT_EQ(Contents(views[v], static_cast<int64_t>(slot)),
                before[4 * v + (slot == 3 ? 1 : slot)])
          << v << ' ' << slot;
    }
  }
}

TEST(RecurrentPoolTest, TellsTheStepsSequences) {
  auto pool = RecurrentPool::Create(SmallSpec());
  ASSERT_TRUE(pool.ok()) << pool.status();
  for (int repeat = 0; repeat < 2; ++repeat) {
    pool->BeginStep();
    EXPECT_EQ(pool->slots().extent(0), 0);
    pool->AddToStep(2, 0, 5);
    pool->AddToStep(0, 7, 1);
    const auto slots = pool->slots(), starts = pool->starts(),
               initial = pool->initial();
    ASSERT_EQ(slots.extent(0), 2);
    ASSERT_EQ(starts.extent(0), 3);
    ASSERT_EQ(initial.extent(0), 2);
    const auto* slot = static_cast<const int32_t*>(slots.data());
    const auto* start = static_cast<const int64_t*>(starts.data());
    const auto* had = static_cast<const uint8_t*>(initial.data());
    EXPECT_EQ(std::vector<int32_t>(slot, slot + 2),
              (std::vector<int32_t>{2, 0}));
    EXPECT_EQ(std::vector<int64_t>(start, start + 3),
              (std::vector<int64_t>{0, 5, 6}));
    EXPECT_EQ(std::vector<uint8_t>(had, had + 2), (std::vector<uint8_t>{0, 1}));
  }
}

TEST(RecurrentPoolTest, CountsItsBytes) {
  RecurrentPoolSpec spec = SmallSpec();
  EXPECT_EQ(spec.bytes(), 2 * 4 * (12 + 80));
  const auto both = RecurrentPool::Create(spec);
  ASSERT_TRUE(both.ok()) << both.status();
  // Each layer's windows and states begin at a multiple of 64 bytes.
  EXPECT_EQ(both->bytes(), 2 * (64 + 320));
  spec.heads = 0;
  EXPECT_EQ(spec.bytes(), 2 * 4 * 12);
  const auto windows = RecurrentPool::Create(spec);
  ASSERT_TRUE(windows.ok()) << windows.status();
  EXPECT_EQ(windows->bytes(), 2 * 64);
  EXPECT_EQ(windows->States(1).rank(), 0);
  spec.layers = 0;
  const auto none = RecurrentPool::Create(spec);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->bytes(), 0);
}

TEST(RecurrentPoolTest, CountsTheOperationsOfAStep) {
  RecurrentPoolSpec spec = SmallSpec();
  spec.products = 2;
  auto pool = RecurrentPool::Create(spec);
  ASSERT_TRUE(pool.ok()) << pool.status();
  pool->BeginStep();
  EXPECT_EQ(pool->step_ops(), 0);
  pool->AddToStep(1, 0, 4);
  pool->AddToStep(0, 3, 1);
  // Five tokens in two layers: three weights of three channels, and two
  // multiply-adds with each number of two states.
  EXPECT_EQ(pool->step_ops(), 2 * 5 * 2 * (3 * 3 + 2 * 2 * 10));
}

TEST(RecurrentPoolTest, RefusesWhatCannotBeCounted) {
  RecurrentPoolSpec spec = SmallSpec();
  spec.layers = 4096;
  spec.slots = 1 << 20;
  spec.channels = 1 << 28;
  EXPECT_EQ(RecurrentPool::Create(spec).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace quern
