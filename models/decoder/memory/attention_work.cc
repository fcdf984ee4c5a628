#include "quern/models/decoder/memory/attention_work.h"

#include <algorithm>
#include <cstdint>

#include "quern/attention/attention_spec.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {

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

}  // namespace quern
