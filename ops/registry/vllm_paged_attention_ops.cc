#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/attention/attention_args.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_attention.h"
#include "quern/ops/registry/step_workspace.h"
#include "quern/ops/registry/vllm_attention.h"
#include "quern/ops/registry/vllm_attention_ops.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kOp[] = "cpu_attention_with_kv_cache";

// Where each tensor is in the order of the schema.
enum At : size_t {
  kQuery,
  kKeyCache,
  kValueCache,
  kOutput,
  kQueryStartLoc,
  kSeqLens,
  kAlibi,
  kBlockTable,
  kSinks,
  kDynamicCausal,
  kTensors
};

// What one call keeps in its workspace besides the scratch of the plan.
struct Staged {
  int64_t* indptr;  // of the pages of each request
  int32_t* pages;
  float* sinks;
  double* sums;  // of the reference
};

class BoundAttention final : public BoundOp {
 public:
  BoundAttention(const PagedAttentionPlan& plan, const VllmCache& cache,
                 bool causal, const SchedulerMetadata* metadata, bool native)
      : plan_(plan),
        cache_(cache),
        causal_(causal),
        metadata_(metadata),
        native_(native) {}

  const char* target() const override {
    return native_ ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t) const override {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }

  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, kTensors));
    QUERN_RETURN_IF_ERROR(CheckStepTensors(
        kOp, {t[kSeqLens], t[kQueryStartLoc], t[kDynamicCausal]}));
    QUERN_RETURN_IF_ERROR(CheckStep(t));
    QUERN_RETURN_IF_ERROR(CheckAttentionRows(
        kOp, plan_.spec(),
        {metadata_->schedule, t[kQuery], t[kOutput], {}, {}, {}}));
    for (const At i : {kAlibi, kSinks}) {
      if (t[i].rank() == 0) continue;
      QUERN_RETURN_IF_ERROR(
          CheckDTypeIn(kOp, "s_aux", t[kSinks].dtype(),
                       {DType::kF32, DType::kBF16, DType::kF16}));
      QUERN_RETURN_IF_ERROR(CheckInput(
          kOp, i == kAlibi ? "alibi_slopes" : "s_aux", t[i],
          i == kAlibi ? DType::kF32 : t[i].dtype(), {plan_.spec().q_heads}));
    }
    QUERN_RETURN_IF_ERROR(cache_.CheckViews(kOp, t[kKeyCache], t[kValueCache]));
    const KvCacheView kv = cache_.View(t[kKeyCache], t[kValueCache]);
    QUERN_RETURN_IF_ERROR(CheckCache(kOp, kv));
    QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "output", t[kOutput], kv));
    return CheckBlocks(t[kBlockTable], kv.num_pages());
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    const AttentionLimits& limits = metadata_->limits;
    const bool limited = limits.max_sequences > 0;
    int64_t bytes = 0;
    if (!native_) {
      QUERN_ASSIGN_OR_RETURN(
          bytes, StepWorkspaceBytes(plan_, metadata_->schedule, limits,
                                    max_rows, max_workers));
    }
    int64_t requests = limits.max_sequences, pages = 0;
    const int64_t page_size = plan_.spec().kv.page_size();
    if (!limited) {
      requests = static_cast<int64_t>(metadata_->schedule.sequences().size());
      pages = Pages();
    } else if (!CheckedMul(requests, DivCeil(limits.max_kv_len, page_size),
                           &pages)) {
      pages = -1;
    }
    WorkspaceLayout layout;
    LayOut(layout, requests, pages);
    layout.Allocate<uint8_t>("attention", bytes);
    if (!layout.overflow()) return layout.bytes();
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": the pages of ", requests, " requests of ",
                     limits.max_kv_len, " tokens take more than 2^63 bytes"));
  }

  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    const AttentionSchedule& schedule = metadata_->schedule;
    const auto requests = static_cast<int64_t>(schedule.sequences().size());
    const Staged staged = LayOut(workspace, requests, Pages());
    staged.indptr[0] = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t count = PagesOf(r);
      std::copy_n(RowOf(t[kBlockTable], r), count,
                  staged.pages + staged.indptr[r]);
      staged.indptr[r + 1] = staged.indptr[r] + count;
    }
    PagedAttentionArgs args;
    args.q = t[kQuery];
    args.kv = cache_.View(t[kKeyCache], t[kValueCache]);
    const absl::StatusOr<PageTable> pages = PageTable::Build(
        absl::MakeConstSpan(staged.indptr, static_cast<size_t>(requests) + 1),
        absl::MakeConstSpan(staged.pages,
                            static_cast<size_t>(staged.indptr[requests])),
        args.kv.layout().page_size(), args.kv.num_pages());
    QUERN_CHECK(pages.ok());  // CheckBlocks
    args.pages = *pages;
    args.schedule = schedule;
    args.out = t[kOutput];
    const auto heads = static_cast<size_t>(plan_.spec().q_heads);
    if (t[kAlibi].rank() != 0) {
      args.alibi_slopes = absl::MakeConstSpan(
          static_cast<const float*>(t[kAlibi].data()), heads);
    }
    if (t[kSinks].rank() != 0) {
      const ScalarRow sinks(t[kSinks], 0);
      for (size_t h = 0; h < heads; ++h) {
        staged.sinks[h] = sinks[static_cast<int64_t>(h)];
      }
      args.sinks = absl::MakeConstSpan(staged.sinks, heads);
    }
    if (native_) {
      NativePagedAttention(plan_.spec(), args, staged.sums);
    } else {
      plan_.Execute(args, workspace, executor);
    }
  }

 private:
  template <typename Allocator>
  Staged LayOut(Allocator& a, int64_t requests, int64_t pages) const {
    const AttentionSpec& spec = plan_.spec();
    return {a.template Allocate<int64_t>("page offsets", requests + 1),
            a.template Allocate<int32_t>("pages", pages),
            a.template Allocate<float>("sinks", spec.q_heads),
            a.template Allocate<double>("sums",
                                        native_ ? spec.kv.v_head_dim() : 0)};
  }
  const AttentionSequence& SequenceOf(int64_t r) const {
    return metadata_->schedule.sequences()[static_cast<size_t>(r)];
  }
  int64_t PagesOf(int64_t r) const {
    return DivCeil(SequenceOf(r).kv_len, plan_.spec().kv.page_size());
  }
  int64_t Pages() const {
    int64_t pages = 0;
    for (size_t r = 0; r < metadata_->schedule.sequences().size(); ++r) {
      pages += PagesOf(static_cast<int64_t>(r));
    }
    return pages;
  }
  static const int32_t* RowOf(const AnyTensorView& table, int64_t r) {
    // The stride of a single row is meaningless and is not used.
    const int64_t stride = table.extent(0) > 1 ? table.stride(0) : 0;
    return static_cast<const int32_t*>(table.data()) + r * stride;
  }

  // The lengths and the flags are those that the schedule was built with.
  absl::Status CheckStep(Tensors t) const {
    const int64_t requests = t[kSeqLens].extent(0);
    QUERN_RETURN_IF_ERROR(
        CheckEqual(kOp, "requests of scheduler_metadata",
                   static_cast<int64_t>(metadata_->schedule.sequences().size()),
                   requests, "seq_lens has"));
    const auto* const kv_lens = static_cast<const int32_t*>(t[kSeqLens].data());
    const auto* const starts =
        static_cast<const int32_t*>(t[kQueryStartLoc].data());
    const auto* const dynamic =
        static_cast<const uint8_t*>(t[kDynamicCausal].data());
    const int64_t right =
        AttentionSchedule::WindowTokens(plan_.spec().window_right);
    for (int64_t r = 0; r < requests; ++r) {
      const AttentionSequence& s = SequenceOf(r);
      const bool causal =
          t[kDynamicCausal].rank() == 0 ? causal_ : dynamic[r] != 0;
      if (s.kv_len == kv_lens[r] && s.q_offset == starts[r] &&
          s.q_offset + s.q_len == starts[r + 1] &&
          s.right == (causal ? 0 : right)) {
        continue;
      }
      return InvalidArgument(
          kOp, "request ", r, " is not that of scheduler_metadata: tokens [",
          starts[r], ", ", starts[r + 1], "), seq_len ", kv_lens[r],
          causal ? ", causal" : ", not causal", "; it has tokens [", s.q_offset,
          ", ", s.q_offset + s.q_len, "), seq_len ", s.kv_len, ", and sees ",
          s.right, " keys after its own");
    }
    return absl::OkStatus();
  }

  absl::Status CheckBlocks(const AnyTensorView& table, int64_t pages) const {
    const auto requests =
        static_cast<int64_t>(metadata_->schedule.sequences().size());
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "block_table", table, DType::kI32,
                                     {requests, kAnyExtent}));
    for (int64_t r = 0; r < requests; ++r) {
      const AttentionSequence& s = SequenceOf(r);
      const int64_t count = PagesOf(r);
      if (count > table.extent(1)) {
        return InvalidArgument(kOp, "block_table has ", table.extent(1),
                               " columns; need ", count, " for request ", r,
                               " of ", s.kv_len, " tokens");
      }
      const int32_t* const row = RowOf(table, r);
      // Pages before the first key that is seen may be missing.
      const int64_t first =
          s.q_len == 0
              ? count
              : std::min(count, s.first_key() / plan_.spec().kv.page_size());
      int64_t p = 0;
      while (p < first && row[p] == kNoPage) ++p;
      for (; p < count; ++p) {
        if (0 <= row[p] && row[p] < pages) continue;
        return InvalidArgument(kOp, "block_table[", r, "][", p, "]=", row[p],
                               "; need 0 <= page < ", pages,
                               ", as the caches have, or -1 before the window");
      }
    }
    return absl::OkStatus();
  }

  PagedAttentionPlan plan_;
  VllmCache cache_;
  bool causal_;
  const SchedulerMetadata* metadata_;
  bool native_;
};

