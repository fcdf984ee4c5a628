#ifndef QUERN_GEMM_LINEAR_H_
#define QUERN_GEMM_LINEAR_H_

// Linear layers: one plan over two implementations.
//
//   c[m, n] = round_c(bias[n] + sum over k of a[m, k] * b[k, n])
//
// or that with an activation and a residual, gemm/epilogue.h.
//
//   packed   our kernels, gemm/packed_linear.h
//   oneDNN   gemm/onednn/linear.h, which has no epilogue; in programs that link
//            //gemm/onednn (gemm/linear_backend.h)
//
// a, b and c are each f32, bf16 or f16. Both implementations sum in f32 and
// round once; their sums differ in order, so their bits may. spec.impl decides
// at Create which one runs; m never does. Explain() names it.
//
// A row has the same bits alone and in a batch from the packed kernels, and
// from oneDNN with AVX-512 and without AMX. oneDNN on AVX2 sums in an order
// that depends on the number of rows; nobody has looked at AMX.
//
//   LinearSpec spec;  spec.n = 4096;  spec.k = 14336;
//   QUERN_ASSIGN_OR_RETURN(LinearPlan plan,
//                          LinearPlan::Create(spec, weights, bias, executor));
//   LinearScratch scratch;
//   QUERN_RETURN_IF_ERROR(scratch.Reserve(plan, max_m, executor));
//   plan.Execute(a, c, scratch, executor);

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/linear_backend.h"
#include "gemm/linear_impl.h"
#include "gemm/linear_spec.h"
#include "gemm/packed_linear.h"

namespace quern {

class LinearPlan {
 public:
  // The plan owns the packed weights. Refuses what PackedLinearPlan::Create or
  // OneDnnLinearPlan::Create refuses. Where spec.impl is kOneDnn, besides,
  // Unimplemented: an activation; FailedPrecondition: a program without oneDNN.
  static absl::StatusOr<LinearPlan> Create(const LinearSpec& spec,
                                           const AnyTensorView& weights,
                                           const AnyTensorView& bias,
                                           Executor& executor);

  const LinearSpec& spec() const { return spec_; }
  // kPacked or kOneDnn.
  LinearImpl impl() const {
    return packed_.has_value() ? LinearImpl::kPacked : LinearImpl::kOneDnn;
  }
  // The instruction set of the packed kernels, e.g. "AVX3_ZEN4", or "oneDNN".
  const char* target() const {
    return packed_.has_value() ? packed_->target() : OneDnnBackend()->name;
  }
  // What runs for m rows, and what chose it: "packed AVX3_ZEN4 bf16 dot, tiles
  // of 8 x 32; auto: the packed kernels are the default".
  std::string Explain(int64_t m) const;
  size_t packed_bytes() const;

  // Whether Execute may be called with these: as PackedLinearPlan::CheckArgs.
  // Where impl() is kOneDnn, as OneDnnLinearPlan::CheckArgs, which bounds the
  // row strides; and Unimplemented: a residual of rank > 0.
  absl::Status CheckArgs(const AnyTensorView& a, const AnyTensorView& c,
                         const AnyTensorView& residual = {}) const;

  // Writes the elements of c and nothing else; m = 0 does nothing; c does not
  // overlap a; residual is of rank 0, for none, or c itself, or apart from c.
  // Any number of threads may call it at once, each with a scratch of its own,
  // reserved for at least a's rows, and an executor that allows it. The packed
  // kernels allocate nothing; oneDNN allocates small blocks.
  void Execute(const AnyTensorView& a, const AnyTensorView& c,
               const AnyTensorView& residual, LinearScratch& scratch,
               Executor& executor) const noexcept;
  // The same without a residual.
  void Execute(const AnyTensorView& a, const AnyTensorView& c,
               LinearScratch& scratch, Executor& executor) const noexcept {
    Execute(a, c, AnyTensorView(), scratch, executor);
  }

 private:
  friend class LinearScratch;
  explicit LinearPlan(const LinearSpec& spec) : spec_(spec) {}

  LinearSpec spec_;
  std::optional<PackedLinearPlan> packed_;  // one of the two
  std::unique_ptr<const BackendLinear> onednn_;
};

}  // namespace quern

#endif  // QUERN_GEMM_LINEAR_H_
