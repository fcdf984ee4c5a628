#ifndef QUERN_OPS_ROPE_ROTARY_SCALING_H_
#define QUERN_OPS_ROPE_ROTARY_SCALING_H_

// How models stretch rotary embeddings to contexts longer than they were
// trained on: they change the frequencies, and some multiply cosine and sine by
// a magnitude. With w[j] = base^(-2j / rot_dim), 0 <= j < rot_dim / 2, and s =
// factor:
//
//   kNone        w
//   kLinear      w / s
//   kDynamicNtk  b^(-2j / rot_dim),
//                b = base * u^(rot_dim / (rot_dim - 2)),
//                u = s * target / original - (s - 1)
//   kLlama3      w                     where l < original / high_freq
//                w / s                 where l > original / low_freq
//                (1 - t) w / s + t w   between,
//                l = 2 pi / w,  the wavelength
//                t = (original / l - low_freq) / (high_freq - low_freq)
//   kYarn        (1 - z) w / s + z w,
//                z = (1 - ramp[j]) * extrapolation
//                ramp[j] = clamp((j - low) / (high - low), 0, 1)
//                low = floor(dim(beta_fast)), at least 0
//                high = ceil(dim(beta_slow)), at most rot_dim - 1
//                dim(r) = rot_dim ln(original / (2 pi r)) / (2 ln base)
//                without floor and ceil where `truncate` is false (gpt-oss)
//   kLongRope    w / long_factors[j]   where target > original
//                w / short_factors[j]  elsewhere
//
// The magnitude, a factor of cosine and sine, is 1 except for these kinds:
//
//   kYarn        attention_factor * g(1), or where mscale is given (DeepSeek)
//                attention_factor * g(mscale) / g(mscale_all_dim)
//                g(x) = 0.1 x ln s + 1,  1 if s <= 1
//   kLongRope    sqrt(1 + ln(target / original) / ln original),
//                1 if target <= original
//
// original is the context length that the model was trained on, target the
// length that it is to serve.

#include <cstdint>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"

namespace quern {

enum class RotaryScalingKind : uint8_t {
  kNone,
  kLinear,
  kDynamicNtk,
  kLlama3,
  kYarn,
  kLongRope,
};

struct RotaryScaling {
  RotaryScalingKind kind = RotaryScalingKind::kNone;
  double factor = 1.0;    // finite, > 0
  int64_t original = 0;   // >= 2; every kind but kNone and kLinear
  int64_t target = 0;     // >= 1; kDynamicNtk and kLongRope
  double low_freq = 1.0;  // kLlama3: 0 < low_freq < high_freq
  double high_freq = 4.0;
  double beta_fast = 32.0;        // kYarn, > 0
  double beta_slow = 1.0;         // kYarn, > 0
  double extrapolation = 1.0;     // kYarn, finite
  bool truncate = true;           // kYarn: the range ends at whole pairs
  double attention_factor = 1.0;  // kYarn, > 0
  double mscale = 0.0;            // kYarn, >= 0; 0 for both: not given
  double mscale_all_dim = 0.0;
  std::vector<double> short_factors;  // kLongRope: rot_dim / 2 of each, > 0
  std::vector<double> long_factors;

  // References to all fields. A new field does not compile until it is here.
  auto Tied() const {
    const auto& [k, f, o, t, lf, hf, bf, bs, e, tr, af, m, ma, sf, lg] = *this;
    return std::tie(k, f, o, t, lf, hf, bf, bs, e, tr, af, m, ma, sf, lg);
  }
  friend bool operator==(const RotaryScaling& a, const RotaryScaling& b) {
    return a.Tied() == b.Tied();
  }
};

struct RotaryFrequencies {
  std::vector<double> frequencies;  // rot_dim / 2
  double magnitude = 1.0;
};

// Computes the frequencies, and the magnitude, of rot_dim / 2 pairs. rot_dim is
// even and >= 2, base is finite and > 0. InvalidArgument names the field, its
// value and the bound; also returned if a frequency or the magnitude would not
// be a finite number.
absl::StatusOr<RotaryFrequencies> ComputeRotaryFrequencies(
    int64_t rot_dim, double base, const RotaryScaling& scaling);

}  // namespace quern

#endif  // QUERN_OPS_ROPE_ROTARY_SCALING_H_
