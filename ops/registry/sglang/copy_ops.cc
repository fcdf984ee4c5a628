// What SGLang splits, joins and stores: plain copies of ranges of bytes.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/check_indices.h"
#include "quern/ops/index_view.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/rows_ops.h"

namespace quern {
namespace {

constexpr int64_t kMost = int64_t{1} << 20;

int64_t Bytes(const AnyTensorView& v) {
  return static_cast<int64_t>(SizeOf(v.dtype()));
}

// ---- Projections of gated delta nets

struct SplitSpec {
  int64_t heads_qk = 0, heads_v = 0, head_qk = 0, head_v = 0;
  DType dtype = DType::kF32;
  bool contiguous = false;

  int64_t group() const { return heads_v / heads_qk; }
  int64_t qkv() const { return 2 * heads_qk * head_qk + heads_v * head_v; }
  int64_t qkvz() const { return qkv() + heads_v * head_v; }
};

struct SplitArgs {
  AnyTensorView qkvz, ba, qkv, z, b, a;
};

class Split {
 public:
  static absl::StatusOr<Split> Create(const SplitSpec& spec) {
    return Split(spec);
  }
  const char* target() const { return "scalar"; }

  absl::Status CheckArgs(const SplitArgs& v) const {
    constexpr char kOp[] = "split";
    const SplitSpec& s = spec_;
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "mixed_qkvz", v.qkvz, s.dtype, {kAnyExtent, s.qkvz()}));
    const int64_t tokens = v.qkvz.extent(0);
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "mixed_ba", v.ba, s.dtype, {tokens, 2 * s.heads_v}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out0", v.qkv, s.dtype, {tokens, s.qkv()}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out1", v.z, s.dtype, {tokens, s.heads_v, s.head_v}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out2", v.b, s.dtype, {tokens, s.heads_v}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out3", v.a, s.dtype, {tokens, s.heads_v}));
    const struct {
      const char* name;
      const AnyTensorView& view;
    } all[] = {{"mixed_qkvz", v.qkvz}, {"mixed_ba", v.ba}, {"out0", v.qkv},
               {"out1", v.z},          {"out2", v.b},      {"out3", v.a}};
    for (int written = 2; written < 6; ++written) {
      for (int i = 0; i < written; ++i) {
        QUERN_RETURN_IF_ERROR(CheckApart(kOp, all[i].name, all[i].view,
                                         all[written].name, all[written].view));
      }
    }
    return absl::OkStatus();
  }

  void Execute(const SplitArgs& v, Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(v));
    ParallelRows(executor, v.qkvz.extent(0), spec_.qkvz() + 2 * spec_.heads_v,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t t = begin; t < end; ++t) Token(v, t);
                 });
  }

 private:
  explicit Split(const SplitSpec& spec) : spec_(spec) {}

  // Element i of row t.
  static char* At(const AnyTensorView& v, int64_t t, int64_t i) {
    auto* const data = static_cast<char*>(const_cast<void*>(v.data()));
    return data + (t * v.RowStride() + i) * Bytes(v);
  }

  void Token(const SplitArgs& v, int64_t t) const {
    const SplitSpec& s = spec_;
    const auto copy = [&](char* to, const char* from, int64_t count) {
      std::memcpy(to, from, static_cast<size_t>(count) * SizeOf(s.dtype));
    };
    // The heads of z may have any stride.
    const auto copy_z = [&](int64_t first, int64_t heads, const char* from) {
      const int64_t step = s.heads_v > 1 ? v.z.stride(1) : 0;
      for (int64_t h = 0; h < heads; ++h) {
        copy(At(v.z, t, (first + h) * step), from, s.head_v);
        from += s.head_v * Bytes(v.z);
      }
    };
    if (s.contiguous) {
      copy(At(v.qkv, t, 0), At(v.qkvz, t, 0), s.qkv());
      copy_z(0, s.heads_v, At(v.qkvz, t, s.qkv()));
      copy(At(v.b, t, 0), At(v.ba, t, 0), s.heads_v);
      copy(At(v.a, t, 0), At(v.ba, t, s.heads_v), s.heads_v);
      return;
    }
    const int64_t group = s.group(), values = group * s.head_v;
    const int64_t queries = s.heads_qk * s.head_qk;
    for (int64_t h = 0; h < s.heads_qk; ++h) {
      const int64_t from = h * 2 * (s.head_qk + values);
      copy(At(v.qkv, t, h * s.head_qk), At(v.qkvz, t, from), s.head_qk);
      copy(At(v.qkv, t, queries + h * s.head_qk),
           At(v.qkvz, t, from + s.head_qk), s.head_qk);
      copy(At(v.qkv, t, 2 * queries + h * values),
           At(v.qkvz, t, from + 2 * s.head_qk), values);
      copy_z(h * group, group, At(v.qkvz, t, from + 2 * s.head_qk + values));
      copy(At(v.b, t, h * group), At(v.ba, t, 2 * h * group), group);
      copy(At(v.a, t, h * group), At(v.ba, t, (2 * h + 1) * group), group);
    }
  }

  SplitSpec spec_;
};

