// The words of DeepSeek's vocabularies, against the six patterns applied one
// after another, and the bytes that these vocabularies lack.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/tokenizer/byte_bpe.h"
#include "quern/models/tokenizer/tokenizer.h"
#include "quern/models/tokenizer/word_split.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::ElementsAre;

// Joins the words of `text` by '|'.
std::string Split(absl::string_view text) {
  std::vector<absl::string_view> words;
  while (!text.empty()) {
    words.push_back(
        text.substr(0, FirstWordBytes(WordRules::kDeepSeekLlm, text)));
    text.remove_prefix(words.back().size());
  }
  return absl::StrJoin(words, "|");
}

TEST(DeepSeekWordsTest, SplitsByHand) {
  const struct {
    const char* text;
    const char* words;
  } kCases[] = {
      {"", ""},
      {"Hello world", "Hello| world"},
      {"Hello, world!", "Hello|,| world|!"},
      {"a  b", "a| | b"},
      {"\ta\t\tb", "\ta|\t|\tb"},
      // Newlines are words of their own.
      {"a \n\n b\r\n", "a| |\n|\n| b|\r|\n"},
      // A number is one word, and white space in front of it another.
      {"12345 67", "12345| |67"},
      {"x2\u00b2\u2163", "x|2\u00b2|\u2163"},
      {"3.14", "3|.|14"},
      // White space at the end of a piece is cut off.
      {"12  \n", "12|  |\n"},
      {"12  x", "12| | x"},
      {"12  34", "12|  |34"},
      {"\U0001f600 ", "\U0001f600| "},
      {"\U0001f600 \U0001f600", "\U0001f600 \U0001f600"},
      {"   ", "   "},
      // Marks and Latin letters are one class, but letters were cut before.
      {"don't", "don|'|t"},
      {" ... a", " ...| a"},
      {"_x_", "_|x|_"},
      {"\uff21\uff42\uff0c", "\uff21\uff42|\uff0c"},
      // Accents are not in the class of marks.
      {"caf\u00e9s", "caf|\u00e9|s"},
      {" \u00e9t\u00e9", " \u00e9|t|\u00e9"},
      {"\u043c\u0438\u0440 \u043c\u0438\u0440",
       "\u043c\u0438\u0440| \u043c\u0438\u0440"},
      {"e\u0301a", "e|\u0301|a"},
      // Wide characters are cut off from all others.
      {"\u4f60\u597d\uff0c\u4e16\u754c\u3002",
       "\u4f60\u597d|\uff0c|\u4e16\u754c|\u3002"},
      {"\u4f60a\u597d 1", "\u4f60|a|\u597d| |1"},
      {"a \u201cb\u201d", "a| |\u201c|b|\u201d"},
      {"\u3042\u30a2\ud55c\uae00", "\u3042\u30a2\ud55c\uae00"},
      {"\u0e51"
       "1",
       "\u0e51|1"},
      {"\u0e01\u0e51", "\u0e01|\u0e51"},
      // U+3000 is both white space and a mark.
      {"\u3000\u3000,", "\u3000\u3000|,"},
      {"\u3000a", "\u3000|a"},
      {"\u3000\u00e9", "\u3000|\u00e9"},
      {",\u3000\u00e9", ",|\u3000|\u00e9"},
      {" \u3000\u00e9", " |\u3000|\u00e9"},
      {"a\u2003\u2003b", "a|\u2003|\u2003|b"},
      // Bytes that are not valid UTF-8 are of no class.
      {"a\xff\xfe b", "a|\xff\xfe| b"},
      {"\xe2\x96", "\xe2\x96"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.text);
    EXPECT_EQ(Split(c.text), c.words);
  }
}

// A character with its classes, written down by hand.
struct Known {
  const char* text;
  bool space, cased, mark, wide, number;
};
constexpr Known kKnown[] = {
    {"a", false, true, true, false, false},
    {"\u00e9", false, true, false, false, false},
    {"\u1e01", false, true, false, true, false},
    {"\uff21", false, true, true, false, false},
    {" ", true, false, false, false, false},
    {"\u3000", true, false, true, true, false},
    {"\u2003", true, false, false, true, false},
    {"\n", true, false, false, false, false},
    {",", false, false, true, false, false},
    {"\u201c", false, false, true, true, false},
    {"1", false, false, false, false, true},
    {"\u0e51", false, false, false, true, true},
    {"\u4f60", false, false, false, true, false},
    {"\u0301", false, false, false, false, false},
};

using Piece = std::vector<const Known*>;

