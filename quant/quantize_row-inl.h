// Per-target include: the loop of the kernels that quantise a row.

// clang-format off
#if defined(QUERN_QUANT_QUANTIZE_ROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_QUANT_QUANTIZE_ROW_INL_H_
#undef QUERN_QUANT_QUANTIZE_ROW_INL_H_
#else
#define QUERN_QUANT_QUANTIZE_ROW_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/prefetch.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Turns n elements of type T into codes q of type Byte. quantizer.Step(i) gives
// a vector of codes from element i on, and quantizer.Part(i, count, q) writes
// at most as many as f32 has lanes. Meanwhile prefetches n elements at `next`.
// With `stream` whole cache lines of q go around the caches.
template <typename T, typename Byte, class Quantizer>
HWY_INLINE void QuantizeRow(const Quantizer& quantizer, size_t n,
                            const void* next, bool stream, void* q) {
  const hn::ScalableTag<Byte> d8;
  const size_t lanes = hn::Lanes(hn::ScalableTag<float>());
  const size_t step = hn::Lanes(d8);
  const T* ahead = static_cast<const T*>(next);
  Byte* to = static_cast<Byte*>(q);

  size_t i = 0;
  if (stream) {
    // Whole cache lines only: a line written in parts would be read first.
    const size_t head =
        HWY_MIN(n, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
    for (; i < head; i += HWY_MIN(lanes, head - i)) {
      quantizer.Part(i, HWY_MIN(lanes, head - i), to);
    }
    for (; i + step <= n; i += step) {
      PrefetchL2(ahead + i, step * sizeof(T));
      hn::Stream(quantizer.Step(i), d8, to + i);
    }
  }
  for (; i + step <= n; i += step) {
    PrefetchL2(ahead + i, step * sizeof(T));
    hn::StoreU(quantizer.Step(i), d8, to + i);
  }
  for (; i < n; i += lanes) quantizer.Part(i, HWY_MIN(lanes, n - i), to);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
