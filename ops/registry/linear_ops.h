#ifndef QUERN_OPS_REGISTRY_LINEAR_OPS_H_
#define QUERN_OPS_REGISTRY_LINEAR_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// replicated_linear, column_parallel_linear, row_parallel_linear and
// parallel_lm_head: ops/parallel by name. weight is [n, k], or with
// weight_is_shard the rank's part of it; without `ranks` there is one.
// Providers: simd, our packed kernels; onednn, which MakeFrom takes and which
// exists in programs that link //gemm/onednn; reference, a loop with a sum in
// double.
//
//   const TensorMeta x_meta{DType::kBF16, {max_tokens, k}};
//   QUERN_ASSIGN_OR_RETURN(
//       MadeOp up, ops.Make("column_parallel_linear",
//                           {{"x", x_meta}, {"weight", w_meta},
//                            {"ranks", &communicator}}));
//   // No bias; y[tokens, n / ranks] is what is returned.
//   const AnyTensorView tensors[] = {x, weight, AnyTensorView(), y};
//   QUERN_RETURN_IF_ERROR(up.op->Prepare(tensors, executor));   // once
//   QUERN_RETURN_IF_ERROR(up.op->CheckArgs(tensors));
//   up.op->Execute(tensors, executor);
//
// on the thread or in the process of each rank, in the same order on all: where
// one rank turns back on an error, the others wait for it. x and y are this
// rank's: x of a row layer has k / ranks columns.
//
// simd and onednn pack weight and bias in Prepare, FailedPrecondition from
// CheckArgs before it, and reserve scratch for as many rows as the x that the
// operator was made with. They do not read weight and bias again, but CheckArgs
// wants the same views. Calls of one operator take turns.
//
// Brings gemm along, which the other operators do without.
absl::Status RegisterLinearOps(OpRegistry& registry);

// linear: a layer on LinearWeights of any format, as gemm/linear.h computes it.
// `weights` is borrowed when the operator is made; bytes that the weights have
// adopted are read as long as it lives. x is f32, bf16 or f16. `activation` has
// the names of gemm/epilogue.h. With a residual, the layer adds to it: the view
// of the residual is also what is returned. out_dtype is the residual's if it
// is empty, or else that of x.
//
// Providers: simd and onednn, whichever gemm/linear.h (and QUERN_KERNELS)
// chooses; onednn packs its form when the operator is made, on one thread.
// reference decodes each weight where it is used, with sums in double.
absl::Status RegisterLinearWeightsOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_LINEAR_OPS_H_
