#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/index_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/rope.h"
#include "quern/ops/registry/sglang/rows_ops.h"
#include "quern/ops/rope/apply_rotary.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/table_rotary.h"

namespace quern {
namespace {

constexpr char kOp[] = "rotary_by_table";

using Spec = TableRotarySpec;
struct Args : TableRotaryArgs {
  AnyTensorView at;  // the positions as they are given
  AnyTensorView q, k, q_out, k_out;
};
using Op = OpDeclaration<TableRotaryPlan, Spec, Args>;

int64_t& RotDim(Spec& spec) { return spec.rotary.rot_dim; }
int64_t& MaxPositions(Spec& spec) { return spec.rotary.max_positions; }
DType& HeadDType(Spec& spec) { return spec.rotary.dtype; }

// Views [tokens, heads * n], [tokens, heads, n] or [batch, tokens, heads, n] as
// [tokens, heads, n]. What does not fold is returned unchanged, and refused.
AnyTensorView Heads(const AnyTensorView& v, int64_t n) {
  AnyTensorView::Dims extents{}, strides{};
  if (v.rank() == 2 && n > 0 && v.extent(1) % n == 0 && v.stride(1) == 1) {
    extents = {v.extent(0), v.extent(1) / n, n};
    strides = {v.stride(0), n, 1};
  } else if (v.rank() == 4) {
    const bool one = v.extent(0) == 1;
    int64_t tokens = 0, step = 0;
    if (!CheckedMul(v.extent(0), v.extent(1), &tokens) ||
        !CheckedMul(v.stride(1), v.extent(1), &step) ||
        (!one && v.extent(1) != 1 && step != v.stride(0))) {
      return v;
    }
    extents = {tokens, v.extent(2), v.extent(3)};
    strides = {v.extent(1) == 1 ? v.stride(0) : v.stride(1), v.stride(2),
               v.stride(3)};
  } else {
    return v;
  }
  if (v.writable()) {
    return AnyTensorView(v.dtype(), v.mutable_data(), 3, extents, strides);
  }
  return AnyTensorView(v.dtype(), v.data(), 3, extents, strides);
}

// Row s of positions[3, tokens], or positions[tokens].
IndexView Stream(const AnyTensorView& at, int64_t s) {
  if (at.rank() != 2) return IndicesOf(at, at.rank() == 1 ? at.extent(0) : 0);
  const auto bytes =
      s * at.stride(0) * static_cast<int64_t>(SizeOf(at.dtype()));
  const auto* const data = static_cast<const char*>(at.data()) + bytes;
  return IndicesOf(AnyTensorView(at.dtype(), static_cast<const void*>(data), 1,
                                 {at.extent(1)}, {1}),
                   at.extent(1));
}

// The same arguments in the form that the plan has.
TableRotaryArgs Bound(const Args& a, int64_t head_dim) {
  TableRotaryArgs args = a;
  const bool streams = a.at.rank() == 2;
  for (int64_t s = 0; s < (streams ? 3 : 1); ++s) {
    args.positions[static_cast<size_t>(s)] = Stream(a.at, s);
  }
  args.query = {Heads(a.q, head_dim), Heads(a.q_out, head_dim)};
  args.key = {Heads(a.k, head_dim), Heads(a.k_out, head_dim)};
  return args;
}

absl::Status Check(const TableRotaryPlan& plan, const Args& a) {
  const bool streams = !plan.spec().sections.empty();
  constexpr int64_t kStreams[] = {3, kAnyExtent};
  QUERN_RETURN_IF_ERROR(
      CheckIndexView(kOp, "positions", a.at,
                     absl::MakeConstSpan(kStreams).subspan(streams ? 0 : 1)));
  return plan.CheckArgs(Bound(a, plan.spec().rotary.head_dim));
}
void Execute(const TableRotaryPlan& plan, const Args& a, Workspace,
             Executor& executor) {
  plan.Execute(Bound(a, plan.spec().rotary.head_dim), executor);
}

// The stream of pair j.
int64_t StreamOf(const Spec& spec, int64_t j) {
  const std::vector<int64_t>& s = spec.sections;
  if (s.empty()) return 0;
  if (spec.interleaved)
    return j < 3 * s[static_cast<size_t>(j % 3)] ? j % 3 : 0;
  return j < s[0] ? 0 : j < s[0] + s[1] ? 1 : 2;
}

// Rounds each product and the sum, as elementwise operators do.
void Native(const Spec& spec, const Args& a) {
  const TableRotaryArgs args = Bound(a, spec.rotary.head_dim);
  const int64_t half = spec.rotary.rot_dim / 2;
  for (const TableRotaryHeads& heads : {args.query, args.key}) {
    for (int64_t t = 0; t < heads.x.extent(0); ++t) {
      for (int64_t h = 0; h < heads.x.extent(1); ++h) {
        const ScalarRow x = NativeHead(heads.x, 0, t, h);
        const ScalarRow out = NativeHead(heads.out, 0, t, h);
        for (int64_t j = 0; j < half; ++j) {
          const auto stream = static_cast<size_t>(StreamOf(spec, j));
          const ScalarRow row(args.table, args.positions[stream][t]);
          NativeTurn(spec.rotary, j, row[j], row[half + j], x, out);
        }
        for (int64_t i = spec.rotary.rot_dim; i < spec.rotary.head_dim; ++i) {
          out.Set(i, x[i]);
        }
      }
    }
  }
}

// [tokens, heads * head_size]; for rotary_embedding_cpu also [tokens, heads,
// n] and [batch, tokens, heads, n], whose n is the head's, whatever head_size
// is.
absl::Status FillHeads(Spec& spec, const OpCall& call) {
  const int64_t size = call.Int("head_size");
  const TensorMeta &q = *call.Tensor("query"), &k = *call.Tensor("key");
  const size_t rank = q.extents.size();
  const auto tokens = [](const TensorMeta& meta) -> int64_t {
    if (meta.extents.size() < 4) return meta.extents[0];
    int64_t count = 0;
    return CheckedMul(meta.extents[0], meta.extents[1], &count)
               ? count
               : std::numeric_limits<int64_t>::max();
  };
  const bool ranks =
      (rank == 2 || rank == 3 || rank == 4) && k.extents.size() == rank;
  if (!ranks || tokens(q) != tokens(k) ||
      (rank > 2 && q.extents.back() != k.extents.back())) {
    return InvalidArgument(call.op(), "query is ", PrintMeta(q), " and key is ",
                           PrintMeta(k),
                           "; need [tokens, heads * head_size], or both "
                           "[tokens, heads, n] or [batch, tokens, heads, n]");
  }
  if (rank == 2) {
    QUERN_RETURN_IF_ERROR(CheckAtLeast(call.op(), "head_size", size, 2));
    if (q.extents[1] % size != 0 || k.extents[1] % size != 0) {
      return InvalidArgument(call.op(), "query has ", q.extents[1],
                             " columns and key ", k.extents[1],
                             "; need multiples of head_size=", size);
    }
  }
  spec.rotary.head_dim = rank == 2 ? size : q.extents.back();
  spec.rotary.style = StyleOf(call.Bool("is_neox"));
  const std::vector<int64_t>& at = call.Tensor("positions")->extents;
  if (at.empty() || at.back() != tokens(q)) {
    return InvalidArgument(call.op(), "positions are ",
                           PrintMeta(*call.Tensor("positions")),
                           "; need one for each of ", tokens(q), " tokens");
  }
  return absl::OkStatus();
}

// query, key and the table, and what is returned.
Op& Turned(Op& op) {
  return op.In("query", &Args::q, {}, &HeadDType)
      .In("key", &Args::k, {}, Like("query"))
      .Need<int64_t>("head_size")
      .In("cos_sin_cache", &Args::table, {&MaxPositions, &RotDim},
          &Spec::table_dtype)
      .Word("table", "cos_sin_cache");
}
Op& Returned(Op& op) {
  return op.Need<bool>("is_neox")
      .Then(&FillHeads)
      .Rows("query")
      .Out("query_out", &Args::q_out, Like("query"), Like("query"))
      .Out("key_out", &Args::k_out, Like("key"), Like("key"))
      .InPlace("query", "out0")
      .InPlace("key", "out1")
      .Calls(&Check, &Execute)
      .Reference(&Native);
}

absl::Status AddRotary(OpRegistry& registry) {
  Op op("rotary_embedding_cpu");
  op.In("positions", &Args::at, {kAny}, IndexDType<Spec>());
  return Returned(Turned(op))
      .Example({{"positions", {4}, DType::kI32},
                {"query", {4, 2 * 64}},
                {"key", {4, 64}},
                {"head_size", 64},
                {"cos_sin_cache", {128, 32}},
                {"is_neox", true}})
      .AddTo(registry);
}

absl::Status FillSections(Spec& spec, const OpCall& call) {
  const std::vector<int64_t>& at = call.Tensor("positions")->extents;
  if (call.Tensor("query")->extents.size() != 2) {
    return InvalidArgument(call.op(), "query is ",
                           PrintMeta(*call.Tensor("query")),
                           "; need [tokens, heads * head_size]");
  }
  if (at.size() == 1) return absl::OkStatus();
  if (at.size() != 2 || at[0] != 3) {
    return InvalidArgument(call.op(), "positions are ",
                           PrintMeta(*call.Tensor("positions")),
                           "; need [tokens] or [3, tokens]");
  }
  spec.sections = {call.Int("section_t"), call.Int("section_h"),
                   call.Int("section_w")};
  spec.interleaved = call.Bool("mrope_interleaved");
  return absl::OkStatus();
}

absl::Status AddMultimodal(OpRegistry& registry) {
  Op op("multimodal_rotary_embedding_cpu");
  op.In("positions", &Args::at, {}, IndexDType<Spec>());
  Turned(op)
      .Need<int64_t>("section_t")
      .Need<int64_t>("section_h")
      .Need<int64_t>("section_w")
      .Need<bool>("mrope_interleaved")
      .Then(&FillSections);
  return Returned(op)
      .Example({{"positions", {3, 4}, DType::kI32},
                {"query", {4, 2 * 64}},
                {"key", {4, 64}},
                {"head_size", 64},
                {"cos_sin_cache", {128, 64}},
                {"section_t", 8},
                {"section_h", 12},
                {"section_w", 12},
                {"mrope_interleaved", false},
                {"is_neox", true}})
      .AddTo(registry);
}

struct ApplyArgs {
  AnyTensorView q, k, cos, sin, q_out, k_out;
};

absl::Status CheckApply(const ApplyRotaryPlan& plan, const ApplyArgs& a) {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "query", a.q, plan.spec().dtype,
                                   {kAnyExtent, kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(plan.CheckArgs(a.q, a.cos, a.sin, a.q_out));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "key", a.k, plan.spec().dtype,
                                   {a.q.extent(0), kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(plan.CheckArgs(a.k, a.cos, a.sin, a.k_out));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "query", a.q, "out1", a.k_out));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "key", a.k, "out0", a.q_out));
  return CheckApart(kOp, "out0", a.q_out, "out1", a.k_out);
}
void ExecuteApply(const ApplyRotaryPlan& plan, const ApplyArgs& a, Workspace,
                  Executor& executor) {
  plan.Execute(a.q, a.cos, a.sin, a.q_out, executor);
  plan.Execute(a.k, a.cos, a.sin, a.k_out, executor);
}

