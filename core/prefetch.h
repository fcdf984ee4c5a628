#ifndef QUERN_CORE_PREFETCH_H_
#define QUERN_CORE_PREFETCH_H_

#include <cstddef>
#include <cstdint>

#include "hwy/base.h"
#include "hwy/cache_control.h"

namespace quern {

// Asks for the cache line at `p`, which may be any address, to be in L2 but not
// in L1: what is wanted soon, not next, must not drive out what is wanted now.
// Where there is no such hint, into both.
HWY_INLINE void PrefetchL2(const void* p) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(p, 0, 2);
#else
  hwy::Prefetch(static_cast<const char*>(p));
#endif
}

// Like PrefetchL2, but for the line `bytes` behind p. That line may lie outside
// the object of p, where C++ knows no pointer, so integers are added.
HWY_INLINE void PrefetchL2Behind(const void* p, size_t bytes) {
  PrefetchL2(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + bytes));
}

// Asks for all cache lines of the `bytes` from `p` on.
HWY_INLINE void PrefetchL2(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) {
    PrefetchL2(static_cast<const char*>(p) + i);
  }
}

}  // namespace quern

#endif  // QUERN_CORE_PREFETCH_H_
