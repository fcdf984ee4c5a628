#include "quern/ops/registry/families/attention/encoder_attention_ops.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "quern/attention/varlen_attention.h"
#include "quern/ops/registry/families/attention/varlen_call.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

constexpr char kOp[] = "mm_encoder_attn";

using Spec = VarlenAttentionSpec;
struct Args {
  AnyTensorView query, key, value, cu_seqlens, out;
};

// [batch, tokens, heads * dim] or [batch, tokens, heads, dim] as [batch *
// tokens, heads, dim]. InvalidArgument for other extents, and for strides of
// batch and tokens that are not one.
absl::StatusOr<AnyTensorView> AsHeads(absl::string_view field,
                                      const AnyTensorView& v, int64_t heads,
                                      int64_t dim) {
  const bool split = v.rank() == 4;
  if (split ? v.extent(2) != heads || v.extent(3) != dim
            : v.rank() != 3 || v.extent(2) != heads * dim) {
    return InvalidArgument(kOp, field, " is not [batch, tokens, ", heads, ", ",
                           dim, "] or [batch, tokens, ", heads * dim, "]");
  }
  const int64_t batch = v.extent(0), tokens = v.extent(1);
  int64_t rows = 0, batch_stride = 0;
  if (batch < 0 || tokens < 0 || !CheckedMul(batch, tokens, &rows) ||
      !CheckedMul(tokens, v.stride(1), &batch_stride)) {
    return InvalidArgument(kOp, field, " has 2^63 tokens or more");
  }
  if (batch > 1 && tokens > 1 && v.stride(0) != batch_stride) {
    return InvalidArgument(kOp, field, " has strides ", v.stride(0), " and ",
                           v.stride(1), " of batch and tokens; need the first ",
                           tokens, " times the second");
  }
  // The stride of a dimension of extent 1 is meaningless and is not used.
  const int64_t last = split ? v.stride(3) : v.stride(2);
  int64_t head_stride = split ? v.stride(2) : 0;
  if (!split && !CheckedMul(dim, last, &head_stride)) {
    return InvalidArgument(kOp, field, " has stride ", last,
                           " in its last dimension; the ", dim,
                           " elements of a head are more than 2^63 apart");
  }
  const AnyTensorView::Dims extents = {rows, heads, dim};
  const AnyTensorView::Dims strides = {tokens > 1 ? v.stride(1) : v.stride(0),
                                       head_stride, last};
  if (v.writable()) {
    return AnyTensorView(v.dtype(), v.mutable_data(), 3, extents, strides);
  }
  return AnyTensorView(v.dtype(), v.data(), 3, extents, strides);
}

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
    QUERN_RETURN_IF_ERROR(ArgsOf(a).status());
    batch_ = a.query.extent(0);
    tokens_ = a.query.extent(1);
    if (batch_ * tokens_ > std::numeric_limits<int32_t>::max()) {
      return InvalidArgument(kOp, "query has ", batch_ * tokens_,
                             " tokens; need fewer than 2^31");
    }
    QUERN_RETURN_IF_ERROR(SetSegments(a.cu_seqlens));
    // Every sequence of every one of the batch.
    cu_.assign(1, 0);
    for (int64_t b = 0; b < batch_; ++b) {
      for (size_t i = 1; i < segments_.size(); ++i) {
        cu_.push_back(static_cast<int32_t>(b * tokens_) + segments_[i]);
      }
    }
    return VarlenCall::Prepare(cu_, cu_, VarlenMask::kBidirectional, executor);
  }

  absl::Status CheckArgs(const Args& a) const {
    QUERN_RETURN_IF_ERROR(Prepared());
    if (a.query.extent(0) != batch_ || a.query.extent(1) != tokens_) {
      return InvalidArgument(kOp, "query is [", a.query.extent(0), ", ",
                             a.query.extent(1), ", ..]; Prepare was given [",
                             batch_, ", ", tokens_, ", ..]");
    }
    if (a.cu_seqlens.rank() == 0 && segments_.size() > 2) {
      return InvalidArgument(kOp,
                             "cu_seqlens is missing; Prepare was given it");
    }
    if (a.cu_seqlens.rank() != 0) {
      const auto size = static_cast<int64_t>(segments_.size());
      QUERN_RETURN_IF_ERROR(
          CheckInput(kOp, "cu_seqlens", a.cu_seqlens, DType::kI32, {size}));
      if (!std::equal(segments_.begin(), segments_.end(),
                      static_cast<const int32_t*>(a.cu_seqlens.data()))) {
        return InvalidArgument(kOp, "cu_seqlens is not what Prepare was given");
      }
    }
    QUERN_ASSIGN_OR_RETURN(const VarlenAttentionArgs args, ArgsOf(a));
    return VarlenCall::CheckArgs(args);
  }

  void Execute(const Args& a, Workspace workspace, Executor& executor) const {
    const absl::StatusOr<VarlenAttentionArgs> args = ArgsOf(a);
    QUERN_CHECK(args.ok());
    VarlenCall::Execute(*args, workspace, executor);
  }

 private:
  Plan(const Spec& spec, VarlenCall call)
      : VarlenCall(std::move(call)), spec_(spec) {}

  absl::StatusOr<VarlenAttentionArgs> ArgsOf(const Args& a) const {
    VarlenAttentionArgs args;
    const int64_t dim = spec_.head_dim;
    QUERN_ASSIGN_OR_RETURN(args.q,
                           AsHeads("query", a.query, spec_.q_heads, dim));
    QUERN_ASSIGN_OR_RETURN(args.k, AsHeads("key", a.key, spec_.kv_heads, dim));
    QUERN_ASSIGN_OR_RETURN(args.v,
                           AsHeads("value", a.value, spec_.kv_heads, dim));
    QUERN_ASSIGN_OR_RETURN(args.out, AsHeads("out", a.out, spec_.q_heads, dim));
    return args;
  }

  absl::Status SetSegments(const AnyTensorView& cu) {
    if (cu.rank() == 0) {
      segments_ = {0, static_cast<int32_t>(tokens_)};
      return absl::OkStatus();
    }
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "cu_seqlens", cu, DType::kI32, {kAnyExtent}));
    const auto* const values = static_cast<const int32_t*>(cu.data());
    segments_.assign(values, values + cu.extent(0));
    if (segments_.empty() || segments_.front() != 0 ||
        segments_.back() != tokens_ ||
        !std::is_sorted(segments_.begin(), segments_.end())) {
      return InvalidArgument(kOp, "cu_seqlens does not ascend from 0 to the ",
                             tokens_, " tokens of query");
    }
    return absl::OkStatus();
  }

  Spec spec_;
  // The batch of the last Prepare.
  int64_t batch_ = 0;
  int64_t tokens_ = 0;
  std::vector<int32_t> segments_;  // of one of the batch
  std::vector<int32_t> cu_;        // of all
};

