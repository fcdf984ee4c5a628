#include "quern/models/tokenizer/byte_bpe.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/tokenizer/small_merges_testutil.h"
#include "quern/models/tokenizer/text_testutil.h"
#include "quern/models/tokenizer/tokenizer.h"
#include "quern/models/tokenizer/word_split.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Tokenizer Make(TokenizerSpec spec) {
  auto tokenizer = Tokenizer::Create(std::move(spec));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}
Tokenizer Small() { return Make(SmallSpec(SmallMerges())); }

TEST(PrintableBytesTest, MapsEachByteToItsCharacterAndBack) {
  EXPECT_EQ(PrintableBytes("a~! \n\t"), "a~!\u0120\u010a\u0109");
  EXPECT_EQ(PrintableBytes(std::string("\0", 1)), "\u0100");
  EXPECT_EQ(PrintableBytes("\x7f\x80\xa0\xa1\xac\xad\xae\xff"),
            "\u0121\u0122\u0142\u00a1\u00ac\u0143\u00ae\u00ff");
  for (int byte = 0; byte < 256; ++byte) {
    const std::string bytes(1, static_cast<char>(byte));
    std::string back = "x";
    EXPECT_TRUE(AppendBytesOfPrintable(PrintableBytes(bytes), back));
    EXPECT_EQ(back, "x" + bytes);
  }
  for (const char* none : {" ", "\n", "\u00a0", "\u00ad", "\u0144", "\u6f22",
                           "\x80", "\xc4", "a b"}) {
    std::string bytes;
    EXPECT_FALSE(AppendBytesOfPrintable(none, bytes)) << none;
  }
}

TEST(ByteBpeTest, JoinsByRankWithinWords) {
  const Tokenizer tokenizer = Small();
  EXPECT_THAT(tokenizer.Encode("the the"), ElementsAre(kThe, kSpaceThe));
  EXPECT_THAT(tokenizer.Encode("in thin"), ElementsAre(kIn, ' ', 256, kIn));
  // On a tie the leftmost pair joins, and a lower rank wins over a longer
  // piece.
  EXPECT_THAT(tokenizer.Encode("aaaaa"), ElementsAre(kAa, kAaa));
  EXPECT_THAT(tokenizer.Encode("aaab"), ElementsAre(kAaa, 'b'));
  EXPECT_THAT(tokenizer.Encode("aba"), ElementsAre(264));
  EXPECT_THAT(tokenizer.Encode("bab"), ElementsAre('b', 262));
  // No token crosses two words.
  EXPECT_THAT(tokenizer.Encode("t1he"), ElementsAre('t', '1', 'h', 'e'));
  EXPECT_THAT(tokenizer.Encode(""), ElementsAre());
  EXPECT_EQ(tokenizer.Decode({kSpaceThe, kIn, 0xe2, 0x96}), " thein\xe2\x96");
}

