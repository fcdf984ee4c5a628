#include "quern/ops/activation/activation_spec.h"

#include <cmath>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

float Softplus(float v) {
  return v > 20.0f ? v : static_cast<float>(std::log1p(std::exp(double{v})));
}

}  // namespace

absl::string_view ActivationName(Activation activation) {
  switch (activation) {
    case Activation::kIdentity:
      return "identity";
    case Activation::kSilu:
      return "silu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kQuickGelu:
      return "quick_gelu";
    case Activation::kRelu2:
      return "relu2";
    case Activation::kFatrelu:
      return "fatrelu";
    case Activation::kXielu:
      return "xielu";
    case Activation::kSwigluOai:
      return "swigluoai";
  }
  return "";
}

absl::Status CheckActivationParams(absl::string_view op, Activation activation,
                                   const ActivationParams& params) {
  switch (activation) {
    case Activation::kFatrelu:
      if (!std::isnan(params.threshold)) return absl::OkStatus();
      return InvalidArgument(op, "threshold=nan; need a number");
    case Activation::kSwigluOai:
      if (!(0x1p-32f <= params.alpha && params.alpha <= 0x1p32f)) {
        return InvalidArgument(op, "alpha=", params.alpha,
                               "; need 2^-32 <= alpha <= 2^32");
      }
      if (params.limit > 0.0f) return absl::OkStatus();
      return InvalidArgument(op, "limit=", params.limit, "; need limit > 0");
    case Activation::kXielu:
      QUERN_RETURN_IF_ERROR(
          CheckFinite(op, "alpha_p", params.alpha_p, "a finite alpha_p"));
      QUERN_RETURN_IF_ERROR(
          CheckFinite(op, "alpha_n", params.alpha_n, "a finite alpha_n"));
      QUERN_RETURN_IF_ERROR(
          CheckFinite(op, "beta", params.beta, "a finite beta"));
      if (params.eps <= 0.0f) {
        return CheckFinite(op, "eps", params.eps, "a finite eps");
      }
      return InvalidArgument(op, "eps=", params.eps, "; need eps <= 0");
    default:
      return absl::OkStatus();
  }
}

ActivationParams XieluParams(float stored_p, float stored_n, float beta,
                             float eps) {
  ActivationParams params;
  params.alpha_p = Softplus(stored_p);
  params.alpha_n = beta + Softplus(stored_n);
  params.beta = beta;
  params.eps = eps;
  return params;
}

}  // namespace quern
