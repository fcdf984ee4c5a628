#ifndef QUERN_OPS_REGISTRY_SGLANG_PACKING_INT8_PACK_H_
#define QUERN_OPS_REGISTRY_SGLANG_PACKING_INT8_PACK_H_

// SGLang's packed int8 weights, complete: the geometry of
// ops/registry/sglang/packing/layout.h and behind each block of 32 columns
//
//   compensation[n] = 128 * sum over k of w[n, k]
//
// from quant/s8s8_compensation.h. Other types have no compensation: use
// ops/registry/sglang/packing/pack.h alone.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/sglang/packing/layout.h"
#include "quern/ops/registry/sglang/packing/pack.h"
#include "quern/quant/s8s8_compensation.h"

namespace quern {

class SglangInt8PackPlan {
 public:
  // Refuses what SglangLayout::Create (n % 32, k % 32) and
  // S8S8CompensationPlan::Create (k > kMaxK) refuse, in their words.
  static absl::StatusOr<SglangInt8PackPlan> Create(int64_t k, int64_t n);

  const SglangLayout& layout() const { return pack_.layout(); }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return pack_.target(); }

  // InvalidArgument where Pack would be wrong.
  absl::Status CheckArgs(MatrixView<const int8_t> w,
                         VectorView<int32_t> compensation,
                         const void* packed) const;

  // Reads w[n, k], twice; writes compensation[n] and layout().bytes() at
  // `packed`, of any alignment. None may overlap another. Allocates nothing;
  // concurrent calls are safe.
  void Pack(MatrixView<const int8_t> w, VectorView<int32_t> compensation,
            void* packed, Executor& executor) const noexcept;

 private:
  SglangInt8PackPlan(const SglangPackPlan& pack,
                     const S8S8CompensationPlan& compensate)
      : pack_(pack), compensate_(compensate) {}

  SglangPackPlan pack_;
  S8S8CompensationPlan compensate_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PACKING_INT8_PACK_H_
