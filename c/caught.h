#ifndef QUERN_C_CAUGHT_H_
#define QUERN_C_CAUGHT_H_

// Private to c/. Exceptions end here, because C cannot catch them: those of a
// call in Caught, and those of its refusal, whose sentence needs memory too, in
// Contained.

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
  } catch (...) {  // of a function of the caller's
    return absl::InternalError("an exception that is no std::exception");
  }
}

// What a function of the interface returns: fn(), or without_memory() where fn
// threw.
template <typename Fn, typename WithoutMemory>
auto Contained(const Fn& fn, const WithoutMemory& without_memory) noexcept
    -> decltype(fn()) {
  try {
    return fn();
  } catch (...) {
    return without_memory();
  }
}

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_CAUGHT_H_
