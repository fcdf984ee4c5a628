#ifndef QUERN_MODELS_DECODER_MEMORY_ATTENTION_WORK_H_
#define QUERN_MODELS_DECODER_MEMORY_ATTENTION_WORK_H_

// Private: the operations of attention.

#include <cstdint>

#include "quern/core/dtype.h"
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

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_MEMORY_ATTENTION_WORK_H_
