#ifndef QUERN_MODELS_DECODER_LOADING_BYTE_LIMIT_H_
#define QUERN_MODELS_DECODER_LOADING_BYTE_LIMIT_H_

// Private: the limit on the bytes of a model or a state.

#include <cstdint>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace quern {

// The limit is the caller's max_bytes. If that is 0, it is free + times * size,
// where `size` is the size of `size_name`.
struct ByteLimit {
  int64_t max_bytes;
  int64_t free;
  int64_t times;
  int64_t size;
  absl::string_view size_name;

  // Returns a double, because the sizes that are compared with it may exceed
  // 2^63.
  double bytes() const {
    return max_bytes > 0
               ? static_cast<double>(max_bytes)
               : static_cast<double>(free) +
                     static_cast<double>(times) * static_cast<double>(size);
  }

  // The end of a refusal, such as "need at most max_bytes=268444928, which is
  // 268435456 + 47 times the file's 256 bytes".
  std::string Need() const {
    const std::string need =
        absl::StrFormat("need at most max_bytes=%.0f", bytes());
    if (max_bytes > 0) return need;
    return absl::StrFormat("%s, which is %d + %d times the %s %d bytes", need,
                           free, times, size_name, size);
  }
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_LOADING_BYTE_LIMIT_H_
