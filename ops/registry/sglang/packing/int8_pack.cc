#include "quern/ops/registry/sglang/packing/int8_pack.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/sglang/packing/layout.h"
#include "quern/ops/registry/sglang/packing/pack.h"
#include "quern/quant/s8s8_compensation.h"

namespace quern {

absl::StatusOr<SglangInt8PackPlan> SglangInt8PackPlan::Create(int64_t k,
                                                              int64_t n) {
  QUERN_ASSIGN_OR_RETURN(const SglangLayout layout,
                         SglangLayout::Create(DType::kI8, k, n));
  QUERN_ASSIGN_OR_RETURN(const SglangPackPlan pack,
                         SglangPackPlan::Create(layout));
  S8S8CompensationSpec spec;
  spec.k = k;
  spec.n = n;
  QUERN_ASSIGN_OR_RETURN(const S8S8CompensationPlan compensate,
                         S8S8CompensationPlan::Create(spec));
  return SglangInt8PackPlan(pack, compensate);
}

absl::Status SglangInt8PackPlan::CheckArgs(MatrixView<const int8_t> w,
                                           VectorView<int32_t> compensation,
                                           const void* packed) const {
  QUERN_RETURN_IF_ERROR(pack_.CheckArgs(w, compensation, packed));
  QUERN_RETURN_IF_ERROR(compensate_.CheckNK(w, compensation));
  return CheckApart("sglang_pack", "w", w, "compensation", compensation);
}

void SglangInt8PackPlan::Pack(MatrixView<const int8_t> w,
                              VectorView<int32_t> compensation, void* packed,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(w, compensation, packed));
  compensate_.FromNK(w, compensation, executor);
  pack_.Pack(w, compensation, packed, executor);
}

}  // namespace quern
