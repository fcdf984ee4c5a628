#ifndef QUERN_CORE_SETS_AVX3_DL_H_
#define QUERN_CORE_SETS_AVX3_DL_H_

// Kernels that multiply or permute bytes, and do nothing faster in AVX3_ZEN4
// (core/sets/unused_sets.h).

#ifdef QUERN_ONE_AVX512
#define QUERN_UNUSED_SETS (HWY_AVX3 | HWY_AVX3_ZEN4)
#else
#define QUERN_UNUSED_SETS HWY_AVX3_ZEN4
#endif
#include "quern/core/sets/unused_sets.h"

#endif  // QUERN_CORE_SETS_AVX3_DL_H_
