#include "quern/models/decoder/loading/model_work.h"

#include <algorithm>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {
namespace {

// The group's operations for `rows` rows, and part / whole of its bytes.
DecoderWork Scaled(const DecoderWork& group, int64_t rows, int64_t part,
                   int64_t whole) {
  DecoderWork work;
  work.weight_bytes = group.weight_bytes / whole * part;
  work.f32_ops = group.f32_ops * rows;
  work.bf16_ops = group.bf16_ops * rows;
  work.int8_ops = group.int8_ops * rows;
  return work;
}

}  // namespace

void ModelWork::Add(const LinearWeights& weights, DType rows, bool int8_blocks,
                    DecoderWork& group) {
  const LinearWeightsSpec& spec = weights.spec();
  group.weight_bytes += static_cast<int64_t>(weights.bytes().size());
  const int64_t ops = 2 * spec.n * spec.k;
  switch (spec.format) {
    case WeightFormat::kI8Channel:
      group.int8_ops += ops;
      return;
    case WeightFormat::kBlocks:
      (int8_blocks ? group.int8_ops : group.f32_ops) += ops;
      return;
    case WeightFormat::kF32:
    case WeightFormat::kF16:
      group.f32_ops += ops;
      return;
    default:
      (rows == DType::kBF16 ? group.bf16_ops : group.f32_ops) += ops;
  }
}

DecoderWork ModelWork::Step(int64_t tokens, int64_t logit_rows) const {
  DecoderWork work = Scaled(every, tokens, 1, 1);
  work += Scaled(output, logit_rows, 1, 1);
  // Operations of one expert in each layer times the experts of all tokens.
  DecoderWork expert = routed;
  expert.f32_ops /= experts;
  expert.bf16_ops /= experts;
  expert.int8_ops /= experts;
  work += Scaled(expert, tokens * experts_used,
                 std::min(tokens * experts_used, experts), experts);
  work.weight_bytes += tokens * embedding_row_bytes;
  return work;
}

}  // namespace quern
