// The matrices of a rank, and the memory that loading them takes. Reads no
// tensor.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "quern/core/dtype.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder_options.h"
#include "quern/models/decoder/decoder_work.h"
#include "quern/models/decoder/loading/byte_limit.h"
#include "quern/models/decoder/loading/decoder_loader.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/models/decoder/loading/split_blocks.h"
#include "quern/models/gguf/gguf.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

}  // namespace

std::string DecoderLoader::FormOf(const LinearWeightsSpec& spec) {
  switch (spec.format) {
    case WeightFormat::kI8Channel:
      return "int8";
    case WeightFormat::kI4Group:
      return "q4_0";
    case WeightFormat::kI8Group:
      return "q8_0";
    case WeightFormat::kBlocks:
      return absl::AsciiStrToLower(
          FindBlockFormat(static_cast<uint32_t>(spec.block_format))->name);
    default:
      return std::string(WeightFormatName(spec.format));
  }
}

DType DecoderLoader::ReadType(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBF16:
      return DType::kBF16;
    case WeightFormat::kF16:
      return DType::kF16;
    case WeightFormat::kI4Group:
    case WeightFormat::kI8Group:
    case WeightFormat::kBlocks:
      return DType::kU8;
    default:
      return DType::kF32;
  }
}

WeightFormat DecoderLoader::FormatOf(const MatrixParts& parts) const {
  // Rounding a router could change its choice, and would save nothing.
  if (TensorOf(parts.rows[0]).role == TensorRole::kRouter) {
    return WeightFormat::kF32;
  }
  switch (options_.weights) {
    case DecoderWeights::kBF16:
      return WeightFormat::kBF16;
    case DecoderWeights::kF32:
      return WeightFormat::kF32;
    case DecoderWeights::kInt8:
      return WeightFormat::kI8Channel;
    case DecoderWeights::kAsInFile:
      break;
  }
  const GgufTensorType type = TypeOf(parts);
  for (const TensorId id : parts.rows) {
    // Parts of different types become f32, which represents each of them
    // exactly.
    if (TensorIn(id, parts.layer).type != type) return WeightFormat::kF32;
  }
  switch (type) {
    case GgufTensorType::kF16:
      return WeightFormat::kF16;
    case GgufTensorType::kBF16:
      return WeightFormat::kBF16;
    case GgufTensorType::kQ4_0:
      if (!int8_rows()) return WeightFormat::kI4Group;
      break;
    case GgufTensorType::kQ8_0:
      if (!int8_rows()) return WeightFormat::kI8Group;
      break;
    default:
      break;
  }
  return IsBlockType(type) ? WeightFormat::kBlocks : WeightFormat::kF32;
}

std::vector<MatrixParts> DecoderLoader::QkvParts(int64_t layer) const {
  std::vector<MatrixParts> all;
  for (const auto& [weight, bias] :
       {std::pair(TensorId::kAttnQ, TensorId::kAttnQBias),
        std::pair(TensorId::kAttnK, TensorId::kAttnKBias),
        std::pair(TensorId::kAttnV, TensorId::kAttnVBias)}) {
    const GgufTensorType type = TensorIn(weight, layer).type;
    const bool apart = !all.empty() && TypeOf(all.back()) != type &&
                       (IsBlockType(TypeOf(all.back())) || IsBlockType(type));
    if (all.empty() || apart) {
      all.emplace_back();
      all.back().layer = layer;
      all.back().k = config_.hidden;
    }
    MatrixParts& parts = all.back();
    parts.rows.push_back(weight);
    if (config_.Has(ModelPart::kQkvBias)) parts.biases.push_back(bias);
    parts.n += shard_.Count(TensorOf(weight).rows);
  }
  return all;
}

MatrixParts DecoderLoader::RecurrentInParts(int64_t layer) const {
  MatrixParts parts;
  if (config_.Has(ModelPart::kDeltaNet)) {
    // The order of the operator gated_delta_net: q, k, v, z, b, a.
    parts.rows = {TensorId::kDeltaQkv, TensorId::kDeltaGate,
                  TensorId::kDeltaBetaAlpha};
  } else {
    parts.rows = {config_.Has(ModelPart::kMamba2) ? TensorId::kSsmIn
                                                  : TensorId::kShortConvIn};
  }
  parts.layer = layer;
  for (const TensorId id : parts.rows) {
    parts.n += shard_.Count(TensorOf(id).rows);
  }
  parts.k = config_.hidden;
  return parts;
}

MatrixParts DecoderLoader::RecurrentOutParts(int64_t layer) const {
  return IntoStream(config_.Has(ModelPart::kStates) ? TensorId::kSsmOut
                                                    : TensorId::kShortConvOut,
                    layer);
}

