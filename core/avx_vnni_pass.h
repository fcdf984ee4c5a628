#ifndef QUERN_CORE_AVX_VNNI_PASS_H_
#define QUERN_CORE_AVX_VNNI_PASS_H_

// What a *_avxvnni.cc includes first, before it includes the *_simd.cc that it
// compiles once more, for AVX2 with AVX-VNNI and nothing else:
//
//   #include "quern/core/avx_vnni.h"
//   #if QUERN_AVX_VNNI
//   #include "quern/core/avx_vnni_pass.h"
//   #include "quern/gemm/kernels/int8_simd.cc"
//   #endif
//
// The *_simd.cc includes core/quad_dot-inl.h. A *_avxvnniint8.cc defines
// QUERN_AVX_VNNI_INT8_PASS as 1 before, and has AVX-VNNI-INT8 in place of
// AVX-VNNI.

// The *_simd.cc is compiled with AVX-VNNI.
#ifndef QUERN_AVX_VNNI_INT8_PASS
#define QUERN_AVX_VNNI_PASS 1
#endif

// Highway's switches for one instruction set, whatever the command line says.
#undef HWY_BASELINE_TARGETS
#define HWY_BASELINE_TARGETS HWY_AVX2
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS 0
#undef HWY_COMPILE_ONLY_SCALAR
#undef HWY_COMPILE_ONLY_EMU128
#undef HWY_COMPILE_ALL_ATTAINABLE
#undef HWY_COMPILE_ONLY_STATIC
#define HWY_COMPILE_ONLY_STATIC

#endif  // QUERN_CORE_AVX_VNNI_PASS_H_
