#include "quern/ops/registry/vllm/attention.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/attention/attention_spec.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/attention/token_cache.h"
#include "quern/ops/registry/op_call.h"

namespace quern {
namespace {

// The dtype of the cache's elements. InvalidArgument for an unknown name, or a
// tensor that cannot hold them.
absl::StatusOr<DType> ElementsOf(absl::string_view op, DType tensor,
                                 const std::string& kv_cache_dtype) {
  DType fp8 = DType::kF8E4M3;
  if (kv_cache_dtype == "auto") {
    if (tensor == DType::kF32 || tensor == DType::kBF16 ||
        tensor == DType::kF16) {
      return tensor;
    }
    return InvalidArgument(op, "key_cache is ", DTypeName(tensor),
                           "; need f32, bf16 or f16 with kv_cache_dtype auto");
  }
  if (kv_cache_dtype == "fp8_e5m2") {
    fp8 = DType::kF8E5M2;
  } else if (kv_cache_dtype != "fp8" && kv_cache_dtype != "fp8_e4m3") {
    return InvalidArgument(op, "kv_cache_dtype=\"", kv_cache_dtype,
                           "\"; need auto, fp8, fp8_e4m3 or fp8_e5m2");
  }
  if (tensor == DType::kU8 || tensor == fp8) return fp8;
  return InvalidArgument(op, "key_cache is ", DTypeName(tensor),
                         "; need u8 or ", DTypeName(fp8),
                         " with kv_cache_dtype ", kv_cache_dtype);
}

absl::Status CheckScale(absl::string_view op, absl::string_view field,
                        double scale, bool fp8) {
  const auto value = static_cast<float>(scale);
  if (fp8 ? std::isfinite(value) && value >= KvScales::kMin : scale == 1) {
    return absl::OkStatus();
  }
  return InvalidArgument(
      op, field, "=", scale, "; need ",
      fp8 ? "a finite number from 2^-125 on" : "1 with kv_cache_dtype auto");
}

absl::Status CheckView(absl::string_view op, absl::string_view field,
                       const AnyTensorView& v, DType dtype,
                       const KvLayout& layout, int64_t dim) {
  QUERN_RETURN_IF_ERROR(
      CheckInput(op, field, v, dtype,
                 {kAnyExtent, layout.kv_heads(), layout.page_size(), dim}));
  if (IsEmpty(v) || layout.page_size() == 1) return absl::OkStatus();
  return CheckEqual(op, "stride of a token in the cache", v.stride(2), dim,
                    "a page without gaps has");
}

}  // namespace

absl::StatusOr<int64_t> WindowOf(absl::string_view op, absl::string_view field,
                                 int64_t window) {
  if (window == -1) return kNoWindow;
  if (window >= 1) return window - 1;
  return InvalidArgument(op, field, "=", window,
                         "; need 1 or more keys, that of the query included, "
                         "or -1 for all");
}

absl::Status CheckStepTensors(absl::string_view op, const VllmStepArgs& a) {
  QUERN_RETURN_IF_ERROR(
      CheckInput(op, "seq_lens", a.seq_lens, DType::kI32, {kAnyExtent}));
  const int64_t requests = a.seq_lens.extent(0);
  QUERN_RETURN_IF_ERROR(CheckInput(op, "query_start_loc", a.query_start_loc,
                                   DType::kI32, {requests + 1}));
  if (a.dynamic_causal.rank() == 0) return absl::OkStatus();
  return CheckInput(op, "dynamic_causal", a.dynamic_causal, DType::kU8,
                    {requests});
}

absl::StatusOr<VllmCache> VllmCache::Create(const OpCall& call) {
  const TensorMeta &key_cache = *call.Tensor("key_cache"),
                   &value_cache = *call.Tensor("value_cache");
  const std::vector<int64_t>& k = key_cache.extents;
  const std::vector<int64_t>& v = value_cache.extents;
  if (k.size() != 4 || v.size() != 4 || v[0] != k[0] || v[1] != k[1] ||
      v[2] != k[2] || value_cache.dtype != key_cache.dtype) {
    return InvalidArgument(call.op(),
                           "need key_cache and value_cache [pages, kv_heads, "
                           "page_size, head_dim] of one dtype");
  }
  VllmCache cache;
  cache.stored_ = key_cache.dtype;
  KvLayoutSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.dtype, ElementsOf(call.op(), key_cache.dtype,
                                                call.Text("kv_cache_dtype")));
  const bool fp8 = SizeOf(spec.dtype) == 1;
  for (const auto& [field, scale] :
       {std::pair("k_scale", &cache.k_scale_), {"v_scale", &cache.v_scale_}}) {
    QUERN_RETURN_IF_ERROR(CheckScale(call.op(), field, call.Float(field), fp8));
    *scale = static_cast<float>(call.Float(field));
  }
  spec.kv_heads = k[1];
  spec.page_size = k[2];
  spec.head_dim = k[3];
  spec.v_head_dim = v[3];
  if (fp8) spec.scaling = KvScaling::kPerTensor;
  // A key of an odd number of elements takes one more in pairs, which the
  // tensors do not have.
  if (spec.head_dim % 2 != 0) spec.form = KvForm::kPlain;
  QUERN_ASSIGN_OR_RETURN(cache.layout_, KvLayout::Create(spec));
  return cache;
}

absl::Status VllmCache::CheckViews(absl::string_view op,
                                   const AnyTensorView& keys,
                                   const AnyTensorView& values) const {
  QUERN_RETURN_IF_ERROR(
      CheckView(op, "key_cache", keys, stored_, layout_, layout_.head_dim()));
  QUERN_RETURN_IF_ERROR(CheckView(op, "value_cache", values, stored_, layout_,
                                  layout_.v_head_dim()));
  return CheckEqual(op, "pages of value_cache", values.extent(0),
                    keys.extent(0), "key_cache has");
}

KvCacheView VllmCache::View(const AnyTensorView& keys,
                            const AnyTensorView& values) const {
  KvCacheView view(layout_, keys.extent(0), BlocksOf(keys), BlocksOf(values));
  if (layout_.scaling() == KvScaling::kPerTensor) {
    // The const_cast is safe because these scales are only read.
    view.set_scales({const_cast<float*>(&k_scale_), 0, 0},
                    {const_cast<float*>(&v_scale_), 0, 0});
  }
  return view;
}

}  // namespace quern
