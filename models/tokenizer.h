#ifndef QUERN_MODELS_TOKENIZER_H_
#define QUERN_MODELS_TOKENIZER_H_

// SentencePiece-style byte-pair encoding with byte fallback: the "llama"
// tokenizer of GGUF files.
//
// Encode: put one space in front (not before the empty text), replace every
// space by U+2581, split into code points; while some neighbouring pair
// concatenates to a normal piece, join the one of highest score, the leftmost
// on a tie. A symbol that is no piece becomes the byte tokens of its UTF-8; so
// does each byte that is not part of valid UTF-8. Nothing is normalised.
//
// Decode: join the pieces, U+2581 becoming a space and byte tokens becoming
// bytes; control and unknown tokens give nothing; drop one leading space.
//
// Decode(Encode(text)) == text for all bytes, but for U+2581 itself, which
// comes back as a space.
//
// Kudo, Richardson, "SentencePiece", EMNLP 2018; Sennrich et al., ACL 2016.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "models/gguf.h"

namespace quern {

// The numbers of the GGUF key tokenizer.ggml.token_type.
enum class TokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,  // decodes as its text; Encode does not look for it
  kUnused = 5,
  kByte = 6,  // the piece is "<0xHH>"
};

struct TokenizerSpec {
  std::vector<std::string> pieces;
  std::vector<float> scores;
  std::vector<TokenType> types;
  int32_t bos_id = 1;
  int32_t eos_id = 2;
  // Whether Encode puts a space in front and Decode drops it.
  bool add_space_prefix = true;
  // Whether the model wants bos_id in front of a text. Encode leaves that to
  // the caller.
  bool add_bos = true;
};

class Tokenizer {
 public:
  // InvalidArgument unless: 1..2^24 pieces with as many scores and types;
  // scores are numbers; types are known; each of the 256 bytes has exactly one
  // byte token; normal pieces are distinct, not empty, valid UTF-8, and U+2581
  // is among them; bos_id and eos_id are pieces.
  static absl::StatusOr<Tokenizer> Create(TokenizerSpec spec);

  // From the keys tokenizer.ggml.*. Unimplemented for another model than
  // "llama". Bos and eos default to 1 and 2, add_space_prefix and add_bos to
  // true.
  static absl::StatusOr<Tokenizer> Create(const GgufFile& file);

  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;

  int32_t vocab_size() const { return static_cast<int32_t>(pieces_.size()); }
  int32_t bos_id() const { return bos_id_; }
  int32_t eos_id() const { return eos_id_; }
  bool add_bos() const { return add_bos_; }
  absl::string_view piece(int32_t id) const {
    return pieces_[static_cast<size_t>(id)];
  }
  TokenType type(int32_t id) const { return types_[static_cast<size_t>(id)]; }

  // Ids without bos. O(n log n) in the bytes of `text`.
  std::vector<int32_t> Encode(absl::string_view text) const;

  // The bytes of `ids`. Ids outside [0, vocab_size) give nothing.
  std::string Decode(absl::Span<const int32_t> ids) const;

  // What one token contributes: no leading space is dropped.
  std::string TokenBytes(int32_t id) const;

 private:
  friend class StreamDecoder;
  Tokenizer() = default;
  // The id of the normal piece `text`, or -1.
  int32_t FindPiece(absl::string_view text) const;

  std::vector<std::string> pieces_;
  std::vector<float> scores_;
  std::vector<TokenType> types_;
  int32_t bos_id_ = 0, eos_id_ = 0;
  bool add_space_prefix_ = true;
  bool add_bos_ = true;
  // Keys point into pieces_, whose strings stay where they are in a move.
  std::unordered_map<std::string_view, int32_t> normal_;
  std::array<int32_t, 256> byte_ids_{};
};

// Decodes one token at a time to text for a person to read: what it returns is
// always valid UTF-8. Bytes of a character that is not complete yet are held
// back; a byte that cannot become valid UTF-8 turns into U+FFFD.
class StreamDecoder {
 public:
  enum class Start {
    kOfText,     // drop the space that Encode put in front
    kAfterText,  // the tokens continue a prompt that was printed already
  };

  // `tokenizer` must outlive this.
  StreamDecoder(const Tokenizer& tokenizer, Start start)
      : tokenizer_(tokenizer),
        drop_space_(start == Start::kOfText && tokenizer.add_space_prefix_) {}

  // The text that `id` completes; often empty for a byte token.
  std::string Add(int32_t id);

  // What is held back, as U+FFFD; then the stream is as new, after text.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  bool drop_space_;
  std::string held_;  // at most 3 bytes between calls
};

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_H_