absl::Status CheckRows(absl::string_view field, const TensorMeta& x,
                       const TensorMeta& query, int64_t heads, int64_t dim) {
  std::vector<int64_t> want = query.extents;
  want.resize(2);
  if (x.extents.size() == 4) {
    want.insert(want.end(), {heads, dim});
  } else {
    want.push_back(heads * dim);
  }
  if (x.extents == want && x.dtype == query.dtype) return absl::OkStatus();
  return InvalidArgument(kOp, field, " is ", PrintMeta(x), "; need [", want[0],
                         ", ", want[1], ", ", heads, ", ", dim, "] or [",
                         want[0], ", ", want[1], ", ", heads * dim, "] of ",
                         DTypeName(query.dtype));
}

absl::Status FillEncoder(Spec& spec, const OpCall& call) {
  const TensorMeta& query = *call.Tensor("query");
  if (query.extents.size() != 3 && query.extents.size() != 4) {
    return InvalidArgument(kOp, "query has rank ", query.extents.size(),
                           "; need 3 or 4");
  }
  if (spec.kv_heads == 0) spec.kv_heads = spec.q_heads;
  const int64_t dim = spec.head_dim;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "num_heads", spec.q_heads, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "head_size", dim, 1, kMost));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "num_kv_heads", spec.kv_heads, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRows("query", query, query, spec.q_heads, dim));
  for (const char* field : {"key", "value"}) {
    QUERN_RETURN_IF_ERROR(
        CheckRows(field, *call.Tensor(field), query, spec.kv_heads, dim));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RegisterEncoderAttentionOps(OpRegistry& registry) {
  return OpDeclaration<Plan, Spec, Args>(kOp)
      .Layer()
      .In("query", &Args::query, {}, {&Spec::dtype, &Spec::out_dtype})
      .In("key", &Args::key)
      .In("value", &Args::value)
      .Maybe("cu_seqlens", &Args::cu_seqlens, {kAny}, DType::kI32)
      .Need("num_heads", &Spec::q_heads)
      .Need("head_size", &Spec::head_dim)
      .Attr("scale", 0.0, &Spec::scale)
      .Attr("num_kv_heads", int64_t{0}, &Spec::kv_heads)
      .Attr("max_seqlen", int64_t{0})
      .Then(&FillEncoder)
      .Out("out", &Args::out, Like("query"), Like("query"))
      .Provider("simd", &Plan::Make<false>)
      .Provider("reference", &Plan::Make<true>)
      .Example({{"query", {1, 4, 32}},
                {"key", {1, 4, 16}},
                {"value", {1, 4, 16}},
                {"num_heads", 2},
                {"head_size", 16},
                {"num_kv_heads", 1}})
      .AddTo(registry);
}

}  // namespace quern
