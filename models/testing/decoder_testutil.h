#ifndef QUERN_MODELS_TESTING_DECODER_TESTUTIL_H_
#define QUERN_MODELS_TESTING_DECODER_TESTUTIL_H_

// Small random models of any shape and architecture.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"

namespace quern {

inline GgufFile ParseOrDie(const std::string& bytes) {
  auto file = GgufFile::Parse(absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
  EXPECT_TRUE(file.ok()) << file.status();
  return *std::move(file);
}

struct SmallDecoder {
  std::string architecture = "llama";
  int64_t vocab = 37, context = 64, hidden = 32, layers = 2, ffn = 96;
  int64_t q_heads = 6, kv_heads = 2, head_dim = 32, rope_dim = 20;
  // For qwen3moe and qwen3next, and for llama and granitehybrid if `mixture`.
  // Where all are used, no rounding can change the choice.
  int64_t experts = 3, experts_used = 3, expert_ffn = 64;
  bool mixture = false;
  double expert_reach = 1;  // of the weights of gate and up of experts
  int64_t shared_ffn = 0;   // of a shared expert, if there may be one; 0: none
  // Whether its router is a matrix of one row and of `type`, as some writers
  // have it, and not a vector of F32.
  bool shared_router_is_matrix = false;
  GgufTensorType type = GgufTensorType::kF32;
  std::optional<GgufTensorType> embedding_type;  // defaults to type
  std::optional<GgufTensorType> ffn_type;        // of ffn_*; defaults to type
  std::optional<GgufTensorType> k_type;          // of attn_k; defaults to type
  std::optional<GgufTensorType> v_type;          // of attn_v; defaults to type
  std::optional<GgufTensorType> up_type;    // of ffn_up; defaults to ffn_type
  std::optional<GgufTensorType> down_type;  // of ffn_down; likewise
  bool rope_factors = false;  // whether there is rope_freqs.weight
  bool biases = true;         // of q, k and v, where there may be some
  bool output = true;         // whether there is output.weight; not in gemma2
  // gemma2's caps, small enough to bend scores and logits, which are around 1.
  float attention_cap = 0.7f, logit_cap = 1.5f;
  float local_rope_base = 90;  // the other base is 500
  float rope_divisor = 1;      // 1: there is no scaling
  int64_t window = 9;          // far shorter than the tests' texts
  // With recurrent layers: 'r' for each of these and 'a' for each that attends;
  // empty: in turns, and the last layer attends.
  std::string kinds;
  int64_t conv_width = 3;
  // qwen3next's; 0: every second layer attends, or the only one.
  int64_t attention_interval = 0;
  // 4 heads of 8 channels: granitehybrid's, or qwen3next's heads of values.
  int64_t ssm_inner = 32, ssm_heads = 4, ssm_groups = 2, ssm_state = 12;
  bool rope = true;
  float embedding_scale = 1.4f, residual_scale = 0.6f, attention_scale = 0.3f;
  float logit_divisor = 1.7f;
  float norm_eps = 1e-5f;
  std::string dropped;      // the name of a tensor that the file lacks
  std::string dropped_key;  // the name of a key of an integer, likewise
  // Whether the file leaves out trailing dimensions of 1, as some writers do.
  bool drops_ones = false;
  // deepseek2's: 12 elements of a key do not rotate.
  int64_t value_dim = 16, kv_lora = 32;
  int64_t q_lora = 0;       // 0: one matrix makes queries
  bool split_kv_b = false;  // whether each head has its own matrices
  int64_t leading_dense = 1, shared_experts = 2;
  int64_t gating = DecoderConfig::kSoftmax;
  // Routers by sigmoid have a bias always.
  bool router_bias = false, experts_sum_to_one = false;
  float expert_scale = 1.3f;
  bool yarn = false;
  float yarn_factor = 8, yarn_log_mul = 0.07f;
  int64_t yarn_original = 64;
  // Layers that block_count counts besides `layers`, which predict more tokens.
  // The file has a tensor in each that no other layer has.
  int64_t predicting_layers = 0;

  bool is_latent() const {
    return FindArchitecture(architecture)->always.Has(ModelPart::kLatent);
  }
};

// The architectures whose models have none of `parts`, in the order of
// Architectures().
inline std::vector<std::string> ArchitecturesWithout(const ModelParts& parts) {
  std::vector<std::string> names;
  for (const Architecture* architecture : Architectures()) {
    if (architecture->always.HasAny(parts)) continue;
    names.emplace_back(architecture->name);
  }
  return names;
}

inline std::vector<uint8_t> RecurrentLayersOf(const SmallDecoder& m) {
  std::vector<uint8_t> recurrent;
  for (int64_t layer = 0; layer < m.layers; ++layer) {
    const bool is = m.kinds.empty()
                        ? (m.layers - layer) % 2 == 0
                        : m.kinds[static_cast<size_t>(layer)] == 'r';
    recurrent.push_back(is ? 1 : 0);
  }
  return recurrent;
}

inline DecoderConfig SmallDecoderConfig(const SmallDecoder& m) {
  DecoderConfig c;
  c.vocab = m.vocab;
  c.context = m.context;
  c.hidden = m.hidden;
  c.layers = m.layers;
  c.ffn = m.ffn;
  c.q_heads = m.q_heads;
  c.kv_heads = m.kv_heads;
  c.head_dim = m.head_dim;
  c.value_dim = m.is_latent() ? m.value_dim : m.head_dim;
  c.kv_lora = m.kv_lora;
  c.q_lora = m.q_lora;
  c.leading_dense = m.leading_dense;
  c.shared_experts = m.shared_experts;
  c.gating = m.gating;
  c.experts_sum_to_one = m.experts_sum_to_one;
  c.expert_scale = m.expert_scale;
  c.yarn_factor = m.yarn_factor;
  c.yarn_original = m.yarn_original;
  c.yarn_log_mul = m.yarn_log_mul;
  c.rope_dim = m.rope_dim;
  c.rope_base = 500.0f;
  c.local_rope_base = m.local_rope_base;
  c.rope_divisor = m.rope_divisor;
  c.norm_eps = m.norm_eps;
  c.attention_cap = m.attention_cap;
  c.logit_cap = m.logit_cap;
  c.window = m.window;
  c.experts = m.experts;
  c.experts_used = m.experts_used;
  c.expert_ffn = m.expert_ffn;
  c.shared_ffn = m.shared_ffn;
  c.recurrent = RecurrentLayersOf(m);
  c.attention_interval = m.attention_interval > 0
                             ? m.attention_interval
                             : std::min<int64_t>(2, m.layers);
  c.conv_width = m.conv_width;
  c.ssm_inner = m.ssm_inner;
  c.ssm_heads = m.ssm_heads;
  c.ssm_groups = m.ssm_groups;
  c.ssm_state = m.ssm_state;
  c.rope = m.rope;
  c.embedding_scale = m.embedding_scale;
  c.residual_scale = m.residual_scale;
  c.attention_scale = m.attention_scale;
  c.logit_divisor = m.logit_divisor;
  SetArchitecture(
      *FindArchitecture(m.architecture),
      [&m](ModelPart part) {
        switch (part) {
          case ModelPart::kRopeFactors:
            return m.rope_factors;
          case ModelPart::kQkvBias:
            return m.biases;
          case ModelPart::kLinearRope:
            return m.rope_divisor != 1;
          case ModelPart::kLocalLayers:
            return m.window > 0;
          case ModelPart::kExperts:
            return m.mixture || m.is_latent();
          case ModelPart::kSharedExpert:
            return m.is_latent() ? m.shared_experts > 0 : m.shared_ffn > 0;
          case ModelPart::kQueryLora:
            return m.q_lora > 0;
          case ModelPart::kSplitKvB:
            return m.split_kv_b;
          case ModelPart::kYarn:
            return m.yarn;
          case ModelPart::kRouterBias:
            return m.router_bias || m.gating == DecoderConfig::kSigmoid;
          default:
            return m.output;
        }
      },
      c);
  return c;
}

// Writes the metadata, and then tensors of random weights.
inline GgufWriter SmallDecoderKeys(const SmallDecoder& m) {
  GgufWriter w;
  w.Key("general.architecture", m.architecture.c_str())
      .Key("general.name", "small");
  const std::string scaling = m.architecture + "." + kRopeScalingKey;
  if (SmallDecoderConfig(m).Has(ModelPart::kYarn)) w.Key(scaling, kYarnScaling);
  if (SmallDecoderConfig(m).Has(ModelPart::kLinearRope)) {
    w.Key(scaling, kLinearScaling);
  }
  WriteModelKeys(
      SmallDecoderConfig(m),
      [&](const std::string& name, int64_t value) {
        if (name == m.dropped_key) return;
        if (name == m.architecture + ".block_count") {
          value += m.predicting_layers;
        }
        w.Key(name, static_cast<uint32_t>(value));
      },
      [&w](const std::string& name, float value) { w.Key(name, value); },
      [&w](const std::string& name, bool value) { w.Key(name, value); },
      [&w](const std::string& name, const std::vector<int32_t>& values) {
        w.Key(name, values);
      });
  if (m.predicting_layers > 0) {
    w.Key(m.architecture + ".nextn_predict_layers",
          static_cast<uint32_t>(m.predicting_layers));
  }
  return w;
}

// Bytes of a tensor of uniform random weights.
inline std::string RandomTensor(Rng& rng, int64_t elements, GgufTensorType type,
                                double reach) {
  if (type != GgufTensorType::kQ8_0) {
    const BlockFormatInfo* format =
        FindBlockFormat(static_cast<uint32_t>(type));
    if (format != nullptr) {
      return BytesOf(
          RandomBlocks(rng, format->format, elements / format->values, reach));
    }
  }
  std::string data;
  const int64_t block = GgufBlockOf(type).elements;
  for (int64_t i = 0; i < elements; ++i) {
    const auto value = static_cast<float>(rng.Uniform(-reach, reach));
    if (type == GgufTensorType::kF32) data += Raw(value);
    if (type == GgufTensorType::kF16) data += Raw(FromDouble<Float16>(value));
    if (type == GgufTensorType::kBF16) data += Raw(FromDouble<BFloat16>(value));
    if (type == GgufTensorType::kQ8_0) {
      if (i % block == 0) {
        data += Raw(FromDouble<Float16>(reach / 127));
      }
      data += Raw(static_cast<int8_t>(rng.Integer(-127, 127)));
    }
  }
  return data;
}

inline void AddSmallDecoderTensors(Rng& rng, const SmallDecoder& m,
                                   GgufWriter& w) {
  const DecoderConfig c = SmallDecoderConfig(m);
  const GgufTensorType ffn = m.ffn_type.value_or(m.type);
  const auto type_of = [&m, ffn](TensorId id) {
    switch (id) {
      case TensorId::kEmbedding:
        return m.embedding_type.value_or(m.type);
      case TensorId::kAttnK:
        return m.k_type.value_or(m.type);
      case TensorId::kAttnV:
        return m.v_type.value_or(m.type);
      case TensorId::kFfnUp:
      case TensorId::kExpertUp:
      case TensorId::kSharedUp:
        return m.up_type.value_or(ffn);
      case TensorId::kFfnDown:
      case TensorId::kExpertDown:
      case TensorId::kSharedDown:
        return m.down_type.value_or(ffn);
      case TensorId::kFfnGate:
      case TensorId::kFfnGateUp:
      case TensorId::kExpertGate:
      case TensorId::kSharedGate:
        return ffn;
      case TensorId::kSharedRouter:
        return m.shared_router_is_matrix ? m.type : GgufTensorType::kF32;
      case TensorId::kRouter:
      case TensorId::kShortConv:
      case TensorId::kSsmConv:
        return GgufTensorType::kF32;
      default:
        return m.type;
    }
  };
  const auto reach_of = [&m](TensorId id) {
    const bool expert =
        id == TensorId::kExpertGate || id == TensorId::kExpertUp;
    return expert ? 1.7 * m.expert_reach : 1.7;
  };
  const auto add = [&](const TensorEntry& entry, int64_t layer) {
    const int64_t cols = ExtentOf(entry.cols, c);
    std::vector<uint64_t> dims;
    for (const int64_t dim : TensorDims(entry, c)) {
      dims.push_back(static_cast<uint64_t>(dim));
    }
    if (entry.id == TensorId::kSharedRouter && m.shared_router_is_matrix) {
      dims.push_back(1);
    }
    while (m.drops_ones && dims.size() > 1 && dims.back() == 1) dims.pop_back();
    const std::string name = TensorName(entry.id, layer);
    if (name == m.dropped) return absl::OkStatus();
    if (entry.is_weight() || entry.role == TensorRole::kRouter ||
        entry.role == TensorRole::kConvolution) {
      const GgufTensorType type = type_of(entry.id);
      w.Tensor(
          name, dims, type,
          RandomTensor(
              rng, cols * ExtentOf(entry.rows, c) * ExtentOf(entry.matrices, c),
              type, reach_of(entry.id) / std::sqrt(static_cast<double>(cols))));
      return absl::OkStatus();
    }
    // Factors are far apart, so that a missing or a neighbour's factor shows.
    double min = 0.5, max = 1.5;
    if (entry.role == TensorRole::kBias) min = -1, max = 1;
    if (entry.role == TensorRole::kRopeFactors) max = 8;
    if (entry.role == TensorRole::kDecay) min = -1.5, max = -0.1;
    w.Tensor(
        name, dims, GgufTensorType::kF32,
        BytesOf(UniformReals<float>(
            rng, cols * ExtentOf(entry.rows, c) * ExtentOf(entry.matrices, c),
            min, max)));
    return absl::OkStatus();
  };
  EXPECT_TRUE(ForEachTensor(c, add).ok());
  for (int64_t i = 0; i < m.predicting_layers; ++i) {
    w.Tensor(absl::StrCat("blk.", m.layers + i, ".nextn.eh_proj.weight"),
             {2, 3}, GgufTensorType::kF32, BytesOf(std::vector<float>(6, 7)));
  }
}

inline std::string SmallDecoderFile(Rng& rng, const SmallDecoder& m) {
  GgufWriter w = SmallDecoderKeys(m);
  AddSmallDecoderTensors(rng, m, w);
  return w.Finish();
}

}  // namespace quern

#endif  // QUERN_MODELS_TESTING_DECODER_TESTUTIL_H_
