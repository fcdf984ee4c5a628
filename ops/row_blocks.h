#ifndef QUERN_OPS_ROW_BLOCKS_H_
#define QUERN_OPS_ROW_BLOCKS_H_

// What plans on rows share: where rows begin (rows_of.h), how one is cut into
// blocks, and when it is streamed.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/core/cpu_info.h"
#include "quern/core/stores.h"
#include "quern/ops/row_block_kernels.h"
#include "quern/ops/rows_of.h"  // IWYU pragma: export

namespace quern {

// Rows shorter than this are not streamed: their partial cache lines at both
// ends would cost more than is won.
inline constexpr int64_t kMinStreamRowBytes = 1024;

// Bytes of input and output from which an Execute streams. kAuto does where the
// kernel fetches ahead, once both do not fit the last-level cache together: out
// would drive the input out, and is read in vain. Without fetches it loses:
// rows are written behind those that are read.
inline int64_t StreamFrom(Stores stores, bool auto_streams = false) {
  if (stores == Stores::kStream) return 0;
  return stores == Stores::kAuto && auto_streams ? LastLevelBytes() : INT64_MAX;
}

// fn(i, count, stream) for blocks that cover [0, n). Where it streams, blocks
// after the first begin on a cache line.
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
