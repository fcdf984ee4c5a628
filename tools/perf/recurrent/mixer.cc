#include "quern/tools/perf/recurrent/mixer.h"

#include <algorithm>
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
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/reference_mixers_testutil.h"
#include "quern/testing/errors/rounding_error.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/recurrent/mixer_kinds.h"
#include "quern/tools/perf/recurrent/recurrent_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

// Multiplications of all tokens that Check compares: an oracle in double is
// slow.
constexpr int64_t kCheckedWork = int64_t{1} << 28;

// Each working set has weights of its own, of equal values.
template <class Kind>
class Mixer final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    MixerShape s = Kind::Model();
    QUERN_ASSIGN_OR_RETURN(const int64_t batch, args.Int("batch", 1, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(const int64_t len, args.Int("len", 1, 1 << 20));
    const std::pair<const char*, int64_t*> fields[] = {
        {"hidden", &s.hidden},   {"heads", &s.heads},
        {"groups", &s.groups},   {"head_dim", &s.head_dim},
        {"d_state", &s.d_state}, {"dt_rank", &s.dt_rank}};
    for (const auto& [key, field] : fields) {
      QUERN_ASSIGN_OR_RETURN(const int64_t given, args.Int(key, 0, 1 << 16));
      if (given != 0) *field = given;
    }
    if (Kind::kOneHead && s.heads != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "mixer: heads=", s.heads, "; need 1 of kind ", Kind::kName));
    }
    if (s.d_state > 1024) {
      return absl::InvalidArgumentError(
          absl::StrCat("mixer: d_state=", s.d_state, "; need 1024 or less"));
    }
    if (s.heads % s.groups != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "mixer: groups=", s.groups, "; need a divisor of heads=", s.heads));
    }
    QUERN_ASSIGN_OR_RETURN(s.dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(s.state_dtype, args.Type("state", kFloatDTypes));
    return std::unique_ptr<Op>(
        absl::WrapUnique(new Mixer(s, EqualSequences(batch, len))));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat(Kind::kName, " batch=", sequences_.batch(),
                              " len=", sequences_.len(), " hidden=", s_.hidden,
                              " heads=", s_.heads, " groups=", s_.groups,
                              " head_dim=", s_.head_dim,
                              " d_state=", s_.d_state, " dt_rank=", s_.dt_rank);
    info.dtype =
        absl::StrCat(DTypeName(s_.dtype), " state ", DTypeName(s_.state_dtype));
    if (!plans_.empty()) info.isa = plans_.front().target();
    const auto of = [](int64_t n) { return static_cast<double>(n); };
    info.SetTraffic(of(weight_bytes() + conv_bytes() + number_bytes() +
                       norm_bytes() + x_bytes()),
                    of(x_bytes()), of(state_bytes() + window_bytes()));
    // Products, the convolution, the recurrence. Against the peak of the
    // products: the others, which are f32, are a few percent.
    info.flops =
        2 * of(sequences_.tokens()) *
            (of(Weights()) + of(parts_.conv_channels * s_.width)) +
        of(sequences_.batch()) * Kind::Flops(s_, sequences_.len(), Chunk());
    info.peak_kind = PeakKindOf(s_.dtype);
    return info;
  }

  int64_t set_bytes() const override {
    return weight_bytes() + conv_bytes() + number_bytes() + norm_bytes() +
           2 * x_bytes() + state_bytes() + window_bytes();
  }
  int64_t max_sets() const override { return 64; }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(Fill(sets));
    for (int64_t set = 0; set < sets; ++set) {
      std::vector<LinearWeights> weights;
      for (size_t i = 0; i < parts_.products.size(); ++i) {
        LinearWeightsSpec spec;
        spec.n = parts_.products[i].n;
        spec.k = parts_.products[i].k;
        spec.format = FormatOfFloats(s_.dtype);
        LinearSource source;
        source.codes = Matrix(s_.dtype, codes_[i].at(0), spec.n, spec.k);
        QUERN_ASSIGN_OR_RETURN(LinearWeights packed,
                               LinearWeights::Pack(spec, {source}, executor));
        weights.push_back(std::move(packed));
      }
      QUERN_ASSIGN_OR_RETURN(auto plan, Kind::Make(s_, weights, executor));
      plans_.push_back(std::move(plan));
    }
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           plans_.front().WorkspaceBytes(
                               sequences_.tokens(), executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(memory_, AlignedBuffer::Create(bytes));
    QUERN_RETURN_IF_ERROR(plans_.front().CheckArgs(ArgsOf(0)));
    // oneDNN generates code.
    for (int64_t set = 0; set < sets; ++set) Run(set, executor);
    return absl::OkStatus();
  }

  void Run(int64_t set, Executor& executor) override {
    plans_[static_cast<size_t>(set)].Execute(ArgsOf(set), Workspace(memory_),
                                             executor);
  }

  // The first tokens of some sequences, and where these are all their tokens
  // also what is left of their windows and states.
  absl::StatusOr<double> Check(Executor& executor) override {
    const int64_t work = Weights() + 16 * parts_.state_elements();
    const int64_t len =
        std::clamp<int64_t>(kCheckedWork / work, 1, sequences_.len());
    const int64_t count =
        std::clamp<int64_t>(kCheckedWork / (work * len), 1, sequences_.batch());
    std::vector<Reals> states, windows;
    for (int64_t s = 0; s < count; ++s) {
      states.push_back(StateOf(s));
      windows.push_back(WindowOf(s));
    }
    Run(0, executor);
    const MixerNumbers numbers = Numbers();
    Verdict all;
    std::vector<std::string> complaints(static_cast<size_t>(count));
    executor.ParallelFor(count, [&](int64_t s, int) {
      Verdict mine;
      const auto at = static_cast<size_t>(s);
      complaints[at] =
          CheckSequence(numbers, s, len, states[at], windows[at], mine);
      all.Merge(mine);
    });
    for (const std::string& complaint : complaints) {
      if (complaint.empty()) continue;
      return absl::InternalError(absl::StrCat("mixer: ", complaint));
    }
    return all.Result("mixer");
  }

 private:
  Mixer(const MixerShape& shape, EqualSequences sequences)
      : s_(shape),
        parts_(Kind::Parts(shape)),
        sequences_(std::move(sequences)),
        codes_(parts_.products.size()) {}

  int64_t Chunk() const { return Kind::Chunk(sequences_.len()); }
  int64_t Weights() const {
    int64_t count = 0;
    for (const MixerProduct& p : parts_.products) count += p.n * p.k;
    return count;
  }
  int64_t Bytes(int64_t count) const {
    return count * static_cast<int64_t>(SizeOf(s_.dtype));
  }
  int64_t weight_bytes() const { return Bytes(Weights()); }
  int64_t conv_bytes() const { return Bytes(parts_.conv_channels * s_.width); }
  int64_t number_bytes() const { return 4 * parts_.numbers; }
  int64_t norm_bytes() const { return Bytes(parts_.norm); }
  int64_t x_bytes() const { return Bytes(sequences_.tokens() * s_.hidden); }
  int64_t window_size() const { return (s_.width - 1) * parts_.conv_channels; }
  int64_t window_bytes() const {
    return Bytes(sequences_.batch() * window_size());
  }
  int64_t state_bytes() const {
    return sequences_.batch() * parts_.state_elements() *
           static_cast<int64_t>(SizeOf(s_.state_dtype));
  }

  absl::Status Fill(int64_t sets) {
    const std::pair<SetBuffer*, int64_t> buffers[] = {
        {&x_, x_bytes()},          {&out_, x_bytes()},
        {&conv_, conv_bytes()},    {&windows_, window_bytes()},
        {&states_, state_bytes()}, {&numbers_, number_bytes()},
        {&norm_, norm_bytes()}};
    for (const auto& [buffer, bytes] : buffers) {
      QUERN_RETURN_IF_ERROR(buffer->Create(sets, bytes));
    }
    FillReals<float>(-1, 0, numbers_);
    WithType(s_.state_dtype,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, states_); });
    WithType(s_.dtype, [this](auto type) {
      FillReals<decltype(type)>(-1, 1, x_);
      FillReals<decltype(type)>(-1, 1, windows_);
      FillReals<decltype(type)>(-0.5, 0.5, conv_);
      FillReals<decltype(type)>(0.5, 1.5, norm_);
    });
    for (size_t i = 0; i < codes_.size(); ++i) {
      const MixerProduct& p = parts_.products[i];
      QUERN_RETURN_IF_ERROR(codes_[i].Create(1, Bytes(p.n * p.k)));
      // Results are as large as inputs.
      const double most = std::sqrt(3 / static_cast<double>(p.k));
      WithType(s_.dtype, [&](auto type) {
        FillReals<decltype(type)>(-most, most, codes_[i]);
      });
    }
    return absl::OkStatus();
  }

  auto ArgsOf(int64_t set) {
    MixerArgs layer;
    layer.x = Matrix(s_.dtype, x_.at(set), sequences_.tokens(), s_.hidden);
    layer.out = Matrix(s_.dtype, out_.at(set), sequences_.tokens(), s_.hidden);
    layer.conv_weight =
        Matrix(s_.dtype, conv_.at(set), parts_.conv_channels, s_.width);
    layer.conv_state =
        DenseView(s_.dtype, windows_.at(set),
                  std::array<int64_t, 3>{sequences_.batch(), s_.width - 1,
                                         parts_.conv_channels});
    layer.batch = sequences_.View();
    MixerData data;
    data.state =
        DenseView(s_.state_dtype, states_.at(set),
                  std::array<int64_t, 4>{sequences_.batch(), parts_.state[0],
                                         parts_.state[1], parts_.state[2]});
    data.numbers = numbers_.at<float>(set);
    data.norm = norm_.at(set);
    return Kind::Args(s_, layer, data);
  }

  Reals StateOf(int64_t sequence) {
    const int64_t size = parts_.state_elements();
    return Doubles(s_.state_dtype, states_, sequences_.slot(sequence) * size,
                   size);
  }
  Reals WindowOf(int64_t sequence) {
    return Doubles(s_.dtype, windows_,
                   sequences_.slot(sequence) * window_size(), window_size());
  }
  MixerNumbers Numbers() {
    MixerNumbers m;
    for (size_t i = 0; i < codes_.size(); ++i) {
      const MixerProduct& p = parts_.products[i];
      m.products.push_back(Doubles(s_.dtype, codes_[i], 0, p.n * p.k));
    }
    m.common.in_proj = m.products.front();
    m.common.out_proj = m.products.back();
    m.common.conv_weight =
        Doubles(s_.dtype, conv_, 0, parts_.conv_channels * s_.width);
    m.numbers = Doubles(DType::kF32, numbers_, 0, parts_.numbers);
    m.norm = Doubles(s_.dtype, norm_, 0, parts_.norm);
    return m;
  }

  static BoundedRow Exact(const Reals& values) {
    BoundedRow row;
    for (const double v : values) row.push_back({v, 0});
    return row;
  }
  // Judges rows of so many by bounds and, but for f32, by samples of rounding,
  // because bounds are wide there. Returns a complaint of the latter.
  std::string Judge(int64_t first, const Reals& got, const BoundedRow& want,
                    int64_t row_size, Verdict& verdict) const {
    RoundingRows rows;
    RoundingError row;
    for (size_t i = 0; i < got.size(); ++i) {
      verdict.Add(first + static_cast<int64_t>(i), got[i], want[i].value,
                  want[i].error);
      row.Add(got[i], want[i].value, want[i].rounded - want[i].value);
      if (row.count() < row_size) continue;
      rows.Add(row);
      row = {};
    }
    return s_.dtype == DType::kF32 ? "" : rows.Complaint();
  }

  // Returns the first complaint.
  std::string CheckSequence(const MixerNumbers& numbers, int64_t sequence,
                            int64_t len, const Reals& state_before,
                            const Reals& window_before, Verdict& verdict) {
    const int64_t first = sequence * sequences_.len();
    BoundedRows x;
    for (int64_t t = first; t < first + len; ++t) {
      x.push_back(Exact(Doubles(s_.dtype, x_, t * s_.hidden, s_.hidden)));
    }
    const int64_t n = parts_.conv_channels;
    BoundedWindow window;
    for (int64_t i = 0; i + 1 < s_.width; ++i) {
      window.push_back(Exact(Slice(window_before, i * n, n)));
    }
    BoundedRow state = Exact(state_before);
    const BoundedRows out =
        Kind::Reference(s_, numbers, x, Chunk(), window, state);
    std::string complaint;
    const auto judge = [&](const char* what, int64_t at, const Reals& got,
                           const BoundedRow& want, int64_t row_size) {
      const std::string mine = Judge(at, got, want, row_size, verdict);
      if (complaint.empty() && !mine.empty()) {
        complaint = absl::StrCat(what, ": ", mine);
      }
    };
    for (int64_t t = 0; t < len; ++t) {
      const int64_t at = (first + t) * s_.hidden;
      judge("out", at, Doubles(s_.dtype, out_, at, s_.hidden),
            out[static_cast<size_t>(t)], s_.hidden);
    }
    if (len < sequences_.len()) return complaint;
    if (!state.empty()) {
      judge("states", 0, StateOf(sequence), state, parts_.state.back());
    }
    BoundedRow kept;
    for (const BoundedRow& row : window) {
      kept.insert(kept.end(), row.begin(), row.end());
    }
    judge("windows", 0, WindowOf(sequence), kept, n);
    return complaint;
  }

  MixerShape s_;
  MixerParts parts_;
  EqualSequences sequences_;
  std::vector<typename Kind::Plan> plans_;
  AlignedBuffer memory_;
  std::vector<SetBuffer> codes_;
  SetBuffer x_, out_, conv_, windows_, states_, numbers_, norm_;
};

