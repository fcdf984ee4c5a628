#ifndef QUERN_CORE_CHECK_H_
#define QUERN_CORE_CHECK_H_

// Two severities, no more. QUERN_CHECK guards what only a bug in this library
// can break; QUERN_DCHECK guards what Create or Build already proved.

#include <cstdio>
#include <cstdlib>

namespace quern {

[[noreturn]] inline void CheckFailed(const char* expr, const char* file,
                                     int line) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, expr);
  std::abort();
}

}  // namespace quern

#define QUERN_CHECK(expr)            \
  (static_cast<bool>(expr) ? void(0) \
                           : ::quern::CheckFailed(#expr, __FILE__, __LINE__))
#ifdef NDEBUG
#define QUERN_DCHECK(expr) ((void)sizeof(static_cast<bool>(expr)))
#else
#define QUERN_DCHECK(expr) QUERN_CHECK(expr)
#endif

#endif  // QUERN_CORE_CHECK_H_
