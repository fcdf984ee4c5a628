#include "quern/tools/gguf_writer.h"

#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string TempFile(const std::string& name) {
  return ::testing::TempDir() + "/" + name;
}

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

template <typename T>
absl::Span<const uint8_t> BytesOf(const std::vector<T>& values) {
  return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values.data()),
                             values.size() * sizeof(T));
}

TEST(GgufFileWriterTest, TheReaderReadsWhatWasWritten) {
  const std::string path = TempFile("roundtrip.gguf");
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<uint16_t> b = {0x3f80, 0xbf80, 0x4000};  // 1, -1, 2
  {
    GgufFileWriter w;
    w.KeyU32("u", 7);
    w.KeyF32("f", -0.5f);
    w.KeyBool("b", true);
    w.KeyString("s", "text");
    w.KeyStrings("ss", std::vector<std::string>{"x", "", "yz"});
    w.KeyF32s("ff", std::vector<float>{1.5f, 2});
    w.KeyI32s("ii", std::vector<int32_t>{-1, 9});
    ASSERT_TRUE(w.AddTensor("a", {3, 2}, GgufTensorType::kF32).ok());
    ASSERT_TRUE(w.AddTensor("b", {3}, GgufTensorType::kBF16).ok());
    ASSERT_TRUE(w.Open(path).ok());
    // Appended pieces need not be whole elements.
    ASSERT_TRUE(w.Append(BytesOf(a).subspan(0, 5)).ok());
    ASSERT_TRUE(w.Append(BytesOf(a).subspan(5)).ok());
    ASSERT_TRUE(w.Append(BytesOf(b)).ok());
    const int64_t bytes = w.file_bytes();
    ASSERT_TRUE(w.Finish().ok());
    const auto file = GgufFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->file_bytes(), bytes);
  }
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*file->GetU32("u"), 7u);
  EXPECT_EQ(*file->GetF32("f"), -0.5f);
  EXPECT_EQ(*file->GetBool("b"), true);
  EXPECT_EQ(*file->GetString("s"), "text");
  EXPECT_THAT(*file->GetStrings("ss"), ElementsAre("x", "", "yz"));
  EXPECT_THAT(*file->GetF32s("ff"), ElementsAre(1.5f, 2.0f));
  EXPECT_THAT(*file->GetI32s("ii"), ElementsAre(-1, 9));
  std::vector<float> got(6), row(3);
  ASSERT_TRUE(
      file->ReadRows(**file->FindTensor("a"), 0, absl::MakeSpan(got)).ok());
  EXPECT_EQ(got, a);
  ASSERT_TRUE(
      file->ReadRows(**file->FindTensor("b"), 0, absl::MakeSpan(row)).ok());
  EXPECT_THAT(row, ElementsAre(1.0f, -1.0f, 2.0f));
}

TEST(GgufFileWriterTest, RefusesTensorsThatNoReaderTakes) {
  struct Refusal {
    std::string name;
    std::vector<int64_t> dims;
    GgufTensorType type;
    const char* words;
  };
  for (const Refusal& r : std::vector<Refusal>{
           {"", {1}, GgufTensorType::kF32, "name of a tensor has 0 bytes"},
           {std::string(65, 'x'), {1}, GgufTensorType::kF32, "65 bytes"},
           {"t", {}, GgufTensorType::kF32, "t has 0 dimensions; need 1 to 4"},
           {"t", {1, 1, 1, 1, 1}, GgufTensorType::kF32, "5 dimensions"},
           {"t", {4, 0}, GgufTensorType::kF32, "dimension of t=0; need "},
           {"t", {33}, GgufTensorType::kQ8_0, "rows of 33 elements; need a"},
           {"t",
            {int64_t{1} << 31, int64_t{1} << 31},
            GgufTensorType::kF32,
            "larger than 2^63 bytes"},
           {"t",
            {int64_t{1} << 40, int64_t{1} << 40},
            GgufTensorType::kBF16,
            "larger than 2^63 bytes"}}) {
    GgufFileWriter w;
    const absl::Status status = w.AddTensor(r.name, r.dims, r.type);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << r.words;
    EXPECT_THAT(std::string(status.message()), HasSubstr(r.words));
  }
}

TEST(GgufFileWriterTest, RefusesTooManyAndTooFewBytes) {
  const std::string path = TempFile("bytes.gguf");
  const std::vector<uint8_t> bytes(9);
  GgufFileWriter w;
  ASSERT_TRUE(w.AddTensor("a", {2}, GgufTensorType::kF32).ok());
  EXPECT_THAT(std::string(w.Append(bytes).message()), HasSubstr("after Open"));
  ASSERT_TRUE(w.Open(path).ok());
  EXPECT_THAT(std::string(w.Append(bytes).message()),
              HasSubstr("bytes=9 for tensor 0; need at most 8"));
  ASSERT_TRUE(w.Append(absl::MakeConstSpan(bytes).subspan(0, 7)).ok());
  EXPECT_EQ(w.Finish().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(w.Append(absl::MakeConstSpan(bytes).subspan(0, 1)).ok());
  EXPECT_THAT(std::string(w.Append(bytes).message()),
              HasSubstr("for tensor 1; need at most 0"));
  EXPECT_TRUE(w.Finish().ok());
  EXPECT_TRUE(Exists(path));
}

TEST(GgufFileWriterTest, LeavesNoUnfinishedFile) {
  const std::string path = TempFile("unfinished.gguf");
  {
    GgufFileWriter w;
    ASSERT_TRUE(w.AddTensor("a", {2}, GgufTensorType::kF32).ok());
    ASSERT_TRUE(w.Open(path).ok());
    EXPECT_TRUE(Exists(path));
  }
  EXPECT_FALSE(Exists(path));
}

TEST(GgufFileWriterTest, SaysBeforeItWritesThatTheDiskIsTooSmall) {
  const std::string path = TempFile("large.gguf");
  {
    GgufFileWriter w;
    ASSERT_TRUE(
        w.AddTensor("a", {int64_t{1} << 58}, GgufTensorType::kBF16).ok());
    const absl::Status status = w.Open(path);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), HasSubstr(" MiB left"));
  }
  EXPECT_FALSE(Exists(path));
}

TEST(GgufFileWriterTest, GivesTheSystemsReason) {
  GgufFileWriter w;
  const absl::Status status = w.Open(TempFile("no such directory/x.gguf"));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("No such file or directory"));
}

}  // namespace
}  // namespace quern
