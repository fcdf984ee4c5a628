#include "quern/models/byte_bpe.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/gguf.h"
#include "quern/models/gguf_testutil.h"
#include "quern/models/text_testutil.h"
#include "quern/models/tokenizer.h"
#include "quern/models/word_split.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A vocabulary with the 256 bytes as 0 to 255, the results of `merges` from 256
// on, then <|end|> and <|end|>s (control) and <tool> (user-defined).
TokenizerSpec SmallSpec(const std::vector<std::string>& merges) {
  TokenizerSpec spec;
  spec.kind = TokenizerKind::kByteBpe;
  for (int byte = 0; byte < 256; ++byte) {
    spec.pieces.push_back(
        PrintableBytes(std::string(1, static_cast<char>(byte))));
  }
  for (const std::string& merge : merges) {
    spec.pieces.push_back(absl::StrJoin(absl::StrSplit(merge, ' '), ""));
  }
  spec.types.assign(spec.pieces.size(), TokenType::kNormal);
  spec.bos_id = spec.eos_id = static_cast<int32_t>(spec.pieces.size());
  for (const char* control : {"<|end|>", "<|end|>s"}) {
    spec.pieces.push_back(control);
    spec.types.push_back(TokenType::kControl);
  }
  spec.pieces.push_back("<tool>");
  spec.types.push_back(TokenType::kUserDefined);
  spec.add_bos = false;
  spec.merges = merges;
  return spec;
}

// "\u0120" is the printable form of a space.
const std::vector<std::string>& SmallMerges() {
  static const auto* const merges = new std::vector<std::string>{
      "t h", "th e", "\u0120 the", "i n", "a a", "aa a", "a b", "b a", "ab a"};
  return *merges;
}
constexpr int32_t kThe = 257, kSpaceThe = 258, kIn = 259, kAa = 260, kAaa = 261;
constexpr int32_t kEnd = 265, kEndS = 266, kTool = 267;

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

