#ifndef QUERN_MODELS_GGUF_MUTATE_TESTUTIL_H_
#define QUERN_MODELS_GGUF_MUTATE_TESTUTIL_H_

// Random changes to files, for fuzzing. The same seed makes the same bytes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

#include "quern/models/gguf/gguf_testutil.h"
#include "quern/testing/data.h"

namespace quern {

// A random index of a container with `size` >= 1 elements.
inline size_t At(Rng& rng, size_t size) {
  return static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(size) - 1));
}

// Returns `file` after one to four random changes, three quarters of them
// within its first `front` bytes. Tails of other files come from `corpus`.
inline std::string Mutate(Rng& rng, std::string file,
                          const std::vector<std::string>& corpus,
                          size_t front = 700) {
  static constexpr uint64_t kExtremes[] = {0,
                                           1,
                                           2,
                                           4,
                                           8,
                                           9,
                                           30,
                                           31,
                                           33,
                                           255,
                                           256,
                                           0x7f,
                                           0x7fffffff,
                                           0x80000000,
                                           0xffffffffu,
                                           1ull << 32,
                                           1ull << 40,
                                           1ull << 61,
                                           1ull << 62,
                                           1ull << 63,
                                           ~0ull,
                                           ~0ull - 7,
                                           (1ull << 63) - 1};
  for (int64_t changes = rng.Integer(1, 4); changes > 0 && !file.empty();
       --changes) {
    const size_t reach =
        rng.Integer(0, 3) == 0 ? file.size() : std::min(file.size(), front);
    const size_t at = At(rng, reach);
    switch (rng.Integer(0, 6)) {
      case 0:
        file[at] = static_cast<char>(file[at] ^ (1 << rng.Integer(0, 7)));
        break;
      case 1:
        file[at] = static_cast<char>(rng.Next());
        break;
      case 2:
        file.resize(At(rng, file.size()));
        break;
      case 3: {  // replace a number by an extreme one
        const uint64_t value = kExtremes[At(rng, std::size(kExtremes))];
        const size_t bytes = rng.Integer(0, 1) == 0 ? 4 : 8;
        file.replace(at, bytes, Raw(value).substr(0, bytes));
        break;
      }
      case 4:
        file.erase(at, static_cast<size_t>(rng.Integer(1, 40)));
        break;
      case 5:  // repeat a piece of the file
        file.insert(at, file.substr(At(rng, reach),
                                    static_cast<size_t>(rng.Integer(1, 200))));
        break;
      default: {  // append the tail of another file
        const std::string& other = corpus[At(rng, corpus.size())];
        file = file.substr(0, at) + other.substr(At(rng, other.size()));
        break;
      }
    }
  }
  return file;
}

// Returns QUERN_FUZZ_CASES if set, otherwise `quick` for quick tests and
// `normal` for others.
inline int64_t Cases(int64_t quick, int64_t normal) {
  const char* text = std::getenv("QUERN_FUZZ_CASES");
  if (text != nullptr) return std::strtoll(text, nullptr, 10);
  return QuickTests() ? quick : normal;
}

}  // namespace quern

#endif  // QUERN_MODELS_GGUF_MUTATE_TESTUTIL_H_