Metas Shapes(const TensorMeta& query, const TensorMeta& key_cache,
             const TensorMeta& value_cache, const MutatedMeta& output,
             const TensorMeta& query_start_loc, const TensorMeta& seq_lens,
             double, bool, const MaybeMeta& alibi_slopes,
             int64_t sliding_window, const TensorMeta& block_table, double,
             SchedulerMetadata*, const MaybeMeta& s_aux,
             const MaybeMeta& dynamic_causal, double k_scale, double v_scale,
             const std::string& kv_cache_dtype) {
  QUERN_ASSIGN_OR_RETURN(const VllmCache cache,
                         VllmCache::Create(kOp, key_cache, value_cache,
                                           kv_cache_dtype, k_scale, v_scale));
  const KvLayout& layout = cache.layout();
  if (query.extents.size() != 3 || query.extents[2] != layout.head_dim()) {
    return InvalidArgument(kOp, "query is not [tokens, q_heads, ",
                           layout.head_dim(), "], as the keys are");
  }
  const int64_t heads = query.extents[1];
  if (output.extents !=
      std::vector<int64_t>{query.extents[0], heads, layout.v_head_dim()}) {
    return InvalidArgument(kOp, "output is not [", query.extents[0], ", ",
                           heads, ", ", layout.v_head_dim(), "]");
  }
  QUERN_RETURN_IF_ERROR(
      CheckStepMetas(kOp, seq_lens, query_start_loc, dynamic_causal));
  if (block_table.dtype != DType::kI32 || block_table.extents.size() != 2 ||
      block_table.extents[0] != seq_lens.extents[0]) {
    return InvalidArgument(kOp, "block_table is not i32[", seq_lens.extents[0],
                           ", pages]");
  }
  if (alibi_slopes.has_value() &&
      !(*alibi_slopes == TensorMeta{DType::kF32, {heads}})) {
    return InvalidArgument(kOp, "alibi_slopes is not f32[", heads, "]");
  }
  if (s_aux.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckDTypeIn(
        kOp, "s_aux", s_aux->dtype, {DType::kF32, DType::kBF16, DType::kF16}));
    if (s_aux->extents != std::vector<int64_t>{heads}) {
      return InvalidArgument(kOp, "s_aux is not [", heads, "]");
    }
  }
  QUERN_RETURN_IF_ERROR(
      WindowOf(kOp, "sliding_window", sliding_window).status());
  return std::vector<TensorMeta>();
}

