// What the reader of GGUF files refuses.

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_sample_testutil.h"
#include "quern/models/gguf/gguf_testutil.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

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
  std::string version1 = Sample().Finish(), version4 = version1;
  version1[4] = 1;
  version4[4] = 4;
  const std::string magic = "GGML" + Sample().Finish().substr(4);
  return {
      {"empty", "", Code::kInvalidArgument,
       "magic needs 4 bytes at offset 0; the file has 0"},
      {"magic", magic, Code::kInvalidArgument,
       "magic=0x4c4d4747; need 0x46554747 (GGUF)"},
      {"version 1", version1, Code::kUnimplemented, "version=1; need 2 or 3"},
      {"version 4", version4, Code::kUnimplemented, "version=4; need 2 or 3"},
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
       "Q5_K (13), Q6_K (14), IQ4_NL (20), IQ4_XS (23), BF16 (30), TQ2_0 (35) "
       "or MXFP4 (39); the file is GGUF 3"},
      {"tensor type of a known model",
       GgufWriter()
               .Key("general.architecture", "phi3")
               .Key("general.name", "Phi \x01")
               .RawTensor("t", {256}, 16, 0)
               .Finish() +
           std::string(128, '\0'),
       Code::kUnimplemented,
       "(35) or MXFP4 (39); the file is GGUF 3 of architecture 'phi3', name "
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

TEST(GgufRefusalTest, RefusesWithASentence) {
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
TEST(GgufRefusalTest, RefusesAHeaderThatDoesNotFitInMemory) {
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

TEST(GgufRefusalTest, RefusesEveryTruncation) {
  const std::string whole = Sample().Finish();
  // The last tensor's padding may be missing; its data may not.
  const size_t needed = whole.size() - (96 - 68);
  for (size_t size = 0; size < needed; ++size) {
    EXPECT_FALSE(ParseString(whole.substr(0, size)).ok()) << size;
  }
  EXPECT_TRUE(ParseString(whole.substr(0, needed)).ok());
}

TEST(GgufRefusalTest, RefusesWhatIsNotAFile) {
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

}  // namespace
}  // namespace quern
