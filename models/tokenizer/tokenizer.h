#ifndef QUERN_MODELS_TOKENIZER_TOKENIZER_H_
#define QUERN_MODELS_TOKENIZER_TOKENIZER_H_

// Text to token ids and back, two ways.
//
// kSentencePiece: byte-pair encoding of characters with byte fallback, the
// "llama" tokenizer of GGUF files.
//   Encode: put one space in front (not before the empty text), replace every
//   space by U+2581, split into code points; while some neighbouring pair
//   concatenates to a normal piece, join the one of highest score, the leftmost
//   on a tie. A symbol that is no piece becomes the byte tokens of its UTF-8;
//   so does each byte that is not part of valid UTF-8.
//   Decode: join the pieces, U+2581 becoming a space and byte tokens becoming
//   bytes; drop one leading space.
//
// kByteBpe: byte-pair encoding of the bytes of words, the "gpt2" tokenizer.
//   Encode: cut the text into words (word_split.h), join the bytes of each by
//   rank of merge (byte_bpe.h). With TokenizerSpec::whole_words, a word that is
//   a piece is that piece, whatever the merges say.
//   Decode: join the bytes that the pieces stand for.
//
// In both, the text of a user-defined token is that token, the longest where
// several begin, and what lies between two of them is encoded by itself: no
// join crosses them. In kSentencePiece a space in such a text may be written as
// U+2581 in the piece, and the space in front counts as part of the text.
//
// Nothing is normalised; control, unknown and unused tokens decode to nothing.
// Decode(Encode(text)) == text, with two exceptions: U+2581 in kSentencePiece
// comes back as a space, and bytes without a token in kByteBpe come back as
// U+FFFD. Text in UTF-8 has no such bytes.
//
// Kudo, Richardson, "SentencePiece", EMNLP 2018; Sennrich et al., ACL 2016.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/tokenizer/byte_bpe.h"
#include "quern/models/tokenizer/word_split.h"

namespace quern {

// Token types by their number in the GGUF key tokenizer.ggml.token_type.
enum class TokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,  // its text is always this one token
  kUnused = 5,
  kByte = 6,  // the piece is "<0xHH>"
};

enum class TokenizerKind { kSentencePiece, kByteBpe };

struct TokenizerSpec {
  TokenizerKind kind = TokenizerKind::kSentencePiece;
  std::vector<std::string> pieces;
  std::vector<TokenType> types;
  int32_t bos_id = 1;  // kByteBpe: -1 if there is none
  int32_t eos_id = 2;
  std::vector<int32_t> end_ids;  // tokens that end a text, besides eos_id
  std::vector<float> scores;     // of kSentencePiece
  // kSentencePiece: whether Encode puts a space in front and Decode drops it.
  bool add_space_prefix = true;
  WordRules word_rules = WordRules::kQwen2;  // of kByteBpe, as are
  std::vector<std::string> merges;           // these, lowest rank first,
  bool whole_words = false;  // and whether a word that is a piece is that piece
  // Whether the model expects bos_id before a text. The caller adds it; Encode
  // does not.
  bool add_bos = true;
};

class Tokenizer {
 public:
  // InvalidArgument unless: 1..2^24 pieces with as many types, all known;
  // bos_id, eos_id and end_ids are pieces; control, unknown and user-defined
  // pieces have at most kMaxSpecialBytes bytes. kSentencePiece: as many scores,
  // which are numbers; each of the 256 bytes has exactly one byte token; normal
  // pieces are distinct, not empty, valid UTF-8, and U+2581 is among them.
  // kByteBpe: pieces that are used are distinct, and none is of type byte; a
  // normal piece stands for one byte or more; merges are as ByteBpe::Create
  // wants them; bos_id may be -1 without add_bos.
  static absl::StatusOr<Tokenizer> Create(TokenizerSpec spec);

  // Reads the keys tokenizer.ggml.*. Unimplemented for models other than
  // "llama" and "gpt2", and for a "gpt2" whose pre stands for other rules than
  // WordRules has; the refusal lists the names. For llama, bos and eos default
  // to 1 and 2, add_space_prefix and add_bos to true. For gpt2, eos is
  // required, bos defaults to none, and add_bos to whether pre is "llama-bpe"
  // or one of the names that stand for the same.
  //
  // A text ends at eos_token_id, eot_token_id and eom_token_id, and at control
  // and user-defined pieces whose name ends a text or a turn in some family of
  // models, such as <end_of_turn>, <|eot_id|> or <|im_end|>. Such a piece
  // becomes a control token even if the file calls it user-defined, so that a
  // text that merely contains its name does not end a turn.
  static absl::StatusOr<Tokenizer> Create(const GgufFile& file);

  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;

