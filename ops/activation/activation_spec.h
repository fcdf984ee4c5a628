#ifndef QUERN_OPS_ACTIVATION_ACTIVATION_SPEC_H_
#define QUERN_OPS_ACTIVATION_ACTIVATION_SPEC_H_

// The functions of one number that models put between their linear layers.
//
//   kIdentity   v
//   kSilu       v / (1 + e^-v)
//   kGelu       v * Phi(v)                      Phi(v) = erfc(-v / sqrt(2)) / 2
//   kGeluTanh   v / 2 * (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3)))
//   kQuickGelu  v / (1 + e^(-1.702 v))
//   kRelu2      max(v, 0)^2
//   kFatrelu    v <= threshold ? 0 : v
//   kXielu      v > 0 ? alpha_p v^2 + beta v
//                     : (expm1(min(v, eps)) - v) alpha_n + beta v
//   kSwigluOai  g / (1 + e^(-alpha g)),  g = min(v, limit)      gated only
//
// Arithmetic is in f32. Each function is off by at most this many units of
// 2^-24, relative, before the one rounding to the output:
//
//   kIdentity, kFatrelu 0      kRelu2 1      kSilu 10
//   kGelu       16 + min(v^2 / 2, 110)
//   kGeluTanh   10 + 4 min(|w|, 110), w = 2 sqrt(2 / pi) (v + 0.044715 v^3)
//   kQuickGelu, kSwigluOai   10 + 1.3 min(|alpha v|, 128): alpha v is rounded
//               (1), is the argument of an exponential (1 / 20), and 1.702 is
//               not a float (0.22)
//   kXielu      8 of alpha_p v^2 + (|expm1(v)| + |v|) alpha_n + beta |v|, as
//               its terms may cancel
//
// kXielu's bound is relative to the sum of its terms' magnitudes, because the
// terms may cancel. All but kIdentity, kFatrelu and kRelu2 may also be off by
// an absolute 140 * 2^-149. NaN gives NaN; -infinity gives the limit, -0, or
// NaN for kXielu, which would be infinity less infinity.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quern {

enum class Activation : uint8_t {
  kIdentity,
  kSilu,
  kGelu,
  kGeluTanh,
  kQuickGelu,
  kRelu2,
  kFatrelu,
  kXielu,
  kSwigluOai,
};

// One of "identity", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu2",
// "fatrelu", "xielu" and "swigluoai".
absl::string_view ActivationName(Activation activation);

// Each activation uses the parameters that name it and ignores the others.
struct ActivationParams {
  float threshold = 0.0f;  // kFatrelu: not NaN
  float alpha = 1.702f;    // kSwigluOai: 2^-32 <= alpha <= 2^32
  float limit = 7.0f;      // kSwigluOai: > 0; clamps gate and up
  // Effective parameters of kXielu, after softplus (see XieluParams). All
  // finite, and eps <= 0. The defaults are those of a bf16 model.
  float alpha_p = 0.8046875f;
  float alpha_n = 0.80078125f;
  float beta = 0.5f;
  float eps = -9.98378e-07f;
};

// InvalidArgument names the parameter and its bound.
absl::Status CheckActivationParams(absl::string_view op, Activation activation,
                                   const ActivationParams& params);

// Makes the effective parameters of kXielu from those that a checkpoint stores,
// which are before softplus: alpha_p = softplus(stored_p), alpha_n = beta +
// softplus(stored_n).
ActivationParams XieluParams(float stored_p, float stored_n, float beta = 0.5f,
                             float eps = -1e-6f);

}  // namespace quern

#endif  // QUERN_OPS_ACTIVATION_ACTIVATION_SPEC_H_
