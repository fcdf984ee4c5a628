#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/varlen_attention.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/page_table.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/index_view.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/attention/token_cache.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/attention.h"
#include "quern/ops/registry/vllm/attention.h"

namespace quern {
namespace {

constexpr char kDecode[] = "mla_decode_kvcache";
constexpr char kWrite[] = "concat_and_cache_mla_cpu";

// The rows of a cache [blocks, block_size, dim], whose blocks follow each
// other: InvalidArgument for other strides.
absl::Status CheckBlocks(const char* op, const AnyTensorView& cache) {
  int64_t tokens = 0;
  if (!CheckedMul(cache.extent(0), cache.extent(1), &tokens)) {
    return InvalidArgument(op, "kv_cache has 2^63 tokens or more");
  }
  if (IsEmpty(cache) || cache.extent(0) <= 1 || cache.extent(1) <= 1) {
    return absl::OkStatus();
  }
  const int64_t want = cache.extent(1) * cache.stride(1);
  if (cache.stride(0) == want) return absl::OkStatus();
  return InvalidArgument(op, "kv_cache has blocks ", cache.stride(0),
                         " apart; need ", want, ", where they follow another");
}
// The rows of all blocks as [blocks * block_size, 1, columns].
AnyTensorView RowsOfBlocks(const AnyTensorView& cache, int64_t columns) {
  const int64_t rows = cache.extent(0) * cache.extent(1);
  const int64_t step = cache.extent(1) > 1 ? cache.stride(1) : cache.stride(0);
  return AnyTensorView(cache.dtype(), cache.data(), 3, {rows, 1, columns},
                       {step, columns, 1});
}

struct DecodeSpec {
  int64_t heads = 0, dim = 0, value_dim = 0, block_size = 0;
  DType q = DType::kF32, kv = DType::kF32, out = DType::kF32;
  float scale = 0;
};
struct DecodeArgs {
  AnyTensorView out, query, cache, tables, lens;
};

// PagedAttentionPlan over pages of single tokens, of which values are the first
// columns.
class DecodePlan {
 public:
  template <bool kNative>
  static absl::StatusOr<DecodePlan> Create(const DecodeSpec& spec,
                                           const OpCall&) {
    AttentionSpec attention;
    QUERN_ASSIGN_OR_RETURN(attention.kv,
                           TokenLayout(spec.kv, 1, spec.dim, spec.value_dim));
    attention.q_heads = spec.heads;
    attention.q_dtype = spec.q;
    attention.out_dtype = spec.out;
    attention.scale = spec.scale;
    QUERN_ASSIGN_OR_RETURN(const PagedAttentionPlan plan,
                           PagedAttentionPlan::Create(attention));
    return DecodePlan(spec, plan, kNative);
  }

  const char* target() const { return native_ ? "scalar" : plan_.target(); }
  std::string Explain(int64_t) const {
    if (native_) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }

  // Reads lengths and blocks.
  absl::Status Prepare(const DecodeArgs& a, Executor& executor) {
    prepared_ = false;
    QUERN_RETURN_IF_ERROR(CheckStep(a));
    const auto sequences = static_cast<size_t>(a.lens.extent(0));
    storage_.q_lens.assign(sequences, 1);
    storage_.causal.assign(sequences, 1);
    storage_.kv_lens.clear();
    pages_.Clear();
    for (int64_t s = 0; s < a.lens.extent(0); ++s) {
      QUERN_RETURN_IF_ERROR(AddSequence(a, s));
    }
    QUERN_ASSIGN_OR_RETURN(
        table_, pages_.Build(1, a.cache.extent(0) * a.cache.extent(1)));
    QUERN_ASSIGN_OR_RETURN(
        schedule_,
        AttentionSchedule::Build(
            plan_.spec(),
            {storage_.q_lens, storage_.kv_lens, storage_.causal, {}, {}},
            AttentionTiles(), executor.num_workers(), storage_.schedule));
    prepared_ = true;
    return absl::OkStatus();
  }

