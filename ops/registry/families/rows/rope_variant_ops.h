#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROPE_VARIANT_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROPE_VARIANT_OPS_H_

#include "absl/status/status.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// mrope works in place, with positions[3, n], i32 or i64, of time, row and
// column. Also apply_rotary_emb and dual_chunk_rotary_embedding. Query and key
// are as for rotary_embedding (rope_ops.h). Providers: simd, and reference,
// which rounds each product and each sum, or once with enable_fp32_compute.
absl::Status RegisterRopeVariantOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROPE_VARIANT_OPS_H_
