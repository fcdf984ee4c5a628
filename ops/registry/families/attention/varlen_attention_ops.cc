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

}  // namespace

absl::Status RegisterVarlenAttentionOps(OpRegistry& registry) {
  return OpDeclaration<Plan, Spec, Args>(kOp)
      .Layer()
      .In("query", &Args::query, {kRows, &Spec::q_heads, &Spec::head_dim},
          {&Spec::dtype, &Spec::out_dtype})
      .Word("q", "query")
      .In("key", &Args::key, {kAny, &Spec::kv_heads, &Spec::head_dim},
          Like("query"))
      .Word("k", "key")
      .In("value", &Args::value, {kAny, &Spec::kv_heads, &Spec::v_head_dim},
          Like("query"))
      .Word("v", "value")
      .In("cu_seqlens_q", &Args::cu_q, {kAny}, DType::kI32)
      .In("cu_seqlens_k", &Args::cu_k, {kAny}, DType::kI32)
      .Attr("causal", false, &Spec::causal)
      .Attr("scale", 0.0, &Spec::scale)
      .Out("out", &Args::out, {kRows, &Spec::q_heads, &Spec::v_head_dim},
           Like("query"))
      .Provider("simd", &Plan::Make<false>)
      .Provider("reference", &Plan::Make<true>)
      .Example({{"query", {4, 2, 16}},
                {"key", {4, 1, 16}},
                {"value", {4, 1, 16}},
                {"cu_seqlens_q", {2}, DType::kI32},
                {"cu_seqlens_k", {2}, DType::kI32}})
      .AddTo(registry);
}

}  // namespace quern
