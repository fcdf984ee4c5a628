#ifndef QUERN_ATTENTION_ATTENTION_SPEC_H_
#define QUERN_ATTENTION_ATTENTION_SPEC_H_

// What an attention layer computes, the same for every step: PagedAttentionPlan
// and AttentionSchedule are built from one spec.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"

namespace quern {

// A window_left or window_right without bound.
constexpr int64_t kNoWindow = -1;

struct AttentionSpec {
  KvLayout kv;                    // kv_heads, head dims, pages and type
  int64_t q_heads = 0;            // a multiple of kv.kv_heads()
  DType q_dtype = DType::kF32;    // kF32, kBF16 or kF16
  DType out_dtype = DType::kF32;  // kF32, kBF16 or kF16
  float scale = 0;                // of the logits; 0: 1 / sqrt(head_dim)
  // Keys that a query sees before and after its own position, itself excluded.
  // A causal sequence sees none after it, whatever the window.
  int64_t window_left = kNoWindow;
  int64_t window_right = kNoWindow;
  // logit = soft_cap * tanh(logit / soft_cap); 0: none.
  float soft_cap = 0;

  // Query heads that share one key/value head.
  int64_t group() const { return q_heads / kv.kv_heads(); }
};

// InvalidArgument names the field and what it must be; Unimplemented for other
// dtypes. `op` opens the message.
absl::Status CheckAttentionSpec(const char* op, const AttentionSpec& spec);

}  // namespace quern

#endif  // QUERN_ATTENTION_ATTENTION_SPEC_H_
