#include "cache/write_kv_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cache/write_kv_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

template <class DF>
hn::Vec<DF> LoadRow(DF df, const float* HWY_RESTRICT from, size_t valid) {
  return hn::LoadN(df, from, valid);
}
template <class DF>
hn::Vec<DF> LoadRow(DF df, const hwy::bfloat16_t* HWY_RESTRICT from,
                    size_t valid) {
  const hn::Rebind<hwy::bfloat16_t, DF> dbf;
  return hn::PromoteTo(df, hn::LoadN(dbf, from, valid));
}

template <class DF>
void StoreRow(DF df, hn::Vec<DF> v, float* HWY_RESTRICT to, size_t valid) {
  hn::StoreN(v, df, to, valid);
}
// By integers: the instruction that rounds to bf16 flushes denormals to zero.
template <class DF>
void StoreRow(DF df, hn::Vec<DF> v, hwy::bfloat16_t* HWY_RESTRICT to,
              size_t valid) {
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
             reinterpret_cast<uint16_t*>(to), valid);
}
template <class DF>
void StoreRow(DF df, hn::Vec<DF> v, hwy::float16_t* HWY_RESTRICT to,
              size_t valid) {
  const hn::Rebind<hwy::float16_t, DF> df16;
  (void)df;
  hn::StoreN(hn::DemoteTo(df16, v), df16, to, valid);
}

template <typename From, typename To>
void Convert(const void* from_bytes, size_t count, void* to_bytes) {
  const From* HWY_RESTRICT from = static_cast<const From*>(from_bytes);
  To* HWY_RESTRICT to = static_cast<To*>(to_bytes);
  const hn::ScalableTag<float> df;
  const size_t lanes = hn::Lanes(df);
  for (size_t i = 0; i < count; i += lanes) {
    const size_t valid = HWY_MIN(lanes, count - i);
    StoreRow(df, LoadRow(df, from + i, valid), to + i, valid);
  }
}

template <typename T>
void Copy(const void* from, size_t count, void* to) {
  hwy::CopyBytes(from, to, count * sizeof(T));
}

WriteKvKernels GetKernels(DType input, DType cache) {
  WriteKvKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  if (input == DType::kF32) {
    kernels.convert = cache == DType::kBF16  ? &Convert<float, hwy::bfloat16_t>
                      : cache == DType::kF16 ? &Convert<float, hwy::float16_t>
                                             : &Copy<float>;
  } else {
    kernels.convert = cache == DType::kF32 ? &Convert<hwy::bfloat16_t, float>
                      : cache == DType::kF16
                          ? &Convert<hwy::bfloat16_t, hwy::float16_t>
                          : &Copy<hwy::bfloat16_t>;
  }
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
WriteKvKernels GetWriteKvKernels(DType input, DType cache) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(input, cache);
}
}  // namespace quern
#endif  // HWY_ONCE
