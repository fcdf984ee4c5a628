#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

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
#include "quern/ops/registry/families/attention/step_workspace.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/attention.h"
#include "quern/ops/registry/vllm/attention.h"
#include "quern/ops/registry/vllm/attention_ops.h"

namespace quern {
namespace {

constexpr char kOp[] = "cpu_attention_with_kv_cache";

using Spec = VllmStepSpec;
struct Args : VllmStepArgs {
  AnyTensorView query, key_cache, value_cache, output;
  AnyTensorView alibi_slopes, block_table, s_aux;
};

// What one call keeps in its workspace besides the scratch of the plan.
struct Staged {
  int64_t* indptr;  // of the pages of each request
  int32_t* pages;
  float* sinks;
  double* sums;  // of the reference
};

// PagedAttentionPlan over the pages of a block table.
class Plan {
 public:
  template <bool kNative>
  static absl::StatusOr<Plan> Make(const Spec& spec, const OpCall& call) {
    QUERN_ASSIGN_OR_RETURN(const PagedAttentionPlan plan,
                           PagedAttentionPlan::Create(spec));
    return Plan(spec, plan,
                call.Object<SchedulerMetadata>("scheduler_metadata"), kNative);
  }

  const char* target() const { return native_ ? "scalar" : plan_.target(); }
  std::string Explain(int64_t) const {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }

  absl::Status CheckArgs(const Args& a) const {
    QUERN_RETURN_IF_ERROR(CheckStepTensors(kOp, a));
    QUERN_RETURN_IF_ERROR(CheckStep(a));
    QUERN_RETURN_IF_ERROR(CheckAttentionRows(
        kOp, spec_, {metadata_->schedule, a.query, a.output, {}, {}, {}}));
    if (a.alibi_slopes.rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(kOp, "alibi_slopes", a.alibi_slopes,
                                       DType::kF32, {spec_.q_heads}));
    }
    if (a.s_aux.rank() != 0) {
      QUERN_RETURN_IF_ERROR(
          CheckDTypeIn(kOp, "s_aux", a.s_aux.dtype(), kFloatDTypes));
      QUERN_RETURN_IF_ERROR(
          CheckInput(kOp, "s_aux", a.s_aux, a.s_aux.dtype(), {spec_.q_heads}));
    }
    QUERN_RETURN_IF_ERROR(
        spec_.cache.CheckViews(kOp, a.key_cache, a.value_cache));
    const KvCacheView kv = spec_.cache.View(a.key_cache, a.value_cache);
    QUERN_RETURN_IF_ERROR(CheckCache(kOp, kv));
    QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "output", a.output, kv));
    return CheckBlocks(a.block_table, kv.num_pages());
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    const AttentionLimits& limits = metadata_->limits;
    const bool limited = limits.max_sequences > 0;
    int64_t bytes = 0;
    if (!native_) {
      QUERN_ASSIGN_OR_RETURN(
          bytes, StepWorkspaceBytes(plan_, metadata_->schedule, limits,
                                    max_rows, max_workers));
    }
    int64_t requests = limits.max_sequences, pages = 0;
    const int64_t page_size = spec_.kv.page_size();
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

