#include "quern/models/gguf.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hwy/base.h"
#include "quern/core/dtype.h"
#include "quern/models/gguf_testutil.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kModel[] = "models/quern_kjv_4m/quern-kjv-4m.bf16.gguf";

absl::StatusOr<GgufFile> ParseString(const std::string& file) {
  return GgufFile::Parse(absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(file.data()), file.size()));
}

std::string TempFile(absl::string_view name, const std::string& bytes) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/", name);
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

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

// Bytes of one Q8_0 block: scale 0.5, values 0, -1, 2, -3, ...
std::string Q8Block() {
  std::string block = Raw<uint16_t>(0x3800);
  for (int i = 0; i < 32; ++i) {
    block += Raw(static_cast<int8_t>(i % 2 == 0 ? i : -i));
  }
  return block;
}

GgufWriter Sample() {
  GgufWriter writer;
  writer.Key("u32", 7u)
      .Key("i32", -7)
      .Key("f32", 1.5f)
      .Key("bool", true)
      .Key("string", "text")
      .RawKey("u8", 0, Raw<uint8_t>(200))
      .RawKey("i8", 1, Raw<int8_t>(-3))
      .RawKey("u16", 2, Raw<uint16_t>(60000))
      .RawKey("i16", 3, Raw<int16_t>(-60))
      .RawKey("u64", 10, Raw<uint64_t>(1) + "")
      .RawKey("u64.large", 10, Raw<uint64_t>(~uint64_t{0}))
      .RawKey("i64", 11, Raw<int64_t>(-1))
      .RawKey("f64", 12, Raw<double>(2.5))
      .Key("strings", std::vector<std::string>{"", "one", "two"})
      .Key("floats", std::vector<float>{1, -2})
      .Key("ints", std::vector<int32_t>{})
      .Array("bools", 7, 2, absl::string_view("\0\1", 2));
  writer
      .Tensor("f32", {3, 2}, GgufTensorType::kF32,
              BytesOf<float>({1, 2, 3, 4, 5, 6}))
      .Tensor("f16", {2}, GgufTensorType::kF16,
              BytesOf<uint16_t>({0x3c00, 0xc100}))
      .Tensor("bf16", {1, 2, 1, 1}, GgufTensorType::kBF16,
              BytesOf<uint16_t>({0x3f80, 0xc020}))
      .Tensor("q8_0", {32, 2}, GgufTensorType::kQ8_0, Q8Block() + Q8Block());
  return writer;
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
  expect(file->GetU32("none").status(), Code::kNotFound, "gguf: no key 'none'");
  expect(file->GetInt("none").status(), Code::kNotFound, "gguf: no key 'none'");
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
  expect(file->KeyBytes("none").status(), Code::kNotFound,
         "gguf: no key 'none'");
  expect(file->FindTensor("none").status(), Code::kNotFound,
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

struct Refusal {
  const char* name;
  std::string file;
  absl::StatusCode code;
  const char* words;
};

std::vector<Refusal> Refusals() {
  using Code = absl::StatusCode;
  const auto with_key = [](uint32_t type, const std::string& value) {
    return GgufWriter().RawKey("k", type, value).Finish();
  };
  const auto with_tensor = [](const std::vector<uint64_t>& dims, uint32_t type,
                              uint64_t offset) {
    return GgufWriter().RawTensor("t", dims, type, offset).Finish() +
           std::string(64, '\0');
  };
  const uint64_t huge = uint64_t{1} << 62;
  std::string version2 = Sample().Finish();
  version2[4] = 2;
  const std::string magic = "GGML" + Sample().Finish().substr(4);
  return {
      {"empty", "", Code::kInvalidArgument,
       "magic needs 4 bytes at offset 0; the file has 0"},
      {"magic", magic, Code::kInvalidArgument,
       "magic=0x4c4d4747; need 0x46554747 (GGUF)"},
      {"version", version2, Code::kUnimplemented, "version=2; need 3"},
      {"big endian", "GGUF" + Raw<uint32_t>(0x03000000), Code::kUnimplemented,
       "big-endian"},
      {"tensor count", GgufWriter().Finish(~uint64_t{0}, 0),
       Code::kInvalidArgument,
       "tensor count=18446744073709551615 at offset 8; the rest of the file "
       "has room for 0"},
      {"key count", GgufWriter().Finish(0, uint64_t{1} << 40),
       Code::kInvalidArgument, "key count=1099511627776 at offset 16"},
      {"key length",
       "GGUF" + Raw<uint32_t>(3) + Raw<uint64_t>(0) + Raw<uint64_t>(1) +
           Raw<uint64_t>(huge) + std::string(64, 'x'),
       Code::kInvalidArgument, "name of key 0=4611686018427387904"},
      {"key too long", GgufWriter().Key(std::string(65536, 'x'), 1u).Finish(),
       Code::kInvalidArgument,
       "name of key 0 has 65536 bytes; need at most 65535"},
      {"empty key", GgufWriter().Key("", 1u).Finish(), Code::kInvalidArgument,
       "name of key 0 is empty"},
      {"duplicate key", GgufWriter().Key("k", 1u).Key("k", 2u).Finish(),
       Code::kInvalidArgument, "key 'k' occurs twice"},
      {"value type", with_key(13, "x"), Code::kInvalidArgument,
       "key 'k' has value type 13; need 0..12"},
      {"bool", with_key(7, "\2"), Code::kInvalidArgument,
       "key 'k' is a bool of value 2; need 0 or 1"},
      {"array of arrays", with_key(9, Raw<uint32_t>(9) + Raw<uint64_t>(0)),
       Code::kUnimplemented, "key 'k' is an array of arrays"},
      {"array count", with_key(9, Raw<uint32_t>(4) + Raw<uint64_t>(huge)),
       Code::kInvalidArgument, "key 'k' count=4611686018427387904"},
      {"string array",
       with_key(9, Raw<uint32_t>(8) + Raw<uint64_t>(1) + Raw<uint64_t>(99)),
       Code::kInvalidArgument, "key 'k'=99"},
      {"alignment", GgufWriter().Key("general.alignment", 48u).Finish(),
       Code::kInvalidArgument,
       "general.alignment=48; need a power of two, 8 <= general.alignment"},
      {"alignment type", GgufWriter().Key("general.alignment", "32").Finish(),
       Code::kInvalidArgument, "'general.alignment' is of type string"},
      {"rank 0", with_tensor({}, 0, 0), Code::kInvalidArgument,
       "tensor 't' has rank=0; need 1 <= rank <= 4"},
      {"rank 5", with_tensor({1, 1, 1, 1, 1}, 0, 0), Code::kInvalidArgument,
       "tensor 't' has rank=5"},
      {"zero dim", with_tensor({4, 0}, 0, 0), Code::kInvalidArgument,
       "tensor 't' has dims[1]=0; need >= 1"},
      {"dim overflow", with_tensor({huge, 4}, 0, 0), Code::kInvalidArgument,
       "tensor 't' has dims[1]=4; need >= 1 and a product < 2^63"},
      {"negative dim", with_tensor({~uint64_t{0}}, 0, 0),
       Code::kInvalidArgument, "dims[0]=18446744073709551615"},
      {"bytes overflow", with_tensor({huge}, 0, 0), Code::kInvalidArgument,
       "need fewer than 2^63 bytes"},
      {"tensor type", with_tensor({32}, 9, 0), Code::kUnimplemented,
       "tensor 't' has type=9 (Q8_1); need F32 (0), F16 (1), Q4_0 (2), Q4_1 "
       "(3), Q5_0 (6), Q5_1 (7), Q8_0 (8), Q2_K (10), Q3_K (11), Q4_K (12), "
       "Q5_K (13), Q6_K (14), IQ4_NL (20), IQ4_XS (23), BF16 (30) or MXFP4 "
       "(39); the file is GGUF 3"},
      {"tensor type of a known model",
       GgufWriter()
               .Key("general.architecture", "phi3")
               .Key("general.name", "Phi \x01")
               .RawTensor("t", {256}, 16, 0)
               .Finish() +
           std::string(128, '\0'),
       Code::kUnimplemented,
       "(30) or MXFP4 (39); the file is GGUF 3 of architecture 'phi3', name "
       "'Phi \\x01'"},
      {"partial block", with_tensor({33}, 8, 0), Code::kInvalidArgument,
       "dims[0]=33; need a multiple of 32, as Q8_0 has blocks"},
      {"misaligned", with_tensor({4}, 0, 4), Code::kInvalidArgument,
       "tensor 't' has offset=4; need a multiple of 32"},
      {"beyond the end", with_tensor({17}, 0, 0), Code::kInvalidArgument,
       "tensor 't' needs 68 bytes at offset 0 of the data; the file has 64"},
      {"offset", with_tensor({1}, 0, huge), Code::kInvalidArgument,
       "tensor 't' has offset=4611686018427387904; the file has"},
      {"tensor name",
       GgufWriter().RawTensor(std::string(65, 'x'), {1}, 0, 0).Finish(),
       Code::kInvalidArgument,
       "name of tensor 0 has 65 bytes; need at most 64"},
      {"duplicate tensor", Sample().RawTensor("f32", {1}, 0, 0).Finish(),
       Code::kInvalidArgument, "tensor 'f32' occurs twice"},
      {"overlap", Sample().RawTensor("t", {1}, 0, 0).Finish(),
       Code::kInvalidArgument, "the tensor before it ends at"},
  };
}

TEST(GgufTest, RefusesWithASentence) {
  for (const Refusal& refusal : Refusals()) {
    SCOPED_TRACE(refusal.name);
    const auto file = ParseString(refusal.file);
    ASSERT_FALSE(file.ok());
    EXPECT_EQ(file.status().code(), refusal.code) << file.status();
    EXPECT_THAT(std::string(file.status().message()),
                ::testing::AllOf(::testing::StartsWith("gguf: "),
                                 HasSubstr(refusal.words)));
    // A file on disk is read by pread and must give the same message.
    const auto opened = GgufFile::Open(TempFile("refused.gguf", refusal.file));
    EXPECT_EQ(opened.status().message(), file.status().message());
  }
}

// A sparse file that takes a few KiB on disk and has 256 GiB; reading all of it
// must be refused. (A larger one would not fit in the addresses that
// ThreadSanitizer leaves.)
TEST(GgufTest, RefusesAHeaderThatDoesNotFitInMemory) {
  constexpr int64_t kHuge = int64_t{256} << 30;
  const std::string path = TempFile(
      "sparse.gguf", GgufWriter()
                         .Key("general.architecture", "llama")
                         .RawKey("general.name", 8, Raw<uint64_t>(kHuge - 4096))
                         .Finish());
  if (truncate(path.c_str(), kHuge) != 0) {
    GTEST_SKIP() << "no sparse files of this size here";
  }
  const auto file = GgufFile::Open(path);
  unlink(path.c_str());
  EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(file.status().message()),
              HasSubstr("gguf: key 'general.name' needs 274877902848 bytes at "
                        "offset 101; need a header of at most 268435456"));
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

TEST(GgufTest, RefusesEveryTruncation) {
  const std::string whole = Sample().Finish();
  // The last tensor's padding may be missing; its data may not.
  const size_t needed = whole.size() - (96 - 68);
  for (size_t size = 0; size < needed; ++size) {
    EXPECT_FALSE(ParseString(whole.substr(0, size)).ok()) << size;
  }
  EXPECT_TRUE(ParseString(whole.substr(0, needed)).ok());
}

TEST(GgufTest, RefusesWhatIsNotAFile) {
  const auto absent = GgufFile::Open("no/such/file");
  EXPECT_EQ(absent.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(absent.status().message()),
              HasSubstr("gguf: cannot open 'no/such/file'"));
  EXPECT_THAT(std::string(GgufFile::Open("/").status().message()),
              HasSubstr("is not a regular file"));
  const std::string fifo = ::testing::TempDir() + "/gguf_fifo";
  unlink(fifo.c_str());
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_FALSE(GgufFile::Open(fifo).ok());
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
