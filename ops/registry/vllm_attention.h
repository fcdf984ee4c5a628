#ifndef QUERN_OPS_REGISTRY_VLLM_ATTENTION_H_
#define QUERN_OPS_REGISTRY_VLLM_ATTENTION_H_

// Private: what the operators of vllm_attention_ops.h have in common.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// Defines cpu_attention_with_kv_cache.
absl::Status RegisterVllmPagedAttention(OpRegistry& registry);

// The window_left of a window that counts the query: kNoWindow for -1.
// InvalidArgument for 0 and for less than -1.
absl::StatusOr<int64_t> WindowOf(absl::string_view op, absl::string_view field,
                                 int64_t window);

// InvalidArgument unless these are i32[requests], i32[requests + 1] and, if
// given, u8[requests].
absl::Status CheckStepMetas(absl::string_view op, const TensorMeta& seq_lens,
                            const TensorMeta& query_start_loc,
                            const std::optional<TensorMeta>& dynamic_causal);
struct StepTensors {
  const AnyTensorView& seq_lens;
  const AnyTensorView& query_start_loc;
  const AnyTensorView& dynamic_causal;
};
absl::Status CheckStepTensors(absl::string_view op, const StepTensors& t);

// Two tensors [pages, kv_heads, page_size, head_dim] as a cache.
class VllmCache {
 public:
  // InvalidArgument: tensors of other shapes or types than those of
  // vllm_attention_ops.h; scales that are 1 for no kv_cache_dtype but those of
  // fp8, or that KvScales refuses.
  static absl::StatusOr<VllmCache> Create(absl::string_view op,
                                          const TensorMeta& key_cache,
                                          const TensorMeta& value_cache,
                                          const std::string& kv_cache_dtype,
                                          double k_scale, double v_scale);

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

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_ATTENTION_H_