// Cuts each piece before and behind each match. `match` gives the length of the
// match at place `at` of a piece, or 0.
std::vector<Piece> Cut(
    const std::vector<Piece>& pieces,
    absl::FunctionRef<size_t(const Piece& piece, size_t at)> match) {
  std::vector<Piece> cut;
  for (const Piece& piece : pieces) {
    size_t begin = 0, at = 0;
    const auto end_at = [&](size_t end) {
      if (end > begin) {
        cut.emplace_back(piece.begin() + static_cast<std::ptrdiff_t>(begin),
                         piece.begin() + static_cast<std::ptrdiff_t>(end));
      }
      begin = end;
    };
    while (at < piece.size()) {
      const size_t length = match(piece, at);
      if (length > 0) end_at(at);
      at += length > 0 ? length : 1;
      if (length > 0) end_at(at);
    }
    end_at(piece.size());
  }
  return cut;
}

size_t Run(const Piece& piece, size_t at, bool Known::*is) {
  size_t end = at;
  while (end < piece.size() && piece[end]->*is) ++end;
  return end - at;
}

// Length of \s?X+, where the white space is left out if X+ fails behind it.
size_t AfterSpace(const Piece& piece, size_t at, bool Known::*is) {
  if (piece[at]->space) {
    if (const size_t run = Run(piece, at + 1, is); run > 0) return 1 + run;
  }
  return Run(piece, at, is);
}

std::string Reference(const Piece& text) {
  std::vector<Piece> pieces = {text};
  pieces = Cut(pieces, [](const Piece& p, size_t at) -> size_t {
    return *p[at]->text == '\n' ? 1 : 0;
  });
  pieces = Cut(pieces, [](const Piece& p, size_t at) {
    return AfterSpace(p, at, &Known::cased);
  });
  pieces = Cut(pieces, [](const Piece& p, size_t at) {
    return AfterSpace(p, at, &Known::mark);
  });
  pieces = Cut(pieces, [](const Piece& p, size_t at) -> size_t {
    const size_t run = Run(p, at, &Known::space);
    return at + run == p.size() ? run : 0;
  });
  pieces = Cut(pieces, [](const Piece& p, size_t at) {
    return Run(p, at, &Known::wide);
  });
  pieces = Cut(pieces, [](const Piece& p, size_t at) {
    return Run(p, at, &Known::number);
  });
  return absl::StrJoin(pieces, "|", [](std::string* out, const Piece& piece) {
    for (const Known* known : piece) absl::StrAppend(out, known->text);
  });
}

void ExpectReference(const Piece& text) {
  std::string bytes;
  for (const Known* known : text) bytes += known->text;
  ASSERT_EQ(Split(bytes), Reference(text));
}

TEST(DeepSeekWordsTest, AreThePatternsOneAfterAnother) {
  constexpr size_t kCount = std::size(kKnown);
  // All texts of up to four characters.
  for (size_t length = 1, texts = kCount; length <= 4;
       ++length, texts *= kCount) {
    for (size_t i = 0; i < texts; ++i) {
      Piece text;
      for (size_t rest = i; text.size() < length; rest /= kCount) {
        text.push_back(&kKnown[rest % kCount]);
      }
      ExpectReference(text);
      if (HasFatalFailure()) return;
    }
  }
  // Longer texts, some of which are mostly white space.
  TestRng rng;
  for (int i = 0; i < 20000; ++i) {
    Piece text;
    const bool spaces = rng.Integer(0, 1) == 1;
    for (int64_t n = rng.Integer(5, 16); n > 0; --n) {
      const int64_t known = spaces && rng.Integer(0, 1) == 1
                                ? rng.Integer(4, 6)
                                : rng.Integer(0, kCount - 1);
      text.push_back(&kKnown[known]);
    }
    ExpectReference(text);
    if (HasFatalFailure()) return;
  }
}

