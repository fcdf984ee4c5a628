#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// replicated_linear, column_parallel_linear, row_parallel_linear and
// parallel_lm_head are the layers of ops/parallel by name. weight is [n, k], or
// the rank's part of it with weight_is_shard; without `ranks` there is one
// rank. Providers: simd, our packed kernels; onednn, which MakeFrom
// selects and which exists in programs that link //gemm/onednn; reference, a
// loop with a sum in double.
//
//   const TensorMeta x_meta{DType::kBF16, {max_tokens, k}};
//   QUERN_ASSIGN_OR_RETURN(
//       MadeOp up, ops.Make("column_parallel_linear",
//                           {{"x", x_meta}, {"weight", w_meta},
//                            {"ranks", &communicator}}));
//   // No bias; y[tokens, n / ranks] is what is returned.
//   const AnyTensorView tensors[] = {x, weight, AnyTensorView(), y};
//   QUERN_RETURN_IF_ERROR(up.op->Prepare(tensors, executor));   // once
//   QUERN_ASSIGN_OR_RETURN(const int64_t bytes,                 // once
//                          up.op->WorkspaceBytes(max_tokens, max_workers));
//   QUERN_RETURN_IF_ERROR(up.op->CheckArgs(tensors));
//   up.op->Execute(tensors, workspace, executor);
//
// Each rank makes these calls on its own thread or in its own process, in the
// same order. If one rank stops because of an error, the others wait for it. x
// and y are this rank's: x of a row layer has k / ranks columns.
//
// In Prepare, simd and onednn pack weight and bias. Before it, CheckArgs and
// WorkspaceBytes return FailedPrecondition. Afterwards weight and bias are not
// read again, but CheckArgs requires the same views. An x of more than two
// dimensions has as many rows as all its dimensions but the last have elements.
//
// Registering these operators links gemm, which the operators on rows do not
// need.
absl::Status RegisterLinearOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_LINEAR_OPS_H_
