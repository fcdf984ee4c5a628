#ifndef QUERN_OPS_PARALLEL_RANK_SUM_KERNELS_H_
#define QUERN_OPS_PARALLEL_RANK_SUM_KERNELS_H_

// Private seam between the communicators (plain C++) and the SIMD translation
// unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

// out[i] = round((in[0][i] + in[1][i]) + ...), i < n, ranks >= 1. Sums in f32,
// in the order of ranks, and rounds once. out may be one of in.
using RankSum = void (*)(const void* const* in, size_t ranks, void* out,
                         size_t n);

struct RankSumKernels {
  const char* target;
  RankSum f32;
  RankSum bf16;
  RankSum f16;

  RankSum For(DType dtype) const {
    return dtype == DType::kF32 ? f32 : dtype == DType::kBF16 ? bf16 : f16;
  }
};

// The kernels of the best instruction set this CPU supports.
RankSumKernels GetRankSumKernels();

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_RANK_SUM_KERNELS_H_