absl::StatusOr<std::unique_ptr<Op>> CreateMixer(const Args& args) {
  QUERN_ASSIGN_OR_RETURN(
      const std::string kind,
      args.Choice("kind", {Mamba2Kind::kName, MambaKind::kName,
                           ShortConvKind::kName, DeltaNetKind::kName}));
  if (kind == MambaKind::kName) return Mixer<MambaKind>::Create(args);
  if (kind == ShortConvKind::kName) return Mixer<ShortConvKind>::Create(args);
  if (kind == DeltaNetKind::kName) return Mixer<DeltaNetKind>::Create(args);
  return Mixer<Mamba2Kind>::Create(args);
}

}  // namespace

OpEntry MixerOp() {
  return {
      "mixer",
      "a whole layer over pools of windows and states: products, convolution, "
      "recurrence, norm",
      {{"kind", "mamba2", "mamba2, mamba, short_conv or gated_delta_net"},
       {"batch", "1", "sequences"},
       {"len", "1", "new tokens of each; 1 is decode"},
       {"hidden", "0", "columns of x; 0, here and below: those of a model"},
       {"heads", "0", "heads; 1 of mamba and short_conv"},
       {"groups", "0", "groups of heads that share b and c, or key heads"},
       {"head_dim", "0", "channels of a head; dv of gated_delta_net"},
       {"d_state", "0", "columns of a state; dk of gated_delta_net"},
       {"dt_rank", "0", "columns of mamba's low-rank steps"},
       {"dtype", "bf16", "of x, weights, windows and out: f32, bf16 or f16"},
       {"state", "f32", "of the states: f32, bf16 or f16"}},
      &CreateMixer};
}

}  // namespace quern
