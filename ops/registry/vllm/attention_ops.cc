#include "quern/ops/registry/vllm/attention_ops.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/attention.h"
#include "quern/ops/registry/vllm/attention.h"

namespace quern {
namespace {

constexpr char kSchedule[] = "cpu_attn_get_scheduler_metadata";
constexpr char kWrite[] = "cpu_attn_reshape_and_cache";

absl::Status CheckIsa(const OpCall& call, const char* field) {
  constexpr absl::string_view kAll[] = {"auto", "amx", "vec", "vec16",
                                        "neon", "rvv", "vxe", "vsx"};
  const std::string& isa = call.Text(field);
  if (std::find(std::begin(kAll), std::end(kAll), isa) != std::end(kAll)) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), field, "=\"", isa, "\"; need one of ",
                         absl::StrJoin(kAll, ", "),
                         ", none of which has an effect");
}

// Builds a schedule in Prepare; Execute does nothing.
class SchedulePlan {
 public:
  static absl::StatusOr<SchedulePlan> Make(const VllmStepSpec& spec,
                                           const OpCall& call) {
    return SchedulePlan(spec,
                        call.Object<SchedulerMetadata>("scheduler_metadata"));
  }

  const char* target() const { return "scalar"; }
  absl::Status Prepare(const VllmStepArgs& a, Executor& executor) {
    metadata_->schedule = AttentionSchedule();
    QUERN_RETURN_IF_ERROR(CheckArgs(a));
    VarlenAttentionStorage& storage = metadata_->storage;
    QUERN_RETURN_IF_ERROR(LengthsOf(a, storage));
    QUERN_ASSIGN_OR_RETURN(
        metadata_->schedule,
        AttentionSchedule::Build(
            spec_, {storage.q_lens, storage.kv_lens, storage.causal, {}, {}},
            AttentionTiles(), executor.num_workers(), storage.schedule));
    return absl::OkStatus();
  }
  absl::Status CheckArgs(const VllmStepArgs& a) const {
    return CheckStepTensors(kSchedule, a);
  }
  void Execute(const VllmStepArgs&, Executor&) const {}

 private:
  SchedulePlan(const VllmStepSpec& spec, SchedulerMetadata* metadata)
      : spec_(spec), metadata_(metadata) {}

  absl::Status LengthsOf(const VllmStepArgs& a,
                         VarlenAttentionStorage& to) const {
    const auto requests = static_cast<size_t>(a.seq_lens.extent(0));
    const auto* const kv_lens = static_cast<const int32_t*>(a.seq_lens.data());
    const auto* const starts =
        static_cast<const int32_t*>(a.query_start_loc.data());
    const auto* const dynamic =
        static_cast<const uint8_t*>(a.dynamic_causal.data());
    to.kv_lens.assign(kv_lens, kv_lens + requests);
    to.q_lens.resize(requests);
    to.causal.assign(requests, spec_.causal ? 1 : 0);
    if (starts[0] != 0) {
      return InvalidArgument(kSchedule, "query_start_loc[0]=", starts[0],
                             "; need 0");
    }
    for (size_t r = 0; r < requests; ++r) {
      if (starts[r + 1] < starts[r]) {
        return InvalidArgument(kSchedule, "query_start_loc[", r + 1,
                               "]=", starts[r + 1], "; need at least ",
                               starts[r], ", the one before");
      }
      to.q_lens[r] = int64_t{starts[r + 1]} - starts[r];
      if (a.dynamic_causal.rank() != 0) to.causal[r] = dynamic[r] != 0 ? 1 : 0;
    }
    return absl::OkStatus();
  }

  VllmStepSpec spec_;
  SchedulerMetadata* metadata_;
};

absl::Status FillSchedule(VllmStepSpec& spec, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(CheckIsa(call, "isa_hint"));
  QUERN_RETURN_IF_ERROR(CheckEqual(call.op(), "num_req", call.Int("num_req"),
                                   spec.requests, "seq_lens has"));
  QUERN_ASSIGN_OR_RETURN(
      spec.q_dtype,
      DTypeOr(call.op(), "dtype", call.Text("dtype"), DType::kF32));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(call.op(), "dtype", spec.q_dtype, kFloatDTypes));
  // A schedule depends neither on the pages nor on the cache's type.
  KvLayoutSpec layout;
  layout.dtype = spec.q_dtype;
  layout.kv_heads = call.Int("num_heads_kv");
  layout.head_dim = call.Int("head_dim");
  layout.page_size = KvLayout::kGroupTokens;
  QUERN_ASSIGN_OR_RETURN(spec.kv, KvLayout::Create(layout));
  QUERN_ASSIGN_OR_RETURN(spec.window_left, WindowOf(call.op(), "window_size",
                                                    call.Int("window_size")));
  spec.window_right = spec.window_left;
  return CheckAttentionSpec(kSchedule, spec);
}