MatrixParts DecoderLoader::IntoStream(TensorId id, int64_t layer) const {
  MatrixParts parts;
  parts.rows = {id};
  parts.layer = layer;
  parts.n = config_.hidden;
  parts.k = shard_.Count(TensorOf(id).cols);
  parts.residual = !NeedsBranch(config_, shard_);
  return parts;
}

MatrixParts DecoderLoader::AttnOutParts(int64_t layer) const {
  MatrixParts parts = IntoStream(TensorId::kAttnOutput, layer);
  if (config_.Has(ModelPart::kOutputBias)) {
    AddStreamBias(TensorId::kAttnOutputBias, parts);
  }
  return parts;
}

void DecoderLoader::AddStreamBias(TensorId bias, MatrixParts& parts) const {
  // The ranks' parts of y are summed, and one of them has the bias.
  if (shard_.rank() == 0) parts.biases = {bias};
}

MatrixParts DecoderLoader::DownParts(int64_t layer) const {
  return IntoStream(TensorId::kFfnDown, layer);
}

MatrixParts DecoderLoader::GateUpParts(int64_t layer) const {
  MatrixParts parts;
  parts.rows = {TensorId::kFfnGate, TensorId::kFfnUp};
  parts.layer = layer;
  parts.n = 2 * shard_.Count(Extent::kFfn);
  parts.k = config_.hidden;
  parts.y = rows_dtype_;
  parts.activation = config_.activation;
  return parts;
}

MatrixParts DecoderLoader::RouterParts(int64_t layer) const {
  MatrixParts parts;
  parts.rows = {TensorId::kRouter};
  parts.layer = layer;
  parts.n = config_.experts;
  parts.k = config_.hidden;
  if (config_.Has(ModelPart::kMixtureBias)) {
    parts.biases = {TensorId::kRouterLogitBias};
  }
  return parts;
}

MatrixParts DecoderLoader::ExpertGateUpParts(int64_t layer,
                                             int64_t expert) const {
  MatrixParts parts = GateUpParts(layer);
  parts.rows = {TensorId::kExpertGate, TensorId::kExpertUp};
  parts.n = 2 * shard_.Count(Extent::kExpertFfn);
  if (config_.Has(ModelPart::kMixtureBias)) {
    parts.biases = {TensorId::kExpertGateBias, TensorId::kExpertUpBias};
  }
  parts.expert = expert;
  return parts;
}

MatrixParts DecoderLoader::ExpertDownParts(int64_t layer,
                                           int64_t expert) const {
  MatrixParts parts = IntoStream(TensorId::kExpertDown, layer);
  if (config_.Has(ModelPart::kMixtureBias)) {
    AddStreamBias(TensorId::kExpertDownBias, parts);
  }
  parts.expert = expert;
  return parts;
}

MatrixParts DecoderLoader::SharedGateUpParts(int64_t layer) const {
  MatrixParts parts = GateUpParts(layer);
  parts.rows = {TensorId::kSharedGate, TensorId::kSharedUp};
  parts.n = 2 * shard_.Count(Extent::kSharedFfn);
  return parts;
}

MatrixParts DecoderLoader::SharedDownParts(int64_t layer) const {
  return IntoStream(TensorId::kSharedDown, layer);
}

MatrixParts DecoderLoader::SharedRouterParts(int64_t layer) const {
  MatrixParts parts;
  parts.rows = {TensorId::kSharedRouter};
  parts.layer = layer;
  parts.n = 1;
  parts.k = config_.hidden;
  return parts;
}

MatrixParts DecoderLoader::OutputParts() const {
  MatrixParts parts;
  parts.rows = {config_.Has(ModelPart::kOutputMatrix) ? TensorId::kOutput
                                                      : TensorId::kEmbedding};
  parts.n = shard_.Count(Extent::kVocab);
  parts.k = config_.hidden;
  return parts;
}

DecoderWork& DecoderLoader::WorkOf(const MatrixParts& parts) {
  switch (parts.rows[0]) {
    case TensorId::kExpertGate:
    case TensorId::kExpertDown:
      return work_.routed;
    case TensorId::kOutput:
    case TensorId::kEmbedding:
      return work_.output;
    default:
      return work_.every;
  }
}

LinearWeightsSpec DecoderLoader::WeightsOf(const MatrixParts& parts) const {
  LinearWeightsSpec spec;
  spec.n = parts.n;
  spec.k = parts.k;
  spec.format = FormatOf(parts);
  spec.gated = IsGated(parts.activation);
  spec.group_size = SplitBlocks::kGroup;  // other formats do not look at it
  if (spec.format == WeightFormat::kBlocks) {
    spec.block_format = static_cast<BlockFormat>(TypeOf(parts));
  }
  return spec;
}

