#include "quern/core/sets/avx3.h"
#include "quern/ops/sampling/adjust_logits_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sampling/adjust_logits_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kWordBits = 32;
// Logits between what is changed and what is fetched: 4 KiB.
constexpr size_t kAhead = 32 * kWordBits;

void Mask(float* HWY_RESTRICT logits, size_t n,
          const int32_t* HWY_RESTRICT words) {
  // A vector lies within a word.
  const hn::CappedTag<float, kWordBits> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const size_t lanes = hn::Lanes(d);
  const auto forbidden = hn::Neg(hn::Inf(d));
  const auto bits = hn::Shl(hn::Set(du, 1u), hn::Iota(du, 0));
  for (size_t begin = 0; begin < n; begin += kWordBits) {
    // Words whose tokens are all allowed leave gaps in what is read, over which
    // the CPU's own prefetchers lose it.
    const size_t ahead = begin + kAhead;
    if (ahead < n && words[ahead / kWordBits] != -1) {
      for (size_t i = 0; i < kWordBits; i += 16) {
        hwy::Prefetch(logits + ahead + i);
      }
    }
    const auto word = static_cast<uint32_t>(words[begin / kWordBits]);
    if (word == ~0u) continue;
    const size_t count = HWY_MIN(kWordBits, n - begin);
    for (size_t i = 0; i < count; i += lanes) {
      const size_t part = HWY_MIN(lanes, count - i);
      const auto allowed =
          hn::RebindMask(d, hn::TestBit(hn::Set(du, word >> i), bits));
      float* const at = logits + begin + i;
      if (part == lanes) {
        hn::StoreU(hn::IfThenElse(allowed, hn::LoadU(d, at), forbidden), d, at);
      } else {
        hn::StoreN(hn::IfThenElse(allowed, hn::LoadN(d, at, part), forbidden),
                   d, at, part);
      }
    }
  }
}

AdjustLogitsKernels GetKernels() {
  AdjustLogitsKernels kernels;
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.mask = &Mask;
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
AdjustLogitsKernels GetAdjustLogitsKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
