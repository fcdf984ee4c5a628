#ifndef QUERN_QUANT_S8S8_COMPENSATION_KERNELS_H_
#define QUERN_QUANT_S8S8_COMPENSATION_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>
#include <cstdint>

namespace quern {

struct S8S8CompensationKernels {
  const char* target;
  // comp[c] = 128 * sum over rows r < k of b[r * stride + c], for c < cols.
  void (*columns)(const int8_t* b, size_t stride, size_t k, size_t cols,
                  int32_t* comp);
  // comp[r] = 128 * sum over c < k of b[r * stride + c], for r < rows.
  void (*rows)(const int8_t* b, size_t stride, size_t rows, size_t k,
               int32_t* comp);
  // comp[c] = 128 * sum over l < quads, i < 4 of b[l * line_bytes + c * 4 + i],
  // for c < cols, 4 * cols <= line_bytes.
  void (*panel)(const int8_t* b, size_t line_bytes, size_t quads, size_t cols,
                int32_t* comp);
};

// The kernels of the best instruction set this CPU supports.
S8S8CompensationKernels GetS8S8CompensationKernels();

}  // namespace quern

#endif  // QUERN_QUANT_S8S8_COMPENSATION_KERNELS_H_
