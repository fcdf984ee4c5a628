#ifndef QUERN_CORE_SETS_AVX3_ZEN4_H_
#define QUERN_CORE_SETS_AVX3_ZEN4_H_

// Kernels that multiply or convert bf16, and do nothing faster in AVX3_DL
// (core/sets/unused_sets.h).

#ifdef QUERN_ONE_AVX512
#define QUERN_UNUSED_SETS (HWY_AVX3 | HWY_AVX3_DL)
#else
#define QUERN_UNUSED_SETS HWY_AVX3_DL
#endif
#include "quern/core/sets/unused_sets.h"

#endif  // QUERN_CORE_SETS_AVX3_ZEN4_H_
