#ifndef QUERN_OPS_REGISTRY_REFERENCE_QUANTISED_ROW_H_
#define QUERN_OPS_REGISTRY_REFERENCE_QUANTISED_ROW_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "quern/ops/registry/bound_rows.h"
#include "quern/quant/int8_quantize.h"

namespace quern {

// The scale and codes of a row of k elements by quant/int8_quantize.h, per
// token and without zero points. Codes are whole numbers in [-127, 127], in
// double.
class QuantisedRow {
 public:
  QuantisedRow(const ScalarRow& x, int64_t k) : x_(x) {
    float most = 0;
    bool finite = true;
    for (int64_t i = 0; i < k; ++i) {
      finite = finite && std::isfinite(x[i]);
      most = std::max(most, std::abs(x[i]));
    }
    scale_ = std::max(most / 127.0f, Int8QuantizePlan::kMinScale);
    if (most < std::numeric_limits<float>::min()) scale_ = 1.0f;
    if (!finite) scale_ = std::numeric_limits<float>::quiet_NaN();
    inverse_ = finite ? 1.0f / scale_ : 0.0f;
  }
  float scale() const { return scale_; }
  double operator[](int64_t i) const {
    if (inverse_ == 0.0f) return 0;
    const double code = std::nearbyint(double{x_[i]} * double{inverse_});
    return std::min(127.0, std::max(-128.0, code));
  }

 private:
  const ScalarRow& x_;
  float scale_;
  float inverse_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_QUANTISED_ROW_H_
