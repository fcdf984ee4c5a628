#include "quern/quant/block_format.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

// How many codes a value, and a sub-block's scale and minimum, may have.
struct CodeCounts {
  size_t code, scale, min;
};
CodeCounts CodesOf(BlockFormat format) {
  switch (format) {
    case BlockFormat::kQ5_0:
    case BlockFormat::kQ5_1:
      return {32, 1, 1};
    case BlockFormat::kQ8_0:
      return {256, 1, 1};
    case BlockFormat::kQ2_K:
      return {4, 16, 16};
    case BlockFormat::kQ3_K:
      return {8, 64, 1};
    case BlockFormat::kQ4_K:
      return {16, 64, 64};
    case BlockFormat::kQ5_K:
      return {32, 64, 64};
    case BlockFormat::kQ6_K:
      return {64, 256, 1};
    case BlockFormat::kIQ4_XS:
      return {16, 64, 1};
    case BlockFormat::kTQ2_0:
      return {4, 1, 1};
    case BlockFormat::kMXFP4:
      return {16, 256, 1};
    default:
      return {16, 1, 1};
  }
}

std::vector<uint8_t> RandomBytes(Rng& rng, int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.Next());
  return bytes;
}

std::vector<float> Decoded(const BlockFormatInfo& info,
                           const std::vector<uint8_t>& blocks) {
  std::vector<float> out(blocks.size() / static_cast<size_t>(info.bytes) *
                         static_cast<size_t>(info.values));
  DecodeBlocks(info.format, blocks, absl::MakeSpan(out));
  return out;
}

// Whether `got` is `want` rounded to f32, bit by bit; every NaN is alike.
bool IsRounded(float got, double want) {
  if (std::isnan(want)) return std::isnan(got);
  return BitsOf(got) == BitsOf(FromDouble<float>(want));
}

void ExpectOracle(const BlockFormatInfo& info, const uint8_t* blocks,
                  absl::Span<const float> got) {
  for (size_t i = 0; i < got.size(); ++i) {
    const auto value = static_cast<int64_t>(i) % info.values;
    const uint8_t* block =
        blocks + static_cast<int64_t>(i) / info.values * info.bytes;
    const double want = ReferenceValue(info.format, block, value).value;
    ASSERT_TRUE(IsRounded(got[i], want))
        << info.name << " value " << i << ": " << got[i] << "; want " << want;
  }
}

struct GoldenCase {
  std::string name;
  uint32_t type = 0;
  int64_t values = 0, bytes = 0;
  std::string blocks;
  std::vector<uint32_t> bits;  // of the values in f32
};

// Reads the lines that tools/golden_to_text.py writes.
std::vector<GoldenCase> ReadGolden() {
  std::vector<GoldenCase> cases;
  std::ifstream in("quant/gguf_formats_golden.txt");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    GoldenCase c;
    std::string blocks, values, word;
    fields >> c.name >> c.type >> c.values >> c.bytes >> blocks >> values;
    EXPECT_TRUE(absl::HexStringToBytes(blocks, &c.blocks));
    for (size_t at = 0; at < values.size(); at += 8) {
      c.bits.push_back(
          static_cast<uint32_t>(std::stoul(values.substr(at, 8), nullptr, 16)));
    }
    cases.push_back(c);
  }
  return cases;
}