// Computes in double and rounds once.
void NativeApply(const ApplyRotarySpec& spec, const ApplyArgs& a) {
  const int64_t half = spec.head_dim / 2;
  const std::pair<AnyTensorView, AnyTensorView> kBoth[] = {{a.q, a.q_out},
                                                           {a.k, a.k_out}};
  for (const auto& [from, to] : kBoth) {
    for (int64_t t = 0; t < from.extent(0); ++t) {
      const ScalarRow c(a.cos, t), s(a.sin, t);
      for (int64_t h = 0; h < from.extent(1); ++h) {
        const ScalarRow x = NativeHead(from, 0, t, h);
        const ScalarRow out = NativeHead(to, 0, t, h);
        for (int64_t j = 0; j < half; ++j) {
          const double u = double{x[j]}, v = double{x[half + j]};
          out.Set(j, static_cast<float>(u * double{c[j]} - v * double{s[j]}));
          out.Set(half + j, static_cast<float>(v * double{c[half + j]} +
                                               u * double{s[half + j]}));
        }
      }
    }
  }
}

absl::Status AddApply(OpRegistry& registry) {
  using Spec = ApplyRotarySpec;
  using Args = ApplyArgs;
  return OpDeclaration<ApplyRotaryPlan, Spec, Args>("apply_rotary_pos_emb_cpu")
      .In("query", &Args::q, {kRows, kAny, &Spec::head_dim}, &Spec::dtype)
      .In("key", &Args::k, {kRows, kAny, &Spec::head_dim}, Like("query"))
      .In("cos", &Args::cos, {kRows, &Spec::head_dim}, &Spec::table_dtype)
      .In("sin", &Args::sin, Like("cos"), Like("cos"))
      .Given(&Spec::rows, RotaryRows::kEach)
      .Out("out0", &Args::q_out, Like("query"), Like("query"))
      .Out("out1", &Args::k_out, Like("key"), Like("key"))
      .InPlace("query", "out0")
      .InPlace("key", "out1")
      .Calls(&CheckApply, &ExecuteApply)
      .Reference(&NativeApply)
      .Example({{"query", {4, 2, 64}},
                {"key", {4, 2, 64}},
                {"cos", {4, 64}, DType::kF32},
                {"sin", {4, 64}, DType::kF32}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangRopeOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddRotary(registry));
  QUERN_RETURN_IF_ERROR(AddMultimodal(registry));
  return AddApply(registry);
}

}  // namespace quern
