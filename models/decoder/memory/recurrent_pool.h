#ifndef QUERN_MODELS_DECODER_MEMORY_RECURRENT_POOL_H_
#define QUERN_MODELS_DECODER_MEMORY_RECURRENT_POOL_H_

// Private: what the recurrent layers of a model remember of each sequence. It
// has a fixed size, so each sequence has one slot, whose index is the
// sequence's:
//
//   windows[layer]  [slots, window, channels], the last inputs of a convolution
//   states[layer]   f32[slots, heads, rows, cols], unless heads is 0
//
// A sequence without tokens has a memory of zeros, whatever its slot holds: the
// step tells the operators so (`initial`), and they do not read the slot. So
// taking a slot and giving it back cost nothing.
//
// A layer overwrites the memory of the tokens before a step. A sequence can
// therefore be continued and forked, and not be cut back to fewer tokens; what
// can fail comes before the first layer writes.

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {

struct RecurrentPoolSpec {
  int64_t layers = 0;
  int64_t slots = 0;
  DType window_dtype = DType::kF32;
  int64_t window = 0;    // rows of a window, one less than the convolution has
  int64_t channels = 0;  // of the convolution
  int64_t heads = 0;     // 0: the layers have no state besides the window
  int64_t rows = 0, cols = 0;  // of the state of a head
  // Multiply-adds of a token with each number of the state.
  int64_t products = 0;

  // Bytes of all slots of all layers. Returns a double, because the sizes may
  // come from a file that claims anything.
  double bytes() const;
};

class RecurrentPool {
 public:
  // ResourceExhausted if the memory cannot be had.
  static absl::StatusOr<RecurrentPool> Create(const RecurrentPoolSpec& spec);

  // Begins a step without sequences.
  void BeginStep();
  // Adds to the step a sequence of `length` tokens and `count` new ones, which
  // are the step's next tokens.
  void AddToStep(int32_t sequence, int64_t length, int64_t count);

  // Gives `branch` what `sequence` remembers.
  void Fork(int32_t sequence, int32_t branch) noexcept;

  // The memory of a layer, all slots.
  AnyTensorView Windows(int64_t layer) const;
  // No view if the layers have no state.
  AnyTensorView States(int64_t layer) const;

  // The step's sequences, as the operators take them: the slot of each, i32;
  // the index of its first token, i64, and one behind the last; and whether it
  // has had tokens before, u8.
  AnyTensorView slots() const;
  AnyTensorView starts() const;
  AnyTensorView initial() const;

  int64_t bytes() const { return static_cast<int64_t>(memory_.bytes()); }
  // Bytes of what the step's sequences remember.
  int64_t step_bytes() const {
    return static_cast<int64_t>(slots_.size()) * spec_.layers *
           (window_bytes() + state_bytes());
  }
  // Operations in f32 of the step's tokens, after AddToStep: those of the
  // convolution, which has one weight more than the window has rows, and those
  // of the states.
  int64_t step_ops() const {
    return 2 * starts_.back() * spec_.layers *
           ((spec_.window + 1) * spec_.channels +
            spec_.products * spec_.heads * spec_.rows * spec_.cols);
  }

 private:
  RecurrentPool() = default;
  int64_t window_bytes() const {
    return spec_.window * spec_.channels *
           static_cast<int64_t>(SizeOf(spec_.window_dtype));
  }
  int64_t state_bytes() const {
    return spec_.heads * spec_.rows * spec_.cols *
           static_cast<int64_t>(sizeof(float));
  }
  template <typename Allocator>
  void LayOut(Allocator& a);

  RecurrentPoolSpec spec_;
  AlignedBuffer memory_;
  std::vector<uint8_t*> windows_, states_;  // in memory_; one for each layer

  // The current step.
  std::vector<int32_t> slots_;
  std::vector<int64_t> starts_;
  std::vector<uint8_t> initial_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_MEMORY_RECURRENT_POOL_H_
