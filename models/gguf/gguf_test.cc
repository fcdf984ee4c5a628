#include "quern/models/gguf/gguf.h"

#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hwy/base.h"
#include "quern/core/dtype.h"
#include "quern/models/gguf/gguf_sample_testutil.h"
#include "quern/models/gguf/gguf_testutil.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kModel[] = "models/quern_kjv_4m/quern-kjv-4m.bf16.gguf";

template <typename T>
std::vector<T> ReadAll(const GgufFile& file, absl::string_view name) {
  const auto tensor = file.FindTensor(name);
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  std::vector<T> out(static_cast<size_t>((*tensor)->elements));
  const absl::Status read =
      file.ReadRows(**tensor, 0, absl::MakeSpan(out.data(), out.size()));
  EXPECT_TRUE(read.ok()) << read;
  return out;
}

// Files of version 2 have the layout of version 3.
TEST(GgufTest, ReadsVersion2) {
  std::string bytes = Sample().Key("general.architecture", "llama").Finish();
  bytes[4] = 2;
  const auto file = ParseString(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*file->GetU32("u32"), 7u);
  EXPECT_EQ(*file->GetString("string"), "text");
  std::vector<float> values(6);
  ASSERT_TRUE(
      file->ReadRows(**file->FindTensor("f32"), 0, absl::MakeSpan(values))
          .ok());
  EXPECT_EQ(values, (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(file->Describe().find("GGUF 2 of architecture 'llama'"), 0u);
}

TEST(GgufTest, ReadsMetadataOfEveryType) {
  const std::string bytes = Sample().Finish();
  const auto file = ParseString(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*file->GetU32("u32"), 7u);
  EXPECT_EQ(*file->GetInt("u32"), 7);
  EXPECT_EQ(*file->GetInt("i32"), -7);
  EXPECT_EQ(*file->GetInt("u8"), 200);
  EXPECT_EQ(*file->GetInt("i8"), -3);
  EXPECT_EQ(*file->GetInt("u16"), 60000);
  EXPECT_EQ(*file->GetInt("i16"), -60);
  EXPECT_EQ(*file->GetInt("u64"), 1);
  EXPECT_EQ(*file->GetInt("i64"), -1);
  EXPECT_EQ(*file->GetF32("f32"), 1.5f);
  EXPECT_TRUE(*file->GetBool("bool"));
  EXPECT_EQ(*file->GetString("string"), "text");
  EXPECT_THAT(*file->GetStrings("strings"), ElementsAre("", "one", "two"));
  EXPECT_THAT(*file->GetF32s("floats"), ElementsAre(1.0f, -2.0f));
  EXPECT_TRUE(file->GetI32s("ints")->empty());
  EXPECT_TRUE(file->Has("bools"));
  EXPECT_FALSE(file->Has("none"));
  EXPECT_EQ(file->Keys().size(), 17u);
  EXPECT_EQ(file->Keys().front(), "bool");
  EXPECT_EQ(*file->KeyBytes("ints"), GgufWriter::String("ints") +
                                         Raw<uint32_t>(9) + Raw<uint32_t>(5) +
                                         Raw<uint64_t>(0));
}

TEST(GgufTest, RefusesMetadataOfAnotherType) {
  const std::string bytes = Sample().Finish();
  const auto file = ParseString(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto expect = [](const absl::Status& status, absl::StatusCode code,
                         absl::string_view words) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(status.message(), words);
  };
  using Code = absl::StatusCode;
  expect(file->GetU32("none").status(), Code::kInvalidArgument,
         "gguf: no key 'none'");
  expect(file->GetInt("none").status(), Code::kInvalidArgument,
         "gguf: no key 'none'");
  expect(file->GetU32("i32").status(), Code::kInvalidArgument,
         "gguf: key 'i32' is of type i32; need u32");
  expect(file->GetInt("f64").status(), Code::kInvalidArgument,
         "gguf: key 'f64' is of type f64; need i64");
  expect(file->GetInt("u64.large").status(), Code::kInvalidArgument,
         "gguf: key 'u64.large' is 18446744073709551615; need < 2^63");
  expect(file->GetF32("floats").status(), Code::kInvalidArgument,
         "gguf: key 'floats' is of type array; need f32");
  expect(file->GetStrings("floats").status(), Code::kInvalidArgument,
         "gguf: key 'floats' is an array of f32; need string");
  expect(file->GetI32s("i32").status(), Code::kInvalidArgument,
         "gguf: key 'i32' is of type i32; need array");
  expect(file->KeyBytes("none").status(), Code::kInvalidArgument,
         "gguf: no key 'none'");
  expect(file->FindTensor("none").status(), Code::kInvalidArgument,
         "gguf: no tensor 'none'");
}

TEST(GgufTest, ReadsTensorsOfEveryType) {
  const std::string path = TempFile("sample.gguf", Sample().Finish());
  for (const bool from_memory : {false, true}) {
    SCOPED_TRACE(from_memory);
    const std::string bytes = Sample().Finish();
    auto opened = from_memory ? ParseString(bytes) : GgufFile::Open(path);
    ASSERT_TRUE(opened.ok()) << opened.status();
    const GgufFile file = *std::move(opened);  // the file survives a move
    EXPECT_EQ(file.tensors().size(), 4u);
    EXPECT_EQ((*file.FindTensor("f32"))->rows(), 2);
    EXPECT_EQ((*file.FindTensor("f32"))->cols(), 3);
    EXPECT_THAT(ReadAll<float>(file, "f32"), ElementsAre(1, 2, 3, 4, 5, 6));
    EXPECT_THAT(ReadAll<float>(file, "f16"), ElementsAre(1.0f, -2.5f));
    EXPECT_THAT(ReadAll<float>(file, "bf16"), ElementsAre(1.0f, -2.5f));
    const std::vector<float> q8 = ReadAll<float>(file, "q8_0");
    const std::vector<BFloat16> q8_bf16 = ReadAll<BFloat16>(file, "q8_0");
    for (int i = 0; i < 64; ++i) {
      const float want = 0.5f * (i % 2 == 0 ? i % 32 : -(i % 32));
      EXPECT_EQ(q8[static_cast<size_t>(i)], want) << i;
      EXPECT_EQ(hwy::F32FromBF16(q8_bf16[static_cast<size_t>(i)]), want) << i;
    }
    std::vector<uint8_t> raw(4);
    const GgufTensor& f16 = **file.FindTensor("f16");
    ASSERT_TRUE(
        file.ReadPartBytes(f16, {0, 1, 0, 2}, absl::MakeSpan(raw)).ok());
    EXPECT_THAT(raw, ElementsAre(0x00, 0x3c, 0x00, 0xc1));
    raw.resize(2);
    ASSERT_TRUE(
        file.ReadPartBytes(f16, {0, 1, 1, 1}, absl::MakeSpan(raw)).ok());
    EXPECT_THAT(raw, ElementsAre(0x00, 0xc1));

    std::vector<float> row(3);
    const GgufTensor& f32 = **file.FindTensor("f32");
    ASSERT_TRUE(file.ReadRows(f32, 1, absl::MakeSpan(row)).ok());
    EXPECT_THAT(row, ElementsAre(4, 5, 6));
    EXPECT_EQ(file.ReadRows(f32, 2, absl::MakeSpan(row)).message(),
              "gguf: tensor 'f32': 1 rows from 2, 3 columns from 0, into 3 "
              "elements or bytes; need a part of 2 rows and 3 columns in "
              "blocks of 1, and room for it alone");
    row.resize(4);
    ASSERT_TRUE(file.ReadPart(f32, {0, 2, 1, 2}, absl::MakeSpan(row)).ok());
    EXPECT_THAT(row, ElementsAre(2, 3, 5, 6));
    std::vector<BFloat16> half(32);
    const GgufTensor& blocks = **file.FindTensor("q8_0");
    ASSERT_TRUE(
        file.ReadPart(blocks, {1, 1, 0, 32}, absl::MakeSpan(half)).ok());
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_EQ(half[i].bits, q8_bf16[32 + i].bits) << i;
    }
    // Parts that lie outside the tensor in each direction, and that begin
    // within a block.
    row.resize(32);
    for (const GgufPart& part :
         {GgufPart{-1, 1, 0, 32}, GgufPart{2, 1, 0, 32},
          GgufPart{0, 1, -32, 32}, GgufPart{0, 1, 32, 32},
          GgufPart{0, 2, 16, 16}, GgufPart{0, 2, 0, 16}, GgufPart{0, 2, 0, 32},
          GgufPart{0, -1, 0, -32}, GgufPart{0, int64_t{1} << 62, 0, 32},
          GgufPart{0, 1, INT64_MAX, INT64_MAX}}) {
      EXPECT_EQ(file.ReadPart(blocks, part, absl::MakeSpan(row)).code(),
                absl::StatusCode::kInvalidArgument)
          << part.row << ' ' << part.rows << ' ' << part.col << ' '
          << part.cols;
    }
    row.resize(2);
    EXPECT_FALSE(file.ReadRows(f32, 0, absl::MakeSpan(row)).ok());
  }
}

TEST(GgufTest, RoundsToBF16ToNearestEven) {
  GgufWriter writer;
  writer.Tensor("t", {3}, GgufTensorType::kF32,
                BytesOf<uint32_t>({0x3f808000, 0x3f818000, 0x3f808001}));
  const std::string bytes = writer.Finish();
  const auto file = ParseString(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  const std::vector<BFloat16> t = ReadAll<BFloat16>(*file, "t");
  EXPECT_EQ(t[0].bits, 0x3f80);
  EXPECT_EQ(t[1].bits, 0x3f82);
  EXPECT_EQ(t[2].bits, 0x3f81);
}

TEST(GgufTest, OpensTheShippedModel) {
  const auto file = GgufFile::Open(kModel);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*file->GetString("general.architecture"), "llama");
  EXPECT_EQ(*file->GetU32("llama.block_count"), 6u);
  EXPECT_EQ(file->GetStrings("tokenizer.ggml.tokens")->size(), 2048u);
  EXPECT_EQ(file->tensors().size(), 56u);
  EXPECT_EQ((*file->FindTensor("token_embd.weight"))->rows(), 2048);
}

TEST(GgufTest, ReadsRowsFromTheMiddleOfATensorOfEveryType) {
  constexpr int64_t kRows = 5, kCols = 96;  // three blocks per row
  GgufWriter writer;
  std::string f32, f16, bf16, q8;
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    const auto value = static_cast<float>(i % 127);
    f32 += Raw(value);
    f16 += Raw(hwy::F16FromF32(value));
    bf16 += Raw(hwy::BF16FromF32(value));
    // Each block has a scale of its own.
    if (i % 32 == 0) q8 += Raw(hwy::F16FromF32(static_cast<float>(1 + i / 32)));
    q8 += Raw(static_cast<int8_t>(i % 127));
  }
  const std::vector<uint64_t> dims = {kCols, kRows};
  writer.Tensor("f32", dims, GgufTensorType::kF32, f32)
      .Tensor("f16", dims, GgufTensorType::kF16, f16)
      .Tensor("bf16", dims, GgufTensorType::kBF16, bf16)
      .Tensor("q8_0", dims, GgufTensorType::kQ8_0, q8);
  const std::string bytes = writer.Finish();
  const auto file = ParseString(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  for (const char* name : {"f32", "f16", "bf16", "q8_0"}) {
    const GgufTensor& tensor = **file->FindTensor(name);
    for (int64_t first = 0; first < kRows; ++first) {
      for (int64_t rows = 0; rows <= kRows - first; ++rows) {
        std::vector<float> got(static_cast<size_t>(rows * kCols));
        ASSERT_TRUE(file->ReadRows(tensor, first, absl::MakeSpan(got)).ok());
        for (int64_t i = 0; i < rows * kCols; ++i) {
          const int64_t at = first * kCols + i;
          const int64_t scale =
              tensor.type == GgufTensorType::kQ8_0 ? 1 + at / 32 : 1;
          ASSERT_EQ(got[static_cast<size_t>(i)],
                    static_cast<float>(scale * (at % 127)))
              << name << " from row " << first << " element " << i;
        }
      }
    }
  }
}

TEST(GgufTest, ReadReportsAFileThatBecameShorter) {
  const std::string path = TempFile("shrinks.gguf", Sample().Finish());
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const GgufTensor& tensor = **file->FindTensor("q8_0");
  ASSERT_EQ(truncate(path.c_str(), tensor.offset + 10), 0);
  std::vector<float> out(static_cast<size_t>(tensor.elements));
  const absl::Status read = file->ReadRows(tensor, 0, absl::MakeSpan(out));
  EXPECT_EQ(read.code(), absl::StatusCode::kDataLoss) << read;
  EXPECT_THAT(std::string(read.message()), HasSubstr("the file ends at"));
  EXPECT_EQ(*file->GetString("string"), "text");  // the header was copied
}

}  // namespace
}  // namespace quern
