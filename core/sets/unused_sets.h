// AVX3_DL and AVX3_ZEN4 are AVX3, AVX-512 of Skylake, with more instructions:
// AVX3_DL, of Ice Lake and Sapphire Rapids, has dot products of bytes and
// permutations of them; AVX3_ZEN4, of Zen 4 and 5, also has dot products and
// conversions of bf16. Few kernels use both, and of most the compiler makes the
// same machine code for two or for all three. So a *_simd.cc says, before it
// includes hwy/highway.h, which of them differ; the others are not compiled,
// and CPUs that have them run the next lesser one:
//
//   #include "quern/core/sets/avx3.h"       no more than AVX3
//   #include "quern/core/sets/avx3_dl.h"    AVX3, and bytes in AVX3_DL
//   #include "quern/core/sets/avx3_zen4.h"  AVX3, and bf16 in AVX3_ZEN4
//
// One without any of these is compiled for all sets. tools/kernel_sets.py
// compares machine code. Highway allows it: a table of dispatch and the mask
// that picks from it belong to one source (hwy/targets.h, GetIndex). With a
// Highway that was told other sets than third_party/highway's, these headers do
// nothing.
//
// Each of the three headers defines QUERN_UNUSED_SETS and includes this one.
// QUERN_ONE_AVX512 leaves the best of a kernel's sets of AVX-512 alone
// (.bazelrc, avx2zen4).

#ifdef HIGHWAY_HWY_TARGETS_H_
#error "core/sets comes before hwy/highway.h"
#endif

#include "hwy/detect_targets.h"

#if defined(QUERN_ONE_AVX512) ||  \
    (defined(HWY_WANT_AVX3_DL) && \
     (HWY_DISABLED_TARGETS) == (HWY_AVX3_SPR | HWY_SSSE3))
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_AVX3_SPR | HWY_SSSE3 | QUERN_UNUSED_SETS)
#endif
