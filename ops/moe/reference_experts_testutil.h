#ifndef QUERN_OPS_MOE_REFERENCE_EXPERTS_TESTUTIL_H_
#define QUERN_OPS_MOE_REFERENCE_EXPERTS_TESTUTIL_H_

// ops/moe/experts.h in double, with a bound on the error of each result. The
// bound follows the roundings of the header: those of the sums over k, which
// are (k + 1) * 2^-23 of the sum of magnitudes, carried through the activation,
// whose slope is at most 1.1; one of h; and those of the sum over slots.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/gemm/epilogue.h"
#include "quern/ops/moe/experts.h"
#include "quern/testing/reference_activation.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {

// What one expert's weights are in double; biases may be empty.
struct ReferenceExpert {
  std::vector<double> gate_up;  // [n, hidden]
  std::vector<double> gate_up_bias;
  std::vector<double> down;  // [hidden, inter]
  std::vector<double> down_bias;
  bool int8_rows = false;  // the format is kI8Channel
};

struct ReferenceTerms {
  std::vector<double> value;
  std::vector<double> error;  // at most
};

inline double ReferenceUnit(DType dtype) {
  return dtype == DType::kF32   ? 0x1p-24
         : dtype == DType::kF16 ? 0x1p-11
                                : 0x1p-8;
}

// x[k] times w[n, k], plus bias.
inline ReferenceTerms ReferenceProduct(ReferenceTerms x,
                                       const std::vector<double>& w,
                                       const std::vector<double>& bias,
                                       bool int8_rows) {
  double largest = 0;
  for (size_t i = 0; i < x.value.size() && int8_rows; ++i) {
    largest = std::max(largest, std::abs(x.value[i]) + x.error[i]);
  }
  for (double& error : x.error) error += 0.51 * largest / 127;
  const auto k = static_cast<int64_t>(x.value.size());
  const int64_t n = static_cast<int64_t>(w.size()) / k;
  ReferenceTerms y = {ReferenceLinear(1, n, k, x.value, w, bias), {}};
  std::vector<double> most = Magnitudes(x.value);
  for (size_t i = 0; i < most.size(); ++i) most[i] += x.error[i];
  const std::vector<double> carried =
      ReferenceLinear(1, n, k, x.error, Magnitudes(w));
  y.error = ReferenceLinear(1, n, k, most, Magnitudes(w), Magnitudes(bias));
  for (size_t i = 0; i < y.error.size(); ++i) {
    y.error[i] =
        carried[i] + (1.25 * static_cast<double>(k) + 7) * 0x1p-23 * y.error[i];
  }
  return y;
}

// act, and the product with up where gated. kNone, kSilu, kSiluAndMul and
// kSwigluOaiAndMul.
inline ReferenceTerms ReferenceActivated(LinearActivation activation,
                                         const ReferenceTerms& v, DType x) {
  const bool gated = IsGated(activation);
  const size_t n = v.value.size() / (gated ? 2 : 1);
  ReferenceTerms h;
  for (size_t i = 0; i < n; ++i) {
    double value = v.value[i], error = v.error[i];
    const bool oai = activation == LinearActivation::kSwigluOaiAndMul;
    if (oai) {
      value = ReferenceQuickGelu(std::min(value, 7.0));
      error = 1.1 * error + 179 * 0x1p-24 * std::abs(value) + 0x1p-120;
    } else if (activation != LinearActivation::kNone) {
      value = ReferenceSilu(value);
      error = 1.1 * error + 11 * 0x1p-24 * std::abs(value) + 0x1p-120;
    }
    if (gated) {
      double up = v.value[n + i], up_error = v.error[n + i];
      if (oai) {
        up = std::clamp(up, -7.0, 7.0) + 1;
        up_error += 8 * 0x1p-24;
      }
      error = error * (std::abs(up) + up_error) + std::abs(value) * up_error;
      value *= up;
    }
    error += 2 * ReferenceUnit(x) * (std::abs(value) + error);
    h.value.push_back(value);
    h.error.push_back(error);
  }
  return h;
}

// Row t of x and of out. `weights` and `experts` have an element for each slot;
// an expert of -1 adds nothing. `add` is of hidden elements or empty.
inline ReferenceTerms ReferenceToken(const ExpertsSpec& spec,
                                     const std::vector<ReferenceExpert>& all,
                                     const std::vector<double>& x,
                                     const std::vector<int32_t>& experts,
                                     const std::vector<double>& weights,
                                     const std::vector<double>& add = {}) {
  ReferenceTerms out = {std::vector<double>(x.size()),
                        std::vector<double>(x.size())};
  for (size_t j = 0; j < experts.size(); ++j) {
    if (experts[j] < 0) continue;
    const ReferenceExpert& expert = all[static_cast<size_t>(experts[j])];
    ReferenceTerms in = {x, std::vector<double>(x.size())};
    for (size_t i = 0; i < x.size() && spec.weight_on_input; ++i) {
      in.value[i] *= weights[j];
      in.error[i] = 2 * ReferenceUnit(spec.x) * std::abs(in.value[i]);
    }
    const ReferenceTerms y = ReferenceProduct(
        ReferenceActivated(
            spec.activation,
            ReferenceProduct(in, expert.gate_up, expert.gate_up_bias,
                             expert.int8_rows),
            spec.x),
        expert.down, expert.down_bias, expert.int8_rows);
    const double w = spec.weight_on_input ? 1.0 : weights[j];
    for (size_t i = 0; i < x.size(); ++i) {
      out.value[i] += w * y.value[i];
      out.error[i] += std::abs(w) * y.error[i] +
                      static_cast<double>(experts.size() + 1) * 0x1p-23 *
                          std::abs(w) * (std::abs(y.value[i]) + y.error[i]);
    }
  }
  for (size_t i = 0; i < x.size(); ++i) {
    if (!add.empty()) out.value[i] += add[i];
    const double most = std::abs(out.value[i]) + out.error[i] +
                        (add.empty() ? 0 : std::abs(add[i]));
    out.error[i] += (0x1p-23 + ReferenceUnit(spec.out)) * most;
  }
  return out;
}

}  // namespace quern

#endif  // QUERN_OPS_MOE_REFERENCE_EXPERTS_TESTUTIL_H_
