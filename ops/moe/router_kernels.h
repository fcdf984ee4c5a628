#ifndef QUERN_OPS_MOE_ROUTER_KERNELS_H_
#define QUERN_OPS_MOE_ROUTER_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>
#include <cstdint>

#include "quern/ops/moe/router_spec.h"

namespace quern {

// One worker's scratch. Vectors of up to 16 lanes are read and written at any
// element, so every array has that many elements more.
struct RouterRow {
  static constexpr size_t kSize =
      static_cast<size_t>(RouterSpec::kMaxExperts) + 16;

  alignas(64) float logits[kSize];  // given by the caller; overwritten
  alignas(64) float bias[kSize];    // given by the caller
  alignas(64) float scores[kSize];
  alignas(64) float values[kSize];  // those that may still be chosen,
  alignas(64) int32_t ids[kSize];   // and their experts, ascending
  alignas(64) int32_t ranks[kSize];
  alignas(64) float ranked[kSize];  // values and experts by rank
  alignas(64) int32_t ranked_ids[kSize];
};

struct RouterKernels {
  const char* target;
  // Routes the token whose logits, as f32, are row.logits.
  void (*route)(const RouterSpec& spec, RouterRow& row, float* weights,
                int32_t* ids);
};

// The kernels of the best instruction set this CPU supports.
RouterKernels GetRouterKernels(RouterScore score);

}  // namespace quern

#endif  // QUERN_OPS_MOE_ROUTER_KERNELS_H_
