#ifndef QUERN_OPS_ROW_BLOCKS_H_
#define QUERN_OPS_ROW_BLOCKS_H_

// What the plans on rows share: the start of each row (rows_of.h), its division
// into blocks, and the choice of streaming stores.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/core/machine/cpu_info.h"
#include "quern/core/stores.h"
#include "quern/ops/row_block_kernels.h"
#include "quern/ops/rows_of.h"  // IWYU pragma: export

namespace quern {

// Shorter rows are not streamed, because the partial cache lines at both ends
// would cost more than streaming saves.
inline constexpr int64_t kMinStreamRowBytes = 1024;

// Bytes of input and output together from which Execute streams. kAuto streams
// only for kernels that prefetch, once input and output exceed the last-level
// cache: ordinary stores would then read out in vain and evict the input.
// Without prefetches, streaming loses.
inline int64_t StreamFrom(Stores stores, bool auto_streams = false) {
  if (stores == Stores::kStream) return 0;
  return stores == Stores::kAuto && auto_streams ? LastLevelBytes() : INT64_MAX;
}

// Calls fn(i, count, stream) for blocks that cover [0, n). When streaming,
// every block after the first begins on a cache line.
template <typename Fn>
void ForEachBlock(size_t n, const char* out, size_t out_size, bool stream,
                  const Fn& fn) {
  size_t i = 0;
  while (i < n) {
    const size_t beyond = reinterpret_cast<uintptr_t>(out + i * out_size) % 64;
    const size_t whole = kRowBlock - (stream ? beyond / out_size : 0);
    const size_t count = std::min(whole, n - i);
    fn(i, count, stream && beyond == 0);
    i += count;
  }
}

}  // namespace quern

#endif  // QUERN_OPS_ROW_BLOCKS_H_
