// The kernels of gemm/kernels/block32_simd.cc for AVX2 with AVX-VNNI.

#include "quern/core/avx_vnni.h"

#if QUERN_AVX_VNNI
#include "quern/core/avx_vnni_pass.h"
#include "quern/gemm/kernels/block32_simd.cc"
#endif
