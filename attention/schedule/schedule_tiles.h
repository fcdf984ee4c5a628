#ifndef QUERN_ATTENTION_SCHEDULE_SCHEDULE_TILES_H_
#define QUERN_ATTENTION_SCHEDULE_SCHEDULE_TILES_H_

// Private: what AttentionSchedule::Build does, and AttentionBoundOf must know.

#include <algorithm>
#include <cstdint>

#include "quern/core/math_util.h"

namespace quern {

// The shares of one worker are 1/2, 1/4, ... 1/32, 1/32 of its work: workers of
// unequal speed wait for one another for no longer than the last of them. With
// 1/8 as the last, two workers took 0.58 of the time of one for a prefill of
// 512.
inline constexpr int kMaxRounds = 6;

// Below these rows a block is not made smaller to have more of them.
inline constexpr int64_t kLeastBlockRows = 32;

// Half the rows of a block, where Build may halve them.
inline bool HalveBlockRows(int64_t* block_rows) {
  if (*block_rows < 2 * kLeastBlockRows) return false;
  *block_rows /= 2;
  return true;
}

// Queries of a block: as many as block_rows allows, less some where that fills
// tiles of row_tile rows better.
inline int64_t BlockQueries(int64_t group, int64_t block_rows,
                            int64_t row_tile) {
  const int64_t tile = std::min(row_tile, block_rows);
  const int64_t most = std::max(int64_t{1}, block_rows / group);
  int64_t best = most;
  // With q queries, q * group of RoundUp(q * group, tile) rows are of use.
  for (int64_t q = most; q > most / 2 && q > most - tile; --q) {
    const int64_t best_rows = best * group, rows = q * group;
    if (rows * RoundUp(best_rows, tile) > best_rows * RoundUp(rows, tile)) {
      best = q;
    }
  }
  return best;
}

}  // namespace quern

#endif  // QUERN_ATTENTION_SCHEDULE_SCHEDULE_TILES_H_