  absl::Status CheckArgs(const DecodeArgs& a) const {
    if (!prepared_) return NotPrepared();
    QUERN_RETURN_IF_ERROR(CheckStep(a));
    QUERN_RETURN_IF_ERROR(
        CheckEqual(kDecode, "sequences of Prepare",
                   static_cast<int64_t>(storage_.kv_lens.size()),
                   a.lens.extent(0), "seq_lens has"));
    for (size_t s = 0; s < storage_.kv_lens.size(); ++s) {
      QUERN_RETURN_IF_ERROR(
          CheckEqual(kDecode, absl::StrCat("seq_lens[", s, "]"),
                     IndicesOf(a.lens)[static_cast<int64_t>(s)],
                     storage_.kv_lens[s], "Prepare was given"));
      QUERN_RETURN_IF_ERROR(CheckTable(a.tables, s));
    }
    for (const auto& [field, v] :
         {std::pair("block_tables", &a.tables), {"seq_lens", &a.lens}}) {
      QUERN_RETURN_IF_ERROR(CheckApart(kDecode, field, *v, "out", a.out));
    }
    return plan_.CheckArgs(PagedArgs(a));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t, int max_workers) const {
    if (!prepared_) return NotPrepared();
    int64_t bytes = 0;
    if (!native_) {
      QUERN_ASSIGN_OR_RETURN(bytes,
                             plan_.WorkspaceBytes(schedule_, max_workers));
    }
    WorkspaceLayout layout;
    layout.Allocate<double>("sums", native_ ? spec_.value_dim : 0);
    layout.Allocate<uint8_t>("attention", bytes);
    return layout.bytes();
  }

  void Execute(const DecodeArgs& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    double* const sums =
        workspace.Allocate<double>("sums", native_ ? spec_.value_dim : 0);
    if (native_) {
      NativePagedAttention(plan_.spec(), PagedArgs(a), sums);
    } else {
      plan_.Execute(PagedArgs(a), workspace, executor);
    }
  }

 private:
  DecodePlan(const DecodeSpec& spec, const PagedAttentionPlan& plan,
             bool native)
      : spec_(spec), plan_(plan), native_(native) {}

  static absl::Status NotPrepared() {
    return absl::FailedPreconditionError(absl::StrCat(
        kDecode, ": has no schedule; need a call of Prepare before"));
  }

  absl::Status CheckStep(const DecodeArgs& a) const {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kDecode, "seq_lens", a.lens, DType::kI32, {kAnyExtent}));
    QUERN_RETURN_IF_ERROR(CheckInput(kDecode, "block_tables", a.tables,
                                     DType::kI32,
                                     {a.lens.extent(0), kAnyExtent}));
    QUERN_RETURN_IF_ERROR(
        CheckInput(kDecode, "kv_cache", a.cache, spec_.kv,
                   {kAnyExtent, spec_.block_size, spec_.dim}));
    return CheckBlocks(kDecode, a.cache);
  }

  // The blocks of sequence `s` are those that Prepare was given.
  absl::Status CheckTable(const AnyTensorView& tables, size_t s) const {
    const auto* const row = static_cast<const int32_t*>(tables.data()) +
                            static_cast<int64_t>(s) * tables.RowStride();
    const int64_t size = spec_.block_size;
    for (int64_t i = 0; i < storage_.kv_lens[s]; i += size) {
      const auto at = static_cast<size_t>(pages_.indptr[s] + i);
      const int64_t was = pages_.page_ids[at] / size;
      if (i / size < tables.extent(1) && row[i / size] == was) continue;
      return InvalidArgument(kDecode, "block_tables[", s, "][", i / size,
                             "] is not ", was, ", which Prepare was given");
    }
    return absl::OkStatus();
  }

