#include "quern/tools/perf/recurrent/delta_rule.h"

#include <array>
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
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/testing/reference_delta_rule_testutil.h"
#include "quern/ops/recurrent/testing/reference_rounding_testutil.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/recurrent/recurrent_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

class DeltaRule final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    DeltaRuleSpec spec;
    QUERN_ASSIGN_OR_RETURN(const int64_t batch, args.Int("batch", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(const int64_t len, args.Int("len", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(const int64_t drafts, args.Int("drafts", 0, 2));
    QUERN_ASSIGN_OR_RETURN(spec.value_heads, args.Int("heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(spec.key_heads,
                           args.Int("key_heads", 1, spec.value_heads));
    QUERN_ASSIGN_OR_RETURN(spec.dk, args.Int("dk", 1, DeltaRulePlan::kMaxDk));
    QUERN_ASSIGN_OR_RETURN(spec.dv, args.Int("dv", 1, 1 << 16));
    QUERN_ASSIGN_OR_RETURN(spec.dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(spec.state_dtype, args.Type("state", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(const int64_t kda, args.Int("kda", 0, 1));
    if (kda != 0) spec.decay = DeltaDecay::kPerChannel;
    spec.norm = DeltaNorm::kL2;
    QUERN_ASSIGN_OR_RETURN(spec.chunk,
                           args.Int("chunk", 0, DeltaRulePlan::kMaxChunk));
    QUERN_ASSIGN_OR_RETURN(const DeltaRulePlan plan,
                           DeltaRulePlan::Create(spec));
    return std::unique_ptr<Op>(absl::WrapUnique(new DeltaRule(
        plan, EqualSequences(batch, len, static_cast<DraftStates>(drafts)))));
  }

  OpInfo Info() const override {
    const DeltaRuleSpec& s = spec();
    OpInfo info;
    info.shape = absl::StrCat(
        "batch=", sequences_.batch(), " len=", sequences_.len(),
        " heads=", s.value_heads, " key_heads=", s.key_heads, " dk=", s.dk,
        " dv=", s.dv, s.decay == DeltaDecay::kPerChannel ? " kda" : "");
    info.dtype =
        absl::StrCat(DTypeName(s.dtype), " state ", DTypeName(s.state_dtype));
    info.isa = plan_.target();
    const auto of = [](int64_t bytes) { return static_cast<double>(bytes); };
    // Drafts read one state and write several.
    const int64_t once = state_bytes() / sequences_.columns();
    info.SetTraffic(of(2 * q_bytes() + v_bytes() + g_bytes() + beta_bytes()),
                    of(v_bytes() + state_bytes() - once), of(once));
    if (sequences_.drafts() == DraftStates::kEach) info.shape += " drafts";
    if (sequences_.drafts() == DraftStates::kLast) info.shape += " last draft";
    if (chunked()) {
      // Each token multiplies its k and its q by the state, and its k by a row
      // that is added to the state. A chunk of n tokens has n (n - 1) / 2
      // products of keys and n (n + 1) / 2 of queries and keys, and each of
      // these numbers multiplies a row of dv.
      const double pairs =
          2 * PairsOfChunks(sequences_.len(), s.chunk) - of(sequences_.len());
      const double products = 3 * of(sequences_.len()) * of(s.dk * s.dv);
      info.flops = 2 * of(sequences_.batch() * s.value_heads) *
                   (products + pairs * of(s.dk + s.dv));
      info.shape += absl::StrCat(" chunk=", s.chunk);
      return info;
    }
    // Two sums, a decay and a rank-one update for each element of the state.
    info.flops =
        7.0 * of(sequences_.tokens()) * of(s.value_heads * s.dk * s.dv);
    return info;
  }

  int64_t set_bytes() const override {
    return 2 * q_bytes() + 2 * v_bytes() + g_bytes() + beta_bytes() +
           state_bytes();
  }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        plan_.WorkspaceBytes(sequences_.tokens(), executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(workspace_, AlignedBuffer::Create(bytes));
    QUERN_RETURN_IF_ERROR(q_.Create(sets, q_bytes()));
    QUERN_RETURN_IF_ERROR(k_.Create(sets, q_bytes()));
    QUERN_RETURN_IF_ERROR(v_.Create(sets, v_bytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, v_bytes()));
    QUERN_RETURN_IF_ERROR(g_.Create(sets, g_bytes()));
    QUERN_RETURN_IF_ERROR(beta_.Create(sets, beta_bytes()));
    QUERN_RETURN_IF_ERROR(state_.Create(sets, state_bytes()));
    WithType(spec().dtype, [this](auto type) {
      for (SetBuffer* b : {&q_, &k_, &v_}) FillReals<decltype(type)>(-1, 1, *b);
    });
    WithType(spec().state_dtype,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, state_); });
    FillReals<float>(-1, 0, g_);
    FillReals<float>(0, 1, beta_);
    return plan_.CheckArgs(MakeArgs(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(MakeArgs(set), Workspace(workspace_), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    const DeltaRuleSpec& s = spec();
    const int64_t size = s.dk * s.dv;
    const int64_t units = sequences_.batch() * s.value_heads;
    const int64_t every = CheckEvery(units, sequences_.len() * size);
    std::vector<std::vector<double>> before;
    for (int64_t unit = 0; unit < units; unit += every) {
      before.push_back(
          Doubles(s.state_dtype, state_, StateAt(unit) * size, size));
    }
    Run(0, executor);
    Verdict all;
    executor.ParallelFor(
        static_cast<int64_t>(before.size()), [&](int64_t i, int) {
          Verdict mine;
          CheckHead(i * every, before[static_cast<size_t>(i)], mine);
          all.Merge(mine);
        });
    return all.Result("delta_rule");
  }

 private:
  DeltaRule(const DeltaRulePlan& plan, EqualSequences sequences)
      : plan_(plan), sequences_(std::move(sequences)) {}

  const DeltaRuleSpec& spec() const { return plan_.spec(); }
  bool chunked() const {
    return spec().chunk > 1 && sequences_.drafts() == DraftStates::kInPlace &&
           sequences_.len() >= DeltaRulePlan::kChunkedFrom;
  }
  int64_t per_head() const {
    return spec().decay == DeltaDecay::kPerChannel ? spec().dk : 1;
  }
  int64_t q_bytes() const {
    return sequences_.tokens() * spec().key_heads * spec().dk *
           static_cast<int64_t>(SizeOf(spec().dtype));
  }
  int64_t v_bytes() const {
    return sequences_.tokens() * spec().value_heads * spec().dv *
           static_cast<int64_t>(SizeOf(spec().dtype));
  }
  int64_t beta_bytes() const {
    return sequences_.tokens() * spec().value_heads * 4;
  }
  int64_t g_bytes() const { return beta_bytes() * per_head(); }
  int64_t state_bytes() const {
    return sequences_.slots() * spec().value_heads * spec().dk * spec().dv *
           static_cast<int64_t>(SizeOf(spec().state_dtype));
  }
  // Where the head of a unit, a head of a sequence, is in the pool of heads.
  int64_t StateAt(int64_t unit) const {
    return sequences_.slot(unit / spec().value_heads) * spec().value_heads +
           unit % spec().value_heads;
  }

  DeltaRuleArgs MakeArgs(int64_t set) {
    const DeltaRuleSpec& s = spec();
    const int64_t tokens = sequences_.tokens();
    DeltaRuleArgs args;
    const std::array<int64_t, 3> q = {tokens, s.key_heads, s.dk};
    const std::array<int64_t, 3> v = {tokens, s.value_heads, s.dv};
    const std::array<int64_t, 2> heads = {tokens, s.value_heads};
    args.q = DenseView(s.dtype, q_.at(set), q);
    args.k = DenseView(s.dtype, k_.at(set), q);
    args.v = DenseView(s.dtype, v_.at(set), v);
    args.g =
        per_head() == 1
            ? DenseView(DType::kF32, g_.at(set), heads)
            : DenseView(DType::kF32, g_.at(set),
                        std::array<int64_t, 3>{tokens, s.value_heads, s.dk});
    args.beta = DenseView(DType::kF32, beta_.at(set), heads);
    args.state = DenseView(
        s.state_dtype, state_.at(set),
        std::array<int64_t, 4>{sequences_.slots(), s.value_heads, s.dk, s.dv});
    args.batch = sequences_.View();
    args.out = DenseView(s.dtype, out_.at(set), v);
    return args;
  }

  void CheckHead(int64_t unit, const std::vector<double>& before,
                 Verdict& verdict) {
    const DeltaRuleSpec& s = spec();
    const int64_t sequence = unit / s.value_heads, h = unit % s.value_heads;
    const int64_t key = h / (s.value_heads / s.key_heads);
    DeltaRuleReference reference(
        static_cast<size_t>(s.dk), static_cast<size_t>(s.dv), before,
        s.state_dtype, /*l2=*/true, double{s.scale}, chunked() ? s.chunk : 1);
    for (int64_t i = 0; i < sequences_.len(); ++i) {
      const int64_t t = sequence * sequences_.len() + i;
      const int64_t at = t * s.value_heads + h;
      DeltaRuleToken64 token;
      token.q = Doubles(s.dtype, q_, (t * s.key_heads + key) * s.dk, s.dk);
      token.k = Doubles(s.dtype, k_, (t * s.key_heads + key) * s.dk, s.dk);
      token.v = Doubles(s.dtype, v_, at * s.dv, s.dv);
      token.g = Doubles(DType::kF32, g_, at * per_head(), per_head());
      token.beta = Doubles(DType::kF32, beta_, at, 1)[0];
      reference.Step(token);
      const auto out = Doubles(s.dtype, out_, at * s.dv, s.dv);
      for (size_t c = 0; c < out.size(); ++c) {
        const double want = reference.out()[c], e = reference.out_bound(c);
        verdict.Add(at * s.dv + static_cast<int64_t>(c), out[c], want,
                    e + RoundingBoundOf(s.dtype, std::abs(want) + e));
      }
    }
    reference.Finish();
    const int64_t size = s.dk * s.dv, at = StateAt(unit) * size;
    const auto state = Doubles(s.state_dtype, state_, at, size);
    for (size_t i = 0; i < state.size(); ++i) {
      verdict.Add(at + static_cast<int64_t>(i), state[i], reference.state()[i],
                  reference.state_bound(i % static_cast<size_t>(s.dv)));
    }
  }

  DeltaRulePlan plan_;
  EqualSequences sequences_;
  AlignedBuffer workspace_;
  SetBuffer q_, k_, v_, g_, beta_, state_, out_;
};

}  // namespace

OpEntry DeltaRuleOp() {
  return {
      "delta_rule",
      "the gated delta rule or KDA, over a pool of states",
      {{"batch", "1", "sequences"},
       {"len", "1", "new tokens of each; 1 is decode"},
       {"heads", "32", "value heads"},
       {"key_heads", "16", "key heads"},
       {"dk", "128", "rows of a state"},
       {"dv", "128", "columns of a state"},
       {"drafts", "0",
        "where drafts leave states; 0: in one slot, 1: only the last, 2: in "
        "a slot each"},
       {"chunk", "0", "tokens of a chunk; 0: the plan's; 1: token by token"},
       {"dtype", "bf16", "of q, k, v and out: f32, bf16 or f16"},
       {"state", "f32", "of the states: f32, bf16 or f16"},
       {"kda", "0", "1: a decay for each row of a state"}},
      &DeltaRule::Create};
}

}  // namespace quern