  int32_t vocab_size() const { return static_cast<int32_t>(pieces_.size()); }
  int32_t bos_id() const { return bos_id_; }  // -1: none
  int32_t eos_id() const { return eos_id_; }
  // Whether generation stops at `id`, which is eos_id or one of the spec's
  // end_ids.
  bool IsEnd(int32_t id) const;
  bool add_bos() const { return add_bos_; }
  absl::string_view piece(int32_t id) const {
    return pieces_[static_cast<size_t>(id)];
  }
  TokenType type(int32_t id) const { return types_[static_cast<size_t>(id)]; }

  // How Encode treats the text of a control token.
  enum class Specials {
    kAsText,    // text like any other: what a user wrote commands nothing
    kAsTokens,  // that token, the longest where several begin; the text between
                // two of them is encoded as one of its own. The text of the
                // unknown token, "<unk>", is that token, too.
  };

  // Largest number of bytes of a control, unknown or user-defined piece. It
  // bounds Encode's time for the vocabulary of any file.
  static constexpr int64_t kMaxSpecialBytes = 1024;

  // Returns the ids of `text`, without bos. O(n log n) in its bytes; at worst
  // multiplied by the bytes of the longest user-defined or control piece.
  std::vector<int32_t> Encode(absl::string_view text,
                              Specials specials = Specials::kAsText) const;

  // Returns the ids of a whole text: with bos_id in front if add_bos(). A text
  // that begins with bos_id already, which kAsTokens may find, gets no second
  // one.
  std::vector<int32_t> EncodeText(absl::string_view text,
                                  Specials specials = Specials::kAsText) const;

  // Returns the bytes of `ids`. Ids outside [0, vocab_size) give nothing.
  std::string Decode(absl::Span<const int32_t> ids) const;

  // Returns the bytes of one token; no leading space is dropped.
  std::string TokenBytes(int32_t id) const;

 private:
  friend class StreamDecoder;
  Tokenizer() = default;
  // Build the tables that Encode looks up, from pieces_ and types_.
  absl::Status IndexSentencePieces();
  absl::Status IndexBytePieces();
  absl::Status IndexSpecials();
  // The id of the normal piece `text`, or -1.
  int32_t FindPiece(absl::string_view text) const;
  // A special token, and the text by which Encode finds it.
  struct Special {
    std::string text;
    int32_t id;
    bool operator<(const Special& other) const {
      return text != other.text ? text < other.text : id < other.id;
    }
  };
  // Returns the longest of `specials` at the front of `text`, or null.
  static const Special* FindSpecial(const std::vector<Special>& specials,
                                    absl::string_view text);
  // Encodes a text without control tokens.
  void AppendText(absl::string_view text, std::vector<int32_t>& ids) const;
  // Encodes a text without control or user-defined tokens, and adds no space in
  // front.
  void AppendPlain(absl::string_view text, std::vector<int32_t>& ids) const;
  void AppendSentence(absl::string_view text, std::vector<int32_t>& ids) const;
  void AppendWords(absl::string_view text, std::vector<int32_t>& ids) const;

  std::vector<std::string> pieces_;
  std::vector<float> scores_;
  std::vector<TokenType> types_;
  int32_t bos_id_ = 0, eos_id_ = 0;
  bool add_space_prefix_ = true;
  bool add_bos_ = true;
  WordRules word_rules_ = WordRules::kQwen2;
  bool whole_words_ = false;
  // Keys point into pieces_, whose strings do not move when the tokenizer is
  // moved.
  std::unordered_map<std::string_view, int32_t> normal_;
  std::array<int32_t, 256> byte_ids_{};  // for kSentencePiece
  std::optional<ByteBpe> byte_bpe_;      // for kByteBpe
  std::vector<Special> specials_;      // control, unknown, user-defined; sorted
  std::vector<Special> user_defined_;  // sorted
  std::vector<int32_t> end_ids_;       // sorted
};

// Decodes one token at a time to text for people to read, which is always valid
// UTF-8. Bytes of an incomplete character are held back. A byte that cannot
// become valid UTF-8 turns into U+FFFD.
class StreamDecoder {
 public:
  enum class Start {
    kOfText,     // drop the space that Encode put in front
    kAfterText,  // the tokens continue a printed prompt
  };

  // `tokenizer` must outlive the decoder.
  StreamDecoder(const Tokenizer& tokenizer, Start start)
      : tokenizer_(tokenizer),
        drop_space_(start == Start::kOfText && tokenizer.add_space_prefix_) {}

  // Returns the text that `id` completes; often empty for a byte token.
  std::string Add(int32_t id);

  // Returns held-back bytes as U+FFFD. The decoder then continues as in the
  // middle of a text.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  bool drop_space_;
  std::string held_;  // at most 3 bytes between calls
};

}  // namespace quern

#endif  // QUERN_MODELS_TOKENIZER_TOKENIZER_H_
