#ifndef QUERN_OPS_LOGITS_LOGITS_H_
#define QUERN_OPS_LOGITS_LOGITS_H_

// What happens to hidden states before, and to logits after, the product with
// the vocabulary (which is gemm's linear).
//
//   SelectRows:  out[r, i] = hidden[rows[r], i]      the last token of each
//                                                    sequence, as bytes
//   Execute:     l = round(l / soft_cap)             if soft_cap > 0
//                l = round(tanh(l))
//                l = round(l * soft_cap)
//                l = round(l * scale)                if scale != 1
//
// The cap comes before the scale. `round` is to the dtype of the logits, to
// nearest even, as a framework's operators do one by one:
//
//   bf16, f16   to the bit: what becomes of each of 65536 values is computed
//               at Create, with a tanh rounded from double to f32 first
//   f32         tanh is within 12 units of 2^-24, relative
//
// soft_cap and scale are f32. NaN stays NaN. +-infinity becomes +-soft_cap *
// scale with a cap, and stays without one, but at a scale of 0, where it is
// NaN. f16 logits beyond 65504 become infinite.
//
// vLLM's logits_as_input, which is about logits that no linear layer of that
// operator made, is what this always does. The columns of padding that vLLM
// cuts off otherwise are the caller's to leave out of the view: logits[n,
// vocab] of rows with any stride.

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/logits/logits_kernels.h"

namespace quern {

struct LogitsSpec {
  int64_t vocab = 0;                 // columns of the logits, in [1, 2^59)
  int64_t hidden = 0;                // columns of the hidden states, >= 1
  DType hidden_dtype = DType::kF32;  // any: SelectRows copies bytes
  DType logits_dtype = DType::kF32;  // f32, bf16 or f16
  float soft_cap = 0.0f;             // finite, >= 0; 0: none
  float scale = 1.0f;                // finite
};

class LogitsPlan {
 public:
  // InvalidArgument if a value is out of range, Unimplemented for logits of
  // other dtypes. With a cap or a scale, of 16-bit logits it makes 128 KiB,
  // which copies of the plan share: 65536 values of tanh, about a millisecond.
  static absl::StatusOr<LogitsPlan> Create(const LogitsSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const LogitsSpec& spec() const { return spec_; }

  // Whether SelectRows may be called with these, each row being in
  // [0, hidden.extent(0)). O(rows).
  absl::Status CheckSelectArgs(const AnyTensorView& hidden, IndexView rows,
                               const AnyTensorView& out) const;
  // hidden[tokens, hidden], rows[n] -> out[n, hidden]. A row may be named any
  // number of times; rows of both may have any stride; out does not overlap
  // hidden. Allocates nothing; safe to call concurrently. On the calling thread
  // alone, at the speed of memcpy.
  void SelectRows(const AnyTensorView& hidden, IndexView rows,
                  const AnyTensorView& out) const noexcept;

  absl::Status CheckArgs(const AnyTensorView& logits) const;
  // logits[n, vocab], in place; rows may have any stride, and what lies between
  // them is not touched. Without cap and scale nothing is. n = 0 does nothing.
  // Allocates nothing; safe to call concurrently on other logits; the result
  // does not depend on the number of workers, which share rows. One row of
  // 128256 with a cap: f32 61 microseconds, bf16 39, f16 60 (a core of Zen 4,
  // 2026).
  void Execute(const AnyTensorView& logits, Executor& executor) const noexcept;

 private:
  // What becomes of the logit with the bits i is steps[i].
  using Steps = std::array<uint16_t, 65536>;

  LogitsPlan(const LogitsSpec& spec, const LogitsKernels& kernels,
             std::shared_ptr<const Steps> steps)
      : spec_(spec), kernels_(kernels), steps_(std::move(steps)) {}
  template <typename T>
  static std::shared_ptr<const Steps> StepsOf(const LogitsSpec& spec);

  LogitsSpec spec_;
  LogitsKernels kernels_;
  // Null for f32, and where nothing is done.
  std::shared_ptr<const Steps> steps_;
};

}  // namespace quern

#endif  // QUERN_OPS_LOGITS_LOGITS_H_
