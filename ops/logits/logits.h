#ifndef QUERN_OPS_LOGITS_LOGITS_H_
#define QUERN_OPS_LOGITS_LOGITS_H_

// What happens to hidden states before, and to logits after, the product with
// the vocabulary (which is gemm's linear).
//
//   SelectRows:  out[r, i] = hidden[rows[r], i]      the last token of each
//                                                    sequence, as bytes
//   Execute:     l = soft_cap * tanh(l / soft_cap)   if soft_cap > 0
//                l = l * scale                       if scale != 1
//
// Logits are f32, in place, the cap before the scale. NaN stays NaN; with a
// cap, +-infinity becomes +-soft_cap * scale. tanh is within 12 units of 2^-24,
// relative.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "ops/index_view.h"
#include "ops/logits/logits_kernels.h"

namespace quern {

struct LogitsSpec {
  int64_t vocab = 0;                 // columns of the logits, >= 1
  int64_t hidden = 0;                // columns of the hidden states, >= 1
  DType hidden_dtype = DType::kF32;  // f32 or bf16
  float soft_cap = 0.0f;             // finite, >= 0; 0: none
  float scale = 1.0f;                // finite
};

class LogitsPlan {
 public:
  // InvalidArgument if a value is out of range, Unimplemented for other dtypes.
  static absl::StatusOr<LogitsPlan> Create(const LogitsSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const LogitsSpec& spec() const { return spec_; }

  // Whether SelectRows may be called with these, each row being in
  // [0, hidden.extent(0)).
  absl::Status CheckSelectArgs(const AnyTensorView& hidden, IndexView rows,
                               const AnyTensorView& out) const;
  // hidden[tokens, hidden], rows[n] -> out[n, hidden]; out does not overlap
  // hidden. Allocates nothing.
  void SelectRows(const AnyTensorView& hidden, IndexView rows,
                  const AnyTensorView& out) const noexcept;

  absl::Status CheckArgs(MatrixView<float> logits) const;
  // logits[n, vocab], in place; rows may have any stride. Without cap and scale
  // nothing is touched. Allocates nothing; safe to call concurrently; the
  // result does not depend on the number of workers.
  void Execute(MatrixView<float> logits, Executor& executor) const noexcept;

 private:
  LogitsPlan(const LogitsSpec& spec, const LogitsKernels& kernels)
      : spec_(spec), kernels_(kernels) {}

  LogitsSpec spec_;
  LogitsKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_LOGITS_LOGITS_H_
