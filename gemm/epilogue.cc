#include "quern/gemm/epilogue.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {

absl::string_view LinearActivationName(LinearActivation activation) {
  switch (activation) {
    case LinearActivation::kNone:
      return "none";
    case LinearActivation::kSilu:
      return "silu";
    case LinearActivation::kGelu:
      return "gelu";
    case LinearActivation::kGeluTanh:
      return "gelu_tanh";
    case LinearActivation::kSiluAndMul:
      return "silu_and_mul";
    case LinearActivation::kGeluAndMul:
      return "gelu_and_mul";
    case LinearActivation::kGeluTanhAndMul:
      return "gelu_tanh_and_mul";
    case LinearActivation::kSwigluOaiAndMul:
      return "swigluoai_and_mul";
  }
  return "unknown";
}

absl::Status CheckActivation(absl::string_view op, LinearActivation activation,
                             int64_t n) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(op, "activation", static_cast<int64_t>(activation), 0,
                 static_cast<int64_t>(LinearActivation::kSwigluOaiAndMul)));
  if (IsGated(activation) && n % 2 != 0) {
    return InvalidArgument(op, "n=", n, " is odd; activation ",
                           LinearActivationName(activation),
                           " needs gate and up of n / 2 columns each");
  }
  return absl::OkStatus();
}

absl::Status CheckResidual(absl::string_view op, const AnyTensorView& residual,
                           const AnyTensorView& c) {
  if (residual.rank() == 0) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckInput(op, "residual", residual, c.dtype(),
                                   {c.extent(0), c.extent(1)}));
  return CheckInPlaceOrApart(op, "residual", residual, "c", c);
}

}  // namespace quern
