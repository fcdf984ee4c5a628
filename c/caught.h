#ifndef QUERN_C_CAUGHT_H_
#define QUERN_C_CAUGHT_H_

// Private to c/. Exceptions end here, because C cannot catch them.

#include <exception>
#include <new>

#include "absl/status/status.h"

namespace quern {
namespace c_abi {

// Calls fn(), which returns a Status, and makes one of what it throws:
// ResourceExhausted where memory ran out, else Internal.
template <typename Fn>
absl::Status Caught(const Fn& fn) {
  try {
    return fn();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("the system has no memory left");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_CAUGHT_H_
