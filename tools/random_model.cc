#include "quern/tools/random_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/gguf/gguf.h"
#include "quern/quant/scalar_convert.h"
#include "quern/tools/gguf_writer.h"
#include "quern/tools/random_vocabulary.h"

namespace quern {
namespace {

constexpr char kOp[] = "random_model";

// The sum of four random bytes: range 0 to 1020, mean 510, variance 4 * (256^2
// - 1) / 12.
constexpr int kMean = 510;
constexpr size_t kSums = 2 * kMean + 1;
constexpr double kVariance = 21845;

// The generator of Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", 2014.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t Next() { return Mix(state_ += 0x9e3779b97f4a7c15u); }
  static uint64_t Mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

// The seed of tensor `index` of a file: each has its own random stream.
uint64_t SeedOf(uint64_t seed, size_t index) {
  return SplitMix64::Mix(SplitMix64::Mix(seed) + index);
}

// Makes two sums of four bytes from each 64 random bits.
class SumSource {
 public:
  explicit SumSource(uint64_t seed) : random_(seed) {}
  size_t Next() {
    if (second_ != kNone) return std::exchange(second_, kNone);
    constexpr uint64_t kBytes = 0x00ff00ff00ff00ffu;
    const uint64_t bits = random_.Next();
    const uint64_t pairs = (bits & kBytes) + ((bits >> 8) & kBytes);
    const uint64_t fours = pairs + (pairs >> 16);
    second_ = (fours >> 32) & 0xffff;
    return fours & 0xffff;
  }

 private:
  static constexpr size_t kNone = ~size_t{0};
  SplitMix64 random_;
  size_t second_ = kNone;
};

// Writes a tensor's elements with standard deviation `deviation`.
class Filler {
 public:
  Filler(GgufTensorType type, double deviation, uint64_t seed)
      : type_(type), sums_(seed) {
    const auto scale = static_cast<float>(deviation / std::sqrt(kVariance));
    for (size_t i = 0; i < kSums; ++i) {
      const int centred = static_cast<int>(i) - kMean;
      const float value = scale * static_cast<float>(centred);
      f32_[i] = value;
      bf16_[i] = FromF32<BFloat16>(value);
      f16_[i] = FromF32<Float16>(value);
      q8_[i] = static_cast<int8_t>(std::lround(centred * (127.0 / kMean)));
    }
    q8_scale_ = FromF32<Float16>(scale * static_cast<float>(kMean / 127.0));
  }

  // `elements` must be a multiple of the block size.
  void Fill(int64_t elements, std::vector<uint8_t>& out) {
    switch (type_) {
      case GgufTensorType::kF32:
        return FillFrom(f32_, elements, out);
      case GgufTensorType::kF16:
        return FillFrom(f16_, elements, out);
      case GgufTensorType::kBF16:
        return FillFrom(bf16_, elements, out);
      case GgufTensorType::kQ8_0: {
        const GgufBlock size = GgufBlockOf(type_);
        const int64_t blocks = elements / size.elements;
        out.resize(static_cast<size_t>(blocks * size.bytes));
        uint8_t* to = out.data();
        for (int64_t block = 0; block < blocks; ++block) {
          std::memcpy(to, &q8_scale_, sizeof(q8_scale_));
          to += sizeof(q8_scale_);
          for (int64_t i = 0; i < size.elements; ++i) {
            *to++ = static_cast<uint8_t>(q8_[sums_.Next()]);
          }
        }
        return;
      }
      default:
        QUERN_CHECK(false);
    }
  }

 private:
  template <typename T>
  void FillFrom(const std::array<T, kSums>& values, int64_t elements,
                std::vector<uint8_t>& out) {
    out.resize(static_cast<size_t>(elements) * sizeof(T));
    uint8_t* to = out.data();
    for (int64_t i = 0; i < elements; ++i, to += sizeof(T)) {
      std::memcpy(to, &values[sums_.Next()], sizeof(T));
    }
  }

