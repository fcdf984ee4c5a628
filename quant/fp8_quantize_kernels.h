#ifndef QUERN_QUANT_FP8_QUANTIZE_KERNELS_H_
#define QUERN_QUANT_FP8_QUANTIZE_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

struct Fp8QuantizeKernels {
  const char* target;
  // q[i] = e4m3(clamp(fl(x[i] * inverse), -448, 448)), NaN staying NaN.
  // Meanwhile prefetches n elements at `next`, which may be any address. With
  // `stream`, stores go around the caches, and are complete after flush().
  void (*quantize_any)(const void* x, size_t n, float inverse, const void* next,
                       bool stream, void* q);
  // quantize_any, where every |x[i] * inverse| < 464, which rounds to at most
  // 448.
  void (*quantize)(const void* x, size_t n, float inverse, const void* next,
                   bool stream, void* q);
  void (*flush)();
};

// The kernels of the best instruction set this CPU supports, for x of type f32,
// bf16 or f16.
Fp8QuantizeKernels GetFp8QuantizeKernels(DType dtype);

}  // namespace quern

#endif  // QUERN_QUANT_FP8_QUANTIZE_KERNELS_H_
