#include "quern/ops/registry/attention_ops.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_attention.h"
#include "quern/ops/registry/step_workspace.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kWrite[] = "write_kv";
constexpr char kAttention[] = "paged_attention";

absl::Status CheckCacheMeta(absl::string_view op, const TensorMeta& cache,
                            const KvLayout& layout) {
  if (cache.dtype != DType::kU8 || cache.extents.size() != 2 ||
      cache.extents[1] != layout.page_bytes()) {
    return InvalidArgument(op, "cache is ", PrintMeta(cache),
                           "; need u8[pages, ", layout.page_bytes(),
                           "], as the layout's pages are");
  }
  if (layout.scaling() == KvScaling::kNone ||
      layout.scaling() == KvScaling::kPerTokenHead ||
      layout.scaling() == KvScaling::kPerBlock) {
    return absl::OkStatus();
  }
  return Unimplemented(op, "scaling is ", KvScalingName(layout.scaling()),
                       "; need none, or per_token_head or per_block, whose "
                       "scales lie in the pages");
}

// InvalidArgument unless the pages are contiguous, as KvCacheView requires.
absl::Status CheckPages(absl::string_view op, const AnyTensorView& cache,
                        const KvLayout& layout) {
  QUERN_RETURN_IF_ERROR(CheckInput(op, "cache", cache, DType::kU8,
                                   {kAnyExtent, layout.page_bytes()}));
  if (cache.extent(0) <= 1) return absl::OkStatus();
  return CheckEqual(op, "stride of cache", cache.stride(0), layout.page_bytes(),
                    "pages have");
}

KvCacheView CacheOf(const KvLayout& layout, const AnyTensorView& cache) {
  // The const_cast is safe because attention only reads the cache.
  return KvCacheView(layout, cache.extent(0), const_cast<void*>(cache.data()));
}

// The tensors of write_kv are key, value, slots, cache.
class BoundWriteKv final : public BoundOp {
 public:
  BoundWriteKv(const WriteKvPlan& plan, bool native)
      : plan_(plan), native_(native) {}

  const char* target() const override {
    return native_ ? "scalar" : plan_.target();
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kWrite, t, 4));
    QUERN_RETURN_IF_ERROR(
        CheckInput(kWrite, "slots", t[2], DType::kI64, {t[0].extent(0)}));
    QUERN_RETURN_IF_ERROR(CheckPages(kWrite, t[3], plan_.spec().kv));
    if (!t[3].writable() && !IsEmpty(t[3])) {
      return InvalidArgument(kWrite, "cache is read-only");
    }
    return plan_.CheckArgs(ArgsOf(t));
  }
  void Execute(Tensors t, Workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (native_) {
      NativeWriteKv(ArgsOf(t));
    } else {
      plan_.Execute(ArgsOf(t), executor);
    }
  }

 private:
  WriteKvArgs ArgsOf(Tensors t) const {
    const absl::Span<const int64_t> slots(
        static_cast<const int64_t*>(t[2].data()),
        static_cast<size_t>(t[2].extent(0)));
    return {t[0], t[1], slots, CacheOf(plan_.spec().kv, t[3]), {}, {}, {}};
  }

  WriteKvPlan plan_;
  bool native_;
};

Metas WriteShapes(const TensorMeta& key, const TensorMeta& value,
                  const TensorMeta& slots, const MutatedMeta& cache,
                  const KvLayout* layout) {
  if (key.extents.size() != 3 || value.extents.size() != 3 ||
      slots.dtype != DType::kI64 ||
      slots.extents != std::vector<int64_t>{key.extents[0]}) {
    return InvalidArgument(kWrite,
                           "need key and value [tokens, kv_heads, head_dim] "
                           "and slots i64[tokens]");
  }
  if (value.dtype != key.dtype) {
    return InvalidArgument(kWrite, "value is ", DTypeName(value.dtype),
                           "; need ", DTypeName(key.dtype), ", as key is");
  }
  QUERN_RETURN_IF_ERROR(CheckCacheMeta(kWrite, cache, *layout));
  return std::vector<TensorMeta>();
}
template <bool kNative>
Bound Write(const TensorMeta& key, const TensorMeta& value,
            const TensorMeta& slots, const MutatedMeta& cache,
            const KvLayout* layout) {
  QUERN_RETURN_IF_ERROR(WriteShapes(key, value, slots, cache, layout).status());
  WriteKvSpec spec;
  spec.kv = *layout;
  spec.input = key.dtype;
  QUERN_ASSIGN_OR_RETURN(const WriteKvPlan plan, WriteKvPlan::Create(spec));
  return std::unique_ptr<BoundOp>(new BoundWriteKv(plan, kNative));
}

// The tensors of paged_attention are query, cache, alibi_slopes, sinks, out.
class BoundAttention final : public BoundOp {
 public:
  BoundAttention(const PagedAttentionPlan& plan, const AttentionStep* step,
                 bool native)
      : plan_(plan), step_(step), native_(native) {}

