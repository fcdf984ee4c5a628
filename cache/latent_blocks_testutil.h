#ifndef QUERN_CACHE_LATENT_BLOCKS_TESTUTIL_H_
#define QUERN_CACHE_LATENT_BLOCKS_TESTUTIL_H_

// Latents with a scale for each block (KvScaling::kPerBlock) in double: what
// write_kv.h says is stored, by trial of every exponent, and what a cache
// means.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// The exponent byte of a block.
inline uint8_t LatentExponent(const std::vector<double>& block) {
  double most = 0;
  for (const double x : block) {
    if (!std::isfinite(x)) return 255;
    most = std::max(most, std::abs(x));
  }
  int exponent = 10;
  while (exponent < 246 && most > 448 * std::ldexp(1.0, exponent - 127)) {
    ++exponent;
  }
  return static_cast<uint8_t>(exponent);
}

// The code of an element of a block with this exponent byte.
inline uint8_t LatentCode(double x, uint8_t exponent) {
  if (exponent == 255) return 0x7F;
  return FromDouble<Float8E4M3>(std::ldexp(x, 127 - exponent),
                                Overflow::kSaturate)
      .bits;
}

// What a code means under an exponent byte.
inline double LatentValue(uint8_t code, uint8_t exponent) {
  if (exponent == 255) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(ToDouble(Float8E4M3{code}), exponent - 127);
}

// The key of a token, all of its elements.
inline std::vector<double> LatentRow(const KvCacheView& cache, int64_t page,
                                     int64_t head, int64_t token) {
  const KvLayout& layout = cache.layout();
  const uint8_t* keys = cache.K(page, head);
  std::vector<double> row;
  for (int64_t d = 0; d < layout.head_dim(); ++d) {
    const uint8_t* at = keys + layout.KOffset(token, d);
    if (d < layout.v_head_dim()) {
      row.push_back(LatentValue(
          *at, keys[layout.ExponentOffset(token, d / KvLayout::kScaleBlock)]));
    } else {
      BFloat16 element;
      std::memcpy(&element, at, sizeof(element));
      row.push_back(ToDouble(element));
    }
  }
  return row;
}

}  // namespace quern

#endif  // QUERN_CACHE_LATENT_BLOCKS_TESTUTIL_H_
