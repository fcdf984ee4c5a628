#ifndef QUERN_ATTENTION_SCHEDULE_SCHEDULE_STRETCH_H_
#define QUERN_ATTENTION_SCHEDULE_SCHEDULE_STRETCH_H_

// Private: what a block of an AttentionSchedule costs, and which of its keys
// an item has.

#include <algorithm>
#include <cstdint>

#include "quern/attention/schedule.h"
#include "quern/core/math_util.h"

namespace quern {

// A key and its value brought from memory: 512 bytes.
inline constexpr int64_t kKeyCost = 8;
// A row of partial results brought from another core and merged: as many.
inline constexpr int64_t kMergeCost = 16;

// Pieces of the run [begin, end) of a block whose chunks start at `first`.
inline int64_t PieceCount(int64_t begin, int64_t end, int64_t first) {
  constexpr int64_t kSpan = AttentionSchedule::kSpanChunks;
  const int64_t head = std::min(end, RoundUp(begin, kSpan)) - begin;
  const int64_t spans = DivCeil(end - begin - head, kSpan);
  return (begin == first ? (head == 0 ? 0 : 1) : head) + spans;
}

// The place of a block on a ScheduleLine, whichever its head. Costs are
// integers in double: exact below 2^53, and the same each time beyond it.
struct Stretch {
  static constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;

  Stretch(const AttentionSequence& s, const AttentionBlock& of, int64_t group)
      : block(of), rows(of.q_count() * group) {
    key_begin = s.FirstKey(of.q_begin);
    key_end = std::clamp(s.kv_len - s.q_len + of.q_end + s.right, int64_t{0},
                         s.kv_len);
    chunk_begin = static_cast<int32_t>(key_begin / kChunk);
    chunk_end = static_cast<int32_t>(DivCeil(key_end, kChunk));
    first_chunk = chunk_begin;
  }
  // Keeps the first `tokens`, which are whole chunks that every query sees.
  void OnlyPrefix(int64_t tokens) {
    key_end = tokens;
    chunk_end = static_cast<int32_t>(tokens / kChunk);
  }
  // Drops the first `tokens`, which are whole chunks that every query sees.
  void AfterPrefix(int64_t tokens) {
    key_begin = tokens;
    chunk_begin = static_cast<int32_t>(tokens / kChunk);
  }

  // The first key of `chunk` that any of the queries sees.
  int64_t Key(int32_t chunk) const {
    return std::clamp(chunk * kChunk, key_begin, key_end);
  }
  double key_cost() const { return static_cast<double>(kKeyCost + rows); }
  // Cost of the chunks [begin, end), without that of starting an item.
  double cost(int32_t begin, int32_t end) const {
    return static_cast<double>(Key(end) - Key(begin)) * key_cost();
  }
  double cost() const {
    return AttentionSchedule::kItemCost + cost(chunk_begin, chunk_end);
  }

  AttentionBlock block;
  int64_t rows;
  int64_t key_begin, key_end;      // that any of the queries sees
  int32_t chunk_begin, chunk_end;  // with those keys
  int32_t first_chunk;             // of the block, in whichever item
};

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_SCHEDULE_STRETCH_H_
