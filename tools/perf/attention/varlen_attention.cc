#include "quern/tools/perf/attention/varlen_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/attention/schedule.h"
#include "quern/attention/varlen_attention.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/attention/attention_util.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

constexpr char kOp[] = "varlen_attention";
// Rows that Check compares, one head of each: the reference is slow.
constexpr int64_t kCheckedRows = 128;

// `batch` sequences of `len` queries and as many keys, q, k and v side by side
// as one projection leaves them.
class VarlenAttention final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    VarlenAttentionSpec spec;
    int64_t batch = 0, len = 0, causal = 0;
    QUERN_ASSIGN_OR_RETURN(spec.dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(batch, args.Int("batch", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(len, args.Int("len", 1, 1 << 18));
    QUERN_ASSIGN_OR_RETURN(spec.q_heads, args.Int("q_heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(spec.kv_heads, args.Int("kv_heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(spec.head_dim, args.Int("head_dim", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(causal, args.Int("causal", 0, 1));
    spec.out_dtype = spec.dtype;
    if (batch * len >= int64_t{1} << 30) {
      return InvalidArgument(kOp, "batch * len=", batch * len,
                             "; need fewer than 2^30 tokens");
    }
    QUERN_ASSIGN_OR_RETURN(VarlenAttentionPlan plan,
                           VarlenAttentionPlan::Create(spec));
    return std::unique_ptr<Op>(absl::WrapUnique(
        new VarlenAttention(spec, std::move(plan), batch, len, causal != 0)));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape =
        absl::StrCat("batch=", batch_, " len=", len_,
                     " q_heads=", spec_.q_heads, " kv_heads=", spec_.kv_heads,
                     " head_dim=", spec_.head_dim, causal_ ? " causal" : "");
    info.dtype = std::string(DTypeName(spec_.dtype));
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(QkvBytes()),
                    static_cast<double>(OutBytes()));
    const auto len = static_cast<double>(len_);
    info.flops = 4 * static_cast<double>(tokens()) *
                 (causal_ ? (len + 1) / 2 : len) *
                 static_cast<double>(spec_.q_heads * spec_.head_dim);
    info.peak_kind = PeakKindOf(spec_.dtype);
    return info;
  }

  int64_t set_bytes() const override { return QkvBytes() + OutBytes(); }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(qkv_.Create(sets, QkvBytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, OutBytes()));
    WithType(spec_.dtype,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, qkv_); });
    std::vector<int32_t> cu;
    for (int64_t s = 0; s <= batch_; ++s) {
      cu.push_back(static_cast<int32_t>(s * len_));
    }
    QUERN_ASSIGN_OR_RETURN(
        schedule_,
        plan_.BuildSchedule(
            cu, cu, causal_ ? VarlenMask::kCausal : VarlenMask::kBidirectional,
            executor.num_workers(), storage_));
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        plan_.WorkspaceBytes(schedule_, executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(workspace_, AlignedBuffer::Create(bytes));
    return plan_.CheckArgs(MakeArgs(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(MakeArgs(set),
                  Workspace(workspace_.data(), workspace_.bytes()), executor);
  }

  // One head each of rows spread evenly over the tokens, the last among them.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    const int64_t checked = std::min(tokens(), kCheckedRows);
    Verdict all;
    executor.ParallelFor(checked, [&](int64_t task, int) {
      Verdict mine;
      WithType(spec_.dtype, [&](auto type) {
        CheckRow<decltype(type)>((task + 1) * tokens() / checked - 1,
                                 task % spec_.q_heads, mine);
      });
      all.Merge(mine);
    });
    return all.Result(kOp);
  }

 private:
  VarlenAttention(const VarlenAttentionSpec& spec, VarlenAttentionPlan plan,
                  int64_t batch, int64_t len, bool causal)
      : spec_(spec),
        plan_(std::move(plan)),
        batch_(batch),
        len_(len),
        causal_(causal) {}

  int64_t tokens() const { return batch_ * len_; }
  int64_t row() const {
    return (spec_.q_heads + 2 * spec_.kv_heads) * spec_.head_dim;
  }
  int64_t Element() const { return static_cast<int64_t>(SizeOf(spec_.dtype)); }
  int64_t QkvBytes() const { return tokens() * row() * Element(); }
  int64_t OutBytes() const {
    return tokens() * spec_.q_heads * spec_.head_dim * Element();
  }
  // Elements from the first one of a token to its keys, and to its values.
  int64_t KeyAt() const { return spec_.q_heads * spec_.head_dim; }
  int64_t ValueAt() const { return KeyAt() + spec_.kv_heads * spec_.head_dim; }
  VarlenAttentionArgs MakeArgs(int64_t set) {
    const auto part = [&](int64_t at, int64_t heads) {
      return AnyTensorView(
          spec_.dtype, static_cast<const void*>(qkv_.at(set) + at * Element()),
          3, {tokens(), heads, spec_.head_dim}, {row(), spec_.head_dim, 1});
    };
    VarlenAttentionArgs args;
    args.q = part(0, spec_.q_heads);
    args.k = part(KeyAt(), spec_.kv_heads);
    args.v = part(ValueAt(), spec_.kv_heads);
    args.schedule = schedule_;
    args.out =
        AnyTensorView(spec_.dtype, static_cast<void*>(out_.at(set)), 3,
                      {tokens(), spec_.q_heads, spec_.head_dim},
                      {spec_.q_heads * spec_.head_dim, spec_.head_dim, 1});
    return args;
  }

  template <typename T>
  void CheckRow(int64_t token, int64_t head, Verdict& verdict) {
    const int64_t dim = spec_.head_dim;
    const int64_t kv_head = head / (spec_.q_heads / spec_.kv_heads);
    ReferenceAttentionSpec reference;
    reference.q_len = 1;
    reference.kv_len = causal_ ? token % len_ + 1 : len_;
    reference.head_dim = dim;
    reference.scale = 1 / std::sqrt(static_cast<double>(dim));
    const T* const all = qkv_.at<T>(0);
    const auto append = [&](int64_t at, std::vector<double>* to) {
      for (int64_t d = 0; d < dim; ++d) to->push_back(ToDouble(all[at + d]));
    };
    std::vector<double> q, k, v;
    append(token * row() + head * dim, &q);
    for (int64_t t = 0; t < reference.kv_len; ++t) {
      const int64_t first = (token / len_ * len_ + t) * row() + kv_head * dim;
      append(first + KeyAt(), &k);
      append(first + ValueAt(), &v);
    }
    const ReferenceAttentionResult want =
        ReferenceAttention(reference, q, k, v);
    const double bound = AttentionErrorBound(reference, spec_.dtype);
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t at = (token * spec_.q_heads + head) * dim + i;
      verdict.Add(at, ToDouble(out_.at<T>(0)[at]),
                  want.out[static_cast<size_t>(i)], bound);
    }
  }

  VarlenAttentionSpec spec_;
  VarlenAttentionPlan plan_;
  int64_t batch_;
  int64_t len_;
  bool causal_;
  SetBuffer qkv_, out_;
  VarlenAttentionStorage storage_;
  AttentionSchedule schedule_;
  AlignedBuffer workspace_;
};

}  // namespace

OpEntry VarlenAttentionOp() {
  return {kOp,
          "attention over keys and values in no cache: encoders, first prefill",
          {{"dtype", "bf16", "f32, bf16 or f16, of q, k, v and out"},
           {"batch", "1", "sequences"},
           {"len", "2048", "tokens of each"},
           {"q_heads", "32", "a multiple of kv_heads"},
           {"kv_heads", "8", "key/value heads"},
           {"head_dim", "128", "elements of a head"},
           {"causal", "1", "0: every query sees every key of its sequence"}},
          &VarlenAttention::Create};
}

}  // namespace quern