double DecoderLoader::PackedBytes(const MatrixParts& parts) const {
  const auto bytes = LinearWeights::MaxPackedBytes(WeightsOf(parts));
  // A shape that cannot be packed counts as infinitely large.
  if (!bytes.ok()) return std::numeric_limits<double>::infinity();
  return static_cast<double>(*bytes);
}

double DecoderLoader::UnpackedBytes(const MatrixParts& parts) const {
  const double elements =
      static_cast<double>(parts.n) * static_cast<double>(parts.k);
  const WeightFormat format = FormatOf(parts);
  if (IsSplit(format) || format == WeightFormat::kBlocks) {
    constexpr double kSplit = 1 + 2.0 / SplitBlocks::kGroup;
    return static_cast<double>(parts.n) *
               static_cast<double>(BlockBytes(parts)) +
           (IsSplit(format) ? kSplit * elements : 0);
  }
  const double codes = format == WeightFormat::kI8Channel ? elements : 0;
  return elements * static_cast<double>(SizeOf(ReadType(format))) + codes;
}

absl::Status DecoderLoader::CheckBytes(int64_t context) const {
  const ByteLimit limit = {options_.max_bytes, int64_t{256} << 20,
                           DecoderOptions::kBytesOfFileByte, file_.file_bytes(),
                           "file's"};
  const DecoderConfig& c = config_;
  // Bytes of all matrices, and of the largest while it is being packed. They
  // are double, because a sparse file may claim any size.
  double matrices = 0, largest = 0;
  double small = 0;  // of what some kinds of layers have besides
  const auto add = [&](const MatrixParts& parts, int64_t count = 1) {
    // A plan has tables of kernels besides its weights.
    constexpr double kPlanBytes = 4096;
    matrices += static_cast<double>(count) * (PackedBytes(parts) + kPlanBytes);
    largest = std::max(largest, UnpackedBytes(parts));
  };
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    if (c.IsRecurrent(layer)) {
      add(RecurrentInParts(layer));
      add(RecurrentOutParts(layer));
      small += 4 * (static_cast<double>(c.conv_width + 1) *
                        static_cast<double>(c.conv_channels()) +
                    static_cast<double>(c.ssm_inner + 3 * c.ssm_heads));
    } else if (c.Has(ModelPart::kLatent)) {
      for (const MatrixParts& parts : LatentInParts(layer)) add(parts);
      add(LatentOutParts(layer));
      matrices += KvBPackedBytes(layer);
      largest = std::max(largest, KvBUnpackedBytes(layer));
      small += 4 * static_cast<double>(c.q_lora + c.kv_lora);
    } else {
      for (const MatrixParts& parts : QkvParts(layer)) add(parts);
      add(AttnOutParts(layer));
    }
    if (c.LayerHas(layer, ModelPart::kExperts)) {
      add(RouterParts(layer));
      add(ExpertGateUpParts(layer, 0), c.experts);
      add(ExpertDownParts(layer, 0), c.experts);
      if (c.Has(ModelPart::kSharedExpert)) {
        add(SharedGateUpParts(layer));
        add(SharedDownParts(layer));
        if (c.Has(ModelPart::kSharedGate)) add(SharedRouterParts(layer));
      }
    } else {
      add(GateUpParts(layer));
      add(DownParts(layer));
    }
  }
  add(OutputParts());
  const double embedding = static_cast<double>(shard_.vocab().width) *
                           static_cast<double>(c.hidden) *
                           static_cast<double>(SizeOf(embedding_dtype()));
  // Norms are f32, and each layer has fewer than six of at most the widest
  // width.
  const int64_t whole = c.Has(ModelPart::kWholeNorms) ? c.q_cols() : 0;
  const double norms =
      small + 6 * 4 * static_cast<double>(c.layers + 1) *
                  static_cast<double>(std::max({c.hidden, c.head_dim, whole}));
  // A cosine and a sine for each rotated element, in the larger of the two
  // layouts.
  const double tables = c.rope ? (c.Has(ModelPart::kLocalRope) ? 2 : 1) : 0;
  const double rotary = tables * 8 * static_cast<double>(context) *
                        static_cast<double>(c.rope_dim);
  const double bytes = matrices + largest + embedding + norms + rotary;
  if (bytes <= limit.bytes()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: loading takes up to %.0f bytes: %.0f of matrices, %.0f of the "
      "embedding, %.0f of the rotary table for context=%d, "
      "rope.dimension_count=%d; %s",
      kOp, bytes, matrices + largest + norms, embedding, rotary, context,
      c.rope_dim, limit.Need()));
}

}  // namespace quern
