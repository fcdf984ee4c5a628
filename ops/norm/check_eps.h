#ifndef QUERN_OPS_NORM_CHECK_EPS_H_
#define QUERN_OPS_NORM_CHECK_EPS_H_

// What every layer with an RMS norm asks of its eps.

#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"

namespace quern {

// InvalidArgument unless eps is finite and 0 or more.
inline absl::Status CheckEps(absl::string_view op, float eps) {
  if (eps >= 0.0f && std::isfinite(eps)) return absl::OkStatus();
  return InvalidArgument(op, "eps=", eps, "; need finite eps >= 0");
}

}  // namespace quern

#endif  // QUERN_OPS_NORM_CHECK_EPS_H_