absl::Status CheckSplit(SplitSpec& spec, const OpCall& call) {
  const struct {
    const char* name;
    int64_t value;
  } numbers[] = {{"num_heads_qk", spec.heads_qk},
                 {"num_heads_v", spec.heads_v},
                 {"head_qk", spec.head_qk},
                 {"head_v", spec.head_v}};
  for (const auto& number : numbers) {
    QUERN_RETURN_IF_ERROR(
        CheckRange(call.op(), number.name, number.value, 1, kMost));
  }
  if (!spec.contiguous && spec.heads_v % spec.heads_qk != 0) {
    return InvalidArgument(call.op(), "num_heads_v=", spec.heads_v,
                           "; need a multiple of num_heads_qk=", spec.heads_qk);
  }
  const int64_t tokens = call.Tensor("mixed_qkvz")->extents[0];
  QUERN_RETURN_IF_ERROR(CheckMeta(call.op(), "mixed_qkvz",
                                  *call.Tensor("mixed_qkvz"),
                                  {spec.dtype, {tokens, spec.qkvz()}}));
  return CheckMeta(call.op(), "mixed_ba", *call.Tensor("mixed_ba"),
                   {spec.dtype, {tokens, 2 * spec.heads_v}});
}

std::vector<int64_t> QkvShape(const SplitSpec& spec, const OpCall&,
                              int64_t rows) {
  return {rows, spec.qkv()};
}

absl::Status AddSplit(OpRegistry& registry, const char* name, bool contiguous) {
  using Spec = SplitSpec;
  using Args = SplitArgs;
  return OpDeclaration<Split, Spec, Args>(name)
      .In("mixed_qkvz", &Args::qkvz, {kRows, kAny},
          OpDType<Spec>::OneOf({DType::kF32, DType::kBF16, DType::kF16},
                               {&Spec::dtype}))
      .In("mixed_ba", &Args::ba, {kRows, kAny}, Like("mixed_qkvz"))
      .Need("num_heads_qk", &Spec::heads_qk)
      .Need("num_heads_v", &Spec::heads_v)
      .Need("head_qk", &Spec::head_qk)
      .Need("head_v", &Spec::head_v)
      .Given(&Spec::contiguous, contiguous)
      .Then(&CheckSplit)
      .Out("out0", &Args::qkv, &QkvShape, Like("mixed_qkvz"))
      .Out("out1", &Args::z, {kRows, &Spec::heads_v, &Spec::head_v},
           Like("mixed_qkvz"))
      .Out("out2", &Args::b, {kRows, &Spec::heads_v}, Like("mixed_qkvz"))
      .Out("out3", &Args::a, {kRows, &Spec::heads_v}, Like("mixed_qkvz"))
      .Provider("reference", nullptr)
      .Layer()
      .Example({{"mixed_qkvz", {4, 2 * 2 * 8 + 2 * 4 * 16}},
                {"mixed_ba", {4, 8}},
                {"num_heads_qk", 2},
                {"num_heads_v", 4},
                {"head_qk", 8},
                {"head_v", 16}})
      .AddTo(registry);
}

// ---- Rows of a cache

struct StoreSpec {
  int64_t heads = 0, dim = 0, slots = 0, row_dim = 0;
  DType dtype = DType::kF32;
};

struct StoreArgs {
  AnyTensorView k, v, k_cache, v_cache, indices;
};

class Store {
 public:
  static absl::StatusOr<Store> Create(const StoreSpec& spec) {
    return Store(spec);
  }
  const char* target() const { return "scalar"; }

