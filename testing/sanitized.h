#ifndef QUERN_TESTING_SANITIZED_H_
#define QUERN_TESTING_SANITIZED_H_

#include "hwy/base.h"

namespace quern {

// Whether a sanitizer watches each access, which takes several times as long:
// where a test is about the case and not about its size, it may be smaller.
inline constexpr bool kSanitized = HWY_IS_ASAN || HWY_IS_MSAN || HWY_IS_TSAN;

}  // namespace quern

#endif  // QUERN_TESTING_SANITIZED_H_
