#include "quern/tools/perf/linear/moe.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
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
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/moe/reference_experts_testutil.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/linear/linear_inputs.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

// Tokens that Check compares, all columns of each.
constexpr int64_t kCheckedTokens = 16;

struct Format {
  absl::string_view name;
  LinearInputOr (*input)(const Args& args, const MatrixShape& shape);
};
constexpr Format kFormats[] = {{"float", &FloatInput},
                               {"int8", &Int8ChannelInput},
                               {"fp8_block", &Fp8BlockInput},
                               {"int4", &Int4GroupInput},
                               {"q8_0", &Int8GroupInput}};

// All working sets share the experts, which are as in a model more than the
// caches hold; a set is the routes of its tokens. The experts have equal values
// in memory of their own; tests compare experts that differ.
class Moe final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = absl::WrapUnique(new Moe);
    QUERN_RETURN_IF_ERROR(op->Parse(args));
    return std::unique_ptr<Op>(std::move(op));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("tokens=", tokens_, " experts=", experts_,
                              " top_k=", spec_.top_k, " hidden=", hidden_,
                              " inter=", inter_, skew_ ? " skewed" : "");
    info.dtype = absl::StrCat(DTypeName(spec_.x), gate_up_->arrow(),
                              DTypeName(spec_.out));
    if (plan_ != nullptr) info.isa = plan_->target();
    info.SetTraffic(static_cast<double>(set_bytes() - rows_bytes()),
                    static_cast<double>(rows_bytes()));
    info.flops = 2.0 * static_cast<double>(tokens_ * spec_.top_k) *
                 static_cast<double>(3 * inter_) * static_cast<double>(hidden_);
    info.peak_kind = gate_up_->spec().format == WeightFormat::kI8Channel
                         ? PeakKind::kI8
                         : PeakKindOf(spec_.x);
    return info;
  }

  // The weights of the experts that a set needs, on average, its x and out.
  int64_t set_bytes() const override {
    constexpr int64_t kSets = 16;
    int64_t experts = 0;
    for (int64_t set = 0; set < kSets; ++set) {
      const std::vector<int32_t> ids = Route(set);
      experts += static_cast<int64_t>(
          std::set<int32_t>(ids.begin(), ids.end()).size());
    }
    return experts * (gate_up_->bytes() + down_->bytes()) / kSets +
           2 * rows_bytes();
  }
  int64_t max_sets() const override { return 64; }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_ASSIGN_OR_RETURN(const LinearSource gate_up, gate_up_->Source());
    QUERN_ASSIGN_OR_RETURN(const LinearSource down, down_->Source());
    ExpertWeights weights;
    for (int64_t e = 0; e < experts_; ++e) {
      QUERN_ASSIGN_OR_RETURN(
          const LinearWeights up,
          LinearWeights::Pack(gate_up_->spec(), {gate_up}, executor));
      QUERN_ASSIGN_OR_RETURN(
          const LinearWeights back,
          LinearWeights::Pack(down_->spec(), {down}, executor));
      weights.gate_up.push_back(up);
      weights.down.push_back(back);
    }
    QUERN_ASSIGN_OR_RETURN(ExpertsPlan plan,
                           ExpertsPlan::Create(spec_, weights));
    plan_ = std::make_unique<ExpertsPlan>(std::move(plan));
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        plan_->WorkspaceBytes(tokens_, executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(memory_, AlignedBuffer::Create(bytes));
    QUERN_RETURN_IF_ERROR(x_.Create(sets, rows_bytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, rows_bytes()));
    QUERN_RETURN_IF_ERROR(ids_.Create(sets, tokens_ * spec_.top_k * 4));
    QUERN_RETURN_IF_ERROR(weights_.Create(sets, tokens_ * spec_.top_k * 4));
    WithType(spec_.x,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, x_); });
    FillReals<float>(0, LargestRouteWeight(), weights_);
    for (int64_t set = 0; set < sets; ++set) {
      const std::vector<int32_t> ids = Route(set);
      std::copy(ids.begin(), ids.end(), ids_.at<int32_t>(set));
    }
    return plan_->CheckArgs(ArgsOf(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_->Execute(ArgsOf(set), Workspace(memory_), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    std::vector<ReferenceExpert> experts(1);
    experts[0].gate_up = Values(*gate_up_);
    experts[0].down = Values(*down_);
    experts[0].int8_rows = gate_up_->spec().format == WeightFormat::kI8Channel;
    const int64_t count = std::min(tokens_, kCheckedTokens);
    Verdict all;
    executor.ParallelFor(count, [&](int64_t i, int) {
      const int64_t t = (i + 1) * tokens_ / count - 1;
      const float* w = weights_.at<float>(0) + t * spec_.top_k;
      const ReferenceTerms want = ReferenceToken(
          spec_, experts, Doubles(spec_.x, x_, t * hidden_, hidden_),
          std::vector<int32_t>(static_cast<size_t>(spec_.top_k), 0),
          std::vector<double>(w, w + spec_.top_k));
      const auto got = Doubles(spec_.out, out_, t * hidden_, hidden_);
      Verdict mine;
      for (size_t c = 0; c < got.size(); ++c) {
        mine.Add(t * hidden_ + static_cast<int64_t>(c), got[c], want.value[c],
                 want.error[c]);
      }
      all.Merge(mine);
    });
    return all.Result("moe");
  }

 private:
  absl::Status Parse(const Args& args) {
    QUERN_ASSIGN_OR_RETURN(tokens_, args.Int("tokens", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(experts_, args.Int("experts", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(
        spec_.top_k,
        args.Int("top_k", 1, std::min(experts_, ExpertsSpec::kMaxTopK)));
    QUERN_ASSIGN_OR_RETURN(hidden_, args.Int("hidden", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(inter_, args.Int("inter", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(spec_.x, args.Type("dtype", kFloatDTypes));
    spec_.out = spec_.x;
    QUERN_ASSIGN_OR_RETURN(skew_, args.Flag("skew"));
    std::vector<absl::string_view> names;
    for (const Format& format : kFormats) names.push_back(format.name);
    QUERN_ASSIGN_OR_RETURN(const std::string name,
                           args.Choice("weights", names));
    for (const Format& format : kFormats) {
      if (format.name != name) continue;
      QUERN_ASSIGN_OR_RETURN(gate_up_,
                             format.input(args, {2 * inter_, hidden_, true}));
      QUERN_ASSIGN_OR_RETURN(down_,
                             format.input(args, {hidden_, inter_, false}));
    }
    return absl::OkStatus();
  }

  // Root of the mean square of some weights all over the matrix.
  static double Rms(LinearInput& input) {
    constexpr int64_t kSamples = 64;  // of rows, and of columns of each
    const int64_t rows = std::min(input.spec().n, kSamples);
    const int64_t cols = std::min(input.spec().k, kSamples);
    double squares = 0;
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t k = 0; k < cols; ++k) {
        const double w =
            input.At(n * input.spec().n / rows, k * input.spec().k / cols)
                .value;
        squares += w * w;
      }
    }
    return std::sqrt(squares / static_cast<double>(rows * cols));
  }

  // Makes elements of out of order 1, so that max_err is relative to them, as
  // in mla_layer and mixer. Gate and up have the variance g = hidden / 3 *
  // rms^2, because x is uniform in [-1, 1). silu keeps half of a gate's
  // squares, so a result of an expert has the variance inter * rms^2 * g^2 / 2;
  // and uniform weights up to w have the mean square w^2 / 3.
  double LargestRouteWeight() const {
    const double up = Rms(*gate_up_), down = Rms(*down_);
    const double g = static_cast<double>(hidden_) / 3 * up * up;
    const double y = static_cast<double>(inter_) * down * down * g * g / 2;
    const double sum = static_cast<double>(spec_.top_k) * y / 3;
    return sum > 0 ? 1 / std::sqrt(sum) : 1;
  }

  int64_t rows_bytes() const {
    return tokens_ * hidden_ * static_cast<int64_t>(SizeOf(spec_.x));
  }

  // Distinct experts for each token: any, or where skewed half of them from a
  // tenth of all.
  std::vector<int32_t> Route(int64_t set) const {
    std::vector<int32_t> ids;
    uint64_t state = static_cast<uint64_t>(set) * 0x9e3779b97f4a7c15u + 1;
    const auto below = [&state](int64_t n) {
      state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth
      return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(n));
    };
    const int64_t few = std::max(experts_ / 10, spec_.top_k);
    for (int64_t t = 0; t < tokens_; ++t) {
      std::set<int64_t> chosen;
      while (static_cast<int64_t>(chosen.size()) < spec_.top_k) {
        chosen.insert(below(skew_ && below(2) == 0 ? few : experts_));
      }
      for (const int64_t e : chosen) ids.push_back(static_cast<int32_t>(e));
    }
    return ids;
  }

  static std::vector<double> Values(LinearInput& input) {
    std::vector<double> values;
    for (int64_t n = 0; n < input.spec().n; ++n) {
      for (int64_t k = 0; k < input.spec().k; ++k) {
        values.push_back(input.At(n, k).value);
      }
    }
    return values;
  }

  ExpertsArgs ArgsOf(int64_t set) {
    ExpertsArgs args;
    args.x = Matrix(spec_.x, x_.at(set), tokens_, hidden_);
    args.out = Matrix(spec_.out, out_.at(set), tokens_, hidden_);
    args.ids =
        DenseMatrix<const int32_t>(ids_.at<int32_t>(set), tokens_, spec_.top_k);
    args.weights =
        DenseMatrix<const float>(weights_.at<float>(set), tokens_, spec_.top_k);
    return args;
  }

  ExpertsSpec spec_;
  int64_t tokens_ = 0, experts_ = 0, hidden_ = 0, inter_ = 0;
  bool skew_ = false;
  std::unique_ptr<LinearInput> gate_up_, down_;
  std::unique_ptr<ExpertsPlan> plan_;
  SetBuffer x_, out_, ids_, weights_;
  AlignedBuffer memory_;
};

}  // namespace

OpEntry MoeOp() {
  return {"moe",
          "out[t] = sum over top_k experts of w * down(silu(gate(x)) * up(x))",
          {{"tokens", "1", "rows of x"},
           {"experts", "32", "experts"},
           {"top_k", "4", "experts of a token"},
           {"hidden", "2048", "columns of x and out"},
           {"inter", "1408", "columns of gate and of up"},
           {"dtype", "bf16", "f32, bf16 or f16, of x, out and float weights"},
           {"weights", "float", "float, int8, fp8_block, int4 or q8_0"},
           {"group", "128", "k of a scale of int4, a multiple of 16"},
           {"zeros", "0", "1: int4 with zero points; 0: they are 8"},
           {"block_n", "128", "columns of a scale of fp8_block"},
           {"block_k", "128", "k of a scale of fp8_block, a multiple of 16"},
           {"skew", "0", "1: half of all routes go to a tenth of the experts"}},
          &Moe::Create};
}

}  // namespace quern
