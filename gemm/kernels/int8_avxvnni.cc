// The kernels of gemm/kernels/int8_simd.cc for AVX2 with AVX-VNNI.

#include "quern/core/avx_vnni.h"

#if QUERN_AVX_VNNI
#include "quern/core/avx_vnni_pass.h"
#include "quern/gemm/kernels/int8_simd.cc"
#endif
