#include "quern/ops/registry/vllm_attention_ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
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
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_attention.h"
#include "quern/ops/registry/vllm_attention.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kSchedule[] = "cpu_attn_get_scheduler_metadata";
constexpr char kWrite[] = "cpu_attn_reshape_and_cache";
constexpr char kAttention[] = "cpu_attention_with_kv_cache";

absl::Status CheckIsa(absl::string_view op, const std::string& isa) {
  constexpr absl::string_view kAll[] = {"auto", "amx", "vec", "vec16",
                                        "neon", "rvv", "vxe", "vsx"};
  if (std::find(std::begin(kAll), std::end(kAll), isa) != std::end(kAll)) {
    return absl::OkStatus();
  }
  return InvalidArgument(op, "isa=\"", isa, "\"; need one of ",
                         absl::StrJoin(kAll, ", "),
                         ", none of which has an effect");
}

// The tensors are seq_lens, query_start_loc, dynamic_causal.
class BoundSchedule final : public BoundOp {
 public:
  BoundSchedule(const AttentionSpec& spec, bool causal,
                SchedulerMetadata* metadata)
      : spec_(spec), causal_(causal), metadata_(metadata) {}

  const char* target() const override { return "scalar"; }
  absl::Status Prepare(Tensors t, Executor& executor) override {
    metadata_->schedule = AttentionSchedule();
    QUERN_RETURN_IF_ERROR(CheckArgs(t));
    VarlenAttentionStorage& storage = metadata_->storage;
    QUERN_RETURN_IF_ERROR(LengthsOf(t, storage));
    QUERN_ASSIGN_OR_RETURN(
        metadata_->schedule,
        AttentionSchedule::Build(
            spec_, {storage.q_lens, storage.kv_lens, storage.causal, {}, {}},
            AttentionTiles(), executor.num_workers(), storage.schedule));
    return absl::OkStatus();
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kSchedule, t, 3));
    return CheckStepTensors(kSchedule, {t[0], t[1], t[2]});
  }
  void Execute(Tensors, Workspace, Executor&) const noexcept override {}

 private:
  absl::Status LengthsOf(Tensors t, VarlenAttentionStorage& to) const {
    const auto requests = static_cast<size_t>(t[0].extent(0));
    const auto* const kv_lens = static_cast<const int32_t*>(t[0].data());
    const auto* const starts = static_cast<const int32_t*>(t[1].data());
    const auto* const dynamic = static_cast<const uint8_t*>(t[2].data());
    to.kv_lens.assign(kv_lens, kv_lens + requests);
    to.q_lens.resize(requests);
    to.causal.assign(requests, causal_ ? 1 : 0);
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
      if (t[2].rank() != 0) to.causal[r] = dynamic[r] != 0 ? 1 : 0;
    }
    return absl::OkStatus();
  }

  AttentionSpec spec_;
  bool causal_;
  SchedulerMetadata* metadata_;
};