  absl::Status AddSequence(const DecodeArgs& a, int64_t s) {
    const int64_t len = IndicesOf(a.lens)[s], size = spec_.block_size;
    const int64_t columns = a.tables.extent(1);
    if (len < 0 || len > columns * size) {
      return InvalidArgument(kDecode, "seq_lens[", s, "]=", len, "; need 0 to ",
                             columns * size,
                             ", the tokens of a row of block_tables");
    }
    const auto* const row =
        static_cast<const int32_t*>(a.tables.data()) + s * a.tables.RowStride();
    for (int64_t i = 0; i < len; ++i) {
      const int64_t block = row[i / size];
      if (block < 0 || block >= a.cache.extent(0)) {
        return InvalidArgument(kDecode, "block_tables[", s, "][", i / size,
                               "]=", block, "; need a block of ",
                               a.cache.extent(0));
      }
      pages_.page_ids.push_back(static_cast<int32_t>(block * size + i % size));
    }
    pages_.indptr.push_back(static_cast<int64_t>(pages_.page_ids.size()));
    storage_.kv_lens.push_back(len);
    return absl::OkStatus();
  }

  PagedAttentionArgs PagedArgs(const DecodeArgs& a) const {
    PagedAttentionArgs paged;
    paged.q = a.query;
    paged.kv = TokenCache(plan_.spec().kv, RowsOfBlocks(a.cache, spec_.dim),
                          RowsOfBlocks(a.cache, spec_.value_dim));
    paged.pages = table_;
    paged.schedule = schedule_;
    paged.out = a.out;
    return paged;
  }

  DecodeSpec spec_;
  PagedAttentionPlan plan_;
  bool native_;
  bool prepared_ = false;
  VarlenAttentionStorage storage_;
  PageTableStorage pages_;
  PageTable table_;
  AttentionSchedule schedule_;
};

absl::Status CheckValues(DecodeSpec& spec, const OpCall& call) {
  if (spec.value_dim > spec.dim) {
    return InvalidArgument(call.op(), "out has ", spec.value_dim,
                           " columns; need at most ", spec.dim,
                           ", as query has: values are the first of keys");
  }
  return CheckAtLeast(call.op(), "block_size", spec.block_size, 1);
}