TEST(BlockFormatTest, TheTableIsThatOfTheFormats) {
  struct Row {
    uint32_t type;
    const char* name;
    int64_t values, bytes;
    double bits_per_weight;
  };
  constexpr Row kRows[] = {
      {2, "Q4_0", 32, 18, 4.5},       {3, "Q4_1", 32, 20, 5},
      {6, "Q5_0", 32, 22, 5.5},       {7, "Q5_1", 32, 24, 6},
      {8, "Q8_0", 32, 34, 8.5},       {10, "Q2_K", 256, 84, 2.625},
      {11, "Q3_K", 256, 110, 3.4375}, {12, "Q4_K", 256, 144, 4.5},
      {13, "Q5_K", 256, 176, 5.5},    {14, "Q6_K", 256, 210, 6.5625},
      {20, "IQ4_NL", 32, 18, 4.5},    {23, "IQ4_XS", 256, 136, 4.25},
      {35, "TQ2_0", 256, 66, 2.0625}, {39, "MXFP4", 32, 17, 4.25}};
  ASSERT_EQ(BlockFormats().size(), std::size(kRows));
  std::set<uint32_t> types;
  for (size_t f = 0; f < std::size(kRows); ++f) {
    const BlockFormatInfo& info = BlockFormats()[f];
    EXPECT_EQ(static_cast<uint32_t>(info.format), kRows[f].type);
    EXPECT_EQ(info.name, kRows[f].name);
    EXPECT_EQ(info.values, kRows[f].values) << info.name;
    EXPECT_EQ(info.bytes, kRows[f].bytes) << info.name;
    EXPECT_EQ(info.bits_per_weight(), kRows[f].bits_per_weight) << info.name;
    types.insert(kRows[f].type);
  }
  for (uint32_t type = 0; type < 100; ++type) {
    const BlockFormatInfo* info = FindBlockFormat(type);
    ASSERT_EQ(info != nullptr, types.count(type) == 1) << type;
    if (info != nullptr) {
      EXPECT_EQ(static_cast<uint32_t>(info->format), type);
    }
  }
  EXPECT_EQ(FindBlockFormat(~0u), nullptr);
}

TEST(BlockFormatTest, DecodesTheGoldenBlocks) {
  std::set<std::string> seen;
  for (const GoldenCase& c : ReadGolden()) {
    SCOPED_TRACE(c.name);
    const BlockFormatInfo* info = FindBlockFormat(c.type);
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->name, c.name);
    EXPECT_EQ(info->values, c.values);
    EXPECT_EQ(info->bytes, c.bytes);
    const std::vector<uint8_t> blocks(c.blocks.begin(), c.blocks.end());
    const std::vector<float> got = Decoded(*info, blocks);
    ASSERT_EQ(got.size(), c.bits.size());
    ASSERT_GE(got.size(), 256u);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(BitsOf(got[i]), c.bits[i]) << "value " << i << ": " << got[i];
    }
    ExpectOracle(*info, blocks.data(), got);
    seen.insert(c.name);
  }
  EXPECT_EQ(seen.size(), BlockFormats().size());
}

// Which of `codes` codes each of `places` places has had.
class Seen {
 public:
  Seen(size_t places, size_t codes) : codes_(codes), seen_(places * codes) {}
  void Add(int64_t place, int64_t code) {
    seen_[static_cast<size_t>(place) * codes_ + static_cast<size_t>(code)] = 1;
  }
  bool All() const { return std::count(seen_.begin(), seen_.end(), 0) == 0; }

 private:
  size_t codes_;
  std::vector<char> seen_;
};

// Random blocks, enough that every value has every code, and every sub-block
// every scale and every minimum.
TEST(BlockFormatTest, EqualsTheOracleForEveryCode) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    const CodeCounts counts = CodesOf(info.format);
    const auto values = static_cast<size_t>(info.values);
    Seen codes(values, counts.code), scales(values / 16, counts.scale),
        mins(values / 16, counts.min);
    const int64_t count = info.values == 32 ? 8192 : 4096;
    for (int64_t n = 0; n < count; ++n) {
      const std::vector<uint8_t> block = RandomBytes(rng, info.bytes);
      const std::vector<float> got = Decoded(info, block);
      for (int64_t i = 0; i < info.values; ++i) {
        const ReferenceBlockValue want =
            ReferenceValue(info.format, block.data(), i);
        const float value = got[static_cast<size_t>(i)];
        ASSERT_TRUE(IsRounded(value, want.value))
            << info.name << " block " << n << " value " << i << ": " << value
            << "; want " << want.value;
        codes.Add(i, want.code);
        if (i % 16 != 0) continue;  // the values of a sub-block are alike
        scales.Add(i / 16, want.scale);
        mins.Add(i / 16, want.min);
      }
    }
    EXPECT_TRUE(codes.All() && scales.All() && mins.All()) << info.name;
  }
}

