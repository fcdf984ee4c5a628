#include "quern/models/decoder/model_work.h"

#include <algorithm>
#include <cstdint>

#include "quern/attention/attention_spec.h"
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

int64_t CausalPairs(int64_t q_len, int64_t kv_len, int64_t window_left) {
  const int64_t first = kv_len - q_len + 1;  // keys that the first query sees
  const int64_t most = window_left == kNoWindow ? kv_len : window_left + 1;
  // The queries before the window is full see one key more than the one before.
  const int64_t growing = std::clamp<int64_t>(most - first, 0, q_len);
  return growing * (2 * first + growing - 1) / 2 + (q_len - growing) * most;
}

void AddPairs(const PairShape& shape, int64_t pairs, DecoderWork& work) {
  const int64_t ops =
      2 * pairs * shape.heads * (shape.head_dim + shape.v_head_dim);
  (AttendsInBF16(shape.query, shape.key) ? work.bf16_ops : work.f32_ops) += ops;
}

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
