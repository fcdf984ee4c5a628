#ifndef QUERN_QUANT_INT8_QUANTIZE_KERNELS_H_
#define QUERN_QUANT_INT8_QUANTIZE_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.
// Each kernel handles n consecutive elements of any alignment.

#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"

namespace quern {

struct Int8QuantizeKernels {
  const char* target;
  // The code of the largest |x|, 0 if n == 0. A NaN counts as more than an
  // infinity, as its code is larger.
  uint32_t (*max_abs)(const void* x, size_t n);
  // The codes of the smallest and the largest of x and 0, -0 below 0. A NaN is
  // beyond the infinity of its sign.
  void (*min_max)(const void* x, size_t n, uint32_t* min, uint32_t* max);
  // q[i] = clamp(rint(x[i] * inverse) + zero_point, -128, 127) ^ flip, the
  // product not rounded before; |x[i] * inverse| < 256. Meanwhile prefetches n
  // elements at `next`, which may be any address. With `stream` stores go
  // around the caches, and are complete after flush().
  void (*quantize)(const void* x, size_t n, float inverse, int32_t zero_point,
                   uint8_t flip, const void* next, bool stream, void* q);
  // quantize for any x, where NaN counts as 0, and 2^-118 <= inverse <= 2^125.
  void (*quantize_any)(const void* x, size_t n, float inverse,
                       int32_t zero_point, uint8_t flip, const void* next,
                       bool stream, void* q);
  void (*flush)();
};

// The kernels of the best instruction set this CPU supports, for x of type f32,
// bf16 or f16.
Int8QuantizeKernels GetInt8QuantizeKernels(DType dtype);

}  // namespace quern

#endif  // QUERN_QUANT_INT8_QUANTIZE_KERNELS_H_
