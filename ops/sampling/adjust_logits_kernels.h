#ifndef QUERN_OPS_SAMPLING_ADJUST_LOGITS_KERNELS_H_
#define QUERN_OPS_SAMPLING_ADJUST_LOGITS_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>
#include <cstdint>

namespace quern {

struct AdjustLogitsKernels {
  const char* target;
  // logits[i] = -infinity, i < n, unless bit i % 32 of words[i / 32] is 1.
  void (*mask)(float* logits, size_t n, const int32_t* words);
};

// The kernels of the best instruction set this CPU supports.
AdjustLogitsKernels GetAdjustLogitsKernels();

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_ADJUST_LOGITS_KERNELS_H_
