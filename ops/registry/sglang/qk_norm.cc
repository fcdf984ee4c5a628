#include "quern/ops/registry/sglang/qk_norm.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/registry/families/rows/norm_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/rows_of.h"

namespace quern {
namespace {

constexpr char kOp[] = "qk_norm";

// hidden of the norm is an element count of a head.
struct Spec : RmsNormSpec {
  int64_t q_columns = 0, k_columns = 0;  // of a token
  int64_t heads = 0, kv_heads = 0;
  bool gated = false;  // a gate behind each head of q
};

struct Args {
  AnyTensorView q, k, q_weight, k_weight, q_out, k_out, gate_out;
};

// The heads of a matrix, each `step` elements behind the one before, from
// element `first` on.
AnyTensorView Heads(const AnyTensorView& v, int64_t heads, int64_t head_dim,
                    int64_t step, int64_t first = 0) {
  const auto offset = first * static_cast<int64_t>(SizeOf(v.dtype()));
  const AnyTensorView::Dims extents{v.extent(0), heads, head_dim};
  const AnyTensorView::Dims strides{v.RowStride(), step, 1};
  if (v.writable()) {
    return AnyTensorView(
        v.dtype(),
        static_cast<void*>(static_cast<char*>(v.mutable_data()) + offset), 3,
        extents, strides);
  }
  return AnyTensorView(
      v.dtype(),
      static_cast<const void*>(static_cast<const char*>(v.data()) + offset), 3,
      extents, strides);
}

// tokens * heads, or what no tensor has.
int64_t RowsOfHeads(int64_t tokens, int64_t heads) {
  int64_t rows = 0;
  return CheckedMul(tokens, heads, &rows) ? rows
                                          : std::numeric_limits<int64_t>::max();
}

class Plan {
 public:
  static absl::StatusOr<Plan> Create(const Spec& spec) {
    QUERN_ASSIGN_OR_RETURN(RmsNormPlan norm, RmsNormPlan::Create(spec));
    return Plan(spec, std::move(norm));
  }
  const char* target() const { return norm_.target(); }

  absl::Status CheckArgs(const Args& a) const {
    const DType dtype = spec_.x_dtype;
    const int64_t n = spec_.hidden;
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "q", a.q, dtype, {kAnyExtent, spec_.q_columns}));
    const int64_t tokens = a.q.extent(0);
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "k", a.k, dtype, {tokens, spec_.k_columns}));
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "q_weight", a.q_weight, dtype, {n}));
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "k_weight", a.k_weight, dtype, {n}));
    const auto check = [&](const char* name, const AnyTensorView& out,
                           int64_t heads) {
      return spec_.gated
                 ? CheckOutput(kOp, name, out, dtype,
                               {RowsOfHeads(tokens, heads), n})
                 : CheckOutput(kOp, name, out, dtype, {tokens, heads * n});
    };
    QUERN_RETURN_IF_ERROR(check("out0", a.q_out, spec_.heads));
    QUERN_RETURN_IF_ERROR(check("out1", a.k_out, spec_.kv_heads));
    if (spec_.gated) {
      QUERN_RETURN_IF_ERROR(check("out2", a.gate_out, spec_.heads));
    }
    const struct {
      const char* name;
      const AnyTensorView& view;
    } all[] = {{"q", a.q},
               {"k", a.k},
               {"q_weight", a.q_weight},
               {"k_weight", a.k_weight},
               {"out0", a.q_out},
               {"out1", a.k_out},
               {"out2", a.gate_out}};
    const int count = spec_.gated ? 7 : 6;
    for (int written = 4; written < count; ++written) {
      for (int i = 0; i < written; ++i) {
        QUERN_RETURN_IF_ERROR(CheckApart(kOp, all[i].name, all[i].view,
                                         all[written].name, all[written].view));
      }
    }
    return absl::OkStatus();
  }

  void Execute(const Args& a, Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    OnParts(a, [&](const RmsNormArgs& part) {
      norm_.Execute(part.x, part.weight, part.out, executor);
    });
    if (!spec_.gated || IsEmpty(a.q)) return;
    ParallelRows(executor, a.q.extent(0), spec_.heads * spec_.hidden,
                 [&](int64_t begin, int64_t end) { Copy(a, begin, end); });
  }

  // Calls fn for q and for k, in heads.
  template <class Fn>
  void OnParts(const Args& a, const Fn& fn) const {
    if (a.q.extent(0) == 0) return;
    const int64_t step = spec_.gated ? 2 * spec_.hidden : spec_.hidden;
    RmsNormArgs q, k;
    q.x = Heads(a.q, spec_.heads, spec_.hidden, step);
    q.weight = a.q_weight;
    q.out = Out(a.q_out, a.q.extent(0), spec_.heads);
    fn(q);
    k.x = Heads(a.k, spec_.kv_heads, spec_.hidden, spec_.hidden);
    k.weight = a.k_weight;
    k.out = Out(a.k_out, a.q.extent(0), spec_.kv_heads);
    fn(k);
  }
  // Copies the gates of the tokens [begin, end).
  void Copy(const Args& a, int64_t begin, int64_t end) const {
    const AnyTensorView gates =
        Heads(a.q, spec_.heads, spec_.hidden, 2 * spec_.hidden, spec_.hidden);
    const AnyTensorView out = Out(a.gate_out, a.q.extent(0), spec_.heads);
    const size_t size = SizeOf(spec_.x_dtype);
    for (int64_t t = begin; t < end; ++t) {
      const AnyTensorView from = HeadsOf(gates, t), to = HeadsOf(out, t);
      for (int64_t h = 0; h < spec_.heads; ++h) {
        std::memcpy(static_cast<char*>(to.mutable_data()) +
                        static_cast<size_t>(h * to.stride(0)) * size,
                    static_cast<const char*>(from.data()) +
                        static_cast<size_t>(h * from.stride(0)) * size,
                    static_cast<size_t>(spec_.hidden) * size);
      }
    }
  }
  const Spec& spec() const { return spec_; }

 private:
  Plan(const Spec& spec, RmsNormPlan norm)
      : spec_(spec), norm_(std::move(norm)) {}

  // What is written, [tokens, heads * head_dim] or [tokens * heads, head_dim],
  // as [tokens, heads, head_dim].
  AnyTensorView Out(const AnyTensorView& v, int64_t tokens,
                    int64_t heads) const {
    if (!spec_.gated) return Heads(v, heads, spec_.hidden, spec_.hidden);
    const int64_t row = v.RowStride();
    return AnyTensorView(v.dtype(), v.mutable_data(), 3,
                         {tokens, heads, spec_.hidden}, {heads * row, row, 1});
  }

  Spec spec_;
  RmsNormPlan norm_;
};

