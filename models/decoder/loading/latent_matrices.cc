// The matrices of attention over latents: their descriptions, their sizes and
// how they are packed.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder_options.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/packed_file.h"
#include "quern/models/gguf/gguf.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"

namespace quern {
namespace {

LinearWeightsSpec Floats(DType dtype, int64_t n, int64_t k) {
  LinearWeightsSpec spec;
  spec.n = n;
  spec.k = k;
  spec.format = FormatOfFloats(dtype);
  return spec;
}

// W_kvb of all heads, and of each head the two matrices of the absorbed form.
struct KvBShapes {
  LinearWeightsSpec all, absorb, up;
};

KvBShapes KvBShapesOf(const DecoderConfig& c, DType dtype) {
  const int64_t nope = c.nope(), values = c.value_dim;
  return {Floats(dtype, c.q_heads * (nope + values), c.kv_lora),
          Floats(dtype, c.kv_lora, nope), Floats(dtype, values, c.kv_lora)};
}

// to[c, r] = from[r, c], of elements of this size.
void Transpose(const uint8_t* from, int64_t rows, int64_t cols, size_t element,
               uint8_t* to) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      std::memcpy(to + static_cast<size_t>(c * rows + r) * element,
                  from + static_cast<size_t>(r * cols + c) * element, element);
    }
  }
}

}  // namespace

MatrixParts DecoderLoader::LatentParts(TensorId id, int64_t layer) const {
  MatrixParts parts;
  parts.rows = {id};
  parts.layer = layer;
  parts.n = shard_.Count(TensorOf(id).rows);
  parts.k = shard_.Count(TensorOf(id).cols);
  return parts;
}

std::vector<MatrixParts> DecoderLoader::LatentInParts(int64_t layer) const {
  std::vector<MatrixParts> all = {LatentParts(TensorId::kLatentKvA, layer)};
  if (config_.Has(ModelPart::kQueryLora)) {
    all.push_back(LatentParts(TensorId::kLatentQB, layer));
    all.push_back(LatentParts(TensorId::kLatentQA, layer));
  } else {
    all.push_back(LatentParts(TensorId::kLatentQ, layer));
  }
  return all;
}

MatrixParts DecoderLoader::LatentOutParts(int64_t layer) const {
  return IntoStream(TensorId::kLatentOutput, layer);
}

// Blocks cannot be transposed, so their numbers become those
// of the rows' type: exactly, if that is f32.
DType DecoderLoader::KvBType(int64_t layer) const {
  const bool split = config_.Has(ModelPart::kSplitKvB);
  MatrixParts parts;
  parts.rows = {split ? TensorId::kLatentKB : TensorId::kLatentKvB};
  if (split) parts.rows.push_back(TensorId::kLatentVB);
  parts.layer = layer;
  switch (FormatOf(parts)) {
    case WeightFormat::kF32:
      return DType::kF32;
    case WeightFormat::kF16:
      return DType::kF16;
    case WeightFormat::kBF16:
      return DType::kBF16;
    default:
      return rows_dtype_;
  }
}

std::vector<DecoderLoader::KvBPart> DecoderLoader::KvBParts(
    int64_t layer, MlaWeights& weights) const {
  const KvBShapes shapes = KvBShapesOf(config_, KvBType(layer));
  const auto heads = static_cast<size_t>(config_.q_heads);
  const std::string name = absl::StrCat("blk.", layer, ".kv_b");
  if (!weights.kv_b.has_value()) weights.kv_b.emplace();
  weights.q_absorb.resize(heads);
  weights.v_up.resize(heads);
  std::vector<KvBPart> parts = {{name, shapes.all, &*weights.kv_b}};
  for (size_t h = 0; h < heads; ++h) {
    parts.push_back({absl::StrCat(name, ".absorb[", h, "]"), shapes.absorb,
                     &weights.q_absorb[h]});
    parts.push_back(
        {absl::StrCat(name, ".up[", h, "]"), shapes.up, &weights.v_up[h]});
  }
  return parts;
}

