#include "quern/tools/perf/recurrent/causal_conv1d.h"

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
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/recurrent/testing/reference_causal_conv1d_testutil.h"
#include "quern/ops/recurrent/testing/reference_rounding_testutil.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/recurrent/recurrent_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

class CausalConv1d final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    CausalConv1dSpec spec;
    QUERN_ASSIGN_OR_RETURN(const int64_t batch, args.Int("batch", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(const int64_t len, args.Int("len", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(spec.channels, args.Int("channels", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(spec.width, args.Int("width", 2, 4));
    QUERN_ASSIGN_OR_RETURN(spec.dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(const int64_t silu, args.Int("silu", 0, 1));
    if (silu == 0) spec.activation = ConvActivation::kNone;
    spec.weight_dtype = spec.dtype;
    QUERN_ASSIGN_OR_RETURN(const CausalConv1dPlan plan,
                           CausalConv1dPlan::Create(spec));
    return std::unique_ptr<Op>(
        absl::WrapUnique(new CausalConv1d(plan, EqualSequences(batch, len))));
  }

  OpInfo Info() const override {
    const CausalConv1dSpec& s = spec();
    OpInfo info;
    info.shape =
        absl::StrCat("batch=", sequences_.batch(), " len=", sequences_.len(),
                     " channels=", s.channels, " width=", s.width,
                     s.activation == ConvActivation::kSilu ? " silu" : "");
    info.dtype = std::string(DTypeName(s.dtype));
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(x_bytes() + weight_bytes()),
                    static_cast<double>(x_bytes()),
                    static_cast<double>(state_bytes()));
    info.flops =
        2.0 * static_cast<double>(sequences_.tokens() * s.channels * s.width);
    return info;
  }

  int64_t set_bytes() const override {
    return 2 * x_bytes() + weight_bytes() + state_bytes();
  }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(x_.Create(sets, x_bytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, x_bytes()));
    QUERN_RETURN_IF_ERROR(weight_.Create(sets, weight_bytes()));
    QUERN_RETURN_IF_ERROR(state_.Create(sets, state_bytes()));
    WithType(spec().dtype, [this](auto type) {
      for (SetBuffer* b : {&x_, &weight_, &state_}) {
        FillReals<decltype(type)>(-1, 1, *b);
      }
    });
    return plan_.CheckArgs(MakeArgs(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(MakeArgs(set), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    const int64_t n = spec().channels;
    const int64_t history = spec().width - 1;
    const int64_t every = CheckEvery(n, 16 * sequences_.tokens());
    // The history of the channels that are looked at, sequence by sequence.
    std::vector<double> before;
    for (int64_t row = 0; row < sequences_.batch() * history; ++row) {
      for (int64_t c = 0; c < n; c += every) {
        before.push_back(Element(state_, row * n + c));
      }
    }
    Run(0, executor);
    const int64_t checked = DivCeil(n, every);
    Verdict all;
    executor.ParallelFor(checked, [&](int64_t i, int) {
      Verdict mine;
      for (int64_t s = 0; s < sequences_.batch(); ++s) {
        std::vector<double> inputs;
        for (int64_t j = 0; j < history; ++j) {
          inputs.push_back(before[static_cast<size_t>(
              (sequences_.slot(s) * history + j) * checked + i)]);
        }
        CheckChannel(s, i * every, std::move(inputs), mine);
      }
      all.Merge(mine);
    });
    return all.Result("causal_conv1d");
  }

 private:
  CausalConv1d(const CausalConv1dPlan& plan, EqualSequences sequences)
      : plan_(plan), sequences_(std::move(sequences)) {}

  const CausalConv1dSpec& spec() const { return plan_.spec(); }
  int64_t element() const { return static_cast<int64_t>(SizeOf(spec().dtype)); }
  int64_t x_bytes() const {
    return sequences_.tokens() * spec().channels * element();
  }
  // Weights and bias.
  int64_t weight_bytes() const {
    return spec().channels * (spec().width + 1) * element();
  }
  int64_t state_bytes() const {
    return sequences_.batch() * (spec().width - 1) * spec().channels *
           element();
  }
  double Element(SetBuffer& buffer, int64_t at) {
    return Doubles(spec().dtype, buffer, at, 1)[0];
  }

  CausalConv1dArgs MakeArgs(int64_t set) {
    const CausalConv1dSpec& s = spec();
    const std::array<int64_t, 2> rows = {sequences_.tokens(), s.channels};
    CausalConv1dArgs args;
    args.x = DenseView(s.dtype, x_.at(set), rows);
    args.out = DenseView(s.dtype, out_.at(set), rows);
    args.weight = DenseView(s.dtype, weight_.at(set),
                            std::array<int64_t, 2>{s.channels, s.width});
    args.bias =
        DenseView(s.dtype, weight_.at(set) + s.channels * s.width * element(),
                  std::array<int64_t, 1>{s.channels});
    args.state = DenseView(
        s.dtype, state_.at(set),
        std::array<int64_t, 3>{sequences_.batch(), s.width - 1, s.channels});
    args.batch = sequences_.View();
    return args;
  }

  // inputs: the history.
  void CheckChannel(int64_t sequence, int64_t c, std::vector<double> inputs,
                    Verdict& verdict) {
    const CausalConv1dSpec& s = spec();
    const int64_t first = sequence * sequences_.len();
    const auto weights = Doubles(s.dtype, weight_, c * s.width, s.width);
    const double bias = Element(weight_, s.channels * s.width + c);
    for (int64_t i = 0; i < sequences_.len(); ++i) {
      const int64_t at = (first + i) * s.channels + c;
      inputs.push_back(Element(x_, at));
      const ConvReference want = ReferenceConv(
          weights, bias,
          std::vector<double>(inputs.end() - s.width, inputs.end()),
          s.activation == ConvActivation::kSilu);
      verdict.Add(
          at, Element(out_, at), want.y,
          want.bound + RoundingBoundOf(s.dtype, std::abs(want.y) + want.bound));
    }
    for (int64_t j = 0; j + 1 < s.width; ++j) {
      const int64_t at =
          (sequences_.slot(sequence) * (s.width - 1) + j) * s.channels + c;
      const auto newest = static_cast<int64_t>(inputs.size());
      const double want = inputs[static_cast<size_t>(newest - s.width + 1 + j)];
      verdict.Add(at, Element(state_, at), want, 0.0);
    }
  }

  CausalConv1dPlan plan_;
  EqualSequences sequences_;
  SetBuffer x_, weight_, state_, out_;
};

}  // namespace

OpEntry CausalConv1dOp() {
  return {"causal_conv1d",
          "a causal depthwise convolution over a pool of states",
          {{"batch", "1", "sequences"},
           {"len", "1", "new tokens of each; 1 is decode"},
           {"channels", "8192", "channels"},
           {"width", "4", "2, 3 or 4"},
           {"dtype", "bf16", "of all tensors: f32, bf16 or f16"},
           {"silu", "1", "0: no activation"}},
          &CausalConv1d::Create};
}

}  // namespace quern
