#ifndef QUERN_ATTENTION_TESTING_SCHEDULE_TESTUTIL_H_
#define QUERN_ATTENTION_TESTING_SCHEDULE_TESTUTIL_H_

#include <cstdint>

#include "quern/attention/attention_spec.h"
#include "quern/cache/kv_layout.h"

namespace quern {

// A spec with these heads, without windows, over pages of 16 tokens.
inline AttentionSpec ScheduleSpec(int64_t q_heads, int64_t kv_heads,
                                  int64_t head_dim = 8) {
  KvLayoutSpec layout;
  layout.kv_heads = kv_heads;
  layout.head_dim = head_dim;
  layout.page_size = 16;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = q_heads;
  return spec;
}

// A spec that paged attention accepts, with values narrower than keys: 4 query
// heads over 2 heads of keys of 8 and values of 4 elements, pages of 16 tokens.
inline AttentionSpec GoodSpec() {
  KvLayoutSpec layout;
  layout.kv_heads = 2;
  layout.head_dim = 8;
  layout.v_head_dim = 4;
  layout.page_size = 16;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = 4;
  return spec;
}

}  // namespace quern

#endif  // QUERN_ATTENTION_TESTING_SCHEDULE_TESTUTIL_H_
