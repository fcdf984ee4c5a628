#ifndef QUERN_OPS_ACTIVATION_ACTIVATION_KERNELS_H_
#define QUERN_OPS_ACTIVATION_ACTIVATION_KERNELS_H_

// Private seam between the plans (plain C++) and the SIMD translation unit: the
// functions that are applied to the blocks of ops/row_block_kernels.h.

#include <cstddef>

#include "quern/ops/activation/activation_spec.h"

namespace quern {

struct ActivationKernels {
  const char* target;
  // out[i] = round(activation(gate[i]) * up[i]), i < n, in one pass over bf16
  // or f32. Null for activations that only work in blocks. out may be gate or
  // up. Meanwhile prefetches n elements at next_gate and next_up, which may be
  // any addresses, or both null. With `stream`, out is complete after a flush.
  using Gated = void (*)(const void* gate, const void* up, size_t n,
                         const void* next_gate, const void* next_up,
                         bool stream, void* out);
  Gated gated_bf16;
  Gated gated_f32;
  // g[i] = activation(g[i]), i < n. kSwigluOai also sets u[i] = clamp(u[i]) +
  // 1; the other activations ignore u.
  void (*apply)(const ActivationParams& params, size_t n, float* g, float* u);
  // sum: the sum of v[i]. sum_squares: the sum of (v[i] - center)^2. The order
  // of the additions depends on n alone.
  float (*sum)(const float* v, size_t n);
  float (*sum_squares)(const float* v, float center, size_t n);
  // v[i] = max(v[i] - cutoff, 0), i < n; NaN stays NaN.
  void (*excess)(float cutoff, size_t n, float* v);
};

// The kernels of the best instruction set this CPU supports.
ActivationKernels GetActivationKernels(Activation activation);

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_ACTIVATION_KERNELS_H_
