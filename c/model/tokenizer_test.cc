// Vocabularies through the C interface: the tokens and texts of C++, and what
// is refused.

#include "quern/models/tokenizer/tokenizer.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/quern_model.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/tokenizer/small_vocabulary_testutil.h"

namespace quern {
namespace {

// A file with a vocabulary, and no tensors.
std::string VocabularyFile() {
  TokenizerSpec spec = SmallSpec({{"\u2581", 0},
                                  {"a", 0},
                                  {"b", 0},
                                  {"ab", 1},
                                  {"\u2581ab", 2},
                                  {"\u00e9", 0}});
  spec.pieces.emplace_back("<|im_end|>");
  spec.types.push_back(TokenType::kControl);
  spec.scores.push_back(0);
  std::vector<int32_t> types;
  for (const TokenType type : spec.types) {
    types.push_back(static_cast<int32_t>(type));
  }
  GgufWriter writer;
  writer.Key("tokenizer.ggml.model", "llama")
      .Key("tokenizer.ggml.tokens", spec.pieces)
      .Key("tokenizer.ggml.scores", spec.scores)
      .Key("tokenizer.ggml.token_type", types);
  return writer.Finish();
}

class TokenizerInCTest : public testing::Test {
 protected:
  static quern_tokenizer_options OptionsOf(const std::string& bytes) {
    quern_tokenizer_options options = {};
    options.size = sizeof(options);
    options.bytes = bytes.data();
    options.num_bytes = bytes.size();
    return options;
  }
  static quern_tokenizer* Make(const LibraryInC& library,
                               const std::string& bytes) {
    const quern_tokenizer_options options = OptionsOf(bytes);
    quern_tokenizer* tokenizer = nullptr;
    EXPECT_C_OK(quern_tokenizer_create(library.get(), &options, &tokenizer),
                library.get());
    return tokenizer;
  }
  static Tokenizer MakeInCpp(const std::string& bytes) {
    const auto file = GgufFile::Parse(absl::MakeConstSpan(
        reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
    EXPECT_TRUE(file.ok()) << file.status();
    auto tokenizer = Tokenizer::Create(*file);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return *std::move(tokenizer);
  }

  std::vector<int32_t> Encode(const std::string& text, uint64_t flags) const {
    size_t count = 0;
    EXPECT_C_OK(quern_tokenizer_encode(tokenizer_, text.data(), text.size(),
                                       flags, nullptr, 0, &count),
                tokenizer_);
    // What follows the capacity is not written.
    std::vector<int32_t> ids(count + 1, -9);
    size_t again = 0;
    EXPECT_C_OK(quern_tokenizer_encode(tokenizer_, text.data(), text.size(),
                                       flags, ids.data(), count, &again),
                tokenizer_);
    EXPECT_EQ(again, count);
    EXPECT_EQ(ids.back(), -9);
    ids.pop_back();
    return ids;
  }
  std::string Decode(const std::vector<int32_t>& ids, uint64_t flags) const {
    size_t length = 0;
    EXPECT_C_OK(quern_tokenizer_decode(tokenizer_, ids.data(), ids.size(),
                                       flags, nullptr, 0, &length),
                tokenizer_);
    std::string text(length + 2, 'x');
    EXPECT_C_OK(quern_tokenizer_decode(tokenizer_, ids.data(), ids.size(),
                                       flags, &text[0], length + 1, &length),
                tokenizer_);
    EXPECT_EQ(text[length], '\0');
    EXPECT_EQ(text.back(), 'x');
    text.resize(length);
    return text;
  }

  const std::string bytes_ = VocabularyFile();
  LibraryInC library_;
  quern_tokenizer* const tokenizer_ = Make(library_, bytes_);
  const Tokenizer cpp_ = MakeInCpp(bytes_);
};

TEST_F(TokenizerInCTest, HasTheTokensAndTextsOfCpp) {
  const std::string texts[] = {"",
                               "ab ab",
                               " a",
                               std::string("a\0b", 3),
                               "caf\u00e9 \xff",
                               "ab<|im_end|>ab"};
  for (const std::string& text : texts) {
    SCOPED_TRACE(text);
    std::vector<int32_t> want = cpp_.Encode(text);
    EXPECT_EQ(Encode(text, 0), want);
    EXPECT_EQ(Decode(want, 0), text);
    EXPECT_EQ(Decode(want, 0), cpp_.Decode(want));
    std::string pieces;
    for (const int32_t id : want) {
      EXPECT_EQ(Decode({id}, QUERN_DECODE_CONTINUES), cpp_.TokenBytes(id));
      pieces += cpp_.TokenBytes(id);
    }
    EXPECT_EQ(Decode(want, QUERN_DECODE_CONTINUES), pieces);
    const std::vector<int32_t> commands =
        cpp_.Encode(text, Tokenizer::Specials::kAsTokens);
    EXPECT_EQ(Encode(text, QUERN_ENCODE_SPECIALS), commands);
    want.insert(want.begin(), cpp_.bos_id());
    EXPECT_EQ(Encode(text, QUERN_ENCODE_BOS), want);
  }
  // A text that begins with bos gets no second one.
  EXPECT_EQ(Encode("<s>a", QUERN_ENCODE_BOS | QUERN_ENCODE_SPECIALS),
            Encode("a", QUERN_ENCODE_BOS));
  EXPECT_NE(cpp_.Encode(texts[5], Tokenizer::Specials::kAsTokens),
            cpp_.Encode(texts[5]));
}

TEST_F(TokenizerInCTest, WritesWhatFits) {
  const std::vector<int32_t> all = cpp_.Encode("ab ab b");
  ASSERT_GT(all.size(), 2u);
  int32_t two[] = {-9, -9, -9};
  size_t count = 0;
  ASSERT_C_OK(
      quern_tokenizer_encode(tokenizer_, "ab ab b", 7, 0, two, 2, &count),
      tokenizer_);
  EXPECT_EQ(count, all.size());
  EXPECT_EQ(two[0], all[0]);
  EXPECT_EQ(two[1], all[1]);
  EXPECT_EQ(two[2], -9);
  char text[5] = "xxxx";
  ASSERT_C_OK(quern_tokenizer_decode(tokenizer_, all.data(), all.size(), 0,
                                     text, 3, &count),
              tokenizer_);
  EXPECT_EQ(count, 7u);
  EXPECT_EQ(std::string(text, 5), std::string("ab\0x\0", 5));
}

TEST_F(TokenizerInCTest, TellsItsNumbers) {
  quern_tokenizer_info info = {};
  info.size = sizeof(info);
  ASSERT_C_OK(quern_tokenizer_get_info(tokenizer_, &info), tokenizer_);
  EXPECT_EQ(info.vocab, cpp_.vocab_size());
  EXPECT_EQ(info.bos, 1);
  EXPECT_EQ(info.eos, 2);
  EXPECT_EQ(info.adds_bos, 1);
  for (int32_t id = -2; id < cpp_.vocab_size() + 2; ++id) {
    int32_t is_end = -1;
    ASSERT_C_OK(quern_tokenizer_is_end(tokenizer_, id, &is_end), tokenizer_);
    EXPECT_EQ(is_end, cpp_.IsEnd(id) ? 1 : 0) << id;
  }
  EXPECT_TRUE(cpp_.IsEnd(cpp_.vocab_size() - 1));
  EXPECT_EQ(Decode({-1, cpp_.vocab_size(), 1 << 30}, 0), "");
  EXPECT_EQ(Decode({-1, cpp_.vocab_size()}, QUERN_DECODE_CONTINUES), "");
  EXPECT_EQ(ExplanationOf(tokenizer_), "tokenizer of 266 pieces, bos 1, eos 2");
}

TEST_F(TokenizerInCTest, RefusesFiles) {
  struct Case {
    const char* words;
    std::function<void(quern_tokenizer_options&)> spoil;
    quern_status code = QUERN_INVALID_ARGUMENT;
  };
  static const std::string other =
      GgufWriter().Key("tokenizer.ggml.model", "bert").Finish();
  static const std::string none = GgufWriter().Finish();
  const auto use = [](const std::string& bytes) {
    return [&bytes](quern_tokenizer_options& o) {
      o.bytes = bytes.data();
      o.num_bytes = bytes.size();
    };
  };
  const Case cases[] = {
      {"quern_tokenizer_options: size=0", [](auto& o) { o.size = 0; }},
      {"path and bytes are null", [](auto& o) { o.bytes = nullptr; }},
      {"both given", [](auto& o) { o.path = "x"; }},
      {"bert", use(other), QUERN_UNIMPLEMENTED},
      {"tokenizer.ggml.model", use(none), QUERN_INVALID_ARGUMENT},
      {"gguf", [](auto& o) { o.num_bytes = 9; }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    quern_tokenizer_options options = OptionsOf(bytes_);
    c.spoil(options);
    quern_tokenizer* tokenizer = tokenizer_;
    ExpectRefused(quern_tokenizer_create(library_.get(), &options, &tokenizer),
                  library_.get(), c.code, c.words);
    EXPECT_EQ(tokenizer, nullptr);
  }
  quern_tokenizer* tokenizer = nullptr;
  ExpectRefused(quern_tokenizer_create(library_.get(), nullptr, &tokenizer),
                library_.get(), QUERN_INVALID_ARGUMENT, "options is null");
}

TEST_F(TokenizerInCTest, RefusesCalls) {
  constexpr size_t kHuge = std::numeric_limits<size_t>::max();
  int32_t ids[4] = {};
  char text[4] = {};
  size_t count = 7;
  const struct {
    const char* words;
    std::function<quern_status()> call;
  } cases[] = {
      {"num_tokens is null",
       [&] {
         return quern_tokenizer_encode(tokenizer_, "a", 1, 0, ids, 4, nullptr);
       }},
      {"text is null",
       [&] {
         return quern_tokenizer_encode(tokenizer_, nullptr, 1, 0, ids, 4,
                                       &count);
       }},
      {"num_bytes=18446744073709551615; need",
       [&] {
         return quern_tokenizer_encode(tokenizer_, "a", kHuge, 0, ids, 4,
                                       &count);
       }},
      {"tokens is null",
       [&] {
         return quern_tokenizer_encode(tokenizer_, "a", 1, 0, nullptr, 4,
                                       &count);
       }},
      {"capacity=18446744073709551615; need",
       [&] {
         return quern_tokenizer_encode(tokenizer_, "a", 1, 0, ids, kHuge,
                                       &count);
       }},
      {"flags=4; need bits of 3",
       [&] {
         return quern_tokenizer_encode(tokenizer_, "a", 1, 4, ids, 4, &count);
       }},
      {"num_bytes is null",
       [&] {
         return quern_tokenizer_decode(tokenizer_, ids, 4, 0, text, 4, nullptr);
       }},
      {"tokens is null",
       [&] {
         return quern_tokenizer_decode(tokenizer_, nullptr, 4, 0, text, 4,
                                       &count);
       }},
      {"num_tokens=18446744073709551615; need",
       [&] {
         return quern_tokenizer_decode(tokenizer_, ids, kHuge, 0, text, 4,
                                       &count);
       }},
      {"text is null",
       [&] {
         return quern_tokenizer_decode(tokenizer_, ids, 4, 0, nullptr, 4,
                                       &count);
       }},
      {"flags=2; need bits of 1",
       [&] {
         return quern_tokenizer_decode(tokenizer_, ids, 4, 2, text, 4, &count);
       }},
      {"is_end is null",
       [&] { return quern_tokenizer_is_end(tokenizer_, 2, nullptr); }},
      {"info is null",
       [&] { return quern_tokenizer_get_info(tokenizer_, nullptr); }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.words);
    count = 7;
    ExpectRefused(c.call(), tokenizer_, QUERN_INVALID_ARGUMENT, c.words);
    EXPECT_TRUE(count == 0 || count == 7);
  }
  quern_tokenizer_info info = {};
  ExpectRefused(quern_tokenizer_get_info(tokenizer_, &info), tokenizer_,
                QUERN_INVALID_ARGUMENT, "quern_tokenizer_info: size=0");
}

}  // namespace
}  // namespace quern
