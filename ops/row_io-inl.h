// Per-target include: rows of f32, bf16 or f16 read and written as f32 lanes.
// A tail is a count of lanes; what lies behind it is neither read nor written.

// clang-format off
#if defined(QUERN_OPS_ROW_IO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_OPS_ROW_IO_INL_H_
#undef QUERN_OPS_ROW_IO_INL_H_
#else
#define QUERN_OPS_ROW_IO_INL_H_
#endif
// clang-format on

#include "core/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace row_io {
namespace hn = hwy::HWY_NAMESPACE;

// The bits of bf16 and f16, as many as d has f32 lanes.
template <class D>
using Bits16 = hn::Rebind<uint16_t, D>;

HWY_INLINE const uint16_t* AsBits(const BFloat16* p) {
  return reinterpret_cast<const uint16_t*>(p);
}
HWY_INLINE uint16_t* AsBits(BFloat16* p) {
  return reinterpret_cast<uint16_t*>(p);
}

// bf16 is the upper half of an f32.
template <class D>
HWY_INLINE hn::Vec<D> FromBF16(D d, hn::Vec<Bits16<D>> bits) {
  const hn::RebindToUnsigned<D> du;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}

// To nearest even: adding just under half a unit, plus the lowest bit that
// stays, carries exactly where it must. NaN would carry into infinity; it is
// made quiet instead.
template <class D>
HWY_INLINE hn::Vec<Bits16<D>> ToBF16(D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(du, 1u));
  const auto rounded =
      hn::ShiftRight<16>(hn::Add(hn::Add(bits, odd), hn::Set(du, 0x7FFFu)));
  const auto quiet = hn::Or(upper, hn::Set(du, 0x40u));
  const auto nan = hn::RebindMask(du, hn::IsNaN(v));
  return hn::TruncateTo(Bits16<D>(), hn::IfThenElse(nan, quiet, rounded));
}

template <class D>
HWY_INLINE hn::Vec<D> Load(D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadN(D d, const float* p, size_t n) {
  return hn::LoadN(d, p, n);
}
template <class D>
HWY_INLINE void Store(D d, hn::Vec<D> v, float* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void StoreN(D d, hn::Vec<D> v, float* p, size_t n) {
  hn::StoreN(v, d, p, n);
}

template <class D>
HWY_INLINE hn::Vec<D> Load(D d, const BFloat16* p) {
  return FromBF16(d, hn::LoadU(Bits16<D>(), AsBits(p)));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadN(D d, const BFloat16* p, size_t n) {
  return FromBF16(d, hn::LoadN(Bits16<D>(), AsBits(p), n));
}
template <class D>
HWY_INLINE void Store(D d, hn::Vec<D> v, BFloat16* p) {
  hn::StoreU(ToBF16(d, v), Bits16<D>(), AsBits(p));
}
template <class D>
HWY_INLINE void StoreN(D d, hn::Vec<D> v, BFloat16* p, size_t n) {
  hn::StoreN(ToBF16(d, v), Bits16<D>(), AsBits(p), n);
}

// Highway 1.2.0's PromoteTo makes 65536 of f16's infinity below AVX2.
//
// An f16's exponent and mantissa, moved to where f32 has them, are its value
// times 2^-112, denormals included; the exponent of infinity and NaN becomes
// f32's.
template <class D>
HWY_INLINE hn::Vec<D> FromF16(D d, hn::Vec<Bits16<D>> bits16) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::PromoteTo(du, bits16);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFu));
  const auto moved = hn::ShiftLeft<13>(magnitude);
  const auto finite =
      hn::BitCast(du, hn::Mul(hn::BitCast(d, moved), hn::Set(d, 0x1.0p112f)));
  const auto special = hn::Or(moved, hn::Set(du, 0x7F800000u));
  const auto is_special = hn::Gt(magnitude, hn::Set(du, 0x7BFFu));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  return hn::BitCast(d,
                     hn::Or(sign, hn::IfThenElse(is_special, special, finite)));
}

template <class D>
HWY_INLINE hn::Vec<D> Load(D d, const Float16* p) {
  return FromF16(d,
                 hn::LoadU(Bits16<D>(), reinterpret_cast<const uint16_t*>(p)));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadN(D d, const Float16* p, size_t n) {
  return FromF16(
      d, hn::LoadN(Bits16<D>(), reinterpret_cast<const uint16_t*>(p), n));
}

// What storing v as T and loading it again gives.
template <class D>
HWY_INLINE hn::Vec<D> Round(D, hn::Vec<D> v, const float*) {
  return v;
}
template <class D>
HWY_INLINE hn::Vec<D> Round(D d, hn::Vec<D> v, const BFloat16*) {
  return FromBF16(d, ToBF16(d, v));
}

}  // namespace row_io
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
