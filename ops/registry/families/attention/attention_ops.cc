#include "quern/ops/registry/families/attention/attention_ops.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv.h"
#include "quern/ops/registry/families/attention/step_workspace.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/attention.h"

namespace quern {
namespace {

// A layout whose scales, if it has any, lie in the pages.
template <class Spec>
absl::Status FillLayout(Spec& spec, const OpCall& call) {
  spec.kv = *call.Object<const KvLayout>("layout");
  const KvScaling scaling = spec.kv.scaling();
  if (scaling == KvScaling::kNone || scaling == KvScaling::kPerTokenHead ||
      scaling == KvScaling::kPerBlock) {
    return absl::OkStatus();
  }
  return Unimplemented(call.op(), "scaling is ", KvScalingName(scaling),
                       "; need none, or per_token_head or per_block, whose "
                       "scales lie in the pages");
}
template <class Spec>
int64_t PageBytes(const Spec& spec) {
  return spec.kv.page_bytes();
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

constexpr char kWrite[] = "write_kv";

struct WriteArgs {
  AnyTensorView key, value, slots, cache;
};

WriteKvArgs ArgsOf(const WriteKvSpec& spec, const WriteArgs& a) {
  const absl::Span<const int64_t> slots(
      static_cast<const int64_t*>(a.slots.data()),
      static_cast<size_t>(a.slots.extent(0)));
  return {a.key, a.value, slots, CacheOf(spec.kv, a.cache), {}, {}, {}};
}
absl::Status CheckWrite(const WriteKvPlan& plan, const WriteArgs& a) {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kWrite, "slots", a.slots, DType::kI64, {a.key.extent(0)}));
  QUERN_RETURN_IF_ERROR(CheckPages(kWrite, a.cache, plan.spec().kv));
  if (!a.cache.writable() && !IsEmpty(a.cache)) {
    return InvalidArgument(kWrite, "cache is read-only");
  }
  return plan.CheckArgs(ArgsOf(plan.spec(), a));
}
void ExecuteWrite(const WriteKvPlan& plan, const WriteArgs& a, Workspace,
                  Executor& executor) {
  plan.Execute(ArgsOf(plan.spec(), a), executor);
}

absl::Status AddWrite(OpRegistry& registry) {
  return OpDeclaration<WriteKvPlan, WriteKvSpec, WriteArgs>(kWrite)
      .Layer()
      .Then(&FillLayout<WriteKvSpec>)
      .In("key", &WriteArgs::key, {kRows, kAny, kAny}, &WriteKvSpec::input)
      .Word("k", "key")
      .In("value", &WriteArgs::value, {kRows, kAny, kAny}, Like("key"))
      .Word("v", "value")
      .In("slots", &WriteArgs::slots, {kRows}, DType::kI64)
      .InOut("cache", &WriteArgs::cache, nullptr,
             {kAny, &PageBytes<WriteKvSpec>}, DType::kU8)
      .Object<const KvLayout>("layout")
      .Calls(&CheckWrite, &ExecuteWrite)
      .Reference([](const WriteKvSpec& spec, const WriteArgs& a) {
        NativeWriteKv(ArgsOf(spec, a));
      })
      .Example({{"key", {4, 1, 16}},
                {"value", {4, 1, 16}},
                {"slots", {4}, DType::kI64},
                {"cache", {8, ExampleLayout()->page_bytes()}, DType::kU8},
                {"layout", ExampleLayout()}})
      .AddTo(registry);
}

constexpr char kAttention[] = "paged_attention";

struct AttentionArgs {
  AnyTensorView query, cache, alibi_slopes, sinks, lse, out;
};

// Attention over the pages and the schedule of a step.
class StepAttention {
 public:
  template <bool kNative>
  static absl::StatusOr<StepAttention> Make(const AttentionSpec& spec,
                                            const OpCall& call) {
    QUERN_ASSIGN_OR_RETURN(const PagedAttentionPlan plan,
                           PagedAttentionPlan::Create(spec));
    return StepAttention(plan, call.Object<const AttentionStep>("step"),
                         kNative);
  }

