#ifndef QUERN_MODELS_TOKENIZER_BYTE_BPE_H_
#define QUERN_MODELS_TOKENIZER_BYTE_BPE_H_

// Byte-pair encoding of one word over its bytes: the core of the "gpt2"
// tokenizer of GGUF files.
//
//   symbols = the tokens of the single bytes
//   while some neighbours (a, b) are a merge: join those of lowest rank, the
//   leftmost on a tie
//
// A vocabulary writes each byte as one printable character: 0x21..0x7e,
// 0xa1..0xac and 0xae..0xff as the code point of that number, the other 68 in
// ascending order as U+0100..U+0143; a space is U+0120. A merge is two such
// texts with one space between them, and its rank is its place in the list.
//
// Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quern {

// Converts bytes to their printable form, as UTF-8.
std::string PrintableBytes(absl::string_view bytes);

// Converts `printable` back and appends the bytes to `bytes`. Returns false if
// a character stands for no byte; some bytes may then have been appended.
bool AppendBytesOfPrintable(absl::string_view printable, std::string& bytes);

class ByteBpe {
 public:
  // Largest number of merges that Create accepts.
  static constexpr int64_t kMaxMerges = 1 << 24;

  // Returns the id of the token with this printable form, or -1.
  using FindToken = std::function<int32_t(absl::string_view printable)>;

  // InvalidArgument unless there are 1 to kMaxMerges distinct merges, each of
  // two texts with one space between, and all of these are tokens: the 256
  // bytes, but for 0xc0, 0xc1 and 0xf5..0xff, which no text in UTF-8 has; the
  // two parts of each merge, and what the parts join to.
  static absl::StatusOr<ByteBpe> Create(absl::Span<const std::string> merges,
                                        const FindToken& find);

  // Appends the tokens of `word`, in which a byte without a token counts as
  // U+FFFD. O(n log n) in its number of bytes.
  void Encode(absl::string_view word, std::vector<int32_t>& ids) const;

 private:
  struct Merge {
    int32_t rank;
    int32_t id;  // the token that the two join to
  };
  // Hashes so that both halves of the key reach the low bits, which choose the
  // bucket.
  struct Mix {
    size_t operator()(uint64_t key) const {
      key *= 0x9e3779b97f4a7c15u;
      return static_cast<size_t>(key ^ key >> 32);
    }
  };

  ByteBpe() = default;
  static uint64_t Key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }

  std::array<int32_t, 256> byte_ids_{};
  std::unordered_map<uint64_t, Merge, Mix> merges_;
};

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_BYTE_BPE_H_