// Zero, subnormal, the largest, negative, infinite and NaN scales, with every
// other scale or minimum of the block.
TEST(BlockFormatTest, EqualsTheOracleForExtremeScales) {
  TestRng rng;
  std::vector<Float16> extremes = Extremes<Float16>();
  for (const Float16 special : Specials<Float16>()) {
    extremes.push_back(special);
  }
  for (const BlockFormatInfo& info : BlockFormats()) {
    const std::vector<BlockHalf> halves = HalvesOf(info.format);
    const auto bytes = static_cast<size_t>(info.bytes);
    // Codes that are random, all 0 and all ones.
    for (const std::vector<uint8_t>& codes :
         {RandomBytes(rng, info.bytes), std::vector<uint8_t>(bytes, 0),
          std::vector<uint8_t>(bytes, 255)}) {
      for (const Float16 first : extremes) {
        for (const Float16 second : extremes) {
          std::vector<uint8_t> block = codes;
          if (!halves.empty()) PutHalf(first, halves[0].byte, block.data());
          if (halves.size() > 1) PutHalf(second, halves[1].byte, block.data());
          ExpectOracle(info, block.data(), Decoded(info, block));
          if (HasFatalFailure()) return;
          if (halves.size() < 2) break;
        }
      }
    }
  }
}

TEST(BlockFormatTest, MXFP4HasEveryExponent) {
  const BlockFormatInfo& info = *FindBlockFormat(39);
  for (int e = 0; e < 256; ++e) {
    std::vector<uint8_t> block = {static_cast<uint8_t>(e)};
    for (int j = 0; j < 16; ++j) block.push_back(static_cast<uint8_t>(j * 17));
    const std::vector<float> got = Decoded(info, block);
    ExpectOracle(info, block.data(), got);
    // Code 1 is 0.5, and code 8 is 0 without a sign.
    EXPECT_EQ(got[1], std::ldexp(1.0f, e - 128)) << e;
    EXPECT_EQ(BitsOf(got[8]), 0u) << e;
  }
}

// Between guard pages, from every misaligned address of a few.
TEST(BlockFormatTest, ReadsAndWritesWholeBlocksAndNothingElse) {
  TestRng rng;
  for (const BlockFormatInfo& info : BlockFormats()) {
    for (const int64_t count : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33}) {
      for (const Edge edge : {Edge::kBegin, Edge::kEnd}) {
        for (const int64_t shift : {0, 1, 2, 3}) {
          GuardBuffer<uint8_t> blocks(RandomBytes(rng, count * info.bytes),
                                      edge, shift);
          GuardBuffer<float> out(count * info.values, edge, shift);
          const auto in = absl::MakeConstSpan(
              blocks.data(), static_cast<size_t>(blocks.size()));
          const auto to =
              absl::MakeSpan(out.data(), static_cast<size_t>(out.size()));
          {
            NoAllocScope no_alloc;
            DecodeBlocks(info.format, in, to);
          }
          ExpectOracle(info, blocks.data(), to);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(BlockFormatTest, RefusesWhatIsNotWholeBlocks) {
  const std::vector<uint8_t> bytes(1024);
  const std::vector<float> values(1024);
  const auto check = [&](uint32_t format, size_t block_bytes, size_t count) {
    return CheckDecodeBlocks(static_cast<BlockFormat>(format),
                             absl::MakeConstSpan(bytes).first(block_bytes),
                             absl::MakeConstSpan(values).first(count));
  };
  for (const BlockFormatInfo& info : BlockFormats()) {
    const auto type = static_cast<uint32_t>(info.format);
    const auto block = static_cast<size_t>(info.bytes);
    const auto of_block = static_cast<size_t>(info.values);
    EXPECT_TRUE(check(type, 0, 0).ok());
    EXPECT_TRUE(check(type, 2 * block, 2 * of_block).ok());
    for (const size_t wrong : {size_t{0}, block - 1, block + 1, 2 * block}) {
      ExpectRefusal(
          check(type, wrong, of_block),
          absl::StrCat("decode_blocks: blocks has ", wrong, " bytes; need ",
                       block, " for ", of_block, " values of ", info.name));
    }
    for (const size_t wrong : {of_block - 1, of_block + 1}) {
      ExpectRefusal(check(type, block, wrong),
                    absl::StrCat("decode_blocks: out has ", wrong,
                                 " values; need a multiple of ", of_block,
                                 ", the values of a block of ", info.name));
    }
  }
  for (const uint32_t type : {0u, 1u, 9u, 15u, 16u, 30u, 40u, ~0u}) {
    ExpectRefusal(check(type, 0, 0),
                  absl::StrCat("decode_blocks: format=", type,
                               "; need one of BlockFormats()"));
  }
}

}  // namespace
}  // namespace quern
