#ifndef QUERN_CORE_SETS_AVX3_H_
#define QUERN_CORE_SETS_AVX3_H_

// Kernels with no instruction of AVX-512 beyond AVX3
// (core/sets/unused_sets.h).

#define QUERN_UNUSED_SETS (HWY_AVX3_DL | HWY_AVX3_ZEN4)
#include "quern/core/sets/unused_sets.h"

#endif  // QUERN_CORE_SETS_AVX3_H_
