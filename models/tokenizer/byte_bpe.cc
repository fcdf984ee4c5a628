#include "quern/models/tokenizer/byte_bpe.h"

#include <cstddef>
#include <cstdint>
#include <queue>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/status_macros.h"
#include "quern/models/tokenizer/utf8.h"

namespace quern {
namespace {

constexpr char kOp[] = "tokenizer";

constexpr bool IsPrintable(int byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
}

struct Alphabet {
  char16_t of_byte[256] = {};
  int16_t byte_of[0x144] = {};  // -1: stands for no byte

  constexpr Alphabet() {
    for (int16_t& byte : byte_of) byte = -1;
    int next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const int code_point = IsPrintable(byte) ? byte : next++;
      of_byte[byte] = static_cast<char16_t>(code_point);
      byte_of[code_point] = static_cast<int16_t>(byte);
    }
  }
};
constexpr Alphabet kAlphabet;

// Whether the byte is part of some text in UTF-8.
constexpr bool IsInUtf8(size_t byte) {
  return byte != 0xc0 && byte != 0xc1 && byte < 0xf5;
}

std::string MergeName(size_t rank, absl::string_view merge) {
  return absl::StrCat("merge ", rank, " '",
                      absl::CHexEscape(merge.substr(0, 64)), "'");
}

}  // namespace

std::string PrintableBytes(absl::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const char16_t code_point = kAlphabet.of_byte[static_cast<uint8_t>(c)];
    if (code_point < 0x80) {
      text += static_cast<char>(code_point);
    } else {
      text += static_cast<char>(0xc0 | code_point >> 6);
      text += static_cast<char>(0x80 | (code_point & 0x3f));
    }
  }
  return text;
}

bool AppendBytesOfPrintable(absl::string_view printable, std::string& bytes) {
  while (!printable.empty()) {
    const Utf8Char c = FirstUtf8Char(printable);
    const int byte =
        c.code_point < 0x144 ? kAlphabet.byte_of[c.code_point] : -1;
    if (byte < 0) return false;
    bytes += static_cast<char>(byte);
    printable.remove_prefix(c.bytes);
  }
  return true;
}

absl::StatusOr<ByteBpe> ByteBpe::Create(absl::Span<const std::string> merges,
                                        const FindToken& find) {
  QUERN_RETURN_IF_ERROR(CheckRange(
      kOp, "merges", static_cast<int64_t>(merges.size()), 1, kMaxMerges));
  ByteBpe bpe;
  for (size_t byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    bpe.byte_ids_[byte] = find(PrintableBytes(absl::string_view(&c, 1)));
    if (bpe.byte_ids_[byte] < 0 && IsInUtf8(byte)) {
      return InvalidArgument(kOp, "no token for byte ", byte,
                             "; need all of 0..255 that UTF-8 has");
    }
  }
  bpe.merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const absl::string_view merge = merges[rank];
    const size_t space = merge.find(' ');
    if (space == 0 || space == merge.npos || space + 1 == merge.size() ||
        merge.find(' ', space + 1) != merge.npos) {
      return InvalidArgument(kOp, MergeName(rank, merge),
                             " is not two texts with one space between them");
    }
    const absl::string_view left = merge.substr(0, space);
    const absl::string_view right = merge.substr(space + 1);
    int32_t ids[3];
    int at = 0;
    for (const std::string& part :
         {std::string(left), std::string(right), absl::StrCat(left, right)}) {
      ids[at] = find(part);
      if (ids[at] < 0) {
        return InvalidArgument(kOp, MergeName(rank, merge), ": '",
                               absl::CHexEscape(part.substr(0, 64)),
                               "' is no normal piece; need one");
      }
      ++at;
    }
    const auto inserted = bpe.merges_.emplace(
        Key(ids[0], ids[1]), Merge{static_cast<int32_t>(rank), ids[2]});
    if (!inserted.second) {
      return InvalidArgument(kOp, MergeName(rank, merge), " is also merge ",
                             inserted.first->second.rank);
    }
  }
  return bpe;
}

void ByteBpe::Encode(absl::string_view word, std::vector<int32_t>& ids) const {
  // An element of a linked list of symbols. A symbol that was joined to its
  // left neighbour has id -1.
  struct Symbol {
    int32_t id;
    size_t previous, next;  // kNone at the ends
  };
  constexpr auto kNone = static_cast<size_t>(-1);
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  const auto add = [&](char byte) {
    const size_t at = symbols.size();
    symbols.push_back({byte_ids_[static_cast<uint8_t>(byte)],
                       at == 0 ? kNone : at - 1, at + 1});
  };
  for (const char byte : word) {
    if (byte_ids_[static_cast<uint8_t>(byte)] >= 0) {
      add(byte);
    } else {
      for (const char replacement : {'\xef', '\xbf', '\xbd'}) add(replacement);
    }
  }
  if (!symbols.empty()) symbols.back().next = kNone;

  struct Pair {
    Merge merge;
    size_t left, right;
    int32_t left_id, right_id;  // ids when it was found; if changed, stale
    bool operator<(const Pair& other) const {
      return merge.rank != other.merge.rank ? merge.rank > other.merge.rank
                                            : left > other.left;
    }
  };
  std::priority_queue<Pair> pairs;
  const auto consider = [&](size_t left, size_t right) {
    if (left == kNone || right == kNone) return;
    const int32_t left_id = symbols[left].id, right_id = symbols[right].id;
    const auto merge = merges_.find(Key(left_id, right_id));
    if (merge != merges_.end()) {
      pairs.push({merge->second, left, right, left_id, right_id});
    }
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) consider(i, i + 1);
  while (!pairs.empty()) {
    const Pair pair = pairs.top();
    pairs.pop();
    Symbol& left = symbols[pair.left];
    Symbol& right = symbols[pair.right];
    if (left.id != pair.left_id || right.id != pair.right_id) continue;
    left.id = pair.merge.id;
    right.id = -1;
    left.next = right.next;
    if (left.next != kNone) symbols[left.next].previous = pair.left;
    consider(left.previous, pair.left);
    consider(pair.left, left.next);
  }
  for (size_t i = 0; i < symbols.size() && i != kNone; i = symbols[i].next) {
    ids.push_back(symbols[i].id);
  }
}

}  // namespace quern
