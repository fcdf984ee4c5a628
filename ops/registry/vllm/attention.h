#ifndef QUERN_OPS_REGISTRY_VLLM_ATTENTION_H_
#define QUERN_OPS_REGISTRY_VLLM_ATTENTION_H_

// Private: what the operators of attention_ops.h have in common.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/attention/attention_spec.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Defines cpu_attention_with_kv_cache.
absl::Status RegisterVllmPagedAttention(OpRegistry& registry);
// Defines mla_decode_kvcache and concat_and_cache_mla_cpu.
absl::Status RegisterVllmMla(OpRegistry& registry);

// The window_left of a window that counts the query: kNoWindow for -1.
// InvalidArgument for 0 and for less than -1.
absl::StatusOr<int64_t> WindowOf(absl::string_view op, absl::string_view field,
                                 int64_t window);

// The tensors of a step: i32[requests], i32[requests + 1] and, if given,
// u8[requests].
struct VllmStepArgs {
  AnyTensorView seq_lens, query_start_loc, dynamic_causal;
};
absl::Status CheckStepTensors(absl::string_view op, const VllmStepArgs& a);

// Two tensors [pages, kv_heads, page_size, head_dim] as a cache.
class VllmCache {
 public:
  // Reads key_cache, value_cache, kv_cache_dtype, k_scale and v_scale.
  // InvalidArgument: tensors of other shapes or types than those of
  // attention_ops.h; scales that are 1 for no kv_cache_dtype but those of
  // fp8, or that KvScales refuses.
  static absl::StatusOr<VllmCache> Create(const OpCall& call);

  const KvLayout& layout() const { return layout_; }
  // InvalidArgument unless the views have the shapes of the layout, and no gaps
  // within the page of a head.
  absl::Status CheckViews(absl::string_view op, const AnyTensorView& keys,
                          const AnyTensorView& values) const;
  // The views as one cache, which borrows the scales of this object.
  KvCacheView View(const AnyTensorView& keys,
                   const AnyTensorView& values) const;

 private:
  KvLayout layout_;
  DType stored_ = DType::kF32;  // of the tensors
  float k_scale_ = 1;
  float v_scale_ = 1;
};

// Sets `kv` and `cache` of a Spec.
template <class Spec>
absl::Status FillVllmCache(Spec& spec, const OpCall& call) {
  QUERN_ASSIGN_OR_RETURN(spec.cache, VllmCache::Create(call));
  spec.kv = spec.cache.layout();
  return absl::OkStatus();
}
// The extents of keys and values in that cache.
template <class Spec>
int64_t KvHeads(const Spec& spec) {
  return spec.kv.kv_heads();
}
template <class Spec>
int64_t KeyDim(const Spec& spec) {
  return spec.kv.head_dim();
}
template <class Spec>
int64_t ValueDim(const Spec& spec) {
  return spec.kv.v_head_dim();
}
// The arguments that FillVllmCache reads, but for the tensors.
template <class Op>
Op& VllmCacheAttrs(Op& op) {
  return op.Attr("k_scale", 1.0)
      .Attr("v_scale", 1.0)
      .Attr("kv_cache_dtype", std::string("auto"));
}

// The attention of a step of requests.
struct VllmStepSpec : AttentionSpec {
  int64_t requests = 0;
  bool causal = false;
  VllmCache cache;  // the schedule has none
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_ATTENTION_H_