// The ends of ranges, where the character beyond has another class.
TEST(DeepSeekWordsTest, KnowsTheEndsOfClasses) {
  // White space joins a cased letter that is not wide.
  for (const char* c : {"\u00b5", "\u01ba", "\u01bc", "\u0293", "\u0531",
                        "\u0556", "\u0481", "\u048a", "\ufb06", "\uff5a",
                        "\U00010400", "\U0001044f", "\U0001e943"}) {
    EXPECT_EQ(Split(absl::StrCat(" ", c)), absl::StrCat(" ", c));
  }
  for (const char* c :
       {"\u00aa", "\u00d7", "\u01bb", "\u0294", "\u0561", "\u0482", "\ufb07",
        "\u05d0", "\U00010450", "\U0001e944"}) {
    EXPECT_EQ(Split(absl::StrCat("a", c)), absl::StrCat("a|", c));
    EXPECT_EQ(Split(absl::StrCat("\U0001f600", c)),
              absl::StrCat("\U0001f600", c));
  }
  // A wide letter is cut off from wide letters without case.
  for (const char* c : {"\u10a0", "\u1c90", "\u1f7d", "\u1fd3", "\u1fdb",
                        "\u212a", "\u2126", "\u1fbe"}) {
    EXPECT_EQ(Split(absl::StrCat("\u4f60", c)), absl::StrCat("\u4f60|", c));
  }
  for (const char* c : {"\u10c6", "\u10d0", "\u1f7e", "\u2129", "\u2c7c"}) {
    EXPECT_EQ(Split(absl::StrCat("\u4f60", c)), absl::StrCat("\u4f60", c));
  }
  // Marks attract white space, and wide characters repel others.
  for (const char* c :
       {"!", "/", ":", "~", "\uff01", "\uff0f", "\uff1a", "\uff5e"}) {
    EXPECT_EQ(Split(absl::StrCat("\U0001f600 ", c)),
              absl::StrCat("\U0001f600| ", c));
  }
  for (const char* c : {"\x7f", "\u00a1", "\uff00", "\uff5f"}) {
    EXPECT_EQ(Split(absl::StrCat("\U0001f600 ", c)),
              absl::StrCat("\U0001f600 ", c));
  }
  for (const char* c : {"\u0800", "\u4e00", "\u9fa5", "\uac00", "\ud7ff"}) {
    EXPECT_EQ(Split(absl::StrCat("\U0001f600", c)),
              absl::StrCat("\U0001f600|", c));
  }
  for (const char* c : {"\u07ff", "\u9fa6", "\uabff", "\ue000"}) {
    EXPECT_EQ(Split(absl::StrCat("\U0001f600", c)),
              absl::StrCat("\U0001f600", c));
  }
}

// A megabyte takes a moment, whatever it is made of.
TEST(DeepSeekWordsTest, TakesLinearTime) {
  for (const char* pattern : {"1 ", "  ", "a", "\u4f60,", "\U0001f600 "}) {
    std::string text;
    while (text.size() < 1000000) text += pattern;
    size_t bytes = 0;
    for (absl::string_view rest = text; !rest.empty();) {
      const size_t word = FirstWordBytes(WordRules::kDeepSeekLlm, rest);
      ASSERT_GE(word, 1u);
      rest.remove_prefix(word);
      bytes += word;
    }
    EXPECT_EQ(bytes, text.size());
  }
}

constexpr int kAbsent[] = {0xc0, 0xc1, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9,
                           0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff};

// Pieces for the bytes as 0 to 255, one merge as 256, and an end.
TokenizerSpec Bytes() {
  TokenizerSpec spec;
  spec.kind = TokenizerKind::kByteBpe;
  spec.word_rules = WordRules::kDeepSeekLlm;
  for (int byte = 0; byte < 256; ++byte) {
    spec.pieces.push_back(
        PrintableBytes(std::string(1, static_cast<char>(byte))));
  }
  spec.pieces.push_back("aa");
  spec.types.assign(spec.pieces.size(), TokenType::kNormal);
  spec.pieces.push_back("<end>");
  spec.types.push_back(TokenType::kControl);
  spec.bos_id = -1;
  spec.eos_id = 257;
  spec.add_bos = false;
  spec.merges = {"a a"};
  return spec;
}

// User-defined tokens have the names that the tokens of bytes would have.
TEST(DeepSeekTokenizerTest, BytesThatUtf8HasNotMayBeMissing) {
  TokenizerSpec spec = Bytes();
  for (const int byte : kAbsent) {
    spec.types[static_cast<size_t>(byte)] = TokenType::kUserDefined;
  }
  const auto tokenizer = Tokenizer::Create(spec);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(tokenizer->Encode("\u00ff"), ElementsAre(0xff));
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode("a\u00ff\u00c0z")),
            "a\u00ff\u00c0z");
  EXPECT_THAT(tokenizer->Encode("aa\xff"), ElementsAre(256, 0xef, 0xbf, 0xbd));
  for (const int byte : kAbsent) {
    EXPECT_THAT(tokenizer->Encode(std::string(1, static_cast<char>(byte))),
                ElementsAre(0xef, 0xbf, 0xbd));
  }
  EXPECT_EQ(tokenizer->Encode("aa\xf5 aa\xfe\xc1"),
            tokenizer->Encode("aa\ufffd aa\ufffd\ufffd"));
  // Other bytes that are not valid UTF-8 are themselves.
  EXPECT_THAT(tokenizer->Encode("\xe2\x96"), ElementsAre(0xe2, 0x96));
}

TEST(DeepSeekTokenizerTest, OtherBytesMayNotBeMissing) {
  for (int byte = 0; byte < 256; ++byte) {
    TokenizerSpec spec = Bytes();
    spec.types[static_cast<size_t>(byte)] = TokenType::kUserDefined;
    const bool ok = byte == 0xc0 || byte == 0xc1 || byte >= 0xf5;
    EXPECT_EQ(Tokenizer::Create(std::move(spec)).status().code(),
              ok ? absl::StatusCode::kOk : absl::StatusCode::kInvalidArgument)
        << byte;
  }
}

}  // namespace
}  // namespace quern
