#ifndef QUERN_OPS_REGISTRY_REFERENCE_ACTIVATION_H_
#define QUERN_OPS_REGISTRY_REFERENCE_ACTIVATION_H_

// The activations as a framework composes them from elementwise operators, each
// of which computes in f32 and rounds to the dtype of the tensors. These are
// the bits of an eager model in 16 bits; our kernels round once and may differ
// from them in the last place. One number at a time, for the providers called
// "reference".

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/quant/scalar_convert.h"

namespace quern {

// Rounds to a dtype: f32, bf16 or f16.
class NativeRound {
 public:
  explicit NativeRound(DType dtype) : dtype_(dtype) {}
  float operator()(float v) const {
    if (dtype_ == DType::kBF16) return ToF32(FromF32<BFloat16>(v));
    if (dtype_ == DType::kF16) return ToF32(FromF32<Float16>(v));
    return v;
  }

 private:
  DType dtype_;
};

enum class NativeActivation : uint8_t {
  kSilu,
  kGelu,
  kGeluTanh,
  kGeluNew,
  kGeluFast,
  kQuickGelu,
  kRelu2,
  kFatrelu,
  kXielu,
};

// rd(activation(v)), rounded after each elementwise operator as the framework
// does. Parameters of xIELU are rounded first, as they are stored.
float NativeActivate(NativeActivation activation,
                     const ActivationParams& params, float v,
                     const NativeRound& rd);

// rd(rd(clamp(up) + 1) * rd(g * rd(sigmoid(rd(alpha * g))))), g = min(gate,
// limit)
float NativeSwigluOai(const ActivationParams& params, float gate, float up,
                      const NativeRound& rd);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_ACTIVATION_H_
