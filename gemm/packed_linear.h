#ifndef QUERN_GEMM_PACKED_LINEAR_H_
#define QUERN_GEMM_PACKED_LINEAR_H_

// A linear layer on weights that lie in packing/vnni_layout.h, multiplied by
// our own kernels: for any number of rows, at its best where memory is the
// limit.
//
//   c[m, n] = round_c(bias[n] + sum over k of a[m, k] * b[k, n])
//
// or that with an activation and a residual, gemm/epilogue.h.
//
// a, b and c are each f32, bf16 or f16; operands are never rounded to a
// narrower type, sums are f32, and the result is rounded once, to nearest even.
// bf16 by bf16 uses the CPU's bf16 dot product where there is one, which rounds
// as two fused steps and takes subnormal numbers for zero; everything else is
// widened to f32 in registers and uses its fused multiply-add.
//
// The sum over k is formed in chunks of 256 lines (512 k; 256 k for f32
// weights), each in the order of k, and the chunks are added in order. Nothing
// else decides a result: it has the same bits for any number of rows around it
// and for any number of threads.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gemm/epilogue_kernels.h"
#include "gemm/linear_kernels.h"
#include "packing/vnni_layout.h"
#include "packing/vnni_pack.h"

namespace quern {

struct PackedLinearSpec {
  int64_t n = 0;  // columns of b, and of c unless the activation is gated
  int64_t k = 0;  // columns of a
  DType a = DType::kBF16;
  DType b = DType::kBF16;
  DType c = DType::kBF16;
  // kNK: weights[n, k], as models store them; kKN: weights[k, n].
  WeightOrder order = WeightOrder::kNK;
  LinearActivation activation = LinearActivation::kNone;
};

class PackedLinearPlan {
 public:
  // n and k are below this: sizes then fit comfortably in 64 bits.
  static constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;

  // `weights` has spec.b and any row stride; `bias` is f32[n], or of rank 0 for
  // none. Both are copied. Uses `executor` to pack.
  //
  // InvalidArgument: n or k outside [1, kMaxExtent]; an odd n of a gated
  // activation; weights or bias of another dtype, rank or shape, null or
  // misaligned; packed weights of 2^63 bytes or more.
  // Unimplemented: a dtype that is not f32, bf16 or f16.
  // ResourceExhausted: no memory for the packed weights.
  static absl::StatusOr<PackedLinearPlan> Create(const PackedLinearSpec& spec,
                                                 const AnyTensorView& weights,
                                                 const AnyTensorView& bias,
                                                 Executor& executor);

  const PackedLinearSpec& spec() const { return spec_; }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  // "packed AVX3_ZEN4 bf16 dot, tiles of 8 x 32".
  std::string Explain(int64_t m) const;

  // Of the packed weights, and how many of them lie in huge pages.
  size_t packed_bytes() const { return packed_.bytes(); }
  size_t HugePageBytes() const { return packed_.HugePageBytes(); }

  // Of the workspace that Execute needs for up to max_m rows on up to
  // max_workers workers. Grows with max_m up to a few hundred rows.
  int64_t WorkspaceBytes(int64_t max_m, int max_workers) const;

  // Whether Execute may be called with these: a is [m, k], c is writable and
  // [m, ColumnsOfC(activation, n)], both of the spec's dtypes, and they do not
  // overlap; residual is of rank 0, for none, or like c, and c itself or apart
  // from it.
  absl::Status CheckArgs(const AnyTensorView& a, const AnyTensorView& c,
                         const AnyTensorView& residual = {}) const;

  // Writes c and nothing else; reads nothing outside the rows of a and of
  // residual. m = 0 does nothing. Any number of threads may call it at once,
  // each with its own workspace, and an executor that allows it. Allocates
  // nothing. The workspace has WorkspaceBytes(m, executor.num_workers()) or
  // more: with less, aborts.
  void Execute(const AnyTensorView& a, const AnyTensorView& c,
               const AnyTensorView& residual, Workspace workspace,
               Executor& executor) const noexcept;
  // The same without a residual.
  void Execute(const AnyTensorView& a, const AnyTensorView& c,
               Workspace workspace, Executor& executor) const noexcept {
    Execute(a, c, AnyTensorView(), workspace, executor);
  }

 private:
  PackedLinearPlan(const PackedLinearSpec& spec, const VnniLayout& layout,
                   const LinearKernels& kernels)
      : spec_(spec),
        layout_(layout),
        kernels_(kernels),
        finish_f32_(GetFinish(DType::kF32)),
        epilogue_(GetEpilogueKernels(spec.activation, spec.c)) {}

  PackedLinearSpec spec_;
  VnniLayout layout_;  // of all columns, or of gate's and of up's
  LinearKernels kernels_;
  Finish finish_f32_;  // before the epilogue, if there is one
  EpilogueKernels epilogue_;
  AlignedBuffer packed_;
  AlignedBuffer bias_;  // f32[n], or empty for none
};

}  // namespace quern

#endif  // QUERN_GEMM_PACKED_LINEAR_H_
