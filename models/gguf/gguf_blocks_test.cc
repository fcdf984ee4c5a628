// Tensors in block formats: what is read of them, and what is refused.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_sample_testutil.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr char kSupported[] =
    "); need F32 (0), F16 (1), Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7), Q8_0 "
    "(8), Q2_K (10), Q3_K (11), Q4_K (12), Q5_K (13), Q6_K (14), IQ4_NL (20), "
    "IQ4_XS (23), BF16 (30), TQ2_0 (35) or MXFP4 (39); the file is GGUF 3";

GgufTensorType TypeOf(const BlockFormatInfo& info) {
  return static_cast<GgufTensorType>(info.format);
}

TEST(GgufBlocksTest, EveryBlockFormatIsATensorType) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    EXPECT_EQ(GgufTensorTypeName(TypeOf(info)), info.name);
    const GgufBlock block = GgufBlockOf(TypeOf(info));
    EXPECT_EQ(block.elements, info.values) << info.name;
    EXPECT_EQ(block.bytes, info.bytes) << info.name;
  }
  for (const auto& [type, bytes] :
       {std::pair{GgufTensorType::kF32, 4}, std::pair{GgufTensorType::kF16, 2},
        std::pair{GgufTensorType::kBF16, 2}}) {
    EXPECT_EQ(GgufBlockOf(type).elements, 1);
    EXPECT_EQ(GgufBlockOf(type).bytes, bytes);
  }
  EXPECT_EQ(GgufBlockOf(static_cast<GgufTensorType>(9)).elements, 0);
}

// Parts of a tensor that is larger than the pieces in which it is read.
TEST(GgufBlocksTest, ReadsPartsOfEveryFormat) {
  TestRng rng;
  constexpr int64_t kRows = 401, kBlocks = 3;  // blocks of a row
  for (const BlockFormatInfo& info : BlockFormats()) {
    SCOPED_TRACE(info.name);
    const int64_t rows = info.values == 32 ? kRows : kRows / 8;
    const int64_t cols = kBlocks * info.values;
    const std::vector<uint8_t> blocks =
        RandomBlocks(rng, info.format, rows * kBlocks, 1);
    GgufWriter writer;
    writer.Tensor("t",
                  {static_cast<uint64_t>(cols), static_cast<uint64_t>(rows)},
                  TypeOf(info), BytesOf(blocks));
    const std::string bytes = writer.Finish();
    const auto file = ParseString(bytes);
    ASSERT_TRUE(file.ok()) << file.status();
    const GgufTensor& tensor = **file->FindTensor("t");
    EXPECT_EQ(tensor.bytes, static_cast<int64_t>(blocks.size()));
    EXPECT_EQ(tensor.row_bytes(), kBlocks * info.bytes);
    for (const GgufPart& part :
         {GgufPart{0, rows, 0, cols}, GgufPart{rows - 1, 1, 0, cols},
          GgufPart{3, 0, 0, cols}, GgufPart{5, 7, info.values, info.values},
          GgufPart{1, rows - 1, info.values, 2 * info.values}}) {
      const auto count = static_cast<size_t>(part.rows * part.cols);
      std::vector<float> got(count);
      std::vector<BFloat16> narrow(count);
      std::vector<uint8_t> raw(
          static_cast<size_t>(GgufFile::PartBytes(tensor, part)));
      ASSERT_TRUE(file->ReadPart(tensor, part, absl::MakeSpan(got)).ok());
      ASSERT_TRUE(file->ReadPart(tensor, part, absl::MakeSpan(narrow)).ok());
      ASSERT_TRUE(file->ReadPartBytes(tensor, part, absl::MakeSpan(raw)).ok());
      for (int64_t i = 0; i < part.rows * part.cols; ++i) {
        const int64_t at =
            (part.row + i / part.cols) * cols + part.col + i % part.cols;
        const uint8_t* block = blocks.data() + at / info.values * info.bytes;
        const auto want = FromDouble<float>(
            ReferenceValue(info.format, block, at % info.values).value);
        const auto index = static_cast<size_t>(i);
        ASSERT_EQ(BitsOf(got[index]), BitsOf(want)) << "element " << i;
        ASSERT_EQ(BitsOf(narrow[index]),
                  BitsOf(FromDouble<BFloat16>(static_cast<double>(want))))
            << "element " << i;
        ASSERT_EQ(raw[static_cast<size_t>(i / info.values * info.bytes)],
                  *block)
            << "element " << i;
      }
    }
    std::vector<float> half(static_cast<size_t>(info.values / 2));
    EXPECT_FALSE(
        file->ReadPart(tensor, {0, 1, 0, info.values / 2}, absl::MakeSpan(half))
            .ok());
  }
}