TEST(ByteBpeTest, AWholeWordIsItsPieceInLlama3Alone) {
  // "thin" is a piece that no merge makes.
  TokenizerSpec spec = SmallSpec(SmallMerges());
  spec.pieces.push_back("\u0120thin");
  spec.types.push_back(TokenType::kNormal);
  EXPECT_THAT(Make(spec).Encode(" thin"), ElementsAre(' ', 256, kIn));
  spec.word_rules = WordRules::kLlama3;
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

class ByteBpeFileTest : public ::testing::Test {
 protected:
  // Makes a file of the small vocabulary without the key `without`, plus what
  // `add` writes, and creates its tokenizer.
  template <typename Add>
  absl::StatusOr<Tokenizer> Create(const Add& add, absl::string_view pre,
                                   absl::string_view without = "") {
    const TokenizerSpec spec = SmallSpec(SmallMerges());
    std::vector<int32_t> types;
    for (const TokenType type : spec.types) {
      types.push_back(static_cast<int32_t>(type));
    }
    GgufWriter writer;
    writer.Key("tokenizer.ggml.model", "gpt2")
        .Key("tokenizer.ggml.tokens", spec.pieces)
        .Key("tokenizer.ggml.token_type", types);
    if (without != "merges") writer.Key("tokenizer.ggml.merges", spec.merges);
    if (without != "pre") {
      writer.Key("tokenizer.ggml.pre", std::string(pre).c_str());
    }
    if (without != "eos") writer.Key("tokenizer.ggml.eos_token_id", 265u);
    add(writer);
    bytes_ = writer.Finish();
    const auto file = GgufFile::Parse(absl::MakeConstSpan(
        reinterpret_cast<const uint8_t*>(bytes_.data()), bytes_.size()));
    EXPECT_TRUE(file.ok()) << file.status();
    return Tokenizer::Create(*file);
  }

  static void Nothing(GgufWriter&) {}

  std::string bytes_;
};

TEST_F(ByteBpeFileTest, ReadsRulesAndFlags) {
  const auto qwen = Create(&Nothing, "qwen2");
  ASSERT_TRUE(qwen.ok()) << qwen.status();
  EXPECT_EQ(qwen->vocab_size(), 268);
  EXPECT_EQ(qwen->bos_id(), -1);
  EXPECT_EQ(qwen->eos_id(), kEnd);
  EXPECT_FALSE(qwen->add_bos());
  EXPECT_THAT(qwen->Encode("the'T 12"),
              ElementsAre(kThe, '\'', 'T', ' ', '1', '2'));
  const auto bos = [](GgufWriter& writer) {
    writer.Key("tokenizer.ggml.bos_token_id", 266u);
  };
  const auto llama = Create(bos, "llama-bpe");
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_TRUE(llama->add_bos());
  EXPECT_EQ(llama->bos_id(), 266);
  const auto off = Create(
      [&](GgufWriter& writer) {
        writer.Key("tokenizer.ggml.add_bos_token", false);
      },
      "llama-bpe");
  ASSERT_TRUE(off.ok()) << off.status();
  EXPECT_FALSE(off->add_bos());
  const auto lfm2 = Create(bos, "lfm2");  // the rules of llama-bpe
  ASSERT_TRUE(lfm2.ok()) << lfm2.status();
  EXPECT_TRUE(lfm2->add_bos());
  EXPECT_EQ(lfm2->Encode("the'T 12"), llama->Encode("the'T 12"));
  const auto deepseek = Create(bos, "deepseek-llm");
  ASSERT_TRUE(deepseek.ok()) << deepseek.status();
  EXPECT_FALSE(deepseek->add_bos());
  EXPECT_EQ(deepseek->bos_id(), 266);
  EXPECT_THAT(deepseek->Encode("the the 12"),
              ElementsAre(kThe, kSpaceThe, ' ', '1', '2'));
  const auto gpt = Create(bos, "gpt-2");
  ASSERT_TRUE(gpt.ok()) << gpt.status();
  EXPECT_FALSE(gpt->add_bos());
}

// Files with flipped, overwritten or cut bytes are refused, or give a tokenizer
// that works.
TEST_F(ByteBpeFileTest, DamagedFilesDoNotBreakIt) {
  ASSERT_TRUE(Create(&Nothing, "qwen2").ok());
  const std::string good = bytes_;
  const std::string text = "the 'S \xff\r\n12<|end|><tool> aaab\u6f22";
  TestRng rng;
  const auto any = [&](size_t size) {
    return static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(size) - 1));
  };
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = good;
    for (int64_t n = rng.Integer(1, 3); n > 0; --n) {
      const size_t at = any(bytes.size());
      switch (rng.Integer(0, 3)) {
        case 0:
          bytes[at] = static_cast<char>(rng.Next());
          break;
        case 1:
          bytes[at] = bytes[any(bytes.size())];
          break;
        case 2:
          std::swap(bytes[at], bytes[any(bytes.size())]);
          break;
        default:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng.Integer(0, 7)));
      }
    }
    if (rng.Integer(0, 15) == 0) bytes.resize(any(bytes.size()));
    const auto file = GgufFile::Parse(absl::MakeConstSpan(
        reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
    if (!file.ok()) continue;
    const auto tokenizer = Tokenizer::Create(*file);
    if (!tokenizer.ok()) continue;
    ++accepted;
    ASSERT_EQ(tokenizer->Decode(tokenizer->Encode(text)), text) << i;
    for (const int32_t id :
         tokenizer->Encode(text, Tokenizer::Specials::kAsTokens)) {
      ASSERT_GE(id, 0);
      ASSERT_LT(id, tokenizer->vocab_size());
    }
  }
  EXPECT_GT(accepted, 30);  // too few test only the file reader
  EXPECT_LT(accepted, 2700);
}

TEST_F(ByteBpeFileTest, RefusesWhatItCannotRead) {
  const auto message = [](const absl::StatusOr<Tokenizer>& tokenizer,
                          absl::StatusCode code) {
    EXPECT_EQ(tokenizer.status().code(), code);
    return std::string(tokenizer.status().message());
  };
  EXPECT_THAT(
      message(Create(&Nothing, "qwen\xff"), absl::StatusCode::kUnimplemented),
      HasSubstr("tokenizer: tokenizer.ggml.pre is 'qwen\\xff'; need "
                "'qwen2', 'llama-bpe', 'lfm2', 'deepseek-llm' or 'gpt-2'"));
  for (const char* key : {"pre", "merges"}) {
    EXPECT_THAT(
        message(Create(&Nothing, "qwen2", key), absl::StatusCode::kNotFound),
        HasSubstr(absl::StrCat("tokenizer.ggml.", key)));
  }
  EXPECT_THAT(
      message(Create(&Nothing, "qwen2", "eos"), absl::StatusCode::kNotFound),
      HasSubstr("tokenizer.ggml.eos_token_id"));
  EXPECT_THAT(message(Create(&Nothing, "llama-bpe"),
                      absl::StatusCode::kInvalidArgument),
              HasSubstr("bos_id=-1; need 0 <= bos_id <= 267"));
  EXPECT_THAT(message(Create(
                          [](GgufWriter& w) {
                            w.Key("tokenizer.ggml.bos_token_id", 0xffffffffu);
                          },
                          "qwen2"),
                      absl::StatusCode::kInvalidArgument),
              HasSubstr("tokenizer.ggml.bos_token_id=4294967295; need 0 <= "));
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
