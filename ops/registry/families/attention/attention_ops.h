#ifndef QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_ATTENTION_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_ATTENTION_OPS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/page_table.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// What one step knows of its sequences. paged_attention is made with the
// address of an AttentionStep, which the engine refills for each step, before
// CheckArgs, WorkspaceBytes and Execute. Layers with different windows need one
// each.
struct AttentionStep {
  PageTable pages;
  // Must be built with a spec of the operator's heads and windows.
  AttentionSchedule schedule;
  // Upper limits over all steps. With max_sequences > 0, WorkspaceBytes is
  // enough for every step of up to max_rows tokens within these limits;
  // otherwise it is enough for the schedule above only.
  AttentionLimits limits = {};
};

// The pages of one layer as the operators' tensor `cache`: u8[pages,
// page_bytes]. Keys, values and scales lie in pages one after another, as in
// KvCache.
inline AnyTensorView CachePages(const KvCacheView& layer) {
  const int64_t bytes = layer.layout().page_bytes();
  return AnyTensorView(DType::kU8, static_cast<void*>(layer.k().data), 2,
                       {layer.num_pages(), bytes}, {bytes, 1});
}

// write_kv: key and value[tokens, kv_heads, head_dim], with any token and head
// strides, go to slots[tokens] (i64) of cache[pages, page_bytes]; the layout is
// copied. paged_attention: query[tokens, q_heads, head_dim] attends to the keys
// and values of `step`. alibi_slopes and sinks are f32[q_heads]. lse
// f32[tokens, q_heads], which may be left out, is written: the log-sum-exp of
// the logits, natural, and -inf of a query without keys; merge_states reads it.
// Equations, roundings and refusals are in cache/write_kv.h and
// attention/paged_attention.h.
//
// Providers: simd, and reference, which runs plain loops with sums in double on
// the calling thread. Both take layouts without scales, with a scale for each
// token and head, or with one for each block of a latent (the f8e4m3 cache of
// multi-head latent attention). They return Unimplemented for the other scales,
// which lie outside the pages. In the latent form, key has the first
// v_head_dim elements of a key, and value the rest of it.
//
// Registering these operators links cache and attention.
absl::Status RegisterAttentionOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ATTENTION_ATTENTION_OPS_H_
