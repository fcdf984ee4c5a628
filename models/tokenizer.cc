#include "models/tokenizer.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/status_macros.h"
#include "models/gguf.h"

namespace quern {
namespace {

constexpr char kOp[] = "tokenizer";
constexpr absl::string_view kSpace = "\xe2\x96\x81";  // U+2581
constexpr absl::string_view kReplacement = "\xef\xbf\xbd";
constexpr int64_t kMaxPieces = 1 << 24;

// The bytes of the UTF-8 character at the front of `text`: 1..4 if it is valid,
// 0 if more bytes could make it so, -1 if none can. Unicode 15, table 3-7.
int Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return -1;
  const int length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  for (size_t i = 1; i < static_cast<size_t>(length); ++i) {
    if (i == text.size()) return 0;
    uint8_t low = 0x80, high = 0xbf;
    if (i == 1) {
      if (lead == 0xe0) low = 0xa0;   // not overlong
      if (lead == 0xed) high = 0x9f;  // no surrogates
      if (lead == 0xf0) low = 0x90;
      if (lead == 0xf4) high = 0x8f;  // <= U+10FFFF
    }
    if (byte(i) < low || byte(i) > high) return -1;
  }
  return length;
}

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const int length = Utf8Length(text);
    if (length <= 0) return false;
    text.remove_prefix(static_cast<size_t>(length));
  }
  return true;
}

// The value of "<0xHH>", or -1.
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

std::string PieceName(size_t id, absl::string_view piece) {
  return absl::StrCat("piece ", id, " '", absl::CHexEscape(piece.substr(0, 64)),
                      "'");
}

}  // namespace

absl::StatusOr<Tokenizer> Tokenizer::Create(TokenizerSpec spec) {
  const size_t size = spec.pieces.size();
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "pieces", static_cast<int64_t>(size), 1, kMaxPieces));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "scores", static_cast<int64_t>(spec.scores.size()),
                 static_cast<int64_t>(size), "there are pieces"));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "types", static_cast<int64_t>(spec.types.size()),
                 static_cast<int64_t>(size), "there are pieces"));
  const auto last = static_cast<int64_t>(size) - 1;
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "bos_id", spec.bos_id, 0, last));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "eos_id", spec.eos_id, 0, last));

  Tokenizer tokenizer;
  tokenizer.pieces_ = std::move(spec.pieces);
  tokenizer.scores_ = std::move(spec.scores);
  tokenizer.types_ = std::move(spec.types);
  tokenizer.bos_id_ = spec.bos_id;
  tokenizer.eos_id_ = spec.eos_id;
  tokenizer.add_space_prefix_ = spec.add_space_prefix;
  tokenizer.add_bos_ = spec.add_bos;
  tokenizer.byte_ids_.fill(-1);
  for (size_t id = 0; id < size; ++id) {
    const std::string& piece = tokenizer.pieces_[id];
    if (std::isnan(tokenizer.scores_[id])) {
      return InvalidArgument(kOp, PieceName(id, piece), " has score NaN");
    }
    const auto type = static_cast<int32_t>(tokenizer.types_[id]);
    if (type < 1 || type > 6) {
      return InvalidArgument(kOp, PieceName(id, piece), " has type ", type,
                             "; need 1..6");
    }
    if (tokenizer.types_[id] == TokenType::kByte) {
      const int byte = ByteOfPiece(piece);
      if (byte < 0) {
        return InvalidArgument(kOp, PieceName(id, piece),
                               " has type byte; need <0x00>..<0xFF>");
      }
      int32_t& slot = tokenizer.byte_ids_[static_cast<size_t>(byte)];
      if (slot >= 0) {
        return InvalidArgument(kOp, PieceName(id, piece), " is also piece ",
                               slot);
      }
      slot = static_cast<int32_t>(id);
    } else if (tokenizer.types_[id] == TokenType::kNormal) {
      if (piece.empty() || !IsUtf8(piece)) {
        return InvalidArgument(kOp, PieceName(id, piece),
                               " is empty or not UTF-8");
      }
      const auto inserted =
          tokenizer.normal_.emplace(piece, static_cast<int32_t>(id));
      if (!inserted.second) {
        return InvalidArgument(kOp, PieceName(id, piece), " is also piece ",
                               inserted.first->second);
      }
    }
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    if (tokenizer.byte_ids_[byte] < 0) {
      return InvalidArgument(kOp, "no token for byte ", byte,
                             "; need all of 0..255");
    }
  }
  if (tokenizer.FindPiece(kSpace) < 0) {
    return InvalidArgument(kOp, "no piece U+2581; need one, it is the space");
  }
  return tokenizer;
}

absl::StatusOr<Tokenizer> Tokenizer::Create(const GgufFile& file) {
  QUERN_ASSIGN_OR_RETURN(const absl::string_view model,
                         file.GetString("tokenizer.ggml.model"));
  if (model != "llama") {
    return Unimplemented(kOp, "tokenizer.ggml.model is '",
                         absl::CHexEscape(model.substr(0, 64)),
                         "'; need 'llama'");
  }
  TokenizerSpec spec;
  QUERN_ASSIGN_OR_RETURN(const std::vector<absl::string_view> pieces,
                         file.GetStrings("tokenizer.ggml.tokens"));
  spec.pieces.assign(pieces.begin(), pieces.end());
  QUERN_ASSIGN_OR_RETURN(spec.scores, file.GetF32s("tokenizer.ggml.scores"));
  QUERN_ASSIGN_OR_RETURN(const std::vector<int32_t> types,
                         file.GetI32s("tokenizer.ggml.token_type"));
  for (const int32_t type : types) {
    spec.types.push_back(static_cast<TokenType>(type));
  }
  for (const auto& [key, id] :
       {std::pair<const char*, int32_t*>{"tokenizer.ggml.bos_token_id",
                                         &spec.bos_id},
        {"tokenizer.ggml.eos_token_id", &spec.eos_id}}) {
    if (!file.Has(key)) continue;
    QUERN_ASSIGN_OR_RETURN(const int64_t value, file.GetInt(key));
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, key, value, 0, kMaxPieces));
    *id = static_cast<int32_t>(value);
  }
  for (const auto& [key, flag] :
       {std::pair<const char*, bool*>{"tokenizer.ggml.add_space_prefix",
                                      &spec.add_space_prefix},
        {"tokenizer.ggml.add_bos_token", &spec.add_bos}}) {
    if (!file.Has(key)) continue;
    QUERN_ASSIGN_OR_RETURN(*flag, file.GetBool(key));
  }
  return Create(std::move(spec));
}

int32_t Tokenizer::FindPiece(absl::string_view text) const {
  const auto it = normal_.find(std::string_view(text.data(), text.size()));
  return it == normal_.end() ? -1 : it->second;
}

std::vector<int32_t> Tokenizer::Encode(absl::string_view text) const {
  std::vector<int32_t> ids;
  if (text.empty()) return ids;
  const std::string marked =
      absl::StrCat(add_space_prefix_ ? kSpace : "",
                   absl::StrReplaceAll(text, {{" ", kSpace}}));

  // Symbols are adjacent pieces of `marked` in a list; one that was joined to
  // its left neighbour has no bytes.
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
    size_t bytes;  // of both when it was found; else the pair is stale
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
  return ids;
}

std::string Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return "";
  switch (type(id)) {
    case TokenType::kByte:
      return std::string(1, static_cast<char>(ByteOfPiece(piece(id))));
    case TokenType::kNormal:
    case TokenType::kUserDefined:
      return absl::StrReplaceAll(piece(id), {{kSpace, " "}});
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
