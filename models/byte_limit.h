#ifndef QUERN_MODELS_BYTE_LIMIT_H_
#define QUERN_MODELS_BYTE_LIMIT_H_

// Private: the most bytes that a model or a state may take.

#include <cstdint>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace quern {

// max_bytes of the caller's options or, where that is 0,
// free + times * size, where `size` is what `size_name` has already.
struct ByteLimit {
  int64_t max_bytes;
  int64_t free;
  int64_t times;
  int64_t size;
  absl::string_view size_name;

  // Double, because what is compared with it may exceed 2^63.
  double bytes() const {
    return max_bytes > 0
               ? static_cast<double>(max_bytes)
               : static_cast<double>(free) +
                     static_cast<double>(times) * static_cast<double>(size);
  }

  // The end of a refusal: "need at most max_bytes=268439552, which is 268435456
  // + 16 times the file's 256 bytes".
  std::string Need() const {
    const std::string need =
        absl::StrFormat("need at most max_bytes=%.0f", bytes());
    if (max_bytes > 0) return need;
    return absl::StrFormat("%s, which is %d + %d times the %s %d bytes", need,
                           free, times, size_name, size);
  }
};

}  // namespace quern

#endif  // QUERN_MODELS_BYTE_LIMIT_H_
