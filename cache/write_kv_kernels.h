#ifndef QUERN_CACHE_WRITE_KV_KERNELS_H_
#define QUERN_CACHE_WRITE_KV_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "core/dtype.h"

namespace quern {

struct WriteKvKernels {
  const char* target;
  // to[i] = from[i], i < count, converted between the types asked for.
  void (*convert)(const void* from, size_t count, void* to);
  // to[i / pair * stride + i % pair] = from[i], i < count, likewise. Where pair
  // does not divide count, zero for what is missing of the last one.
  void (*scatter)(const void* from, size_t count, size_t pair, size_t stride,
                  void* to);
};

// The kernels of the best instruction set this CPU supports. `input` is kF32 or
// kBF16; `cache` kF32, kBF16 or kF16.
WriteKvKernels GetWriteKvKernels(DType input, DType cache);

}  // namespace quern

#endif  // QUERN_CACHE_WRITE_KV_KERNELS_H_
