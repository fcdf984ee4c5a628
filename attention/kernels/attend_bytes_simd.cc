#include "quern/attention/kernels/attend_bytes.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/core/dtype.h"
#include "quern/core/sets/avx3_zen4.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/attend_bytes_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target.
#include "quern/attention/kernels/attend-inl.h"
#include "quern/attention/kernels/scaled_e4m3-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {

template <class Arithmetic>
AttendBytes By(bool (*serves)(const ChunkArgs&) = nullptr) {
  return {hwy::TargetName(HWY_TARGET), &Attend<Arithmetic>, serves};
}

AttendBytes GetKernels(DType q, DType kv) {
#if HWY_NATIVE_DOT_BF16 && HWY_ARCH_X86
  if (q == DType::kBF16) {
    if (kv == DType::kI8) return By<DotI8>();
    if (kv == DType::kF8E4M3) return By<DotFp8<Float8E4M3>>();
    return By<DotFp8<Float8E5M2>>();
  }
#endif
  (void)q;
  if (kv == DType::kI8) return By<FmaBytes<int8_t>>();
  if (kv == DType::kF8E5M2) return By<FmaBytes<Float8E5M2>>();
#if QUERN_ATTENTION_SCALED_E4M3
  return By<ScaledE4M3>(&ScaledE4M3::Serves);
#else
  return By<FmaBytes<Float8E4M3>>();
#endif
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
AttendBytes GetAttendBytes(DType q, DType kv) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(q, kv);
}
}  // namespace quern
#endif  // HWY_ONCE
