#ifndef QUERN_OPS_MOE_ROUTER_H_
#define QUERN_OPS_MOE_ROUTER_H_

// The router of a mixture of experts: for each token, top_k experts and their
// weights. Formulas, models and bounds: router_spec.h.
//
//   RouterSpec spec;
//   spec.experts = 128;
//   spec.top_k = 8;
//   spec.renormalize = true;
//   QUERN_ASSIGN_OR_RETURN(const RouterPlan plan, RouterPlan::Create(spec));
//   plan.Execute(logits, AnyTensorView(), weights, ids, executor);

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/moe/router_kernels.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

class RouterPlan {
 public:
  // InvalidArgument if a value is out of its range, if the groups do not divide
  // the experts, if top_groups have fewer than top_k experts, or if there is a
  // bias and a group is a single expert; Unimplemented for other dtypes.
  static absl::StatusOr<RouterPlan> Create(const RouterSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const RouterSpec& spec() const { return spec_; }

  // Whether Execute may be called with these: dtypes, shapes, strides, memory,
  // aliasing. InvalidArgument names the argument.
  absl::Status CheckArgs(const AnyTensorView& logits, const AnyTensorView& bias,
                         const MatrixView<float>& weights,
                         const MatrixView<int32_t>& ids) const;

  // logits[tokens, experts], bias[experts] -> weights[tokens, top_k],
  // ids[tokens, top_k]. Rows may have any stride, and what lies between them is
  // not touched. A plan without a bias takes AnyTensorView() for it. The
  // results overlap neither each other nor what is read. tokens = 0 does
  // nothing. Needs no workspace and allocates nothing; safe to call
  // concurrently. A token depends on its own row alone: neither the batch nor
  // the number of workers, which divide tokens, changes a bit. Instruction sets
  // may differ in the last bits of scores, so with a bias they may choose
  // differently between experts whose c differ by no more than that.
  void Execute(const AnyTensorView& logits, const AnyTensorView& bias,
               const MatrixView<float>& weights, const MatrixView<int32_t>& ids,
               Executor& executor) const noexcept;

 private:
  explicit RouterPlan(const RouterSpec& spec);
  void Route(const AnyTensorView& logits, const void* bias,
             const MatrixView<float>& weights, const MatrixView<int32_t>& ids,
             int64_t begin, int64_t end) const;

  RouterSpec spec_;
  RouterKernels kernels_;
  RowBlockKernels logits_blocks_;
  RowBlockKernels bias_blocks_;
};

}  // namespace quern

#endif  // QUERN_OPS_MOE_ROUTER_H_
