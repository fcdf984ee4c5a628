#include "quern/ops/rope/rotary_scaling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "rotary_embedding";
const double kTwoPi = 2.0 * std::acos(-1.0);

absl::Status CheckFactors(absl::string_view field,
                          const std::vector<double>& factors, int64_t half) {
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, field,
                                   static_cast<int64_t>(factors.size()), half,
                                   "rot_dim has halves"));
  const std::string name = absl::StrCat("scaling.", field);
  for (const double factor : factors) {
    QUERN_RETURN_IF_ERROR(CheckPositive(kOp, name, factor));
  }
  return absl::OkStatus();
}

absl::Status CheckScaling(int64_t rot_dim, double base,
                          const RotaryScaling& s) {
  if (s.kind == RotaryScalingKind::kNone) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckPositive(kOp, "scaling.factor", s.factor));
  if (s.kind == RotaryScalingKind::kLinear) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "scaling.original", s.original, 2));
  switch (s.kind) {
    case RotaryScalingKind::kDynamicNtk:
      QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "scaling.target", s.target, 1));
      QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "rot_dim", rot_dim, 4));
      return CheckPositive(kOp,
                           "scaling.factor * target / original - (factor - 1)",
                           s.factor * static_cast<double>(s.target) /
                                   static_cast<double>(s.original) -
                               (s.factor - 1.0));
    case RotaryScalingKind::kLlama3:
      QUERN_RETURN_IF_ERROR(CheckPositive(kOp, "scaling.low_freq", s.low_freq));
      return CheckPositive(kOp, "scaling.high_freq - low_freq",
                           s.high_freq - s.low_freq);
    case RotaryScalingKind::kYarn:
      QUERN_RETURN_IF_ERROR(
          CheckPositive(kOp, "scaling.beta_fast", s.beta_fast));
      QUERN_RETURN_IF_ERROR(
          CheckPositive(kOp, "scaling.beta_slow", s.beta_slow));
      QUERN_RETURN_IF_ERROR(
          CheckPositive(kOp, "scaling.attention_factor", s.attention_factor));
      QUERN_RETURN_IF_ERROR(
          CheckFinite(kOp, "scaling.extrapolation", s.extrapolation));
      QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "scaling.mscale", s.mscale));
      QUERN_RETURN_IF_ERROR(
          CheckNotNegative(kOp, "scaling.mscale_all_dim", s.mscale_all_dim));
      // YarnDim divides by ln base.
      return CheckPositive(kOp, "scaling.ln base", std::log(base));
    case RotaryScalingKind::kLongRope:
      QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "scaling.target", s.target, 1));
      QUERN_RETURN_IF_ERROR(
          CheckFactors("short_factors", s.short_factors, rot_dim / 2));
      return CheckFactors("long_factors", s.long_factors, rot_dim / 2);
    default:
      return absl::OkStatus();
  }
}

double Llama3(double w, const RotaryScaling& s) {
  const auto original = static_cast<double>(s.original);
  const double wavelength = kTwoPi / w;
  if (wavelength < original / s.high_freq) return w;
  if (wavelength > original / s.low_freq) return w / s.factor;
  const double t =
      (original / wavelength - s.low_freq) / (s.high_freq - s.low_freq);
  return (1.0 - t) * w / s.factor + t * w;
}

// The (fractional) pair index whose angle makes `rotations` turns over the
// original context.
double YarnDim(double rotations, int64_t rot_dim, double base,
               const RotaryScaling& s) {
  return static_cast<double>(rot_dim) *
         std::log(static_cast<double>(s.original) / (rotations * kTwoPi)) /
         (2.0 * std::log(base));
}

struct YarnRange {
  double low;
  double high;
};
YarnRange YarnRangeOf(int64_t rot_dim, double base, const RotaryScaling& s) {
  YarnRange range = {YarnDim(s.beta_fast, rot_dim, base, s),
                     YarnDim(s.beta_slow, rot_dim, base, s)};
  if (s.truncate) range = {std::floor(range.low), std::ceil(range.high)};
  range.low = std::max(range.low, 0.0);
  range.high = std::min(range.high, static_cast<double>(rot_dim - 1));
  if (range.low == range.high) range.high += 0.001;
  return range;
}

