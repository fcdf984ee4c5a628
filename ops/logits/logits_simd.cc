#include "quern/core/sets/avx3.h"
#include "quern/ops/logits/logits_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logits/logits_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/core/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

// tanh(v). With m = exp(-2|v|) - 1, tanh |v| = -m / (2 + m), which does not
// cancel near 0.
HWY_INLINE VF Tanh(VF v) {
  const DF d;
  const auto lowest = hn::Set(d, kExpLowest);
  const auto x = hn::Mul(hn::Set(d, -2.0f), hn::Abs(v));
  const auto m =
      ExpM1NonPositive(d, hn::IfThenElse(hn::Lt(x, lowest), lowest, x));
  const auto magnitude = hn::Div(hn::Neg(m), hn::Add(m, hn::Set(d, 2.0f)));
  return hn::CopySign(magnitude, v);
}

#if HWY_NATIVE_FMA && HWY_ARCH_X86
// Caps between these go the short way, in which no power of two and no
// reciprocal leaves the range of f32.
constexpr float kLeastShortCap = 0x1p-60f;
constexpr float kMostShortCap = 0x1p60f;

// cap * tanh(v / cap) * scale, for a vector of logits. Beyond 21 caps tanh is 1
// in f32.
class ShortCap {
 public:
  HWY_INLINE ShortCap(float cap, float scale)
      : cap_(hn::Set(DF(), cap)),
        inverse_(hn::Set(DF(), 1.0f / cap)),
        most_(hn::Set(DF(), 21.0f * cap)),
        scale_(hn::Set(DF(), scale)) {}

  HWY_INLINE VF operator()(VF v) const {
    const auto tanh = hn::CopySign(TanhMagnitude(Quotient(v)), v);
    return hn::Mul(hn::Mul(tanh, cap_), scale_);
  }

 private:
  // v / cap rounded to nearest, by one step from the product with fl(1 / cap)
  // (Markstein).
  HWY_INLINE VF Quotient(VF v) const {
    // These instructions return their second operand if either is NaN.
    v = hn::Max(hn::Neg(most_), hn::Min(most_, v));
    const auto q = hn::Mul(v, inverse_);
    return hn::MulAdd(hn::NegMulAdd(q, cap_, v), inverse_, q);
  }
  // tanh t but for the sign, with e^x - 1 for x = -2|t| in [-43, 0]. e^x = 2^k
  // e^r: what the nearest f32 to ln(2) is off by counts only where e^x does
  // not. e^r - 1 is r
  // + r^2 Q(r) within 2.1 units of 2^-24, Q of degree 4 by Remez.
  static HWY_INLINE VF TanhMagnitude(VF t) {
    const DF d;
    const hn::RebindToUnsigned<DF> du;
    const auto x = hn::Mul(hn::Set(d, -2.0f), hn::Abs(t));
    // The unit in the last place is 1: the lower bits are k + 127.
    const auto round = hn::Set(d, 0x1.8p23f + 127.0f);
    const auto rounded = hn::MulAdd(x, hn::Set(d, 1.44269504f), round);
    const auto k = hn::Sub(rounded, round);
    const auto r = hn::NegMulAdd(k, hn::Set(d, 0.693147182f), x);
    // Terms in pairs, whose latency is two thirds of Horner's.
    const auto r2 = hn::Mul(r, r);
    const auto p34 =
        hn::MulAdd(r, hn::Set(d, 0.000994135026f), hn::Set(d, 0.00836315415f));
    const auto p12 =
        hn::MulAdd(r, hn::Set(d, 0.0417263206f), hn::Set(d, 0.166665772f));
    const auto p14 = hn::MulAdd(p34, r2, p12);
    const auto q =
        hn::MulAdd(hn::MulAdd(p14, r, hn::Set(d, 0.499998209f)), r2, r);
    const auto power =
        hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, rounded)));
    const auto one = hn::Set(d, 1.0f);
    // e^x - 1 over e^x + 1.
    return hn::Div(hn::MulAdd(q, power, hn::Sub(power, one)),
                   hn::MulAdd(q, power, hn::Add(power, one)));
  }

  VF cap_, inverse_, most_, scale_;
};

void CapAndScaleShort(float* logits, size_t n, float cap, float scale) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const ShortCap capped(cap, scale);
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const auto a = capped(hn::LoadU(d, logits + i));
    const auto b = capped(hn::LoadU(d, logits + i + lanes));
    hn::StoreU(a, d, logits + i);
    hn::StoreU(b, d, logits + i + lanes);
  }
  for (; i < n; i += lanes) {
    const size_t part = HWY_MIN(lanes, n - i);
    hn::StoreN(capped(hn::LoadN(d, logits + i, part)), d, logits + i, part);
  }
}
#endif

void CapAndScale(float* logits, size_t n, float cap, float scale) {
#if HWY_NATIVE_FMA && HWY_ARCH_X86
  if (kLeastShortCap <= cap && cap <= kMostShortCap) {
    return CapAndScaleShort(logits, n, cap, scale);
  }
#endif
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto vcap = hn::Set(d, cap);
  const auto vscale = hn::Set(d, scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto t = Tanh(hn::Div(hn::LoadU(d, logits + i), vcap));
    hn::StoreU(hn::Mul(hn::Mul(t, vcap), vscale), d, logits + i);
  }
  if (i < n) {
    const auto t = Tanh(hn::Div(hn::LoadN(d, logits + i, n - i), vcap));
    hn::StoreN(hn::Mul(hn::Mul(t, vcap), vscale), d, logits + i, n - i);
  }
}

void Scale(float* logits, size_t n, float scale) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto vscale = hn::Set(d, scale);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, logits + i), vscale), d, logits + i);
  }
  if (i < n) {
    hn::StoreN(hn::Mul(hn::LoadN(d, logits + i, n - i), vscale), d, logits + i,
               n - i);
  }
}

LogitsKernels GetKernels() {
  LogitsKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.cap_and_scale = &CapAndScale;
  kernels.scale = &Scale;
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
LogitsKernels GetLogitsKernels() { return HWY_DYNAMIC_DISPATCH(GetKernels)(); }
}  // namespace quern
#endif  // HWY_ONCE