  GgufTensorType type_;
  SumSource sums_;
  std::array<float, kSums> f32_;
  std::array<BFloat16, kSums> bf16_;
  std::array<Float16, kSums> f16_;
  std::array<int8_t, kSums> q8_;
  Float16 q8_scale_;
};

// Whether the embedding is the output matrix, too.
bool IsTied(const RandomModelShape& s) {
  return !s.recurrence.kinds.empty() || s.architecture == "gemma3" ||
         FindArchitecture(s.architecture)->always.Has(ModelPart::kMultipliers);
}

DecoderConfig ConfigOf(const RandomModelShape& s) {
  DecoderConfig c;
  c.vocab = s.vocab;
  c.context = s.context;
  c.hidden = s.hidden;
  c.layers = s.layers;
  c.ffn = s.ffn;
  c.q_heads = s.q_heads;
  c.kv_heads = s.kv_heads;
  c.head_dim = c.value_dim = s.head_dim;
  c.rope_dim = s.recurrence.rope_dim > 0 ? s.recurrence.rope_dim : s.head_dim;
  c.rope_base = s.rope_base;
  c.norm_eps = s.norm_eps;
  c.window = s.window;
  c.experts = s.experts;
  c.experts_used = s.experts_used;
  c.expert_ffn = s.expert_ffn;
  c.shared_ffn = s.recurrence.shared_ffn;
  const RandomRecurrence& r = s.recurrence;
  for (int64_t layer = 0; layer < s.layers && !r.kinds.empty(); ++layer) {
    const auto at = static_cast<size_t>(layer) % r.kinds.size();
    c.recurrent.push_back(r.kinds[at] == 'r' ? 1 : 0);
  }
  // One layer attends, however few there are.
  c.attention_interval = std::min(r.attention_interval, s.layers);
  c.conv_width = r.conv_width;
  c.ssm_inner = r.ssm_inner;
  c.ssm_heads = r.ssm_heads;
  c.ssm_groups = r.ssm_groups;
  c.ssm_state = r.ssm_state;
  // Used in models whose files say how experts are scored.
  c.leading_dense = std::min(s.latent.leading_dense, s.layers - 1);
  const bool glm = s.architecture == "glm4moe";
  if (!r.kinds.empty() || glm) c.gating = DecoderConfig::kSigmoid;
  if (const RandomLatent& l = s.latent; l.kv_lora > 0) {
    c.kv_lora = l.kv_lora;
    c.q_lora = l.q_lora;
    c.rope_dim = l.rope;
    c.value_dim = l.value_dim;
    c.experts_sum_to_one = false;
  }
  c.shared_experts = s.latent.shared_experts;
  c.yarn_factor = s.latent.yarn_factor;
  c.yarn_original = s.latent.yarn_original;
  c.yarn_log_mul = s.latent.yarn_log_mul;
  // Granite's, but for the divisor of logits, so that these are of order 1.
  c.rope = r.kinds.empty();
  c.embedding_scale = 12;
  c.residual_scale = 0.22f;
  c.attention_scale = 1 / static_cast<float>(s.head_dim);
  c.attention_cap = 50;  // only Gemma-2 has it
  c.logit_cap = 30;
  SetArchitecture(
      *FindArchitecture(s.architecture),
      [&s](ModelPart part) {
        return (part == ModelPart::kOutputMatrix && !IsTied(s)) ||
               (part == ModelPart::kRopeFactors && s.rope_scale > 0) ||
               (part == ModelPart::kSharedExpert &&
                s.latent.shared_experts + s.recurrence.shared_ffn > 0) ||
               part == ModelPart::kQkvBias ||
               (part == ModelPart::kRouterBias &&
                (!s.recurrence.kinds.empty() || s.architecture == "glm4moe")) ||
               (part == ModelPart::kLocalLayers && s.window > 0) ||
               (part == ModelPart::kYarn && s.latent.yarn_factor > 0) ||
               (part == ModelPart::kQueryLora && s.latent.q_lora > 0) ||
               (part == ModelPart::kExperts && s.experts > 0);
      },
      c);
  return c;
}

struct Tensor {
  std::string name;
  std::vector<int64_t> dims;
  GgufTensorType type;
  double deviation;  // 0 means `values`, in f32
  std::vector<float> values;
};

// Divisors by which Llama 3.1 reduces the frequencies base^(-2j / head_dim).
// The divisor is 1 if a turn takes less than a quarter of the original context,
// and `scale` if it takes more than all of it. In between, its reciprocal is
// linear in original / turn.
std::vector<float> RopeFactors(const RandomModelShape& s) {
  constexpr double kOriginal = 8192, kLow = 1, kHigh = 4;
  const double kTwoPi = 2 * std::acos(-1.0);
  const auto scale = static_cast<double>(s.rope_scale);
  std::vector<float> factors;
  for (int64_t j = 0; j < s.head_dim / 2; ++j) {
    const double turn = kTwoPi * std::pow(static_cast<double>(s.rope_base),
                                          2 * static_cast<double>(j) /
                                              static_cast<double>(s.head_dim));
    const double part =
        std::clamp((kOriginal / turn - kLow) / (kHigh - kLow), 0.0, 1.0);
    factors.push_back(static_cast<float>(1 / ((1 - part) / scale + part)));
  }
  return factors;
}

size_t ElementsOf(const std::vector<int64_t>& dims) {
  int64_t elements = 1;
  for (const int64_t extent : dims) elements *= extent;
  return static_cast<size_t>(elements);
}

// Numbers from `min` to `max`, in steps of 1/256 of their difference, which are
// exact in f32.
std::vector<float> UniformValues(size_t count, float min, float max,
                                 uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<float> values;
  for (size_t i = 0; i < count; ++i) {
    const auto step = static_cast<float>(random.Next() >> 56);
    values.push_back(min + (max - min) * step / 256);
  }
  return values;
}

// The values of a tensor that is not a matrix.
std::vector<float> ValuesOf(const TensorEntry& entry, const RandomModelShape& s,
                            size_t count, uint64_t seed) {
  switch (entry.role) {
    case TensorRole::kRopeFactors:
      return RopeFactors(s);
    case TensorRole::kBias:
      return UniformValues(count, -0.25f, 0.25f, seed);
    case TensorRole::kDecay:
      return UniformValues(count, -1.5f, -0.5f, seed);
    default:
      return UniformValues(count, 0.5f, 1.5f, seed);
  }
}

// The standard deviation of a tensor's weights; 0 for norms, biases, factors
// and decays.
double DeviationOf(const TensorEntry& entry, const DecoderConfig& c) {
  const auto cols = static_cast<double>(ExtentOf(entry.cols, c));
  switch (entry.role) {
    case TensorRole::kEmbedding:
      return c.Has(ModelPart::kOutputMatrix) ? 1 : 1 / std::sqrt(cols);
    case TensorRole::kMatrix:
    case TensorRole::kRouter:
    case TensorRole::kConvolution:
      return 1 / std::sqrt(cols);
    case TensorRole::kMatrixIntoStream:
      return 1 / std::sqrt(2 * static_cast<double>(c.layers) * cols);
    case TensorRole::kNorm:
    case TensorRole::kBias:
    case TensorRole::kRopeFactors:
    case TensorRole::kDecay:
      break;
  }
  return 0;
}

std::vector<Tensor> Tensors(const RandomModelShape& s, const DecoderConfig& c,
                            GgufTensorType type, uint64_t seed) {
  std::vector<Tensor> tensors;
  const absl::Status added =
      ForEachTensor(c, [&](const TensorEntry& entry, int64_t layer) {
        Tensor tensor = {TensorName(entry.id, layer),
                         TensorDims(entry, c),
                         type,
                         DeviationOf(entry, c),
                         {}};
        // Routers and convolutions are f32 in every file.
        if (tensor.deviation == 0 || entry.role == TensorRole::kRouter ||
            entry.role == TensorRole::kConvolution) {
          tensor.type = GgufTensorType::kF32;
        }
        if (tensor.deviation == 0) {
          tensor.values = ValuesOf(entry, s, ElementsOf(tensor.dims),
                                   SeedOf(seed, tensors.size()));
        }
        tensors.push_back(std::move(tensor));
        return absl::OkStatus();
      });
  QUERN_CHECK(added.ok());
  return tensors;
}

// The value of general.file_type for a file that is mostly of `type`.
uint32_t FileType(GgufTensorType type) {
  switch (type) {
    case GgufTensorType::kF32:
      return 0;
    case GgufTensorType::kF16:
      return 1;
    case GgufTensorType::kQ8_0:
      return 7;
    case GgufTensorType::kBF16:
      return 32;
    default:
      QUERN_CHECK(false);
  }
  return 0;
}

void AddModelKeys(const RandomModelShape& s, const DecoderConfig& c,
                  GgufTensorType type, GgufFileWriter& w) {
  w.KeyString("general.architecture", c.architecture);
  w.KeyString("general.name", absl::StrCat(s.name, " with random weights"));
  w.KeyU32("general.file_type", FileType(type));
  if (c.Has(ModelPart::kYarn)) {
    w.KeyString(absl::StrCat(c.architecture, ".", kRopeScalingKey),
                kYarnScaling);
  }
  // Files of models that see images tell which pairs of a head turn by which of
  // an image's three positions. A token of text has the same in all, so that
  // models of text do not read it; llama.cpp wants it.
  if (absl::StrContains(c.architecture, "vl")) {
    const auto pairs = static_cast<int32_t>(c.rope_dim / 2);
    const int32_t rows = pairs * 3 / 8;
    w.KeyI32s(absl::StrCat(c.architecture, ".rope.dimension_sections"),
              {pairs - 2 * rows, rows, rows, 0});
  }
  WriteModelKeys(
      c,
      [&w](const std::string& name, int64_t value) {
        w.KeyU32(name, static_cast<uint32_t>(value));
      },
      [&w](const std::string& name, float value) { w.KeyF32(name, value); },
      [&w](const std::string& name, bool value) { w.KeyBool(name, value); },
      [&w](const std::string& name, const std::vector<int32_t>& values) {
        w.KeyI32s(name, values);
      });
}

}  // namespace

absl::Status CheckRandomModel(const RandomModelShape& shape) {
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "vocab", shape.vocab, kMinRandomVocab));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "layers", shape.layers, 1, DecoderConfig::kMaxLayers));
  const absl::string_view kinds = shape.recurrence.kinds;
  const size_t first = kinds.find('a');
  if (kinds.empty() || static_cast<size_t>(shape.layers) > first) {
    return absl::OkStatus();
  }
  return InvalidArgument(kOp, "layers=", shape.layers, " of ", shape.name,
                         " are all recurrent; need layers >= ", first + 1,
                         ", so that one attends");
}