template <bool kNative>
Bound Make(const TensorMeta& query, const TensorMeta& key_cache,
           const TensorMeta& value_cache, const MutatedMeta& output,
           const TensorMeta& query_start_loc, const TensorMeta& seq_lens,
           double scale, bool causal, const MaybeMeta& alibi_slopes,
           int64_t sliding_window, const TensorMeta& block_table,
           double softcap, SchedulerMetadata* scheduler_metadata,
           const MaybeMeta& s_aux, const MaybeMeta& dynamic_causal,
           double k_scale, double v_scale, const std::string& kv_cache_dtype) {
  QUERN_RETURN_IF_ERROR(Shapes(query, key_cache, value_cache, output,
                               query_start_loc, seq_lens, scale, causal,
                               alibi_slopes, sliding_window, block_table,
                               softcap, scheduler_metadata, s_aux,
                               dynamic_causal, k_scale, v_scale, kv_cache_dtype)
                            .status());
  QUERN_ASSIGN_OR_RETURN(const VllmCache cache,
                         VllmCache::Create(kOp, key_cache, value_cache,
                                           kv_cache_dtype, k_scale, v_scale));
  AttentionSpec spec;
  spec.kv = cache.layout();
  spec.q_heads = query.extents[1];
  spec.q_dtype = query.dtype;
  spec.out_dtype = output.dtype;
  spec.scale = static_cast<float>(scale);
  QUERN_ASSIGN_OR_RETURN(spec.window_left,
                         WindowOf(kOp, "sliding_window", sliding_window));
  spec.window_right = spec.window_left;
  spec.soft_cap = static_cast<float>(softcap);
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kOp, spec));
  QUERN_ASSIGN_OR_RETURN(const PagedAttentionPlan plan,
                         PagedAttentionPlan::Create(spec));
  return std::unique_ptr<BoundOp>(
      new BoundAttention(plan, cache, causal, scheduler_metadata, kNative));
}

