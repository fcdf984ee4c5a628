#ifndef QUERN_GEMM_KERNELS_LINEAR_KERNELS_H_
#define QUERN_GEMM_KERNELS_LINEAR_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation units.

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/kernel_set.h"
#include "quern/gemm/kernels/tile.h"

namespace quern {

// One chunk of a row of a, k >= 1 elements, to the form that tiles read: 32-bit
// elements, either pairs of bf16 or f32. After an odd k comes a zero.
using PackRow = void (*)(const void* a, size_t k, uint32_t* to);

// c[r, i] = round(sums[r, i] + bias[i]), r < rows, i < cols.
struct FinishArgs {
  const float* sums;
  size_t sums_stride;
  const float* bias;  // or null
  size_t rows;
  size_t cols;
  void* c;
  ptrdiff_t c_row_bytes;
};
using Finish = void (*)(const FinishArgs&);

struct LinearKernels {
  const char* target;
  const char* arithmetic;  // "bf16 dot" or "f32 fma"
  // 32-bit elements of packed a that one line of b meets: 2 where pairs are
  // multiplied as f32, else 1.
  size_t elements_per_line;
  TileSums sums;
  TileTable table;
  PackRow pack_row;  // null in a list's row: it follows from elements_per_line
};

// Chosen by a: f32, bf16 or f16.
using LinearKernelSet = KernelSet<LinearKernels, DType>;

// All sets, best first, by the type of the weights.
absl::Span<const LinearKernelSet> LinearKernelSetsBF16();
absl::Span<const LinearKernelSet> LinearKernelSetsF16();
absl::Span<const LinearKernelSet> LinearKernelSetsF32();
// The kernels of the first that runs on this CPU, with pack_row.
LinearKernels GetLinearKernelsBF16(DType a);
LinearKernels GetLinearKernelsF16(DType a);
LinearKernels GetLinearKernelsF32(DType a);

// The parts that do not depend on the weights: pack_row to pairs of bf16 (a is
// bf16) or to f32, and finish.
PackRow GetPackPairs();
PackRow GetPackF32(DType a);
Finish GetFinish(DType c);

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_LINEAR_KERNELS_H_