absl::Status AddSchedule(const char* name, OpRegistry& registry) {
  using Spec = VllmStepSpec;
  using Args = VllmStepArgs;
  static SchedulerMetadata example;
  return OpDeclaration<SchedulePlan, Spec, Args>(name)
      .Layer()
      .Need<int64_t>("num_req")
      .Need("num_heads_q", &Spec::q_heads)
      .Need<int64_t>("num_heads_kv")
      .Need<int64_t>("head_dim")
      .In("seq_lens", &Args::seq_lens, {&Spec::requests}, DType::kI32)
      .Need<std::string>("dtype")
      .In("query_start_loc", &Args::query_start_loc, {Plus(1, &Spec::requests)},
          DType::kI32)
      .Need("causal", &Spec::causal)
      .Attr("window_size", int64_t{-1})
      .Attr("isa_hint", std::string("auto"))
      .Attr("enable_kv_split", true)
      .Maybe("dynamic_causal", &Args::dynamic_causal, {&Spec::requests},
             DType::kU8)
      .Object<SchedulerMetadata>("scheduler_metadata")
      .Then(&FillSchedule)
      .Provider("reference", &SchedulePlan::Make)
      .Example({{"num_req", 2},
                {"num_heads_q", 2},
                {"num_heads_kv", 1},
                {"head_dim", 16},
                {"seq_lens", {2}, DType::kI32},
                {"dtype", "f32"},
                {"query_start_loc", {3}, DType::kI32},
                {"causal", true},
                {"scheduler_metadata", &example}})
      .AddTo(registry);
}

struct WriteSpec : WriteKvSpec {
  VllmCache cache;
};
struct WriteArgs {
  AnyTensorView key, value, key_cache, value_cache, slot_mapping;
};

WriteKvArgs ArgsOf(const VllmCache& cache, const WriteArgs& a) {
  const absl::Span<const int64_t> slots(
      static_cast<const int64_t*>(a.slot_mapping.data()),
      static_cast<size_t>(a.slot_mapping.extent(0)));
  return {a.key, a.value, slots, cache.View(a.key_cache, a.value_cache),
          {},    {},      {}};
}

// WriteKvPlan on two tensors.
class WritePlan {
 public:
  static absl::StatusOr<WritePlan> Create(const WriteSpec& spec) {
    QUERN_ASSIGN_OR_RETURN(const WriteKvPlan plan, WriteKvPlan::Create(spec));
    return WritePlan(plan, spec.cache);
  }

  const char* target() const { return plan_.target(); }
  absl::Status CheckArgs(const WriteArgs& a) const {
    QUERN_RETURN_IF_ERROR(CheckInput(kWrite, "slot_mapping", a.slot_mapping,
                                     DType::kI64, {a.key.extent(0)}));
    QUERN_RETURN_IF_ERROR(
        cache_.CheckViews(kWrite, a.key_cache, a.value_cache));
    for (const AnyTensorView* v : {&a.key_cache, &a.value_cache}) {
      if (v->writable() || IsEmpty(*v)) continue;
      return InvalidArgument(kWrite,
                             v == &a.key_cache ? "key_cache" : "value_cache",
                             " is read-only");
    }
    return plan_.CheckArgs(ArgsOf(cache_, a));
  }
  void Execute(const WriteArgs& a, Executor& executor) const {
    plan_.Execute(ArgsOf(cache_, a), executor);
  }

 private:
  WritePlan(const WriteKvPlan& plan, const VllmCache& cache)
      : plan_(plan), cache_(cache) {}

  WriteKvPlan plan_;
  VllmCache cache_;
};

absl::Status AddWrite(OpRegistry& registry) {
  using Spec = WriteSpec;
  using Args = WriteArgs;
  OpDeclaration<WritePlan, Spec, Args> op(kWrite);
  op.Layer()
      .Then(&FillVllmCache<Spec>)
      .In("key", &Args::key, {kRows, &KvHeads<Spec>, &KeyDim<Spec>},
          &Spec::input)
      .In("value", &Args::value, {kRows, &KvHeads<Spec>, &ValueDim<Spec>},
          Like("key"))
      .InOut("key_cache", &Args::key_cache, nullptr)
      .InOut("value_cache", &Args::value_cache, nullptr)
      .In("slot_mapping", &Args::slot_mapping, {kRows}, DType::kI64)
      .Attr("isa", std::string("auto"))
      .Then([](Spec&, const OpCall& call) { return CheckIsa(call, "isa"); });
  return VllmCacheAttrs(op)
      .Reference([](const Spec& spec, const Args& a) {
        NativeWriteKv(ArgsOf(spec.cache, a));
      })
      .Example({{"key", {4, 1, 16}},
                {"value", {4, 1, 16}},
                {"key_cache", {8, 1, 16, 16}},
                {"value_cache", {8, 1, 16, 16}},
                {"slot_mapping", {4}, DType::kI64}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVllmAttentionOps(OpRegistry& registry) {
  // vLLM's wrapper in Python, and what it calls.
  QUERN_RETURN_IF_ERROR(AddSchedule(kSchedule, registry));
  QUERN_RETURN_IF_ERROR(AddSchedule("get_scheduler_metadata", registry));
  QUERN_RETURN_IF_ERROR(AddWrite(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmPagedAttention(registry));
  return RegisterVllmMla(registry);
}

}  // namespace quern