  void Execute(const Args& a, Workspace workspace, Executor& executor) const {
    const AttentionSchedule& schedule = metadata_->schedule;
    const auto requests = static_cast<int64_t>(schedule.sequences().size());
    const Staged staged = LayOut(workspace, requests, Pages());
    staged.indptr[0] = 0;
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t count = PagesOf(r);
      std::copy_n(RowOf(a.block_table, r), count,
                  staged.pages + staged.indptr[r]);
      staged.indptr[r + 1] = staged.indptr[r] + count;
    }
    PagedAttentionArgs args;
    args.q = a.query;
    args.kv = spec_.cache.View(a.key_cache, a.value_cache);
    const absl::StatusOr<PageTable> pages = PageTable::Build(
        absl::MakeConstSpan(staged.indptr, static_cast<size_t>(requests) + 1),
        absl::MakeConstSpan(staged.pages,
                            static_cast<size_t>(staged.indptr[requests])),
        args.kv.layout().page_size(), args.kv.num_pages());
    QUERN_CHECK(pages.ok());  // CheckBlocks
    args.pages = *pages;
    args.schedule = schedule;
    args.out = a.output;
    const auto heads = static_cast<size_t>(spec_.q_heads);
    if (a.alibi_slopes.rank() != 0) {
      args.alibi_slopes = absl::MakeConstSpan(
          static_cast<const float*>(a.alibi_slopes.data()), heads);
    }
    if (a.s_aux.rank() != 0) {
      const ScalarRow sinks(a.s_aux, 0);
      for (size_t h = 0; h < heads; ++h) {
        staged.sinks[h] = sinks[static_cast<int64_t>(h)];
      }
      args.sinks = absl::MakeConstSpan(staged.sinks, heads);
    }
    if (native_) {
      NativePagedAttention(spec_, args, staged.sums);
    } else {
      plan_.Execute(args, workspace, executor);
    }
  }

 private:
  Plan(const Spec& spec, const PagedAttentionPlan& plan,
       const SchedulerMetadata* metadata, bool native)
      : spec_(spec), plan_(plan), metadata_(metadata), native_(native) {}

  template <typename Allocator>
  Staged LayOut(Allocator& to, int64_t requests, int64_t pages) const {
    return {to.template Allocate<int64_t>("page offsets", requests + 1),
            to.template Allocate<int32_t>("pages", pages),
            to.template Allocate<float>("sinks", spec_.q_heads),
            to.template Allocate<double>("sums",
                                         native_ ? spec_.kv.v_head_dim() : 0)};
  }
  const AttentionSequence& SequenceOf(int64_t r) const {
    return metadata_->schedule.sequences()[static_cast<size_t>(r)];
  }
  int64_t PagesOf(int64_t r) const {
    return DivCeil(SequenceOf(r).kv_len, spec_.kv.page_size());
  }
  int64_t Pages() const {
    int64_t pages = 0;
    for (size_t r = 0; r < metadata_->schedule.sequences().size(); ++r) {
      pages += PagesOf(static_cast<int64_t>(r));
    }
    return pages;
  }
  static const int32_t* RowOf(const AnyTensorView& table, int64_t r) {
    return static_cast<const int32_t*>(table.data()) + r * table.RowStride();
  }

  // The lengths and the flags are those that the schedule was built with.
  absl::Status CheckStep(const Args& a) const {
    const int64_t requests = a.seq_lens.extent(0);
    QUERN_RETURN_IF_ERROR(
        CheckEqual(kOp, "requests of scheduler_metadata",
                   static_cast<int64_t>(metadata_->schedule.sequences().size()),
                   requests, "seq_lens has"));
    const auto* const kv_lens = static_cast<const int32_t*>(a.seq_lens.data());
    const auto* const starts =
        static_cast<const int32_t*>(a.query_start_loc.data());
    const auto* const dynamic =
        static_cast<const uint8_t*>(a.dynamic_causal.data());
    const int64_t right = AttentionSchedule::WindowTokens(spec_.window_right);
    for (int64_t r = 0; r < requests; ++r) {
      const AttentionSequence& s = SequenceOf(r);
      const bool causal =
          a.dynamic_causal.rank() == 0 ? spec_.causal : dynamic[r] != 0;
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
          s.q_len == 0 ? count
                       : std::min(count, s.first_key() / spec_.kv.page_size());
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

  Spec spec_;
  PagedAttentionPlan plan_;
  const SchedulerMetadata* metadata_;
  bool native_;
};

absl::Status FillWindow(Spec& spec, const OpCall& call) {
  QUERN_ASSIGN_OR_RETURN(
      spec.window_left,
      WindowOf(kOp, "sliding_window", call.Int("sliding_window")));
  spec.window_right = spec.window_left;
  return absl::OkStatus();
}

}  // namespace

absl::Status RegisterVllmPagedAttention(OpRegistry& registry) {
  static SchedulerMetadata example;
  OpDeclaration<Plan, Spec, Args> op(kOp);
  op.Layer()
      .Then(&FillVllmCache<Spec>)
      .In("query", &Args::query, {kRows, &Spec::q_heads, &KeyDim<Spec>},
          &Spec::q_dtype)
      .In("key_cache", &Args::key_cache)
      .In("value_cache", &Args::value_cache)
      .InOut("output", &Args::output, nullptr,
             {kRows, &Spec::q_heads, &ValueDim<Spec>}, &Spec::out_dtype)
      .In("query_start_loc", &Args::query_start_loc, {Plus(1, &Spec::requests)},
          DType::kI32)
      .In("seq_lens", &Args::seq_lens, {&Spec::requests}, DType::kI32)
      .Need("scale", &Spec::scale)
      .Need("causal", &Spec::causal)
      .Maybe("alibi_slopes", &Args::alibi_slopes, {&Spec::q_heads}, DType::kF32)
      .Attr("sliding_window", int64_t{-1})
      .Then(&FillWindow)
      .In("block_table", &Args::block_table, {&Spec::requests, kAny},
          DType::kI32)
      .Attr("softcap", 0.0, &Spec::soft_cap)
      .Object<SchedulerMetadata>("scheduler_metadata")
      .Maybe("s_aux", &Args::s_aux, {&Spec::q_heads},
             OpDType<Spec>::OneOf(
                 {std::begin(kFloatDTypes), std::end(kFloatDTypes)}))
      .Maybe("dynamic_causal", &Args::dynamic_causal, {&Spec::requests},
             DType::kU8);
  return VllmCacheAttrs(op)
      .Provider("simd", &Plan::Make<false>)
      .Provider("reference", &Plan::Make<true>)
      .Example({{"query", {4, 2, 16}},
                {"key_cache", {8, 1, 16, 16}},
                {"value_cache", {8, 1, 16, 16}},
                {"output", {4, 2, 16}},
                {"query_start_loc", {3}, DType::kI32},
                {"seq_lens", {2}, DType::kI32},
                {"scale", 0.25},
                {"causal", true},
                {"block_table", {2, 4}, DType::kI32},
                {"scheduler_metadata", &example}})
      .AddTo(registry);
}

}  // namespace quern