  const AttentionSpec& spec() const { return plan_.spec(); }
  const char* target() const { return native_ ? "scalar" : plan_.target(); }
  std::string Explain(int64_t) const {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }
  absl::Status CheckArgs(const AttentionArgs& a) const {
    QUERN_RETURN_IF_ERROR(CheckPages(kAttention, a.cache, spec().kv));
    QUERN_RETURN_IF_ERROR(CheckPerHead("alibi_slopes", a.alibi_slopes));
    QUERN_RETURN_IF_ERROR(CheckPerHead("sinks", a.sinks));
    if (a.lse.rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckOutput(kAttention, "lse", a.lse, DType::kF32,
                                        {a.query.extent(0), spec().q_heads}));
    }
    return plan_.CheckArgs(ArgsOf(a));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    if (native_) {
      WorkspaceLayout layout;
      LayOut(layout);
      return layout.bytes();
    }
    return StepWorkspaceBytes(plan_, step_->schedule, step_->limits, max_rows,
                              max_workers);
  }
  void Execute(const AttentionArgs& a, Workspace workspace,
               Executor& executor) const {
    if (native_) {
      NativePagedAttention(spec(), ArgsOf(a), LayOut(workspace));
    } else {
      plan_.Execute(ArgsOf(a), workspace, executor);
    }
  }

 private:
  StepAttention(const PagedAttentionPlan& plan, const AttentionStep* step,
                bool native)
      : plan_(plan), step_(step), native_(native) {}

  template <typename Allocator>
  double* LayOut(Allocator& allocator) const {
    return allocator.template Allocate<double>("sums", spec().kv.v_head_dim());
  }
  absl::Status CheckPerHead(absl::string_view field,
                            const AnyTensorView& v) const {
    if (v.rank() == 0) return absl::OkStatus();
    return CheckInput(kAttention, field, v, DType::kF32, {spec().q_heads});
  }
  absl::Span<const float> PerHead(const AnyTensorView& v) const {
    if (v.rank() == 0) return {};
    return absl::MakeConstSpan(static_cast<const float*>(v.data()),
                               static_cast<size_t>(v.extent(0)));
  }
  PagedAttentionArgs ArgsOf(const AttentionArgs& a) const {
    return {a.query,
            CacheOf(spec().kv, a.cache),
            step_->pages,
            step_->schedule,
            a.out,
            a.lse.rank() == 0 ? MatrixView<float>() : a.lse.As<float, 2>(),
            PerHead(a.alibi_slopes),
            PerHead(a.sinks)};
  }

  PagedAttentionPlan plan_;
  const AttentionStep* step_;
  bool native_;
};

int64_t KeyDim(const AttentionSpec& spec) { return spec.kv.head_dim(); }
int64_t ValueDim(const AttentionSpec& spec) { return spec.kv.v_head_dim(); }

absl::Status AddAttention(OpRegistry& registry) {
  static const AttentionStep example = {};
  return OpDeclaration<StepAttention, AttentionSpec, AttentionArgs>(kAttention)
      .Layer()
      .Then(&FillLayout<AttentionSpec>)
      .In("query", &AttentionArgs::query,
          {kRows, &AttentionSpec::q_heads, &KeyDim}, &AttentionSpec::q_dtype)
      .Word("q", "query")
      .In("cache", &AttentionArgs::cache, {kAny, &PageBytes<AttentionSpec>},
          DType::kU8)
      .Maybe("alibi_slopes", &AttentionArgs::alibi_slopes,
             {&AttentionSpec::q_heads}, DType::kF32)
      .Maybe("sinks", &AttentionArgs::sinks, {&AttentionSpec::q_heads},
             DType::kF32)
      .MaybeInOut("lse", &AttentionArgs::lse, {kRows, &AttentionSpec::q_heads},
                  DType::kF32)
      .Object<const KvLayout>("layout")
      .Object<const AttentionStep>("step")
      .Attr("scale", 0.0, &AttentionSpec::scale)
      .Attr("window_left", int64_t{-1}, &AttentionSpec::window_left)
      .Attr("window_right", int64_t{-1}, &AttentionSpec::window_right)
      .Attr("soft_cap", 0.0, &AttentionSpec::soft_cap)
      .DTypeAttr("out_dtype", Like("query"), &AttentionSpec::out_dtype)
      .Out("out", &AttentionArgs::out,
           {kRows, &AttentionSpec::q_heads, &ValueDim},
           &AttentionSpec::out_dtype)
      .Provider("simd", &StepAttention::Make<false>)
      .Provider("reference", &StepAttention::Make<true>)
      .Example({{"query", {4, 2, 16}},
                {"cache", {8, ExampleLayout()->page_bytes()}, DType::kU8},
                {"layout", ExampleLayout()},
                {"step", &example}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterAttentionOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddWrite(registry));
  return AddAttention(registry);
}

}  // namespace quern
