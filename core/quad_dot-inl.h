// Dot products of quads of u8 by s8, once per instruction set, and once more
// for AVX2 with AVX-VNNI (core/avx_vnni.h).
//
// A *_simd.cc with kernels for AVX-VNNI includes this header before those whose
// functions call DotQuads, or call what does: in a *_avxvnni.cc, functions
// between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE use AVX-VNNI from here
// on, and DotQuads can be inlined into no others. None of them may be shared
// with other sources, or a CPU without AVX-VNNI might run it: they are in an
// anonymous namespace, templates over a type that is, or always inlined.

// clang-format off
#if defined(QUERN_CORE_QUAD_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_CORE_QUAD_DOT_INL_H_
#undef QUERN_CORE_QUAD_DOT_INL_H_
#else
#define QUERN_CORE_QUAD_DOT_INL_H_
#endif
// clang-format on

#include <cstdint>

#include "hwy/highway.h"
#include "quern/core/avx_vnni.h"

#ifndef QUERN_AVX_VNNI_PASS
#define QUERN_AVX_VNNI_PASS 0
#endif

// Whether DotQuads is one instruction of x86.
#undef QUERN_HAS_VPDPBUSD
#if QUERN_AVX_VNNI_PASS || (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL)
#define QUERN_HAS_VPDPBUSD 1
#else
#define QUERN_HAS_VPDPBUSD 0
#endif

#if QUERN_AVX_VNNI_PASS
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX2 ",avxvnni"
#endif

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// sums[i] + sum over j < 4 of a[4 i + j] * b[4 i + j], exact modulo 2^32.
template <class DI>
HWY_INLINE hn::Vec<DI> DotQuads(DI di, hn::Vec<hn::Repartition<uint8_t, DI>> a,
                                hn::Vec<hn::Repartition<int8_t, DI>> b,
                                hn::Vec<DI> sums) {
#if QUERN_AVX_VNNI_PASS
  (void)di;
  static_assert(sizeof(sums.raw) == 32, "AVX2 has vectors of 256 bits");
  return hn::Vec<DI>{_mm256_dpbusd_avx_epi32(sums.raw, a.raw, b.raw)};
#else
  return hn::SumOfMulQuadAccumulate(di, a, b, sums);
#endif
}

// The name of the instruction set that kernels here are for.
HWY_INLINE const char* KernelTarget() {
  return QUERN_AVX_VNNI_PASS ? kAvxVnniTarget : hwy::TargetName(HWY_TARGET);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
