// Dot products of quads of u8 by s8, once per instruction set, and once more
// for AVX2 with AVX-VNNI (core/avx_vnni.h); of s8 by s8 for AVX2 with
// AVX-VNNI-INT8.
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
#ifndef QUERN_AVX_VNNI_INT8_PASS
#define QUERN_AVX_VNNI_INT8_PASS 0
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

#if QUERN_AVX_VNNI_INT8_PASS
// DotQuads of s8 by s8: vpdpbssd. Its bytes are written here, because GCC 12,
// clang 14 and assemblers of their time do not know it: C4, then the registers
// in the bits that VEX.256.F2.0F38.W0 leaves to them, opcode 50, then ModRM.
template <class DI>
HWY_INLINE hn::Vec<DI> DotSignedQuads(DI /*di*/,
                                      hn::Vec<hn::Repartition<int8_t, DI>> a,
                                      hn::Vec<hn::Repartition<int8_t, DI>> b,
                                      hn::Vec<DI> sums) {
  static_assert(sizeof(sums.raw) == 32, "AVX2 has vectors of 256 bits");
  // The numbers of the registers that the compiler has chosen.
  asm(".irp quern_n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\t"
      ".ifc %0,%%ymm\\quern_n\n\t.set .Lquern_sums,\\quern_n\n\t.endif\n\t"
      ".ifc %1,%%ymm\\quern_n\n\t.set .Lquern_a,\\quern_n\n\t.endif\n\t"
      ".ifc %2,%%ymm\\quern_n\n\t.set .Lquern_b,\\quern_n\n\t.endif\n\t"
      ".endr\n\t"
      ".byte 0xC4\n\t"
      ".byte 0xE2 - (.Lquern_sums >> 3 << 7) - (.Lquern_b >> 3 << 5)\n\t"
      ".byte 0x7F - (.Lquern_a << 3)\n\t"
      ".byte 0x50\n\t"
      ".byte 0xC0 + ((.Lquern_sums & 7) << 3) + (.Lquern_b & 7)"
      : "+x"(sums.raw)
      : "x"(a.raw), "x"(b.raw));
  return sums;
}
#endif

// The name of the instruction set that kernels here are for.
HWY_INLINE const char* KernelTarget() {
  if (QUERN_AVX_VNNI_INT8_PASS) return kAvxVnniInt8Target;
  return QUERN_AVX_VNNI_PASS ? kAvxVnniTarget : hwy::TargetName(HWY_TARGET);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
