#include "quern/models/tokenizer/tokenizer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/status_macros.h"
#include "quern/models/tokenizer/byte_bpe.h"
#include "quern/models/tokenizer/utf8.h"
#include "quern/models/tokenizer/word_split.h"

namespace quern {
namespace {

constexpr char kOp[] = "tokenizer";
constexpr absl::string_view kSpace = "\xe2\x96\x81";  // U+2581
constexpr absl::string_view kReplacement = "\xef\xbf\xbd";
constexpr int64_t kMaxPieces = 1 << 24;

// The value of a piece "<0xHH>", or -1 for other pieces.
int ByteOfPiece(absl::string_view piece) {
  if (piece.size() != 6 || piece.substr(0, 3) != "<0x" || piece[5] != '>') {
    return -1;
  }
  int value = 0;
  for (const char c : piece.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

// Replaces U+2581 by spaces, as kSentencePiece reads a piece.
std::string WithSpaces(absl::string_view text) {
  return absl::StrReplaceAll(text, {{kSpace, " "}});
}

std::string PieceName(size_t id, absl::string_view piece) {
  return absl::StrCat("piece ", id, " '", absl::CHexEscape(piece.substr(0, 64)),
                      "'");
}

absl::Status Duplicate(size_t id, absl::string_view piece, int32_t first) {
  return InvalidArgument(kOp, PieceName(id, piece), " is also piece ", first);
}

}  // namespace

absl::StatusOr<Tokenizer> Tokenizer::Create(TokenizerSpec spec) {
  const bool bytes = spec.kind == TokenizerKind::kByteBpe;
  const auto size = static_cast<int64_t>(spec.pieces.size());
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "pieces", size, 1, kMaxPieces));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "types",
                                   static_cast<int64_t>(spec.types.size()),
                                   size, "there are pieces"));
  if (!bytes) {
    QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "scores",
                                     static_cast<int64_t>(spec.scores.size()),
                                     size, "there are pieces"));
  }
  const bool no_bos = bytes && !spec.add_bos && spec.bos_id == -1;
  if (!no_bos) {
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, "bos_id", spec.bos_id, 0, size - 1));
  }
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "eos_id", spec.eos_id, 0, size - 1));
  for (const int32_t id : spec.end_ids) {
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, "end_ids", id, 0, size - 1));
  }

  Tokenizer tokenizer;
  tokenizer.pieces_ = std::move(spec.pieces);
  tokenizer.scores_ = std::move(spec.scores);
  tokenizer.types_ = std::move(spec.types);
  tokenizer.bos_id_ = spec.bos_id;
  tokenizer.eos_id_ = spec.eos_id;
  tokenizer.end_ids_ = std::move(spec.end_ids);
  tokenizer.end_ids_.push_back(spec.eos_id);
  std::sort(tokenizer.end_ids_.begin(), tokenizer.end_ids_.end());
  tokenizer.add_space_prefix_ = spec.add_space_prefix && !bytes;
  tokenizer.add_bos_ = spec.add_bos;
  tokenizer.word_rules_ = spec.word_rules;
  tokenizer.whole_words_ = spec.whole_words;
  for (size_t id = 0; id < tokenizer.pieces_.size(); ++id) {
    const auto type = static_cast<int32_t>(tokenizer.types_[id]);
    if (type < 1 || type > 6) {
      return InvalidArgument(kOp, PieceName(id, tokenizer.pieces_[id]),
                             " has type ", type, "; need 1..6");
    }
  }
  QUERN_RETURN_IF_ERROR(bytes ? tokenizer.IndexBytePieces()
                              : tokenizer.IndexSentencePieces());
  if (bytes) {
    QUERN_ASSIGN_OR_RETURN(
        tokenizer.byte_bpe_,
        ByteBpe::Create(spec.merges, [&](absl::string_view text) {
          return tokenizer.FindPiece(text);
        }));
  }
  QUERN_RETURN_IF_ERROR(tokenizer.IndexSpecials());
  return tokenizer;
}