// A sparse file may have rows of any length. rows * cols * row_bytes of these
// is 2^64 and more.
TEST(GgufBlocksTest, LongRowsDoNotOverflowTheBytesOfAPart) {
  constexpr int64_t kRows = 3, kCols = int64_t{1} << 34;
  const auto tensor = [](GgufTensorType type) {
    const GgufBlock block = GgufBlockOf(type);
    return GgufTensor{
        "t",           type, {kCols, kRows},
        kRows * kCols, 0,    kRows * kCols / block.elements * block.bytes};
  };
  for (const GgufTensorType type :
       {GgufTensorType::kF32, GgufTensorType::kBF16, GgufTensorType::kQ8_0,
        GgufTensorType::kQ2_K, GgufTensorType::kTQ2_0,
        GgufTensorType::kMXFP4}) {
    SCOPED_TRACE(GgufTensorTypeName(type));
    const GgufTensor t = tensor(type);
    EXPECT_EQ(GgufFile::PartBytes(t, {0, kRows, 0, kCols}), t.bytes);
    EXPECT_EQ(GgufFile::PartBytes(t, {2, 1, 0, kCols}), t.row_bytes());
    EXPECT_EQ(GgufFile::PartBytes(t, {0, kRows, kCols / 2, kCols / 2}),
              t.bytes / 2);
    EXPECT_EQ(GgufFile::PartBytes(t, {0, 0, 0, kCols}), 0);
  }
  const GgufTensor f32 = tensor(GgufTensorType::kF32);
  constexpr int64_t kMost = INT64_MAX / 4;
  EXPECT_EQ(GgufFile::PartBytes(f32, {0, 1, 0, kMost}), 4 * kMost);
  EXPECT_EQ(GgufFile::PartBytes(f32, {0, 1, 0, kMost + 1}), -1);
  EXPECT_EQ(GgufFile::PartBytes(f32, {0, kMost + 1, 0, 1}), -1);
}

TEST(GgufBlocksTest, RefusesRowsThatAreNotWholeBlocks) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    for (const int64_t cols :
         {int64_t{1}, info.values - 1, info.values + 1, info.values * 3 / 2}) {
      const std::string file =
          GgufWriter()
              .RawTensor("a.weight", {static_cast<uint64_t>(cols), 2},
                         static_cast<uint32_t>(info.format), 0)
              .Finish() +
          std::string(1024, '\0');
      ExpectRefusal(ParseString(file).status(),
                    absl::StrCat("gguf: tensor 'a.weight' has dims[0]=", cols,
                                 "; need a multiple of ", info.values, ", as ",
                                 info.name, " has blocks"));
    }
  }
}

TEST(GgufBlocksTest, RefusesTruncatedBlocks) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    const std::string header =
        GgufWriter()
            .RawTensor("a.weight", {static_cast<uint64_t>(info.values), 2},
                       static_cast<uint32_t>(info.format), 0)
            .Finish();
    const auto with = [&](int64_t bytes) {
      return ParseString(header + std::string(static_cast<size_t>(bytes), '\0'))
          .status();
    };
    EXPECT_TRUE(with(2 * info.bytes).ok());
    for (const int64_t bytes :
         {int64_t{0}, int64_t{1}, info.bytes, 2 * info.bytes - 1}) {
      ExpectRefusal(
          with(bytes),
          absl::StrCat("gguf: tensor 'a.weight' needs ", 2 * info.bytes,
                       " bytes at offset 0 of the data; the file has ", bytes));
    }
  }
}

TEST(GgufBlocksTest, RefusesEveryOtherType) {
  for (uint32_t type = 0; type < 64; ++type) {
    if (GgufBlockOf(static_cast<GgufTensorType>(type)).elements != 0) continue;
    const std::string file =
        GgufWriter().RawTensor("a.weight", {256}, type, 0).Finish() +
        std::string(1024, '\0');
    ExpectRefusal(
        ParseString(file).status(), absl::StatusCode::kUnimplemented,
        absl::StrCat("gguf: tensor 'a.weight' has type=", type, " (",
                     GgufTensorTypeName(static_cast<GgufTensorType>(type)),
                     kSupported));
  }
}

}  // namespace
}  // namespace quern