// The definition as a plain quadratic loop.
std::vector<int32_t> ReferenceEncode(const TokenizerSpec& spec,
                                     absl::string_view word) {
  std::vector<std::string> symbols;
  for (const char c : word) symbols.push_back(PrintableBytes({&c, 1}));
  for (;;) {
    size_t best = spec.merges.size(), at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      for (size_t rank = 0; rank < best; ++rank) {
        if (spec.merges[rank] ==
            absl::StrCat(symbols[i], " ", symbols[i + 1])) {
          best = rank;
          at = i;
        }
      }
    }
    if (best == spec.merges.size()) break;
    symbols[at] += symbols[at + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  std::vector<int32_t> ids;
  for (const std::string& symbol : symbols) {
    int32_t id = 0;
    while (spec.pieces[static_cast<size_t>(id)] != symbol) ++id;
    ids.push_back(id);
  }
  return ids;
}

// Random vocabularies over two letters, in which any wrong order of merges
// shows. Several merges may make the same piece.
TEST(ByteBpeTest, EqualsTheDefinitionOnCollidingMerges) {
  TestRng rng;
  for (int vocabulary = 0; vocabulary < 100; ++vocabulary) {
    std::vector<std::string> pieces = {"a", "b"};
    const auto any_piece = [&] {
      return pieces[static_cast<size_t>(
          rng.Integer(0, static_cast<int64_t>(pieces.size()) - 1))];
    };
    std::vector<std::string> merges;
    while (merges.size() < 12) {
      const std::string left = any_piece(), right = any_piece();
      const std::string merge = absl::StrCat(left, " ", right);
      if (absl::c_linear_search(merges, merge)) continue;
      merges.push_back(merge);
      if (!absl::c_linear_search(pieces, left + right)) {
        pieces.push_back(left + right);
      }
    }
    // Only merges that make a new piece are given, because SmallSpec adds a
    // piece for each.
    std::vector<std::string> first_merges, made;
    for (const std::string& merge : merges) {
      const std::string piece = absl::StrJoin(absl::StrSplit(merge, ' '), "");
      if (absl::c_linear_search(made, piece)) continue;
      made.push_back(piece);
      first_merges.push_back(merge);
    }
    TokenizerSpec spec = SmallSpec(first_merges);
    spec.merges = merges;
    const Tokenizer tokenizer = Make(spec);
    for (int i = 0; i < 40; ++i) {
      std::string word;
      for (int64_t n = rng.Integer(1, 24); n > 0; --n) {
        word += rng.Integer(0, 1) == 0 ? 'b' : 'a';
      }
      ASSERT_EQ(tokenizer.Encode(word), ReferenceEncode(spec, word))
          << word << " by " << absl::StrJoin(merges, ", ");
    }
  }
}

TEST(ByteBpeTest, RoundTripsAnyBytes) {
  TestRng rng;
  const std::vector<std::string> parts = {
      "the",     " ",     "'S",       "\r\n", "\xe2\x96", "\u00e9",
      "12",      "\xff",  "\xed\xa0", "\x80", "\u6f22",   "\xf0\x9f\x98\x80",
      "<|end|>", "<tool>"};
  for (const WordRules rules :
       {WordRules::kQwen2, WordRules::kLlama3, WordRules::kGpt2}) {
    TokenizerSpec spec = SmallSpec(SmallMerges());
    spec.word_rules = rules;
    const Tokenizer tokenizer = Make(std::move(spec));
    for (int i = 0; i < 3000; ++i) {
      const std::string text = RandomText(rng, parts);
      const std::vector<int32_t> ids = tokenizer.Encode(text);
      ASSERT_EQ(tokenizer.Decode(ids), text) << i;
      for (const int32_t id : ids) {
        ASSERT_NE(tokenizer.type(id), TokenType::kControl);
      }
    }
  }
}

TEST(ByteBpeTest, EncodesAMegabyteOfOneWord) {
  const Tokenizer tokenizer = Small();
  const std::string text(1 << 20, 'a');
  const std::vector<int32_t> ids = tokenizer.Encode(text);
  EXPECT_EQ(ids.size(), size_t{1} << 19);  // "aa" ranks before "aaa"
  EXPECT_EQ(tokenizer.Decode(ids), text);
  const std::string spaces(1 << 20, ' ');
  EXPECT_EQ(tokenizer.Decode(tokenizer.Encode(spaces + "x")), spaces + "x");
}

TEST(ByteBpeTest, SpecialTokensAreTextUnlessAskedFor) {
  const Tokenizer tokenizer = Small();
  using Specials = Tokenizer::Specials;
  EXPECT_EQ(tokenizer.Decode(tokenizer.Encode("a<|end|>the<tool>")),
            "a<|end|>the<tool>");
  // User-defined texts are always tokens, and end the words around them.
  EXPECT_THAT(tokenizer.Encode("the<tool>the"), ElementsAre(kThe, kTool, kThe));
  EXPECT_THAT(tokenizer.Encode("a<|end|>the<tool><|end|>", Specials::kAsTokens),
              ElementsAre('a', kEnd, kThe, kTool, kEnd));
  // The longest special text wins, parts of it are plain text, and words end
  // where it begins.
  EXPECT_THAT(tokenizer.Encode("<|end|>sa", Specials::kAsTokens),
              ElementsAre(kEndS, 'a'));
  EXPECT_THAT(tokenizer.Encode("<|<tool", Specials::kAsTokens),
              ElementsAre('<', '|', '<', 't', 'o', 'o', 'l'));
  EXPECT_THAT(tokenizer.Encode("<<tool>a<|end|>aa", Specials::kAsTokens),
              ElementsAre('<', kTool, 'a', kEnd, kAa));
  EXPECT_THAT(tokenizer.Encode(absl::string_view("<|end|>\0\0", 9),
                               Specials::kAsTokens),
              ElementsAre(kEnd, 0, 0));
  EXPECT_THAT(tokenizer.Encode("", Specials::kAsTokens), ElementsAre());
  // Control tokens decode to nothing, user-defined ones to their text.
  EXPECT_EQ(tokenizer.Decode({kEnd, 'a', kTool, -1, 268}), "a<tool>");
}

TEST(ByteBpeTest, AWholeWordIsItsPieceWhereTheSpecSaysSo) {
  // "thin" is a piece that no merge makes.
  TokenizerSpec spec = SmallSpec(SmallMerges());
  spec.pieces.push_back("\u0120thin");
  spec.types.push_back(TokenType::kNormal);
  EXPECT_THAT(Make(spec).Encode(" thin"), ElementsAre(' ', 256, kIn));
  spec.word_rules = WordRules::kLlama3;
  EXPECT_THAT(Make(spec).Encode(" thin"), ElementsAre(' ', 256, kIn));
  spec.whole_words = true;
  EXPECT_THAT(Make(spec).Encode(" thin"), ElementsAre(268));
  EXPECT_THAT(Make(spec).Encode(" thins"), ElementsAre(' ', 256, kIn, 's'));
}

TEST(ByteBpeTest, AStreamHoldsIncompleteCharactersBack) {
  const Tokenizer tokenizer = Small();
  StreamDecoder decoder(tokenizer, StreamDecoder::Start::kOfText);
  EXPECT_EQ(decoder.Add(kSpaceThe), " the");  // kByteBpe drops no space
  EXPECT_EQ(decoder.Add(0xc3), "");
  EXPECT_EQ(decoder.Add(0xa9), "\u00e9");
  EXPECT_EQ(decoder.Add(0xff), "\ufffd");
  EXPECT_EQ(decoder.Add(0xed), "");
  EXPECT_EQ(decoder.Add(0xa0), "\ufffd\ufffd");  // half a surrogate
  EXPECT_EQ(decoder.Add(kTool), "<tool>");
}

TEST(ByteBpeTest, RefusesHostileVocabularies) {
  const TokenizerSpec good = SmallSpec(SmallMerges());
  const auto expect_refused = [&](auto&& change, absl::string_view words) {
    TokenizerSpec spec = good;
    change(spec);
    const auto tokenizer = Tokenizer::Create(std::move(spec));
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(tokenizer.status().message()),
                HasSubstr(std::string(words)));
  };
  using Spec = TokenizerSpec;
  expect_refused([](Spec& s) { s.pieces.clear(); },
                 "tokenizer: pieces=0; need 1 <= pieces <= 16777216");
  expect_refused([](Spec& s) { s.types.pop_back(); },
                 "tokenizer: types=267; need 268, as there are pieces");
  expect_refused([](Spec& s) { s.types[0] = static_cast<TokenType>(0); },
                 "piece 0 '\\xc4\\x80' has type 0; need 1..6");
  expect_refused(
      [](Spec& s) { s.types[256] = TokenType::kByte; },
      "piece 256 'th' has type byte; a vocabulary of merges has none");
  expect_refused([](Spec& s) { s.pieces[257] = "th"; },
                 "piece 257 'th' is also piece 256");
  expect_refused([](Spec& s) { s.pieces[266] = "the"; },
                 "piece 266 'the' is also piece 257");
  for (const char* piece : {"", "a b", "\u6f22", "\xff"}) {
    expect_refused([&](Spec& s) { s.pieces[256] = piece; },
                   "is empty or has a character that stands for no byte");
  }
  expect_refused([](Spec& s) { s.types[7] = TokenType::kControl; },
                 "no token for byte 7; need all of 0..255");
  expect_refused([](Spec& s) { s.merges.clear(); },
                 "tokenizer: merges=0; need 1 <= merges <= 16777216");
  for (const char* merge : {"", " ", "th", " th", "th ", "t h e", "t  h"}) {
    expect_refused([&](Spec& s) { s.merges[3] = merge; },
                   absl::StrCat("merge 3 '", merge,
                                "' is not two texts with one space between"));
  }
  expect_refused([](Spec& s) { s.merges[3] = "xx a"; },
                 "merge 3 'xx a': 'xx' is no normal piece; need one");
  expect_refused([](Spec& s) { s.merges[3] = "a xx"; },
                 "merge 3 'a xx': 'xx' is no normal piece; need one");
  expect_refused([](Spec& s) { s.merges[3] = "x x"; },
                 "merge 3 'x x': 'xx' is no normal piece; need one");
  expect_refused([](Spec& s) { s.types[259] = TokenType::kUnused; },
                 "merge 3 'i n': 'in' is no normal piece; need one");
  expect_refused([](Spec& s) { s.merges[3] = "th e"; },
                 "merge 3 'th e' is also merge 1");
  expect_refused([](Spec& s) { s.bos_id = -2; }, "bos_id=-2; need 0 <= bos_id");
  expect_refused([](Spec& s) { s.bos_id = 268; }, "bos_id=268; need 0 <= ");
  expect_refused(
      [](Spec& s) {
        s.bos_id = -1;
        s.add_bos = true;
      },
      "bos_id=-1; need 0 <= bos_id <= 267");
  expect_refused([](Spec& s) { s.eos_id = -1; }, "eos_id=-1; need 0 <= ");
}

}  // namespace
}  // namespace quern
