#include "quern/ops/registry/reference/merge_states.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Where the log-sum-exp of a token and a head lies.
float* LseAt(const MergeStatesSpec& spec, const AnyTensorView& v, int64_t token,
             int64_t head) {
  const int64_t at = spec.lse_by_head ? head * v.stride(0) + token
                                      : token * v.stride(0) + head;
  return static_cast<float*>(const_cast<void*>(v.data())) + at;
}

// An lse of +inf is that of a part without keys, as -inf is.
double PartLse(float lse) { return double{lse == kInfinity ? -lse : lse}; }

// The weight of a part `below` the larger one; 0 below the least normal f32.
double WeightBelow(double below) {
  const double w = std::exp(-below);
  return w < double{std::numeric_limits<float>::min()} ? 0.0 : w;
}

}  // namespace

void NativeMergeStates(const MergeStatesSpec& spec,
                       const MergeStatesArgs& args) noexcept {
  const int64_t tokens = args.out.extent(0);
  const int64_t a_tokens = spec.a_tokens < 0 ? tokens : spec.a_tokens;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < spec.heads; ++h) {
      const float b_lse = *LseAt(spec, args.b.lse, t, h);
      double weight_a = 0, weight_b = 1;
      float merged = b_lse;
      if (t < a_tokens) {
        const double a = PartLse(*LseAt(spec, args.a.lse, t, h));
        const double b = PartLse(b_lse);
        const double most = std::max(a, b);
        if (std::isnan(a) || std::isnan(b)) {
          weight_a = weight_b = std::numeric_limits<double>::quiet_NaN();
          merged = std::numeric_limits<float>::quiet_NaN();
        } else if (std::isinf(most)) {
          weight_b = 0;
          merged = -kInfinity;
        } else {
          weight_a = WeightBelow(most - a);
          weight_b = WeightBelow(most - b);
          const double sum = weight_a + weight_b;
          merged = static_cast<float>(most + std::log(sum));
          weight_a /= sum;
          weight_b /= sum;
        }
      }
      const int64_t row = t * spec.heads + h;
      const ScalarRow a(args.a.out, row), b(args.b.out, row);
      const ScalarRow out(args.out, row);
      for (int64_t d = 0; d < spec.head_dim; ++d) {
        // What has weight 0 is not read, because it may hold anything.
        const double x = weight_a == 0 ? 0 : weight_a * double{a[d]};
        const double y = weight_b == 0 ? 0 : weight_b * double{b[d]};
        out.Set(d, static_cast<float>(x + y));
      }
      if (args.lse.rank() != 0) *LseAt(spec, args.lse, t, h) = merged;
    }
  }
}

}  // namespace quern