absl::StatusOr<std::function<void(const Args&)>> Reference(const Spec& spec,
                                                           const Plan& plan) {
  return std::function<void(const Args&)>([spec, plan](const Args& a) {
    plan.OnParts(a,
                 [&](const RmsNormArgs& part) { NativeRmsNorm(spec, part); });
    if (spec.gated) plan.Copy(a, 0, a.q.extent(0));
  });
}

absl::Status CheckHeads(Spec& spec, const OpCall& call) {
  const int64_t n = spec.hidden;
  // This check precedes 2 * n, which overflows from 2^62 on.
  QUERN_RETURN_IF_ERROR(
      CheckRange(call.op(), "head_dim", n, 1, kMaxRowElements));
  const int64_t step = spec.gated ? 2 * n : n;
  const char* const q = spec.gated ? "q_gate" : "q";
  if (spec.q_columns % step != 0 || spec.k_columns % n != 0) {
    return InvalidArgument(call.op(), q, " has ", spec.q_columns,
                           " columns and k ", spec.k_columns,
                           "; need multiples of ",
                           spec.gated ? "twice head_dim=" : "head_dim=", n,
                           spec.gated ? " and of it" : "");
  }
  spec.heads = spec.q_columns / step;
  spec.kv_heads = spec.k_columns / n;
  if (spec.gated && call.Int("num_head") != spec.heads) {
    return InvalidArgument(call.op(), "num_head=", call.Int("num_head"),
                           "; need ", spec.heads,
                           ", as q_gate has that many heads");
  }
  return absl::OkStatus();
}

using Op = OpDeclaration<Plan, Spec, Args>;

int64_t HeadDim(const OpCall& call) { return call.Int("head_dim"); }

Op Norms(const char* name, const char* q, bool gated) {
  Op op(name);
  op.Known(&Spec::hidden, &HeadDim)
      .In(q, &Args::q, {kRows, &Spec::q_columns},
          {&Spec::x_dtype, &Spec::weight_dtype, &Spec::residual_dtype,
           &Spec::out_dtype})
      .In("k", &Args::k, {kRows, &Spec::k_columns}, &Spec::x_dtype)
      .In("q_weight", &Args::q_weight, {&Spec::hidden}, &Spec::weight_dtype)
      .In("k_weight", &Args::k_weight, {&Spec::hidden}, &Spec::weight_dtype)
      .Need("eps", &Spec::eps)
      .Need<int64_t>("head_dim")
      .Given(&Spec::weight, NormWeight::kOnePlus)
      .Given(&Spec::sum, NormSum::kExact)
      .Given(&Spec::gated, gated)
      .ReferenceFrom(&Reference);
  if (gated) op.Need<int64_t>("num_head").Word("q", q);
  op.Then(&CheckHeads);
  return op;
}

// The shapes of what is returned where there are gates.
std::vector<int64_t> Queries(const Spec& spec, const OpCall&, int64_t rows) {
  return {RowsOfHeads(rows, spec.heads), spec.hidden};
}
std::vector<int64_t> Keys(const Spec& spec, const OpCall&, int64_t rows) {
  return {RowsOfHeads(rows, spec.kv_heads), spec.hidden};
}

}  // namespace

absl::Status AddQkNorms(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(Norms("fused_qk_gemma_rmsnorm_cpu", "q", false)
                            .Out("out0", &Args::q_out, Like("q"), Like("q"))
                            .Out("out1", &Args::k_out, Like("k"), Like("k"))
                            .Example({{"q", {4, 64}},
                                      {"k", {4, 32}},
                                      {"q_weight", {16}},
                                      {"k_weight", {16}},
                                      {"eps", 1e-6},
                                      {"head_dim", 16}})
                            .AddTo(registry));
  return Norms("fused_qk_gemma_rmsnorm_with_gate_cpu", "q_gate", true)
      .Out("out0", &Args::q_out, &Queries, Like("q_gate"))
      .Out("out1", &Args::k_out, &Keys, Like("q_gate"))
      .Out("out2", &Args::gate_out, &Queries, Like("q_gate"))
      .Example({{"q_gate", {4, 128}},
                {"k", {4, 32}},
                {"q_weight", {16}},
                {"k_weight", {16}},
                {"eps", 1e-6},
                {"head_dim", 16},
                {"num_head", 4}})
      .AddTo(registry);
}

}  // namespace quern
