#include "quern/ops/registry/reference/rope.h"

#include <cmath>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/reference/activation.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

RotaryStyle StyleOf(bool is_neox) {
  return is_neox ? RotaryStyle::kHalves : RotaryStyle::kPairs;
}

ScalarRow NativeHead(const AnyTensorView& v, int64_t b, int64_t t, int64_t h) {
  const int r = v.rank();
  const int64_t at = (r == 4 ? b * v.stride(0) : 0) + t * v.stride(r - 3) +
                     h * v.stride(r - 2);
  const char* const data = static_cast<const char*>(v.data()) +
                           at * static_cast<int64_t>(SizeOf(v.dtype()));
  return ScalarRow(AnyTensorView(v.dtype(), static_cast<const void*>(data), 1,
                                 {v.extent(r - 1)}, {1}),
                   0);
}

void NativeTurn(const RotaryEmbeddingSpec& spec, int64_t j, float cosine,
                float sine, const ScalarRow& x, const ScalarRow& out) {
  const NativeRound rd(spec.dtype);
  const bool halves = spec.style == RotaryStyle::kHalves;
  const int64_t ia = halves ? j : 2 * j;
  const int64_t ib = halves ? j + spec.rot_dim / 2 : 2 * j + 1;
  const float a = x[ia], b = x[ib], c = rd(cosine), s = rd(sine);
  out.Set(ia, rd(a * c) - rd(b * s));
  out.Set(ib, rd(b * c) + rd(a * s));
}

void NativeTurnTo(const RotaryEmbeddingSpec& spec, int64_t j, int64_t position,
                  const ScalarRow& x, const ScalarRow& out) {
  const double angle =
      static_cast<double>(position) *
      std::pow(spec.base, -2.0 * static_cast<double>(j) /
                              static_cast<double>(spec.rot_dim));
  NativeTurn(spec, j, static_cast<float>(std::cos(angle)),
             static_cast<float>(std::sin(angle)), x, out);
}

}  // namespace quern