absl::Status WriteRandomModel(
    const RandomModelShape& shape, GgufTensorType type, uint64_t seed,
    const std::string& path,
    const std::function<void(int64_t done, int64_t total)>& progress) {
  QUERN_RETURN_IF_ERROR(CheckRandomModel(shape));
  GgufFileWriter writer;
  const DecoderConfig config = ConfigOf(shape);
  AddModelKeys(shape, config, type, writer);
  AddVocabularyKeys(shape.architecture, shape.vocab, writer);
  const std::vector<Tensor> tensors = Tensors(shape, config, type, seed);
  for (const Tensor& tensor : tensors) {
    QUERN_RETURN_IF_ERROR(
        writer.AddTensor(tensor.name, tensor.dims, tensor.type));
  }
  QUERN_RETURN_IF_ERROR(writer.Open(path));

  constexpr int64_t kChunk = 1 << 18;  // elements: 1 MiB of f32
  const int64_t total = writer.file_bytes();
  int64_t done = 0;
  std::vector<uint8_t> bytes;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Tensor& tensor = tensors[t];
    if (tensor.deviation == 0) {
      const std::vector<float>& values = tensor.values;
      QUERN_RETURN_IF_ERROR(writer.Append(
          absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values.data()),
                              values.size() * sizeof(float))));
      continue;
    }
    Filler filler(tensor.type, tensor.deviation, SeedOf(seed, t));
    const auto elements = static_cast<int64_t>(ElementsOf(tensor.dims));
    for (int64_t begin = 0; begin < elements; begin += kChunk) {
      filler.Fill(std::min(kChunk, elements - begin), bytes);
      QUERN_RETURN_IF_ERROR(writer.Append(bytes));
      done += static_cast<int64_t>(bytes.size());
      if (progress) progress(done, total);
    }
  }
  return writer.Finish();
}

}  // namespace quern
