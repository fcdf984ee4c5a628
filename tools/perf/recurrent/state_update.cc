#include "quern/tools/perf/recurrent/state_update.h"

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
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/recurrent/testing/reference_rounding_testutil.h"
#include "quern/ops/recurrent/testing/reference_state_update_testutil.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/recurrent/recurrent_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

// With --mamba=1 the shape of the largest Mamba-1 model, of 2.8e9 weights,
// replaces the defaults, which are those of a Mamba-2 model.
constexpr std::pair<absl::string_view, absl::string_view> kMamba1[] = {
    {"heads", "1"}, {"head_dim", "5120"}, {"d_state", "16"}};

class StateUpdate final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& given) {
    StateUpdateSpec spec;
    Args args = given;
    QUERN_ASSIGN_OR_RETURN(const int64_t mamba, args.Int("mamba", 1, 2));
    for (const auto& [key, value] : kMamba1) {
      if (mamba == 1 && !given.given(key)) args.Set(key, std::string(value));
    }
    QUERN_ASSIGN_OR_RETURN(const int64_t batch, args.Int("batch", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(const int64_t len, args.Int("len", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(const int64_t drafts, args.Int("drafts", 0, 2));
    QUERN_ASSIGN_OR_RETURN(spec.heads, args.Int("heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(spec.groups, args.Int("groups", 1, spec.heads));
    QUERN_ASSIGN_OR_RETURN(spec.head_dim, args.Int("head_dim", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(spec.d_state,
                           args.Int("d_state", 1, StateUpdatePlan::kMaxState));
    QUERN_ASSIGN_OR_RETURN(spec.dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(spec.state_dtype, args.Type("state", kFloatDTypes));
    spec.form = mamba == 1 ? SsmForm::kPerRow : SsmForm::kPerHead;
    QUERN_ASSIGN_OR_RETURN(spec.chunk,
                           args.Int("chunk", 0, StateUpdatePlan::kMaxChunk));
    QUERN_ASSIGN_OR_RETURN(const StateUpdatePlan plan,
                           StateUpdatePlan::Create(spec));
    return std::unique_ptr<Op>(absl::WrapUnique(new StateUpdate(
        plan, EqualSequences(batch, len, static_cast<DraftStates>(drafts)))));
  }

  OpInfo Info() const override {
    const StateUpdateSpec& s = spec();
    OpInfo info;
    info.shape = absl::StrCat(
        "batch=", sequences_.batch(), " len=", sequences_.len(),
        " heads=", s.heads, " head_dim=", s.head_dim, " d_state=", s.d_state,
        " groups=", s.groups, per_row() ? " mamba=1" : " mamba=2");
    info.dtype =
        absl::StrCat(DTypeName(s.dtype), " state ", DTypeName(s.state_dtype));
    info.isa = plan_.target();
    const auto of = [](int64_t bytes) { return static_cast<double>(bytes); };
    // Drafts read one state and write several.
    const int64_t once = state_bytes() / sequences_.columns();
    info.SetTraffic(of(2 * x_bytes() + dt_bytes() + 2 * b_bytes() + a_bytes()),
                    of(x_bytes() + state_bytes() - once), of(once));
    if (sequences_.drafts() == DraftStates::kEach) info.shape += " drafts";
    if (sequences_.drafts() == DraftStates::kLast) info.shape += " last draft";
    if (chunked()) {
      // Each token multiplies its c by the state, and adds a product to it. A
      // chunk of n tokens has n (n + 1) / 2 products of c and b in each group,
      // each of which multiplies a row of x in each head.
      const double pairs = PairsOfChunks(sequences_.len(), s.chunk);
      info.flops = 2 * of(sequences_.batch()) *
                   (2 * of(sequences_.len()) * of(rows() * s.d_state) +
                    pairs * of(rows() + s.groups * s.d_state));
      info.shape += absl::StrCat(" chunk=", s.chunk);
      return info;
    }
    // A decay, an addition of a product and a sum for each element of the
    // state.
    info.flops = 5.0 * of(sequences_.tokens()) * of(rows() * s.d_state);
    return info;
  }

  int64_t set_bytes() const override {
    return 3 * x_bytes() + dt_bytes() + 2 * b_bytes() + a_bytes() +
           state_bytes();
  }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        plan_.WorkspaceBytes(sequences_.tokens(), executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(workspace_, AlignedBuffer::Create(bytes));
    const std::pair<SetBuffer*, int64_t> buffers[] = {
        {&x_, x_bytes()},   {&z_, x_bytes()},        {&out_, x_bytes()},
        {&b_, b_bytes()},   {&c_, b_bytes()},        {&a_, a_bytes()},
        {&dt_, dt_bytes()}, {&state_, state_bytes()}};
    for (const auto& [buffer, bytes] : buffers) {
      QUERN_RETURN_IF_ERROR(buffer->Create(sets, bytes));
    }
    WithType(spec().dtype, [this](auto type) {
      for (SetBuffer* b : {&x_, &z_, &b_, &c_, &dt_}) {
        FillReals<decltype(type)>(-1, 1, *b);
      }
    });
    WithType(spec().state_dtype,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, state_); });
    FillReals<float>(-2, 0, a_);
    return plan_.CheckArgs(MakeArgs(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(MakeArgs(set), Workspace(workspace_), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    const int64_t n = spec().d_state;
    const int64_t units = sequences_.batch() * rows();
    const int64_t every = CheckEvery(units, sequences_.len() * (n + 64));
    std::vector<std::vector<double>> before;
    for (int64_t unit = 0; unit < units; unit += every) {
      before.push_back(
          Doubles(spec().state_dtype, state_, StateAt(unit) * n, n));
    }
    Run(0, executor);
    Verdict all;
    executor.ParallelFor(
        static_cast<int64_t>(before.size()), [&](int64_t i, int) {
          Verdict mine;
          CheckRow(i * every, before[static_cast<size_t>(i)], mine);
          all.Merge(mine);
        });
    return all.Result("state_update");
  }

 private:
  StateUpdate(const StateUpdatePlan& plan, EqualSequences sequences)
      : plan_(plan), sequences_(std::move(sequences)) {}

  const StateUpdateSpec& spec() const { return plan_.spec(); }
  bool chunked() const {
    return spec().chunk > 1 && sequences_.drafts() == DraftStates::kInPlace &&
           sequences_.len() >= StateUpdatePlan::kChunkedFrom;
  }
  bool per_row() const { return spec().form == SsmForm::kPerRow; }
  int64_t rows() const { return spec().heads * spec().head_dim; }
  // How many numbers dt has for a token, and d and dt_bias have in all.
  int64_t numbers() const { return per_row() ? rows() : spec().heads; }
  // How many numbers a has, which d and dt_bias follow.
  int64_t rates() const {
    return per_row() ? rows() * spec().d_state : spec().heads;
  }
  int64_t Bytes(int64_t count) const {
    return sequences_.tokens() * count *
           static_cast<int64_t>(SizeOf(spec().dtype));
  }
  int64_t x_bytes() const { return Bytes(rows()); }
  int64_t dt_bytes() const { return Bytes(numbers()); }
  int64_t b_bytes() const { return Bytes(spec().groups * spec().d_state); }
  int64_t a_bytes() const { return 4 * (rates() + 2 * numbers()); }
  int64_t state_bytes() const {
    return sequences_.slots() * rows() * spec().d_state *
           static_cast<int64_t>(SizeOf(spec().state_dtype));
  }
  // Where the row of a unit, a row of a sequence, is in the pool of rows.
  int64_t StateAt(int64_t unit) const {
    return sequences_.slot(unit / rows()) * rows() + unit % rows();
  }

  StateUpdateArgs MakeArgs(int64_t set) {
    const StateUpdateSpec& s = spec();
    const int64_t tokens = sequences_.tokens();
    const std::array<int64_t, 3> x = {tokens, s.heads, s.head_dim};
    const std::array<int64_t, 3> b = {tokens, s.groups, s.d_state};
    const std::array<int64_t, 1> heads = {s.heads};
    const std::array<int64_t, 2> matrix = {s.heads, s.head_dim};
    float* const a = a_.at<float>(set);
    const auto per_number = [&](float* at) {
      return per_row() ? DenseView(DType::kF32, at, matrix)
                       : DenseView(DType::kF32, at, heads);
    };
    StateUpdateArgs args;
    args.state = DenseView(s.state_dtype, state_.at(set),
                           std::array<int64_t, 4>{sequences_.slots(), s.heads,
                                                  s.head_dim, s.d_state});
    args.x = DenseView(s.dtype, x_.at(set), x);
    args.z = DenseView(s.dtype, z_.at(set), x);
    args.out = DenseView(s.dtype, out_.at(set), x);
    args.dt = per_row() ? DenseView(s.dtype, dt_.at(set), x)
                        : DenseView(s.dtype, dt_.at(set),
                                    std::array<int64_t, 2>{tokens, s.heads});
    args.a =
        per_row()
            ? DenseView(DType::kF32, a,
                        std::array<int64_t, 3>{s.heads, s.head_dim, s.d_state})
            : DenseView(DType::kF32, a, heads);
    args.b = DenseView(s.dtype, b_.at(set), b);
    args.c = DenseView(s.dtype, c_.at(set), b);
    args.d = per_number(a + rates());
    args.dt_bias = per_number(a + rates() + numbers());
    args.batch = sequences_.View();
    return args;
  }

  void CheckRow(int64_t unit, const std::vector<double>& before,
                Verdict& verdict) {
    const StateUpdateSpec& s = spec();
    const int64_t sequence = unit / rows(), r = unit % rows();
    const int64_t head = r / s.head_dim, n = s.d_state;
    const int64_t group = head / (s.heads / s.groups);
    const int64_t number = per_row() ? r : head;
    const auto f32 = [&](int64_t at, int64_t count) {
      return Doubles(DType::kF32, a_, at, count);
    };
    StateUpdateToken64 token;
    token.a = per_row() ? f32(r * n, n)
                        : std::vector<double>(static_cast<size_t>(n),
                                              f32(head, 1)[0]);
    token.d = f32(rates() + number, 1)[0];
    token.bias = f32(rates() + numbers() + number, 1)[0];
    token.softplus = token.gated = true;
    StateUpdateReference reference(before, s.state_dtype,
                                   chunked() ? s.chunk : 1);
    for (int64_t i = 0; i < sequences_.len(); ++i) {
      const int64_t t = sequence * sequences_.len() + i;
      const int64_t at = t * rows() + r;
      token.x = Doubles(s.dtype, x_, at, 1)[0];
      token.z = Doubles(s.dtype, z_, at, 1)[0];
      token.dt = Doubles(s.dtype, dt_, t * numbers() + number, 1)[0];
      token.b = Doubles(s.dtype, b_, (t * s.groups + group) * n, n);
      token.c = Doubles(s.dtype, c_, (t * s.groups + group) * n, n);
      reference.Step(token);
      const double e = reference.y_bound();
      verdict.Add(at, Doubles(s.dtype, out_, at, 1)[0], reference.y(),
                  e + RoundingBoundOf(s.dtype, std::abs(reference.y()) + e));
    }
    reference.Finish();
    const auto state = Doubles(s.state_dtype, state_, StateAt(unit) * n, n);
    for (size_t i = 0; i < state.size(); ++i) {
      verdict.Add(StateAt(unit) * n + static_cast<int64_t>(i), state[i],
                  reference.row()[i], reference.bound(i));
    }
  }

  StateUpdatePlan plan_;
  EqualSequences sequences_;
  AlignedBuffer workspace_;
  SetBuffer x_, z_, dt_, a_, b_, c_, state_, out_;
};

}  // namespace

OpEntry StateUpdateOp() {
  return {
      "state_update",
      "the selective state update over a pool of states: Mamba-1's selective "
      "scan, Mamba-2's in decode, and SSD on its prompts",
      {{"batch", "1", "sequences"},
       {"len", "1", "new tokens of each; 1 is decode"},
       {"heads", "80", "heads"},
       {"groups", "1", "groups of heads that share b and c"},
       {"head_dim", "64", "rows of a state"},
       {"d_state", "128", "columns of a state"},
       {"drafts", "0",
        "where drafts leave states; 0: in one slot, 1: only the last, 2: in "
        "a slot each"},
       {"chunk", "0", "tokens of a chunk; 0: the plan's; 1: token by token"},
       {"dtype", "bf16", "of x, dt, b, c, z and out: f32, bf16 or f16"},
       {"state", "f32", "of the states: f32, bf16 or f16"},
       {"mamba", "2",
        "2: rates and steps for each head; 1: for each row, and unless they "
        "are given 1 head, head_dim=5120 and d_state=16"}},
      &StateUpdate::Create};
}

}  // namespace quern
