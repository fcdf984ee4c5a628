#ifndef QUERN_OPS_LOGITS_LOGITS_KERNELS_H_
#define QUERN_OPS_LOGITS_LOGITS_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

namespace quern {

struct LogitsKernels {
  const char* target;
  // logits[i] = cap * tanh(logits[i] / cap) * scale, i < n.
  void (*cap_and_scale)(float* logits, size_t n, float cap, float scale);
  // logits[i] *= scale, i < n.
  void (*scale)(float* logits, size_t n, float scale);
};

// The kernels of the best instruction set this CPU supports.
LogitsKernels GetLogitsKernels();

}  // namespace quern

#endif  // QUERN_OPS_LOGITS_LOGITS_KERNELS_H_
