#ifndef QUERN_OPS_SPECULATION_RECOVERED_TOKENS_KERNELS_H_
#define QUERN_OPS_SPECULATION_RECOVERED_TOKENS_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstdint>

namespace quern {

// The largest product so far, and its place.
struct BestToken {
  float value;
  int64_t token;
};

struct RecoveredTokensKernels {
  const char* target;
  // The first v in [begin, end) with the largest w[v] * inv_q[v], if that is
  // more than best.value, else `best`. end < 2^31.
  // difference: w[v] = max(p[v] - q[v], 0), and 0 for NaN. probability: w = p.
  BestToken (*difference)(const float* p, const float* q, const float* inv_q,
                          int64_t begin, int64_t end, BestToken best);
  BestToken (*probability)(const float* p, const float* inv_q, int64_t begin,
                           int64_t end, BestToken best);
};

// The kernels of the best instruction set this CPU supports.
RecoveredTokensKernels GetRecoveredTokensKernels();

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_RECOVERED_TOKENS_KERNELS_H_
