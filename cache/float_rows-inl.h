// Loads and stores of f32, bf16 and f16 elements as vectors of f32, with the
// names of quant/convert-inl.h, whose place it holds.

// Per-target include guard.
#if defined(QUERN_CACHE_FLOAT_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_CACHE_FLOAT_ROWS_INL_H_
#undef QUERN_CACHE_FLOAT_ROWS_INL_H_
#else
#define QUERN_CACHE_FLOAT_ROWS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class DF>
HWY_INLINE hn::Vec<DF> LoadF32(DF df, const float* from) {
  return hn::LoadU(df, from);
}
template <class DF>
HWY_INLINE hn::Vec<DF> LoadNF32(DF df, const float* from, size_t n) {
  return hn::LoadN(df, from, n);
}
template <class DF, typename T>
HWY_INLINE hn::Vec<DF> LoadF32(DF df, const T* from) {
  return hn::PromoteTo(df, hn::LoadU(hn::Rebind<T, DF>(), from));
}
template <class DF, typename T>
HWY_INLINE hn::Vec<DF> LoadNF32(DF df, const T* from, size_t n) {
  return hn::PromoteTo(df, hn::LoadN(hn::Rebind<T, DF>(), from, n));
}

template <class DF>
HWY_INLINE void StoreNF32(hn::Vec<DF> v, DF df, float* to, size_t n) {
  hn::StoreN(v, df, to, n);
}
// By integers: the instruction that rounds to bf16 flushes denormals to zero.
template <class DF>
HWY_INLINE void StoreNF32(hn::Vec<DF> v, DF, BFloat16* to, size_t n) {
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint16_t, DF> du16;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF)));
  // Rounding would carry a NaN into infinity: set its quiet bit instead.
  const auto quiet = hn::Or(bits, hn::Set(du, 0x00400000));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  const auto result = hn::IfThenElse(is_nan, quiet, rounded);
  hn::StoreN(hn::TruncateTo(du16, hn::ShiftRight<16>(result)), du16,
             reinterpret_cast<uint16_t*>(to), n);
}
template <class DF>
HWY_INLINE void StoreNF32(hn::Vec<DF> v, DF, Float16* to, size_t n) {
  const hn::Rebind<Float16, DF> df16;
  hn::StoreN(hn::DemoteTo(df16, v), df16, to, n);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
