#ifndef QUERN_MODELS_TOKENIZER_TEXT_TESTUTIL_H_
#define QUERN_MODELS_TOKENIZER_TEXT_TESTUTIL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "quern/testing/data.h"

namespace quern {

// A random text of up to 12 pieces, each from `parts` or, one time in three, a
// random byte.
inline std::string RandomText(Rng& rng, const std::vector<std::string>& parts) {
  std::string text;
  for (int64_t n = rng.Integer(0, 12); n > 0; --n) {
    text += rng.Integer(0, 2) == 0
                ? std::string(1, static_cast<char>(rng.Next()))
                : parts[static_cast<size_t>(
                      rng.Integer(0, static_cast<int64_t>(parts.size()) - 1))];
  }
  return text;
}

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_TEXT_TESTUTIL_H_