double DecoderLoader::KvBPackedBytes(int64_t layer) const {
  const KvBShapes shapes = KvBShapesOf(config_, KvBType(layer));
  const auto heads = static_cast<double>(config_.q_heads);
  // A layer over latents has tables for each head besides its weights.
  constexpr double kHeadBytes = 4096;
  double bytes = heads * kHeadBytes;
  const struct {
    LinearWeightsSpec spec;
    double count;
  } counts[] = {{shapes.all, 1}, {shapes.absorb, heads}, {shapes.up, heads}};
  for (const auto& one : counts) {
    const auto packed = LinearWeights::MaxPackedBytes(one.spec);
    // A shape that cannot be packed counts as infinitely large.
    if (!packed.ok()) return std::numeric_limits<double>::infinity();
    bytes += one.count * static_cast<double>(*packed);
  }
  return bytes;
}

// The matrix itself, and one head of it, which is transposed.
double DecoderLoader::KvBUnpackedBytes(int64_t layer) const {
  const double row = static_cast<double>(config_.kv_lora) *
                     static_cast<double>(SizeOf(KvBType(layer)));
  return row * (static_cast<double>(config_.q_heads) + 1) *
         static_cast<double>(config_.nope() + config_.value_dim);
}

absl::StatusOr<AlignedBuffer> DecoderLoader::ReadKvB(int64_t layer,
                                                     DType dtype) {
  if (!config_.Has(ModelPart::kSplitKvB)) {
    return Read({TensorId::kLatentKvB}, layer, dtype);
  }
  const int64_t nope = config_.nope(), latent = config_.kv_lora;
  const auto element = SizeOf(dtype);
  const auto k_bytes = static_cast<size_t>(nope * latent) * element;
  const auto v_bytes =
      static_cast<size_t>(config_.value_dim * latent) * element;
  const auto heads = static_cast<size_t>(config_.q_heads);
  QUERN_ASSIGN_OR_RETURN(
      AlignedBuffer all,
      AlignedBuffer::Create(static_cast<int64_t>(heads * (k_bytes + v_bytes))));
  uint8_t* to = all.data();
  for (int64_t h = 0; h < config_.q_heads; ++h) {
    QUERN_ASSIGN_OR_RETURN(const AlignedBuffer k,
                           Read({TensorId::kLatentKB}, layer, dtype, h));
    Transpose(k.data(), latent, nope, element, to);
    QUERN_ASSIGN_OR_RETURN(const AlignedBuffer v,
                           Read({TensorId::kLatentVB}, layer, dtype, h));
    std::memcpy(to + k_bytes, v.data(), v_bytes);
    to += k_bytes + v_bytes;
  }
  return all;
}

absl::Status DecoderLoader::MakeKvB(int64_t layer, MlaWeights& weights) {
  const DType dtype = KvBType(layer);
  if (packed_ == nullptr) {
    unpacked_ = AlignedBuffer();  // two at once would exceed CheckBytes
    QUERN_ASSIGN_OR_RETURN(AlignedBuffer kv_b, ReadKvB(layer, dtype));
    MlaSpec spec;
    spec.heads = config_.q_heads;
    spec.nope = config_.nope();
    spec.v_head_dim = config_.value_dim;
    const absl::Status packed = PackKvB(
        spec,
        DenseAny(dtype, kv_b.data(), spec.heads * (spec.nope + spec.v_head_dim),
                 config_.kv_lora),
        executor_, weights);
    QUERN_RETURN_IF_ERROR(executor_.Check());
    QUERN_RETURN_IF_ERROR(packed);
  }
  for (const KvBPart& part : KvBParts(layer, weights)) {
    if (packed_ != nullptr) {
      QUERN_ASSIGN_OR_RETURN(*part.weights,
                             Find(part.name, part.spec, /*bias=*/false));
    }
    Keep(part.name, *part.weights);
    // A step reads W_kvb either whole or in its pieces, which are as large.
    if (part.weights != &*weights.kv_b) {
      ModelWork::Add(*part.weights, rows_dtype_, int8_rows(), work_.every);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<MlaWeights> DecoderLoader::MakeLatentWeights(int64_t layer) {
  MlaWeights weights;
  const std::vector<MatrixParts> in = LatentInParts(layer);
  QUERN_ASSIGN_OR_RETURN(weights.kv_a, MakeWeights(in[0]));
  QUERN_ASSIGN_OR_RETURN(weights.q, MakeWeights(in[1]));
  if (in.size() > 2) {
    QUERN_ASSIGN_OR_RETURN(weights.q_a, MakeWeights(in[2]));
  }
  QUERN_ASSIGN_OR_RETURN(weights.out, MakeWeights(LatentOutParts(layer)));
  QUERN_RETURN_IF_ERROR(MakeKvB(layer, weights));
  return weights;
}

}  // namespace quern