  const char* target() const override {
    return native_ ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t) const override {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kAttention, t, 5));
    QUERN_RETURN_IF_ERROR(CheckPages(kAttention, t[1], plan_.spec().kv));
    for (const size_t i : {size_t{2}, size_t{3}}) {
      if (t[i].rank() == 0) continue;
      QUERN_RETURN_IF_ERROR(CheckInput(kAttention,
                                       i == 2 ? "alibi_slopes" : "sinks", t[i],
                                       DType::kF32, {plan_.spec().q_heads}));
    }
    return plan_.CheckArgs(ArgsOf(t));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if (native_) {
      WorkspaceLayout layout;
      LayOut(layout);
      return layout.bytes();
    }
    return StepWorkspaceBytes(plan_, step_->schedule, step_->limits, max_rows,
                              max_workers);
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (native_) {
      NativePagedAttention(plan_.spec(), ArgsOf(t), LayOut(workspace));
    } else {
      plan_.Execute(ArgsOf(t), workspace, executor);
    }
  }

 private:
  template <typename Allocator>
  double* LayOut(Allocator& allocator) const {
    return allocator.template Allocate<double>("sums",
                                               plan_.spec().kv.v_head_dim());
  }
  absl::Span<const float> PerHead(const AnyTensorView& v) const {
    if (v.rank() == 0) return {};
    return absl::MakeConstSpan(static_cast<const float*>(v.data()),
                               static_cast<size_t>(v.extent(0)));
  }
  PagedAttentionArgs ArgsOf(Tensors t) const {
    return {t[0],          CacheOf(plan_.spec().kv, t[1]),
            step_->pages,  step_->schedule,
            t[4],          {},
            PerHead(t[2]), PerHead(t[3])};
  }

  PagedAttentionPlan plan_;
  const AttentionStep* step_;
  bool native_;
};

Metas AttentionShapes(const TensorMeta& query, const TensorMeta& cache,
                      const MaybeMeta& alibi_slopes, const MaybeMeta& sinks,
                      const KvLayout* layout, const AttentionStep*, double,
                      int64_t, int64_t, double, const std::string& out_dtype) {
  if (query.extents.size() != 3 || query.extents[2] != layout->head_dim()) {
    return InvalidArgument(kAttention, "query is ", PrintMeta(query),
                           "; need [tokens, q_heads, ", layout->head_dim(),
                           "], as the layout's keys are");
  }
  QUERN_RETURN_IF_ERROR(CheckCacheMeta(kAttention, cache, *layout));
  const TensorMeta heads = {DType::kF32, {query.extents[1]}};
  if (alibi_slopes.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckMeta(kAttention, "alibi_slopes", *alibi_slopes,
                                    heads, ", one for each query head"));
  }
  if (sinks.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckMeta(kAttention, "sinks", *sinks, heads,
                                    ", one for each query head"));
  }
  QUERN_ASSIGN_OR_RETURN(const DType out, DTypeOr(kAttention, "out_dtype",
                                                  out_dtype, query.dtype));
  return std::vector<TensorMeta>{
      {out, {query.extents[0], query.extents[1], layout->v_head_dim()}}};
}
template <bool kNative>
Bound Attention(const TensorMeta& query, const TensorMeta& cache,
                const MaybeMeta& alibi_slopes, const MaybeMeta& sinks,
                const KvLayout* layout, const AttentionStep* step, double scale,
                int64_t window_left, int64_t window_right, double soft_cap,
                const std::string& out_dtype) {
  QUERN_ASSIGN_OR_RETURN(
      const std::vector<TensorMeta> out,
      AttentionShapes(query, cache, alibi_slopes, sinks, layout, step, scale,
                      window_left, window_right, soft_cap, out_dtype));
  AttentionSpec spec;
  spec.kv = *layout;
  spec.q_heads = query.extents[1];
  spec.q_dtype = query.dtype;
  spec.out_dtype = out[0].dtype;
  spec.scale = static_cast<float>(scale);
  spec.window_left = window_left;
  spec.window_right = window_right;
  spec.soft_cap = static_cast<float>(soft_cap);
  QUERN_ASSIGN_OR_RETURN(const PagedAttentionPlan plan,
                         PagedAttentionPlan::Create(spec));
  return std::unique_ptr<BoundOp>(new BoundAttention(plan, step, kNative));
}

// A layout of one head of 16 in pages of 16, for listings and tests.
const KvLayout* ExampleLayout() {
  static const KvLayout layout = [] {
    KvLayoutSpec spec;
    spec.dtype = DType::kF32;
    spec.kv_heads = 1;
    spec.head_dim = spec.page_size = 16;
    auto made = KvLayout::Create(spec);
    QUERN_CHECK(made.ok());
    return *made;
  }();
  return &layout;
}
NamedArgs WriteExample(DType dtype) {
  return {{"key", TensorMeta{dtype, {4, 1, 16}}},
          {"value", TensorMeta{dtype, {4, 1, 16}}},
          {"slots", TensorMeta{DType::kI64, {4}}},
          {"cache", TensorMeta{DType::kU8, {8, ExampleLayout()->page_bytes()}}},
          {"layout", ExampleLayout()}};
}
NamedArgs AttentionExample(DType dtype) {
  static const AttentionStep step = {};
  return {{"query", TensorMeta{dtype, {4, 2, 16}}},
          {"cache", TensorMeta{DType::kU8, {8, ExampleLayout()->page_bytes()}}},
          {"layout", ExampleLayout()},
          {"step", &step}};
}

}  // namespace

absl::Status RegisterAttentionOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&WriteShapes>(
      "write_kv(Tensor key, Tensor value, Tensor slots, Tensor(a3!) cache, "
      "KvLayout layout) -> ()",
      &WriteExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kWrite, {{}, OpRows::kFirst, "", {{"k", "key"}, {"v", "value"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Write<false>>(kWrite, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Write<true>>(kWrite, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&AttentionShapes>(
      "paged_attention(Tensor query, Tensor cache, Tensor? alibi_slopes, "
      "Tensor? sinks, KvLayout layout, AttentionStep step, float scale=0.0, "
      "int window_left=-1, int window_right=-1, float soft_cap=0.0, "
      "str out_dtype=\"\") -> Tensor",
      &AttentionExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(
      r.Declare(kAttention, {{}, OpRows::kFirst, "", {{"q", "query"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Attention<false>>(kAttention, kSimd));
  return r.Add<&Attention<true>>(kAttention, kReference);
}

}  // namespace quern