absl::Status AddDecode(OpRegistry& registry) {
  using Spec = DecodeSpec;
  using Args = DecodeArgs;
  const auto floats = [](DType Spec::*to) {
    return OpDType<Spec>::OneOf(
        {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, {to});
  };
  return OpDeclaration<DecodePlan, Spec, Args>(kDecode)
      .InOut("out", &Args::out, nullptr,
             {kRows, &Spec::heads, &Spec::value_dim}, floats(&Spec::out))
      .In("query", &Args::query, {kRows, &Spec::heads, &Spec::dim},
          floats(&Spec::q))
      .Word("q", "query")
      .In("kv_cache", &Args::cache, {kAny, &Spec::block_size, &Spec::dim},
          floats(&Spec::kv))
      .Need("scale", &Spec::scale)
      .In("block_tables", &Args::tables, {kRows, kAny}, DType::kI32)
      .In("seq_lens", &Args::lens, {kRows}, DType::kI32)
      .Then(&CheckValues)
      .Provider("simd", &DecodePlan::Create<false>)
      .Provider("reference", &DecodePlan::Create<true>)
      .Layer()
      .Example({{"out", {4, 2, 8}},
                {"query", {4, 2, 12}},
                {"kv_cache", {128, 16, 12}},
                {"scale", 0.25},
                {"block_tables", {4, 8}, DType::kI32},
                {"seq_lens", {4}, DType::kI32}})
      .AddTo(registry);
}

struct WriteSpec {
  int64_t latent = 0, rope = 0, dim = 0, block_size = 0;
  DType dtype = DType::kF32;
};
struct WriteArgs {
  AnyTensorView latent, rope, cache, slots;
};

// kv_cache[slot / block_size, slot % block_size] <- latent and rope of a token.
class WritePlan {
 public:
  static absl::StatusOr<WritePlan> Create(const WriteSpec& spec) {
    return WritePlan(spec);
  }
  const char* target() const { return "scalar"; }

  absl::Status CheckArgs(const WriteArgs& a) const {
    QUERN_RETURN_IF_ERROR(CheckInput(kWrite, "kv_c_normed", a.latent,
                                     spec_.dtype, {kAnyExtent, spec_.latent}));
    const int64_t tokens = a.latent.extent(0);
    QUERN_RETURN_IF_ERROR(
        CheckInput(kWrite, "k_pe", a.rope, spec_.dtype, {tokens, spec_.rope}));
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(kWrite, "slot_mapping", a.slots, {tokens}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kWrite, "kv_cache", a.cache, spec_.dtype,
                    {kAnyExtent, spec_.block_size, spec_.dim}));
    for (const auto& [field, v] : {std::pair("kv_c_normed", &a.latent),
                                   {"k_pe", &a.rope},
                                   {"slot_mapping", &a.slots}}) {
      QUERN_RETURN_IF_ERROR(CheckApart(kWrite, field, *v, "kv_cache", a.cache));
    }
    const int64_t slots = a.cache.extent(0) * spec_.block_size;
    const IndexView to = IndicesOf(a.slots);
    for (int64_t t = 0; t < tokens; ++t) {
      if (to[t] < slots) continue;
      return InvalidArgument(kWrite, "slot_mapping[", t, "]=", to[t],
                             "; need a slot of ", slots,
                             ", or a negative number for none");
    }
    return absl::OkStatus();
  }

  // Token by token, so that the last of several in a slot stays.
  void Execute(const WriteArgs& a, Executor&) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const auto size = static_cast<int64_t>(SizeOf(spec_.dtype));
    const auto row = [size](const AnyTensorView& v, int64_t t) {
      return static_cast<const char*>(v.data()) + t * v.RowStride() * size;
    };
    const IndexView slots = IndicesOf(a.slots);
    for (int64_t t = 0; t < slots.size(); ++t) {
      if (slots[t] < 0) continue;
      char* const to = static_cast<char*>(a.cache.mutable_data()) +
                       (slots[t] / spec_.block_size * a.cache.stride(0) +
                        slots[t] % spec_.block_size * a.cache.stride(1)) *
                           size;
      const int64_t latent = spec_.latent * size;
      std::memcpy(to, row(a.latent, t), static_cast<size_t>(latent));
      std::memcpy(to + latent, row(a.rope, t),
                  static_cast<size_t>(spec_.rope * size));
    }
  }

 private:
  explicit WritePlan(const WriteSpec& spec) : spec_(spec) {}

  WriteSpec spec_;
};

absl::Status CheckColumns(WriteSpec& spec, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(call.op(), "block_size", spec.block_size, 1));
  if (spec.rope <= spec.dim && spec.latent == spec.dim - spec.rope) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), "kv_cache has ", spec.dim,
                         " columns; need ", spec.latent, " + ", spec.rope,
                         ", as kv_c_normed and k_pe have");
}

absl::Status AddWrite(OpRegistry& registry) {
  using Spec = WriteSpec;
  using Args = WriteArgs;
  return OpDeclaration<WritePlan, Spec, Args>(kWrite)
      .In("kv_c_normed", &Args::latent, {kRows, &Spec::latent},
          OpDType<Spec>::OneOf(
              {std::begin(kFloatDTypes), std::end(kFloatDTypes)},
              {&Spec::dtype}))
      .In("k_pe", &Args::rope, {kRows, &Spec::rope}, Like("kv_c_normed"))
      .InOut("kv_cache", &Args::cache, nullptr,
             {kAny, &Spec::block_size, &Spec::dim}, Like("kv_c_normed"))
      .In("slot_mapping", &Args::slots, {kRows}, IndexDType<Spec>())
      .Then(&CheckColumns)
      .Provider("reference", nullptr)
      .Layer()
      .Example({{"kv_c_normed", {4, 8}},
                {"k_pe", {4, 4}},
                {"kv_cache", {8, 16, 12}},
                {"slot_mapping", {4}, DType::kI64}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVllmMla(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddDecode(registry));
  return AddWrite(registry);
}

}  // namespace quern