double Yarn(double w, int64_t j, const YarnRange& range,
            const RotaryScaling& s) {
  const double ramp = std::clamp(
      (static_cast<double>(j) - range.low) / (range.high - range.low), 0.0,
      1.0);
  const double mask = (1.0 - ramp) * s.extrapolation;
  return w / s.factor * (1.0 - mask) + w * mask;
}

double YarnMagnitude(const RotaryScaling& s) {
  const auto g = [&](double m) {
    return s.factor <= 1.0 ? 1.0 : 0.1 * m * std::log(s.factor) + 1.0;
  };
  const double over = s.mscale == 0.0 && s.mscale_all_dim == 0.0
                          ? g(1.0)
                          : g(s.mscale) / g(s.mscale_all_dim);
  return over * s.attention_factor;
}

double DynamicNtkBase(int64_t rot_dim, double base, const RotaryScaling& s) {
  const auto dim = static_cast<double>(rot_dim);
  const double grown = s.factor * static_cast<double>(s.target) /
                           static_cast<double>(s.original) -
                       (s.factor - 1.0);
  return base * std::pow(grown, dim / (dim - 2.0));
}

double LongRopeMagnitude(const RotaryScaling& s) {
  if (s.target <= s.original) return 1.0;
  const auto original = static_cast<double>(s.original);
  return std::sqrt(1.0 + std::log(static_cast<double>(s.target) / original) /
                             std::log(original));
}

}  // namespace

absl::StatusOr<RotaryFrequencies> ComputeRotaryFrequencies(
    int64_t rot_dim, double base, const RotaryScaling& s) {
  QUERN_RETURN_IF_ERROR(CheckScaling(rot_dim, base, s));
  const bool yarn = s.kind == RotaryScalingKind::kYarn;
  const YarnRange range =
      yarn ? YarnRangeOf(rot_dim, base, s) : YarnRange{0.0, 1.0};
  if (s.kind == RotaryScalingKind::kDynamicNtk) {
    base = DynamicNtkBase(rot_dim, base, s);
  }
  RotaryFrequencies result;
  for (int64_t j = 0; j < rot_dim / 2; ++j) {
    const double w = std::pow(
        base, -2.0 * static_cast<double>(j) / static_cast<double>(rot_dim));
    double scaled = w;
    switch (s.kind) {
      case RotaryScalingKind::kNone:
      case RotaryScalingKind::kDynamicNtk:
        break;
      case RotaryScalingKind::kLinear:
        scaled = w / s.factor;
        break;
      case RotaryScalingKind::kLlama3:
        scaled = Llama3(w, s);
        break;
      case RotaryScalingKind::kYarn:
        scaled = Yarn(w, j, range, s);
        break;
      case RotaryScalingKind::kLongRope:
        scaled = w / (s.target > s.original
                          ? s.long_factors
                          : s.short_factors)[static_cast<size_t>(j)];
        break;
    }
    result.frequencies.push_back(scaled);
  }
  if (yarn) result.magnitude = YarnMagnitude(s);
  if (s.kind == RotaryScalingKind::kLongRope) {
    result.magnitude = LongRopeMagnitude(s);
  }
  // Extreme values of base or of the factors can overflow a double.
  for (const double frequency : result.frequencies) {
    if (!std::isfinite(frequency)) {
      return InvalidArgument(kOp, "base=", base, ", scaling.factor=", s.factor,
                             " make a frequency of ", frequency,
                             "; need finite ones");
    }
  }
  if (!(result.magnitude > 0.0 && std::isfinite(result.magnitude))) {
    return InvalidArgument(kOp, "scaling makes a magnitude of ",
                           result.magnitude, "; need a finite number > 0");
  }
  return result;
}

}  // namespace quern
