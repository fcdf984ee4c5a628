#ifndef QUERN_OPS_ROW_STORES_H_
#define QUERN_OPS_ROW_STORES_H_

#include <cstdint>

namespace quern {

// Whether stores go through the caches. Streaming ones spare the read of what
// is overwritten, and leave the result in memory only.
enum class RowStores : uint8_t {
  kAuto,    // what measured best: kCached, but for rms_norm, and for what
            // act_and_mul does in one pass of bf16, where out is not the input
            // and both exceed the last-level cache
  kCached,  // the next operator reads the result at once
  kStream,
};

}  // namespace quern

#endif  // QUERN_OPS_ROW_STORES_H_