absl::Status Tokenizer::IndexSentencePieces() {
  byte_ids_.fill(-1);
  for (size_t id = 0; id < pieces_.size(); ++id) {
    const std::string& piece = pieces_[id];
    if (std::isnan(scores_[id])) {
      return InvalidArgument(kOp, PieceName(id, piece), " has score NaN");
    }
    if (types_[id] == TokenType::kByte) {
      const int byte = ByteOfPiece(piece);
      if (byte < 0) {
        return InvalidArgument(kOp, PieceName(id, piece),
                               " has type byte; need <0x00>..<0xFF>");
      }
      int32_t& slot = byte_ids_[static_cast<size_t>(byte)];
      if (slot >= 0) return Duplicate(id, piece, slot);
      slot = static_cast<int32_t>(id);
    } else if (types_[id] == TokenType::kNormal) {
      if (piece.empty() || !IsUtf8(piece)) {
        return InvalidArgument(kOp, PieceName(id, piece),
                               " is empty or not UTF-8");
      }
      const auto inserted = normal_.emplace(piece, static_cast<int32_t>(id));
      if (!inserted.second) return Duplicate(id, piece, inserted.first->second);
    }
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    if (byte_ids_[byte] < 0) {
      return InvalidArgument(kOp, "no token for byte ", byte,
                             "; need all of 0..255");
    }
  }
  if (FindPiece(kSpace) < 0) {
    return InvalidArgument(kOp, "no piece U+2581; need one, it is the space");
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::IndexBytePieces() {
  std::unordered_map<std::string_view, int32_t> used;
  used.reserve(pieces_.size());
  normal_.reserve(pieces_.size());
  for (size_t id = 0; id < pieces_.size(); ++id) {
    const std::string& piece = pieces_[id];
    if (types_[id] == TokenType::kUnused) continue;
    if (types_[id] == TokenType::kByte) {
      return InvalidArgument(kOp, PieceName(id, piece),
                             " has type byte; a vocabulary of merges has none");
    }
    const auto inserted = used.emplace(piece, static_cast<int32_t>(id));
    if (!inserted.second) return Duplicate(id, piece, inserted.first->second);
    if (types_[id] != TokenType::kNormal) continue;
    std::string bytes;
    if (piece.empty() || !AppendBytesOfPrintable(piece, bytes)) {
      return InvalidArgument(kOp, PieceName(id, piece),
                             " is empty or has a character that stands for no "
                             "byte");
    }
    normal_.emplace(piece, static_cast<int32_t>(id));
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::IndexSpecials() {
  for (size_t id = 0; id < pieces_.size(); ++id) {
    const bool user_defined = types_[id] == TokenType::kUserDefined;
    if (!user_defined && types_[id] != TokenType::kControl &&
        types_[id] != TokenType::kUnknown) {
      continue;
    }
    if (static_cast<int64_t>(pieces_[id].size()) > kMaxSpecialBytes) {
      return InvalidArgument(kOp, PieceName(id, pieces_[id]), " has ",
                             pieces_[id].size(), " bytes; need at most ",
                             kMaxSpecialBytes,
                             " of a control, unknown or user-defined piece");
    }
    Special special{
        byte_bpe_.has_value() ? pieces_[id] : WithSpaces(pieces_[id]),
        static_cast<int32_t>(id)};
    if (user_defined) user_defined_.push_back(special);
    specials_.push_back(std::move(special));
  }
  // Only the first of several pieces with the same text is kept. Encode finds
  // no other, and the time it takes would grow with their number.
  for (std::vector<Special>* all : {&specials_, &user_defined_}) {
    std::sort(all->begin(), all->end());
    all->erase(std::unique(all->begin(), all->end(),
                           [](const Special& a, const Special& b) {
                             return a.text == b.text;
                           }),
               all->end());
  }
  return absl::OkStatus();
}

bool Tokenizer::IsEnd(int32_t id) const {
  return std::binary_search(end_ids_.begin(), end_ids_.end(), id);
}

int32_t Tokenizer::FindPiece(absl::string_view text) const {
  const auto it = normal_.find(std::string_view(text.data(), text.size()));
  return it == normal_.end() ? -1 : it->second;
}

const Tokenizer::Special* Tokenizer::FindSpecial(
    const std::vector<Special>& specials, absl::string_view text) {
  const Special* longest = nullptr;
  // [begin, end) are the special texts that begin with text[0, depth).
  auto begin = specials.begin(), end = specials.end();
  for (size_t depth = 0; depth < text.size(); ++depth) {
    const auto byte_of = [&](const Special& special) {
      return static_cast<uint8_t>(special.text[depth]);
    };
    while (begin != end && begin->text.size() == depth) ++begin;
    const auto byte = static_cast<uint8_t>(text[depth]);
    begin = std::partition_point(
        begin, end, [&](const Special& s) { return byte_of(s) < byte; });
    end = std::partition_point(
        begin, end, [&](const Special& s) { return byte_of(s) == byte; });
    if (begin == end) break;
    if (begin->text.size() == depth + 1) longest = &*begin;
  }
  return longest;
}

std::vector<int32_t> Tokenizer::Encode(absl::string_view text,
                                       Specials specials) const {
  std::vector<int32_t> ids;
  const std::string spaced =
      byte_bpe_.has_value() ? std::string() : WithSpaces(text);
  if (!byte_bpe_.has_value()) text = spaced;
  size_t done = 0;
  for (size_t at = 0; specials == Specials::kAsTokens && at < text.size();) {
    const Special* special = FindSpecial(specials_, text.substr(at));
    if (special == nullptr) {
      ++at;
      continue;
    }
    // User-defined tokens are left in the text, where AppendText finds them
    // again.
    if (type(special->id) != TokenType::kUserDefined) {
      AppendText(text.substr(done, at - done), ids);
      ids.push_back(special->id);
      done = at + special->text.size();
    }
    at += special->text.size();
  }
  AppendText(text.substr(done), ids);
  return ids;
}

std::vector<int32_t> Tokenizer::EncodeText(absl::string_view text,
                                           Specials specials) const {
  std::vector<int32_t> ids = Encode(text, specials);
  if (add_bos_ && (ids.empty() || ids[0] != bos_id_)) {
    ids.insert(ids.begin(), bos_id_);
  }
  return ids;
}

void Tokenizer::AppendText(absl::string_view text,
                           std::vector<int32_t>& ids) const {
  if (text.empty()) return;
  std::string prefixed;
  if (add_space_prefix_) {
    prefixed = absl::StrCat(" ", text);
    text = prefixed;
  }
  size_t done = 0;
  for (size_t at = 0; !user_defined_.empty() && at < text.size();) {
    const Special* special = FindSpecial(user_defined_, text.substr(at));
    if (special == nullptr) {
      ++at;
      continue;
    }
    AppendPlain(text.substr(done, at - done), ids);
    ids.push_back(special->id);
    at += special->text.size();
    done = at;
  }
  AppendPlain(text.substr(done), ids);
}

void Tokenizer::AppendPlain(absl::string_view text,
                            std::vector<int32_t>& ids) const {
  if (text.empty()) return;
  if (byte_bpe_.has_value()) {
    AppendWords(text, ids);
  } else {
    AppendSentence(text, ids);
  }
}

void Tokenizer::AppendWords(absl::string_view text,
                            std::vector<int32_t>& ids) const {
  while (!text.empty()) {
    const absl::string_view word =
        text.substr(0, FirstWordBytes(word_rules_, text));
    text.remove_prefix(word.size());
    const int32_t whole = whole_words_ ? FindPiece(PrintableBytes(word)) : -1;
    if (whole >= 0) {
      ids.push_back(whole);
    } else {
      byte_bpe_->Encode(word, ids);
    }
  }
}

void Tokenizer::AppendSentence(absl::string_view text,
                               std::vector<int32_t>& ids) const {
  const std::string marked = absl::StrReplaceAll(text, {{" ", kSpace}});

  // An element of a linked list of adjacent pieces of `marked`. A symbol that
  // was joined to its left neighbour has no bytes.
  struct Symbol {
    size_t begin, bytes;
    size_t previous, next;  // kNone at the ends
  };
  constexpr auto kNone = static_cast<size_t>(-1);
  std::vector<Symbol> symbols;
  for (size_t at = 0; at < marked.size();) {
    const int length = Utf8Length(absl::string_view(marked).substr(at));
    const size_t bytes = length > 0 ? static_cast<size_t>(length) : 1;
    const size_t index = symbols.size();
    symbols.push_back({at, bytes, index == 0 ? kNone : index - 1, index + 1});
    at += bytes;
  }
  symbols.back().next = kNone;

  struct Pair {
    float score;
    size_t left, right;
    size_t bytes;  // of both when found; if changed, stale
    bool operator<(const Pair& other) const {
      return score != other.score ? score < other.score : left > other.left;
    }
  };
  std::priority_queue<Pair> pairs;
  const auto consider = [&](size_t left, size_t right) {
    if (left == kNone || right == kNone) return;
    const size_t bytes = symbols[left].bytes + symbols[right].bytes;
    const int32_t id =
        FindPiece(absl::string_view(marked).substr(symbols[left].begin, bytes));
    if (id >= 0) {
      pairs.push({scores_[static_cast<size_t>(id)], left, right, bytes});
    }
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) consider(i, i + 1);
  while (!pairs.empty()) {
    const Pair pair = pairs.top();
    pairs.pop();
    Symbol& left = symbols[pair.left];
    Symbol& right = symbols[pair.right];
    if (left.bytes == 0 || right.bytes == 0 ||
        left.bytes + right.bytes != pair.bytes) {
      continue;
    }
    left.bytes = pair.bytes;
    right.bytes = 0;
    left.next = right.next;
    if (left.next != kNone) symbols[left.next].previous = pair.left;
    consider(left.previous, pair.left);
    consider(pair.left, left.next);
  }

  for (size_t i = 0; i != kNone; i = symbols[i].next) {
    const absl::string_view symbol =
        absl::string_view(marked).substr(symbols[i].begin, symbols[i].bytes);
    const int32_t id = FindPiece(symbol);
    if (id >= 0) {
      ids.push_back(id);
    } else {
      for (const char c : symbol) {
        ids.push_back(byte_ids_[static_cast<uint8_t>(c)]);
      }
    }
  }
}

std::string Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return "";
  if (byte_bpe_.has_value()) {
    std::string bytes;
    if (type(id) == TokenType::kUserDefined) return std::string(piece(id));
    if (type(id) == TokenType::kNormal) {
      AppendBytesOfPrintable(piece(id), bytes);
    }
    return bytes;
  }
  switch (type(id)) {
    case TokenType::kByte:
      return std::string(1, static_cast<char>(ByteOfPiece(piece(id))));
    case TokenType::kNormal:
    case TokenType::kUserDefined:
      return WithSpaces(piece(id));
    case TokenType::kUnknown:
    case TokenType::kControl:
    case TokenType::kUnused:
      return "";
  }
  return "";
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += TokenBytes(id);
  if (add_space_prefix_ && !text.empty() && text[0] == ' ') text.erase(0, 1);
  return text;
}

std::string StreamDecoder::Add(int32_t id) {
  held_ += tokenizer_.TokenBytes(id);
  if (drop_space_ && !held_.empty()) {
    if (held_[0] == ' ') held_.erase(0, 1);
    drop_space_ = false;
  }
  std::string text;
  absl::string_view rest = held_;
  while (!rest.empty()) {
    const int length = Utf8Length(rest);
    if (length == 0) break;
    if (length > 0) {
      text += std::string(rest.substr(0, static_cast<size_t>(length)));
      rest.remove_prefix(static_cast<size_t>(length));
    } else {
      text += std::string(kReplacement);
      rest.remove_prefix(1);
    }
  }
  held_ = std::string(rest);
  return text;
}

std::string StreamDecoder::Finish() {
  std::string text;
  for (size_t i = 0; i < held_.size(); ++i) text += std::string(kReplacement);
  held_.clear();
  drop_space_ = false;
  return text;
}

}  // namespace quern