Metas ScheduleShapes(int64_t num_req, int64_t, int64_t, int64_t,
                     const TensorMeta& seq_lens, const std::string& dtype,
                     const TensorMeta& query_start_loc, bool,
                     int64_t window_size, const std::string& isa_hint, bool,
                     const MaybeMeta& dynamic_causal, SchedulerMetadata*) {
  QUERN_RETURN_IF_ERROR(
      DTypeOr(kSchedule, "dtype", dtype, DType::kF32).status());
  QUERN_RETURN_IF_ERROR(CheckIsa(kSchedule, isa_hint));
  QUERN_RETURN_IF_ERROR(
      WindowOf(kSchedule, "window_size", window_size).status());
  QUERN_RETURN_IF_ERROR(
      CheckStepMetas(kSchedule, seq_lens, query_start_loc, dynamic_causal));
  QUERN_RETURN_IF_ERROR(CheckEqual(kSchedule, "num_req", num_req,
                                   seq_lens.extents[0], "seq_lens has"));
  return std::vector<TensorMeta>();
}
Bound MakeSchedule(int64_t num_req, int64_t num_heads_q, int64_t num_heads_kv,
                   int64_t head_dim, const TensorMeta& seq_lens,
                   const std::string& dtype, const TensorMeta& query_start_loc,
                   bool causal, int64_t window_size,
                   const std::string& isa_hint, bool enable_kv_split,
                   const MaybeMeta& dynamic_causal,
                   SchedulerMetadata* scheduler_metadata) {
  QUERN_RETURN_IF_ERROR(
      ScheduleShapes(num_req, num_heads_q, num_heads_kv, head_dim, seq_lens,
                     dtype, query_start_loc, causal, window_size, isa_hint,
                     enable_kv_split, dynamic_causal, scheduler_metadata)
          .status());
  AttentionSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.q_dtype,
                         DTypeOr(kSchedule, "dtype", dtype, DType::kF32));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kSchedule, "dtype", spec.q_dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  // A schedule depends neither on the pages nor on the cache's type.
  KvLayoutSpec layout;
  layout.dtype = spec.q_dtype;
  layout.kv_heads = num_heads_kv;
  layout.head_dim = head_dim;
  layout.page_size = KvLayout::kGroupTokens;
  const auto kv = KvLayout::Create(layout);
  if (!kv.ok()) return OfOp(kSchedule, kv.status());
  spec.kv = *kv;
  spec.q_heads = num_heads_q;
  QUERN_ASSIGN_OR_RETURN(spec.window_left,
                         WindowOf(kSchedule, "window_size", window_size));
  spec.window_right = spec.window_left;
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kSchedule, spec));
  return std::unique_ptr<BoundOp>(
      new BoundSchedule(spec, causal, scheduler_metadata));
}

// The tensors are key, value, key_cache, value_cache, slot_mapping.
class BoundWrite final : public BoundOp {
 public:
  BoundWrite(const WriteKvPlan& plan, const VllmCache& cache, bool native)
      : plan_(plan), cache_(cache), native_(native) {}

  const char* target() const override {
    return native_ ? "scalar" : plan_.target();
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kWrite, t, 5));
    QUERN_RETURN_IF_ERROR(CheckInput(kWrite, "slot_mapping", t[4], DType::kI64,
                                     {t[0].extent(0)}));
    QUERN_RETURN_IF_ERROR(cache_.CheckViews(kWrite, t[2], t[3]));
    for (const size_t i : {size_t{2}, size_t{3}}) {
      if (t[i].writable() || IsEmpty(t[i])) continue;
      return InvalidArgument(kWrite, i == 2 ? "key_cache" : "value_cache",
                             " is read-only");
    }
    return OfOp(kWrite, plan_.CheckArgs(ArgsOf(t)));
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
        static_cast<const int64_t*>(t[4].data()),
        static_cast<size_t>(t[4].extent(0)));
    return {t[0], t[1], slots, cache_.View(t[2], t[3]), {}, {}, {}};
  }

  WriteKvPlan plan_;
  VllmCache cache_;
  bool native_;
};

