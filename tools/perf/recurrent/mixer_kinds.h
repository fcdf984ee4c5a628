#ifndef QUERN_TOOLS_PERF_RECURRENT_MIXER_KINDS_H_
#define QUERN_TOOLS_PERF_RECURRENT_MIXER_KINDS_H_

// The layers that `perf mixer` runs: for each, its shape in a model, its plan,
// and its oracle.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mixer/gated_delta_net.h"
#include "quern/ops/mixer/mamba_mixer.h"
#include "quern/ops/mixer/mamba_mixer2.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/reference_mixers_testutil.h"
#include "quern/ops/mixer/short_conv.h"
#include "quern/ops/recurrent/delta_rule.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/tools/perf/recurrent/recurrent_util.h"

namespace quern {

// gated_delta_net: heads are value heads, groups key heads, head_dim is dv and
// d_state dk. Layers of one head have head_dim channels.
struct MixerShape {
  int64_t hidden, heads, groups, head_dim, d_state, dt_rank, width;
  DType dtype = DType::kF32, state_dtype = DType::kF32;

  int64_t channels() const { return heads * head_dim; }
};
struct MixerProduct {
  int64_t n, k;
};
// What a kind has beside x and out.
struct MixerParts {
  std::vector<MixerProduct> products;  // in_proj first, out_proj last
  int64_t conv_channels = 0;
  std::array<int64_t, 3> state = {0, 0, 0};  // of a slot
  int64_t numbers = 0;                       // f32
  int64_t norm = 0;                          // elements of dtype
  int64_t state_elements() const { return state[0] * state[1] * state[2]; }
};
// What a call is given beside the common arguments.
struct MixerData {
  AnyTensorView state;
  float* numbers;
  void* norm;
};
// The same in double.
struct MixerNumbers {
  std::vector<Reals> products;
  ReferenceMixer common;
  Reals numbers, norm;
};

inline Reals Slice(const Reals& v, int64_t first, int64_t count) {
  return Reals(v.begin() + first, v.begin() + first + count);
}
// Operations of a state update on one sequence, as in state_update.cc.
inline double StateUpdateFlops(const MixerShape& s, int64_t len,
                               int64_t chunk) {
  const double state = static_cast<double>(s.channels() * s.d_state);
  if (chunk == 1) return 5.0 * static_cast<double>(len) * state;
  return 2 * (2 * static_cast<double>(len) * state +
              PairsOfChunks(len, chunk) *
                  static_cast<double>(s.channels() + s.groups * s.d_state));
}

struct ShortConvKind {
  using Plan = ShortConvPlan;
  static constexpr char kName[] = "short_conv";
  static constexpr bool kOneHead = true;
  // The layer of LFM2 1.2B.
  static MixerShape Model() { return {2048, 1, 1, 2048, 1, 1, 3}; }
  static ShortConvSpec Spec(const MixerShape& s) {
    ShortConvSpec spec;
    spec.hidden = s.hidden;
    spec.channels = s.channels();
    spec.width = s.width;
    spec.dtype = spec.weight_dtype = s.dtype;
    return spec;
  }
  static MixerParts Parts(const MixerShape& s) {
    MixerParts parts;
    parts.products = {{3 * s.channels(), s.hidden}, {s.hidden, s.channels()}};
    parts.conv_channels = s.channels();
    return parts;
  }
  static absl::StatusOr<Plan> Make(const MixerShape& s,
                                   const std::vector<LinearWeights>& w,
                                   Executor& executor) {
    return Plan::Create(Spec(s), w[0], w[1], executor);
  }
  static MixerArgs Args(const MixerShape&, const MixerArgs& layer,
                        const MixerData&) {
    return layer;
  }
  static int64_t Chunk(int64_t) { return 1; }
  static double Flops(const MixerShape&, int64_t, int64_t) { return 0; }
  static BoundedRows Reference(const MixerShape& s, const MixerNumbers& m,
                               const BoundedRows& x, int64_t,
                               BoundedWindow& window, BoundedRow&) {
    return ReferenceShortConv(Spec(s), m.common, x, window);
  }
};

struct MambaKind {
  using Plan = MambaMixerPlan;
  static constexpr char kName[] = "mamba";
  static constexpr bool kOneHead = true;
  // The layer of Mamba 2.8B.
  static MixerShape Model() { return {2560, 1, 1, 5120, 16, 160, 4}; }
  static MambaMixerSpec Spec(const MixerShape& s) {
    MambaMixerSpec spec;
    spec.hidden = s.hidden;
    spec.heads = s.heads;
    spec.head_dim = s.head_dim;
    spec.d_state = s.d_state;
    spec.dt_rank = s.dt_rank;
    spec.width = s.width;
    spec.dtype = spec.weight_dtype = s.dtype;
    spec.state_dtype = s.state_dtype;
    return spec;
  }
  static MixerParts Parts(const MixerShape& s) {
    MixerParts parts;
    parts.products = {{2 * s.channels(), s.hidden},
                      {s.dt_rank + 2 * s.d_state, s.channels()},
                      {s.channels(), s.dt_rank},
                      {s.hidden, s.channels()}};
    parts.conv_channels = s.channels();
    parts.state = {s.heads, s.head_dim, s.d_state};
    parts.numbers = s.channels() * (s.d_state + 2);
    return parts;
  }
  static absl::StatusOr<Plan> Make(const MixerShape& s,
                                   const std::vector<LinearWeights>& w,
                                   Executor& executor) {
    return Plan::Create(Spec(s), {w[0], w[1], w[2], w[3]}, executor);
  }
  static MambaMixerArgs Args(const MixerShape& s, const MixerArgs& layer,
                             const MixerData& data) {
    MambaMixerArgs args;
    args.layer = layer;
    args.ssm_state = data.state;
    float* const d = data.numbers + s.channels() * s.d_state;
    args.a = DenseView(DType::kF32, data.numbers,
                       std::array<int64_t, 3>{s.heads, s.head_dim, s.d_state});
    const std::array<int64_t, 2> rows = {s.heads, s.head_dim};
    args.d = DenseView(DType::kF32, d, rows);
    args.dt_bias = DenseView(DType::kF32, d + s.channels(), rows);
    return args;
  }
  static int64_t Chunk(int64_t) { return 1; }
  static double Flops(const MixerShape& s, int64_t len, int64_t chunk) {
    return StateUpdateFlops(s, len, chunk);
  }
  static BoundedRows Reference(const MixerShape& s, const MixerNumbers& m,
                               const BoundedRows& x, int64_t chunk,
                               BoundedWindow& window, BoundedRow& state) {
    const int64_t d = s.channels() * s.d_state;
    return ReferenceMamba(
        Spec(s), m.common, {m.products[1], m.products[2], {}, {}, {}},
        {Slice(m.numbers, 0, d), Slice(m.numbers, d, s.channels()),
         Slice(m.numbers, d + s.channels(), s.channels())},
        x, chunk, window, state);
  }
};

struct Mamba2Kind {
  using Plan = MambaMixer2Plan;
  static constexpr char kName[] = "mamba2";
  static constexpr bool kOneHead = false;
  // The layer of Mamba-2 2.7B.
  static MixerShape Model() { return {2560, 80, 1, 64, 128, 1, 4}; }
  static MambaMixer2Spec Spec(const MixerShape& s) {
    MambaMixer2Spec spec;
    spec.hidden = s.hidden;
    spec.heads = s.heads;
    spec.groups = s.groups;
    spec.head_dim = s.head_dim;
    spec.d_state = s.d_state;
    spec.width = s.width;
    spec.dtype = spec.weight_dtype = s.dtype;
    spec.state_dtype = s.state_dtype;
    return spec;
  }
  static MixerParts Parts(const MixerShape& s) {
    const MambaMixer2Spec spec = Spec(s);
    MixerParts parts;
    parts.products = {{spec.projected(), s.hidden}, {s.hidden, s.channels()}};
    parts.conv_channels = spec.conv_channels();
    parts.state = {s.heads, s.head_dim, s.d_state};
    parts.numbers = 3 * s.heads;
    parts.norm = s.channels();
    return parts;
  }
  static absl::StatusOr<Plan> Make(const MixerShape& s,
                                   const std::vector<LinearWeights>& w,
                                   Executor& executor) {
    return Plan::Create(Spec(s), w[0], w[1], executor);
  }
  static MambaMixer2Args Args(const MixerShape& s, const MixerArgs& layer,
                              const MixerData& data) {
    MambaMixer2Args args;
    args.layer = layer;
    args.ssm_state = data.state;
    const std::array<int64_t, 1> heads = {s.heads};
    args.a = DenseView(DType::kF32, data.numbers, heads);
    args.d = DenseView(DType::kF32, data.numbers + s.heads, heads);
    args.dt_bias = DenseView(DType::kF32, data.numbers + 2 * s.heads, heads);
    args.norm =
        DenseView(s.dtype, data.norm, std::array<int64_t, 1>{s.channels()});
    return args;
  }
  static int64_t Chunk(int64_t len) {
    return len < StateUpdatePlan::kChunkedFrom ? 1 : StateUpdatePlan::kChunk;
  }
  static double Flops(const MixerShape& s, int64_t len, int64_t chunk) {
    return StateUpdateFlops(s, len, chunk);
  }
  static BoundedRows Reference(const MixerShape& s, const MixerNumbers& m,
                               const BoundedRows& x, int64_t chunk,
                               BoundedWindow& window, BoundedRow& state) {
    return ReferenceMamba2(
        Spec(s), m.common,
        {Slice(m.numbers, 0, s.heads), Slice(m.numbers, s.heads, s.heads),
         Slice(m.numbers, 2 * s.heads, s.heads)},
        m.norm, x, chunk, window, state);
  }
};

struct DeltaNetKind {
  using Plan = GatedDeltaNetPlan;
  static constexpr char kName[] = "gated_delta_net";
  static constexpr bool kOneHead = false;
  // The layer of Qwen3-Next 80B.
  static MixerShape Model() { return {2048, 32, 16, 128, 128, 1, 4}; }
  static GatedDeltaNetSpec Spec(const MixerShape& s) {
    GatedDeltaNetSpec spec;
    spec.hidden = s.hidden;
    spec.key_heads = s.groups;
    spec.value_heads = s.heads;
    spec.dk = s.d_state;
    spec.dv = s.head_dim;
    spec.width = s.width;
    spec.dtype = spec.weight_dtype = s.dtype;
    spec.state_dtype = s.state_dtype;
    return spec;
  }
  static MixerParts Parts(const MixerShape& s) {
    const GatedDeltaNetSpec spec = Spec(s);
    MixerParts parts;
    parts.products = {{spec.projected(), s.hidden}, {s.hidden, spec.values()}};
    parts.conv_channels = spec.conv_channels();
    parts.state = {s.heads, s.d_state, s.head_dim};
    parts.numbers = 2 * s.heads;
    parts.norm = s.head_dim;
    return parts;
  }
  static absl::StatusOr<Plan> Make(const MixerShape& s,
                                   const std::vector<LinearWeights>& w,
                                   Executor& executor) {
    return Plan::Create(Spec(s), w[0], w[1], executor);
  }
  static GatedDeltaNetArgs Args(const MixerShape& s, const MixerArgs& layer,
                                const MixerData& data) {
    GatedDeltaNetArgs args;
    args.layer = layer;
    args.state = data.state;
    const std::array<int64_t, 1> heads = {s.heads};
    args.a_log = DenseView(DType::kF32, data.numbers, heads);
    args.dt_bias = DenseView(DType::kF32, data.numbers + s.heads, heads);
    args.norm =
        DenseView(s.dtype, data.norm, std::array<int64_t, 1>{s.head_dim});
    return args;
  }
  static int64_t Chunk(int64_t len) {
    return len < DeltaRulePlan::kChunkedFrom ? 1 : DeltaRulePlan::kChunk;
  }
  // As in delta_rule.cc.
  static double Flops(const MixerShape& s, int64_t len, int64_t chunk) {
    const double tokens = static_cast<double>(len);
    const double state = static_cast<double>(s.d_state * s.head_dim);
    const double heads = static_cast<double>(s.heads);
    if (chunk == 1) return 7.0 * tokens * heads * state;
    const double pairs = 2 * PairsOfChunks(len, chunk) - tokens;
    return 2 * heads *
           (3 * tokens * state +
            pairs * static_cast<double>(s.d_state + s.head_dim));
  }
  static BoundedRows Reference(const MixerShape& s, const MixerNumbers& m,
                               const BoundedRows& x, int64_t chunk,
                               BoundedWindow& window, BoundedRow& state) {
    return ReferenceDeltaNet(Spec(s), m.common,
                             {Slice(m.numbers, 0, s.heads),
                              Slice(m.numbers, s.heads, s.heads), m.norm},
                             x, chunk, window, state);
  }
};

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_RECURRENT_MIXER_KINDS_H_