NamedArgs Example(DType dtype) {
  static SchedulerMetadata metadata;
  return {{"query", TensorMeta{dtype, {4, 2, 16}}},
          {"key_cache", TensorMeta{dtype, {8, 1, 16, 16}}},
          {"value_cache", TensorMeta{dtype, {8, 1, 16, 16}}},
          {"output", TensorMeta{dtype, {4, 2, 16}}},
          {"query_start_loc", TensorMeta{DType::kI32, {3}}},
          {"seq_lens", TensorMeta{DType::kI32, {2}}},
          {"scale", 0.25},
          {"causal", true},
          {"block_table", TensorMeta{DType::kI32, {2, 4}}},
          {"scheduler_metadata", &metadata}};
}

}  // namespace

absl::Status RegisterVllmPagedAttention(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&Shapes>(
      "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, "
      "Tensor value_cache, Tensor(a3!) output, Tensor query_start_loc, "
      "Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, "
      "int sliding_window=-1, Tensor block_table, float softcap=0.0, "
      "SchedulerMetadata scheduler_metadata, Tensor? s_aux, "
      "Tensor? dynamic_causal, float k_scale=1.0, float v_scale=1.0, "
      "str kv_cache_dtype=\"auto\") -> ()",
      &Example, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<false>>(kOp, "simd"));
  return r.Add<&Make<true>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
