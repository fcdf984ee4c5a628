#ifndef QUERN_TESTING_REFERENCE_ATTENTION_H_
#define QUERN_TESTING_REFERENCE_ATTENTION_H_

// Attention of one sequence, in double, as the papers write it. Query i stands
// at position kv_len - q_len + i; query head h reads KV head h * kv_heads /
// q_heads.
//
//   s[j]   = scale * sum over d of q[i, h, d] * k[j, g, d]
//   s[j]   = soft_cap * tanh(s[j] / soft_cap)          if soft_cap > 0
//   s[j]  += alibi_slopes[h] * (j - position)          if there are slopes
//   p      = softmax over the j that position i sees, and sinks[h] if there are
//   out[i, h, :] = sum over j of p[j] * v[j, g, :]
//   lse[i, h]    = log(sum over j of exp(s[j]))
//
// The last draft_masks.size() queries and keys are drafts, if there are any.
// Draft i sees draft j where bit j of its mask is set, j <= i, and all keys
// before the drafts. These keys are its path: positions, of which the windows
// and slopes above speak, are counted along it.
//
// A query that sees nothing gives zeros and lse = -infinity.

#include <cstdint>
#include <vector>

namespace quern {

struct ReferenceAttentionSpec {
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t q_heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 1;
  int64_t v_head_dim = 0;  // 0: head_dim
  double scale = 1.0;
  bool causal = true;         // position p sees j <= p
  int64_t window = 0;         // > 0: p sees only j > p - window
  int64_t window_right = -1;  // >= 0: p sees only j <= p + window_right
  double soft_cap = 0.0;      // > 0: see above
  std::vector<double> alibi_slopes = {};  // [q_heads] or none
  std::vector<double> sinks = {};  // [q_heads] or none: in lse, without v
  std::vector<uint64_t> draft_masks = {};  // [drafts]
};

struct ReferenceAttentionResult {
  std::vector<double> out;  // [q_len, q_heads, v_head_dim]
  std::vector<double> lse;  // [q_len, q_heads]
};

// q[q_len, q_heads, head_dim], k[kv_len, kv_heads, head_dim],
// v[kv_len, kv_heads, v_head_dim], dense.
ReferenceAttentionResult ReferenceAttention(const ReferenceAttentionSpec& spec,
                                            const std::vector<double>& q,
                                            const std::vector<double>& k,
                                            const std::vector<double>& v);

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_ATTENTION_H_
