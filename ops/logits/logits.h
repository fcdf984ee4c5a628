#ifndef QUERN_OPS_LOGITS_LOGITS_H_
#define QUERN_OPS_LOGITS_LOGITS_H_

// Operators before and after the product of hidden states with the vocabulary,
// which itself is a linear layer of gemm/.
//
//   SelectRows:  out[r, i] = hidden[rows[r], i]      the last token of each
//                                                    sequence, as bytes
//   Execute:     l = round(l / soft_cap)             if soft_cap > 0
//                l = round(tanh(l))
//                l = round(l * soft_cap)
//                l = round(l * scale)                if scale != 1
//
// The cap comes before the scale. `round` is to the dtype of the logits, to
// nearest even, after each step, as the elementwise operators of a framework
// do:
//
//   bf16, f16   to the bit: what becomes of each of 65536 values is computed
//               at Create, with a tanh rounded from double to f32 first
//   f32         tanh is within 12 units of 2^-24, relative
//
// soft_cap and scale are f32. NaN stays NaN. With a cap, +-infinity becomes
// +-soft_cap * scale. Without one it stays infinite, except that a scale of 0
// makes it NaN. f16 logits beyond 65504 become infinite.
//
// vLLM's option logits_as_input corresponds to what this plan always does: it
// processes logits that the caller computed. The caller drops padding columns
// by passing a view logits[n, vocab] with a larger row stride.

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
  float soft_cap = 0.0f;             // finite, >= 0; 0 disables the cap
  float scale = 1.0f;                // finite
};

class LogitsPlan {
 public:
  // InvalidArgument if a value is out of range, Unimplemented for logits of
  // other dtypes. For 16-bit logits with a cap or a scale, makes a table of 128
  // KiB, which copies of the plan share; its 65536 values of tanh take about a
  // millisecond.
  static absl::StatusOr<LogitsPlan> Create(const LogitsSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const LogitsSpec& spec() const { return spec_; }

  // Whether SelectRows may be called with these arguments, including that each
  // row is in [0, hidden.extent(0)). O(rows).
  absl::Status CheckSelectArgs(const AnyTensorView& hidden, IndexView rows,
                               const AnyTensorView& out) const;
  // hidden[tokens, hidden], rows[n] -> out[n, hidden]. A row may be named any
  // number of times; rows of hidden and out may have any stride; out must not
  // overlap hidden. Allocates nothing; safe to call concurrently. Runs on the
  // calling thread, at the speed of memcpy.
  void SelectRows(const AnyTensorView& hidden, IndexView rows,
                  const AnyTensorView& out) const noexcept;

  absl::Status CheckArgs(const AnyTensorView& logits) const;
  // Changes logits[n, vocab] in place. Rows may have any stride, and the memory
  // between rows is not touched. Does nothing if n = 0, or without cap and
  // scale. Allocates nothing; safe to call concurrently on different logits.
  // Workers share the rows, and the result does not depend on their number.
  // Cost of one row of 128256 logits with a cap: f32 61 us, bf16 39 us, f16 60
  // us (one core of Zen 4, 2026).
  void Execute(const AnyTensorView& logits, Executor& executor) const noexcept;

 private:
  // Table of results: the logit with the bits i becomes steps[i].
  using Steps = std::array<uint16_t, 65536>;

  LogitsPlan(const LogitsSpec& spec, const LogitsKernels& kernels,
             std::shared_ptr<const Steps> steps)
      : spec_(spec), kernels_(kernels), steps_(std::move(steps)) {}
  template <typename T>
  static std::shared_ptr<const Steps> StepsOf(const LogitsSpec& spec);

  LogitsSpec spec_;
  LogitsKernels kernels_;
  // Null for f32 logits, and where there is neither cap nor scale.
  std::shared_ptr<const Steps> steps_;
};

}  // namespace quern

#endif  // QUERN_OPS_LOGITS_LOGITS_H_
