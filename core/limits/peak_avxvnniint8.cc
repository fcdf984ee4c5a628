// The loops of core/limits/peak_simd.cc for AVX2 with AVX-VNNI-INT8.

#include "quern/core/avx_vnni.h"

#if QUERN_AVX_VNNI
#define QUERN_AVX_VNNI_INT8_PASS 1
#include "quern/core/avx_vnni_pass.h"
#include "quern/core/limits/peak_simd.cc"
#endif
