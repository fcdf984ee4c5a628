#ifndef QUERN_MODELS_DECODER_MODEL_WORK_H_
#define QUERN_MODELS_DECODER_MODEL_WORK_H_

// Private: the matrices of a rank, counted by how often a step multiplies by
// them, and the operations of attention.

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {

// Whether attention multiplies queries by keys of these types as bf16, where
// the CPU has such products (attention/paged_attention.h); else as f32.
constexpr bool AttendsInBF16(DType query, DType key) {
  return query == DType::kBF16 && (key == DType::kBF16 || SizeOf(key) == 1);
}

// The number of pairs of a query and a key that it sees: the queries are the
// last q_len of kv_len tokens, and each sees itself and the window_left tokens
// before it, or all of them with kNoWindow.
int64_t CausalPairs(int64_t q_len, int64_t kv_len, int64_t window_left);

// What one pair costs: the product of a query and a key, and of a weight and a
// value, for each head.
struct PairShape {
  int64_t heads = 0;  // of queries
  int64_t head_dim = 0, v_head_dim = 0;
  DType query = DType::kF32, key = DType::kF32;
};
// Adds the operations of so many pairs.
void AddPairs(const PairShape& shape, int64_t pairs, DecoderWork& work);

struct ModelWork {
  // Bytes of matrices, and operations of one row.
  DecoderWork every;   // by which every token is multiplied
  DecoderWork output;  // of the logits
  DecoderWork routed;  // all experts that routers choose from
  // Experts of a layer, which are of one size, and those that a token has.
  int64_t experts = 1, experts_used = 1;
  int64_t embedding_row_bytes = 0;

  // Adds a matrix to one of the groups. It multiplies rows of this type, or of
  // int8 where `int8_blocks` and the matrix is in blocks.
  static void Add(const LinearWeights& weights, DType rows, bool int8_blocks,
                  DecoderWork& group);

  // The work of a step of so many tokens, `logit_rows` of which have logits,
  // without its cache and attention. Different tokens are taken to have
  // different experts as long as there are some: no step reads more.
  DecoderWork Step(int64_t tokens, int64_t logit_rows) const;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_MODEL_WORK_H_
