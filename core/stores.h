#ifndef QUERN_CORE_STORES_H_
#define QUERN_CORE_STORES_H_

#include <cstdint>

namespace quern {

// Whether an operator stores its result through the caches. Streaming stores
// spare the read of what is overwritten, and leave the result in memory only.
enum class Stores : uint8_t {
  kAuto,    // the operator decides; its spec says by what
  kCached,  // the next operator reads the result at once
  kStream,
};

}  // namespace quern

#endif  // QUERN_CORE_STORES_H_
