#include "quern/ops/registry/families/attention/varlen_attention_ops.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "quern/attention/varlen_attention.h"
#include "quern/ops/registry/families/attention/varlen_call.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

constexpr char kOp[] = "varlen_attention";

struct Spec : VarlenAttentionSpec {
  bool causal = false;
  bool paired = false;  // a causal sequence has as many keys as queries
};
struct Args {
  AnyTensorView query, key, value, cu_q, cu_k, out;
};

// Attention over the sequences of a batch, which Prepare is given.
class Plan : public VarlenCall {
 public:
  template <bool kNative>
  static absl::StatusOr<Plan> Make(const Spec& spec, const OpCall&) {
    QUERN_ASSIGN_OR_RETURN(VarlenCall call,
                           VarlenCall::Create(kOp, spec, kNative));
    return Plan(spec, std::move(call));
  }

  const Spec& spec() const { return spec_; }

  absl::Status Prepare(const Args& a, Executor& executor) {
    Forget();
    QUERN_RETURN_IF_ERROR(ReadEnds("cu_seqlens_q", a.cu_q, a.query, cu_q_));
    QUERN_RETURN_IF_ERROR(ReadEnds("cu_seqlens_k", a.cu_k, a.key, cu_k_));
    if (spec_.paired && spec_.causal && cu_q_ != cu_k_) {
      return InvalidArgument(kOp,
                             "cu_seqlens_k is not cu_seqlens_q; need it with "
                             "causal");
    }
    return VarlenCall::Prepare(
        cu_q_, cu_k_,
        spec_.causal ? VarlenMask::kCausal : VarlenMask::kBidirectional,
        executor);
  }

  absl::Status CheckArgs(const Args& a) const {
    QUERN_RETURN_IF_ERROR(Prepared());
    QUERN_RETURN_IF_ERROR(CheckEnds("cu_seqlens_q", a.cu_q, cu_q_));
    QUERN_RETURN_IF_ERROR(CheckEnds("cu_seqlens_k", a.cu_k, cu_k_));
    return VarlenCall::CheckArgs(ArgsOf(a));
  }

  void Execute(const Args& a, Workspace workspace, Executor& executor) const {
    VarlenCall::Execute(ArgsOf(a), workspace, executor);
  }

 private:
  Plan(const Spec& spec, VarlenCall call)
      : VarlenCall(std::move(call)), spec_(spec) {}

  static VarlenAttentionArgs ArgsOf(const Args& a) {
    VarlenAttentionArgs args;
    args.q = a.query;
    args.k = a.key;
    args.v = a.value;
    args.out = a.out;
    return args;
  }

  // Copies the ends of sequences, which must be those of all `rows`.
  static absl::Status ReadEnds(absl::string_view field, const AnyTensorView& cu,
                               const AnyTensorView& rows,
                               std::vector<int32_t>& ends) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, field, cu, DType::kI32, {kAnyExtent}));
    const auto* const values = static_cast<const int32_t*>(cu.data());
    ends.assign(values, values + cu.extent(0));
    if (!ends.empty() && ends.front() == 0 && ends.back() == rows.extent(0) &&
        std::is_sorted(ends.begin(), ends.end())) {
      return absl::OkStatus();
    }
    return InvalidArgument(kOp, field, " does not ascend from 0 to ",
                           rows.extent(0), ", the rows that it divides");
  }
  static absl::Status CheckEnds(absl::string_view field,
                                const AnyTensorView& cu,
                                const std::vector<int32_t>& ends) {
    const auto size = static_cast<int64_t>(ends.size());
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, field, cu, DType::kI32, {size}));
    if (std::equal(ends.begin(), ends.end(),
                   static_cast<const int32_t*>(cu.data()))) {
      return absl::OkStatus();
    }
    return InvalidArgument(kOp, field, " is not what Prepare was given");
  }

  Spec spec_;
  std::vector<int32_t> cu_q_, cu_k_;  // of the last Prepare
};

// `sglang`: by SGLang's name and in its words, which are the plan's.
absl::Status AddVarlen(OpRegistry& registry, bool sglang) {
  const char *const q = sglang ? "q" : "query", *const k = sglang ? "k" : "key",
                    *const v = sglang ? "v" : "value";
  OpDeclaration<Plan, Spec, Args> op(sglang ? "flash_attn_varlen_func" : kOp);
  op.Layer()
      .Given(&Spec::paired, sglang)
      .In(q, &Args::query, {kRows, &Spec::q_heads, &Spec::head_dim},
          {&Spec::dtype, &Spec::out_dtype})
      .In(k, &Args::key, {kAny, &Spec::kv_heads, &Spec::head_dim}, Like(q))
      .In(v, &Args::value, {kAny, &Spec::kv_heads, &Spec::v_head_dim}, Like(q))
      .In("cu_seqlens_q", &Args::cu_q, {kAny}, DType::kI32)
      .In("cu_seqlens_k", &Args::cu_k, {kAny}, DType::kI32);
  if (sglang) {
    op.Need<int64_t>("max_seqlen_q")
        .Need<int64_t>("max_seqlen_k")
        .Need("causal", &Spec::causal);
  } else {
    op.Word("q", q)
        .Word("k", k)
        .Word("v", v)
        .Attr("causal", false, &Spec::causal)
        .Attr("scale", 0.0, &Spec::scale);
  }
  return op
      .Out("out", &Args::out, {kRows, &Spec::q_heads, &Spec::v_head_dim},
           Like(q))
      .Provider("simd", &Plan::Make<false>)
      .Provider("reference", &Plan::Make<true>)
      .ExampleOf([=](DType dtype) {
        NamedArgs args = {{q, TensorMeta{dtype, {4, 2, 16}}},
                          {k, TensorMeta{dtype, {4, 1, 16}}},
                          {v, TensorMeta{dtype, {4, 1, 16}}},
                          {"cu_seqlens_q", TensorMeta{DType::kI32, {2}}},
                          {"cu_seqlens_k", TensorMeta{DType::kI32, {2}}}};
        if (sglang) {
          args.emplace_back("max_seqlen_q", int64_t{4});
          args.emplace_back("max_seqlen_k", int64_t{4});
          args.emplace_back("causal", false);
        }
        return args;
      })
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVarlenAttentionOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddVarlen(registry, false));
  return AddVarlen(registry, true);
}

}  // namespace quern
