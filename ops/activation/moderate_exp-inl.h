// Per-target include: 1 + e^-w for moderate w, as activations need it.

// clang-format off
#if defined(QUERN_OPS_ACTIVATION_MODERATE_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_OPS_ACTIVATION_MODERATE_EXP_INL_H_
#undef QUERN_OPS_ACTIVATION_MODERATE_EXP_INL_H_
#else
#define QUERN_OPS_ACTIVATION_MODERATE_EXP_INL_H_
#endif
// clang-format on

#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The cap keeps every block a multiple of the vector, however long vectors are.
using DF = hn::CappedTag<float, 64>;
using VF = hn::Vec<DF>;
using DC = hn::Repartition<uint16_t, DF>;

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
// Computes e^-w + 1 for |w| <= 64 by the table of ExpByTable. In this range no
// power of two overflows, so an integer addition sets the exponent in place of
// the scaling instruction, which takes two cycles.
class ModerateExp {
 public:
  HWY_INLINE ModerateExp() {
    const DI di;
    const DF d;
    // Table entries less their index: PlusOne adds the exponent and, in the
    // bits below it, the index.
    const auto i = hn::ShiftLeft<18>(hn::Iota(di, 0));
    lower_ = hn::Sub(hn::BitCast(di, hn::Load(d, kExpTable)), i);
    upper_ = hn::Sub(hn::BitCast(di, hn::Load(d, kExpTable + 16)),
                     hn::Add(i, hn::Set(di, 16 << 18)));
  }
  HWY_INLINE VF PlusOne(VF w) const {
    const DF d;
    const DI di;
    const auto round = hn::Set(d, 0x1.8p18f);
    const auto rounded = hn::MulAdd(w, hn::Set(d, -1.44269504f), round);
    const auto bits = hn::BitCast(di, rounded);
    const auto entry = hn::Vec<DI>{
        _mm512_permutex2var_epi32(lower_.raw, bits.raw, upper_.raw)};
    const auto power = hn::BitCast(d, hn::Add(entry, hn::ShiftLeft<18>(bits)));
    const auto k = hn::Sub(rounded, round);
    const auto minus_r = hn::MulAdd(k, hn::Set(d, 0.693147182f), w);
    const auto s = hn::Sub(hn::Set(d, 1.00002204f), minus_r);
    const auto q = hn::MulAdd(s, s, hn::Set(d, 0.99997062f));
    return hn::MulAdd(q, power, hn::Set(d, 1.0f));
  }

 private:
  using DI = hn::RebindToSigned<DF>;
  hn::Vec<DI> lower_, upper_;
};
#elif HWY_NATIVE_FMA
// Four vectors, on which each step is done before the next one. A core with
// short queues overlaps four chains of operations that way, and hardly more
// than one where they follow one another.
struct Four {
  VF a, b, c, d;
};
HWY_INLINE VF Power(VF v) {
  const hn::RebindToUnsigned<DF> du;
  return hn::BitCast(DF(), hn::ShiftLeft<23>(hn::BitCast(du, v)));
}
HWY_INLINE Four Power(const Four& v) {
  return {Power(v.a), Power(v.b), Power(v.c), Power(v.d)};
}
HWY_INLINE Four Sub(const Four& x, VF y) {
  return {hn::Sub(x.a, y), hn::Sub(x.b, y), hn::Sub(x.c, y), hn::Sub(x.d, y)};
}
HWY_INLINE Four Mul(const Four& x, const Four& y) {
  return {hn::Mul(x.a, y.a), hn::Mul(x.b, y.b), hn::Mul(x.c, y.c),
          hn::Mul(x.d, y.d)};
}
HWY_INLINE Four Div(const Four& x, const Four& y) {
  return {hn::Div(x.a, y.a), hn::Div(x.b, y.b), hn::Div(x.c, y.c),
          hn::Div(x.d, y.d)};
}
HWY_INLINE Four MulAdd(const Four& x, VF y, VF z) {
  return {hn::MulAdd(x.a, y, z), hn::MulAdd(x.b, y, z), hn::MulAdd(x.c, y, z),
          hn::MulAdd(x.d, y, z)};
}
HWY_INLINE Four MulAdd(const Four& x, const Four& y, VF z) {
  return {hn::MulAdd(x.a, y.a, z), hn::MulAdd(x.b, y.b, z),
          hn::MulAdd(x.c, y.c, z), hn::MulAdd(x.d, y.d, z)};
}
HWY_INLINE Four MulAdd(const Four& x, VF y, const Four& z) {
  return {hn::MulAdd(x.a, y, z.a), hn::MulAdd(x.b, y, z.b),
          hn::MulAdd(x.c, y, z.c), hn::MulAdd(x.d, y, z.d)};
}

// e^-w + 1 for |w| <= 64 by the polynomial of ExpNonPositive, of -r. In this
// range every power of two is a normal number. V is VF or Four.
class ModerateExp {
 public:
  template <class V>
  HWY_INLINE V PlusOne(const V& w) const {
    using hn::MulAdd;
    using hn::Sub;
    using HWY_NAMESPACE::MulAdd;
    using HWY_NAMESPACE::Sub;
    const DF d;
    // Its unit in the last place is 1, so that the lower bits are k + 127: the
    // exponent of 2^k.
    const auto round = hn::Set(d, 0x1.8p23f + 127.0f);
    const V rounded = MulAdd(w, hn::Set(d, -1.44269504f), round);
    const V k = Sub(rounded, round);
    const V minus_r = MulAdd(k, hn::Set(d, 0.693147182f), w);
    V p =
        MulAdd(minus_r, hn::Set(d, -0.00831251037f), hn::Set(d, 0.0418902472f));
    p = MulAdd(p, minus_r, hn::Set(d, -0.16667115f));
    p = MulAdd(p, minus_r, hn::Set(d, 0.499992309f));
    p = MulAdd(p, minus_r, hn::Set(d, -1.0f));
    p = MulAdd(p, minus_r, hn::Set(d, 1.0f));
    return MulAdd(p, Power(rounded), hn::Set(d, 1.0f));
  }
};
#endif

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