  absl::Status CheckArgs(const StoreArgs& a) const {
    constexpr char kOp[] = "store";
    const StoreSpec& s = spec_;
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "k", a.k, s.dtype, {kAnyExtent, s.heads, s.dim}));
    const int64_t tokens = a.k.extent(0);
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "v", a.v, s.dtype, {tokens, s.heads, s.dim}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "k_cache", a.k_cache, s.dtype,
                                      {kAnyExtent, s.heads, s.dim}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "v_cache", a.v_cache, s.dtype,
                                      {a.k_cache.extent(0), s.heads, s.dim}));
    QUERN_RETURN_IF_ERROR(CheckIndexView(kOp, "indices", a.indices, {tokens}));
    const struct {
      const char* name;
      const AnyTensorView& view;
    } all[] = {{"k", a.k},
               {"v", a.v},
               {"indices", a.indices},
               {"k_cache", a.k_cache},
               {"v_cache", a.v_cache}};
    for (int written = 3; written < 5; ++written) {
      for (int i = 0; i < written; ++i) {
        QUERN_RETURN_IF_ERROR(CheckApart(kOp, all[i].name, all[i].view,
                                         all[written].name, all[written].view));
      }
    }
    return CheckIndices(kOp, "indices", "index", IndicesOf(a.indices),
                        a.k_cache.extent(0));
  }

  // Workers share the heads, so that of several tokens with one slot the last
  // is kept.
  void Execute(const StoreArgs& a, Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const IndexView slots = IndicesOf(a.indices);
    const int64_t tokens = a.k.extent(0);
    if (IsEmpty(a.k)) return;
    const auto at = [&](const AnyTensorView& v, int64_t row, int64_t head) {
      const int64_t step = spec_.heads > 1 ? v.stride(1) : 0;
      return static_cast<char*>(const_cast<void*>(v.data())) +
             (row * v.RowStride() + head * step) * Bytes(v);
    };
    const size_t bytes = static_cast<size_t>(spec_.dim) * SizeOf(spec_.dtype);
    ParallelRows(
        executor, spec_.heads, 2 * tokens * spec_.dim,
        [&](int64_t begin, int64_t end) {
          for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t h = begin; h < end; ++h) {
              std::memcpy(at(a.k_cache, slots[t], h), at(a.k, t, h), bytes);
              std::memcpy(at(a.v_cache, slots[t], h), at(a.v, t, h), bytes);
            }
          }
        });
  }

 private:
  explicit Store(const StoreSpec& spec) : spec_(spec) {}
  StoreSpec spec_;
};

absl::Status CheckStore(StoreSpec& spec, const OpCall& call) {
  const std::vector<int64_t>& k = call.Tensor("k")->extents;
  if (spec.row_dim == 0 || (spec.heads > 0 && spec.row_dim % spec.heads == 0 &&
                            spec.row_dim / spec.heads == spec.dim)) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), "row_dim=", spec.row_dim, "; need ", k[1],
                         " times ", k[2], ", a row of k, or 0");
}

absl::Status AddStore(OpRegistry& registry) {
  using Spec = StoreSpec;
  using Args = StoreArgs;
  return OpDeclaration<Store, Spec, Args>("store_cache_cpu")
      .In("k", &Args::k, {kRows, &Spec::heads, &Spec::dim},
          OpDType<Spec>::OneOf(
              {DType::kF32, DType::kBF16, DType::kF16, DType::kU8},
              {&Spec::dtype}))
      .In("v", &Args::v, Like("k"), Like("k"))
      .InOut("k_cache", &Args::k_cache, nullptr,
             {&Spec::slots, &Spec::heads, &Spec::dim}, &Spec::dtype)
      .InOut("v_cache", &Args::v_cache, nullptr, Like("k_cache"), Like("k"))
      .In("indices", &Args::indices, {kRows}, IndexDType<Spec>())
      .Attr("row_dim", int64_t{0}, &Spec::row_dim)
      .Then(&CheckStore)
      .Provider("reference", nullptr)
      .Layer()
      .Example({{"k", {4, 2, 16}},
                {"v", {4, 2, 16}},
                {"k_cache", {16, 2, 16}},
                {"v_cache", {16, 2, 16}},
                {"indices", {4}, DType::kI32}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangCopyOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(
      AddSplit(registry, "fused_qkvzba_split_reshape_cat_cpu", false));
  QUERN_RETURN_IF_ERROR(AddSplit(
      registry, "fused_qkvzba_split_reshape_cat_contiguous_cpu", true));
  return AddStore(registry);
}

}  // namespace quern