Metas WriteShapes(const TensorMeta& key, const TensorMeta& value,
                  const MutatedMeta& key_cache, const MutatedMeta& value_cache,
                  const TensorMeta& slot_mapping, const std::string& isa,
                  double k_scale, double v_scale,
                  const std::string& kv_cache_dtype) {
  QUERN_RETURN_IF_ERROR(CheckIsa(kWrite, isa));
  QUERN_ASSIGN_OR_RETURN(const VllmCache cache,
                         VllmCache::Create(kWrite, key_cache, value_cache,
                                           kv_cache_dtype, k_scale, v_scale));
  const KvLayout& layout = cache.layout();
  const auto rows = [&](int64_t dim) {
    const int64_t tokens = key.extents.empty() ? -1 : key.extents[0];
    return std::vector<int64_t>{tokens, layout.kv_heads(), dim};
  };
  if (key.extents != rows(layout.head_dim()) ||
      value.extents != rows(layout.v_head_dim()) || value.dtype != key.dtype) {
    return InvalidArgument(kWrite, "need key [tokens, ", layout.kv_heads(),
                           ", ", layout.head_dim(), "] and value [tokens, ",
                           layout.kv_heads(), ", ", layout.v_head_dim(),
                           "] of one dtype, as the caches have heads");
  }
  if (slot_mapping.dtype != DType::kI64 ||
      slot_mapping.extents != std::vector<int64_t>{key.extents[0]}) {
    return InvalidArgument(kWrite, "slot_mapping is not i64[", key.extents[0],
                           "], one for each token of key");
  }
  return std::vector<TensorMeta>();
}
template <bool kNative>
Bound MakeWrite(const TensorMeta& key, const TensorMeta& value,
                const MutatedMeta& key_cache, const MutatedMeta& value_cache,
                const TensorMeta& slot_mapping, const std::string& isa,
                double k_scale, double v_scale,
                const std::string& kv_cache_dtype) {
  QUERN_RETURN_IF_ERROR(WriteShapes(key, value, key_cache, value_cache,
                                    slot_mapping, isa, k_scale, v_scale,
                                    kv_cache_dtype)
                            .status());
  QUERN_ASSIGN_OR_RETURN(const VllmCache cache,
                         VllmCache::Create(kWrite, key_cache, value_cache,
                                           kv_cache_dtype, k_scale, v_scale));
  WriteKvSpec spec;
  spec.kv = cache.layout();
  spec.input = key.dtype;
  const auto plan = WriteKvPlan::Create(spec);
  if (!plan.ok()) return OfOp(kWrite, plan.status());
  return std::unique_ptr<BoundOp>(new BoundWrite(*plan, cache, kNative));
}

NamedArgs ScheduleExample(DType dtype) {
  static SchedulerMetadata metadata;
  return {{"num_req", 2},
          {"num_heads_q", 2},
          {"num_heads_kv", 1},
          {"head_dim", 16},
          {"seq_lens", TensorMeta{DType::kI32, {2}}},
          {"dtype", DTypeName(dtype)},
          {"query_start_loc", TensorMeta{DType::kI32, {3}}},
          {"causal", true},
          {"scheduler_metadata", &metadata}};
}
NamedArgs WriteExample(DType dtype) {
  return {{"key", TensorMeta{dtype, {4, 1, 16}}},
          {"value", TensorMeta{dtype, {4, 1, 16}}},
          {"key_cache", TensorMeta{dtype, {8, 1, 16, 16}}},
          {"value_cache", TensorMeta{dtype, {8, 1, 16, 16}}},
          {"slot_mapping", TensorMeta{DType::kI64, {4}}}};
}

}  // namespace

absl::Status RegisterVllmAttentionOps(OpRegistry& r) {
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&ScheduleShapes>(
      "cpu_attn_get_scheduler_metadata(int num_req, int num_heads_q, "
      "int num_heads_kv, int head_dim, Tensor seq_lens, str dtype, "
      "Tensor query_start_loc, bool causal, int window_size=-1, "
      "str isa_hint=\"auto\", bool enable_kv_split=True, "
      "Tensor? dynamic_causal, SchedulerMetadata scheduler_metadata) -> ()",
      &ScheduleExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeSchedule>(kSchedule, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&WriteShapes>(
      "cpu_attn_reshape_and_cache(Tensor key, Tensor value, "
      "Tensor(a2!) key_cache, Tensor(a3!) value_cache, Tensor slot_mapping, "
      "str isa=\"auto\", float k_scale=1.0, float v_scale=1.0, "
      "str kv_cache_dtype=\"auto\") -> ()",
      &WriteExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeWrite<false>>(kWrite, "simd"));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeWrite<true>>(kWrite, kReference));
  return RegisterVllmPagedAttention(r);
}

}  // namespace quern
