#ifndef QUERN_ATTENTION_TESTING_DRAFT_TESTUTIL_H_
#define QUERN_ATTENTION_TESTING_DRAFT_TESTUTIL_H_

// What the tests of trees of drafts share.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/testing/data.h"

namespace quern {

using Masks = std::vector<uint64_t>;

inline uint64_t Bit(int64_t i) { return uint64_t{1} << i; }

inline Masks Chain(int64_t drafts) {
  Masks masks;
  for (int64_t i = 0; i < drafts; ++i) {
    masks.push_back((i == 0 ? 0 : masks.back()) | Bit(i));
  }
  return masks;
}

// Every draft follows an earlier one, or none. One in eight does not see
// itself.
inline Masks RandomTree(TestRng& rng, int64_t drafts) {
  Masks masks;
  for (int64_t i = 0; i < drafts; ++i) {
    const int64_t parent = rng.Integer(-1, i - 1);
    const uint64_t path =
        parent < 0 ? 0 : masks[static_cast<size_t>(parent)] | Bit(parent);
    masks.push_back(path | (rng.Integer(0, 7) == 0 ? 0 : Bit(i)));
  }
  return masks;
}

template <typename Q, typename Kv>
Sequence RandomDrafts(TestRng& rng, const Heads& heads, const Lengths& length,
                      const Masks& masks) {
  Sequence s = RandomSequence<Q, Kv>(rng, heads, length);
  s.draft_masks = masks;
  return s;
}

inline Heads GroupedHeads() {
  Heads heads;
  heads.q_heads = 6;
  heads.kv_heads = 2;
  heads.head_dim = 24;
  return heads;
}

}  // namespace quern

#endif  // QUERN_ATTENTION_TESTING_DRAFT_TESTUTIL_H_
