// Files of packed weights: mapped bytes must equal the written ones, damage
// must be refused by a message that names it, and a model from such a file must
// compute the bits of a model that was packed in memory.

#include "quern/models/decoder/loading/packed_file.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/files.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

using testing::HasSubstr;

std::string PathOf(absl::string_view name) {
  std::string path = absl::StrCat(testing::TempDir(), "/", name);
  std::remove(path.c_str());
  return path;
}
void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}
absl::Span<const uint8_t> BytesOf(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

TEST(PackedFileTest, FindsWhatWasWritten) {
  const std::string path = PathOf("blobs");
  // Blobs of sizes around the alignment, and an empty blob.
  std::vector<std::string> texts;
  for (const size_t size : {0, 1, 63, 64, 65, 5000}) {
    texts.emplace_back(size, static_cast<char>('a' + texts.size()));
  }
  std::vector<PackedFile::Blob> blobs;
  for (const std::string& text : texts) {
    blobs.emplace_back(absl::StrCat("blob ", text.size()), BytesOf(text));
  }
  ASSERT_TRUE(PackedFile::Write(path, 42, blobs).ok());
  auto file = PackedFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  PackedFile moved = *std::move(file);
  EXPECT_EQ(moved.source(), 42u);
  for (const auto& [name, bytes] : blobs) {
    const auto found = moved.Find(name);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, bytes) << name;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(found->data()) % 64, 0u) << name;
  }
  EXPECT_EQ(moved.Find("other").status().code(),
            absl::StatusCode::kInvalidArgument);

  // An existing file must not be overwritten.
  EXPECT_EQ(PackedFile::Write(path, 43, {}).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(PackedFile::Open(path)->source(), 42u);
  EXPECT_EQ(PackedFile::Write(PathOf("twice"), 1,
                              {{"a", BytesOf(texts[1])}, {"a", {}}})
                .code(),
            absl::StatusCode::kInvalidArgument);
  // A temporary file that a killed process left behind must not be in the way.
  const std::string none = PathOf("none");
  WriteBytes(absl::StrCat(none, ".", getpid(), ".0.tmp"), "left behind");
  ASSERT_TRUE(PackedFile::Write(none, 1, {}).ok());
  EXPECT_TRUE(PackedFile::Open(none).ok());
}

TEST(PackedFileTest, RefusesDamage) {
  const std::string path = PathOf("whole"), damaged = PathOf("damaged");
  const std::string text(100, 'x');
  ASSERT_TRUE(
      PackedFile::Write(path, 7, {{"a", BytesOf(text)}, {"b", BytesOf(text)}})
          .ok());
  const std::string whole = FileBytes(path);
  EXPECT_EQ(PackedFile::Open(damaged).status().code(),
            absl::StatusCode::kNotFound);
  const auto message = [&](const std::string& bytes) {
    WriteBytes(damaged, bytes);
    const absl::Status status = PackedFile::Open(damaged).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(damaged));
    return std::string(status.message());
  };
  EXPECT_THAT(message(""), HasSubstr("has 0 bytes; need 64 or more"));
  EXPECT_THAT(message(whole.substr(0, 63)), HasSubstr("has 63 bytes"));
  EXPECT_THAT(message("GGUF" + whole.substr(4)), HasSubstr("QuernPak"));
  for (const size_t size : {size_t{64}, size_t{200}, whole.size() - 1}) {
    EXPECT_THAT(message(whole.substr(0, size)), HasSubstr("its header says"));
  }
  EXPECT_THAT(message(whole + '\0'), HasSubstr("its header says"));
  const auto with = [&](size_t at, char bits) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ bits);
    return bytes;
  };
  EXPECT_EQ(PackedFile::Open(testing::TempDir()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(message(with(8, 2)), HasSubstr("version=3; need 1"));
  EXPECT_THAT(message(with(12, 1)), HasSubstr("byte_order="));
  // Flips every other bit of the header, and every bit of the index.
  const size_t index = 64 + 2 * 128;
  ASSERT_EQ(whole.size(), index + 2 * 25);
  for (size_t at = 0; at < whole.size(); ++at) {
    if (at >= 64 && at < index) continue;  // blobs describe themselves
    for (int bit = 0; bit < 8; ++bit) {
      message(with(at, static_cast<char>(1 << bit)));
    }
  }
}

class PackedModelTest : public DecoderFixture {
 protected:
  struct Made {
    absl::Status status;
    Rows logits;
  };
  // The logits of a model made from `file` with a file of packed weights at
  // `path`.
  Made Make(const std::string& file, DecoderWeights weights,
            const std::string& path,
            DecoderActivations activations = DecoderActivations::kExact) {
    DecoderOptions options;
    options.weights = weights;
    options.activations = activations;
    options.packed_path = path;
    auto model = Decoder::Create(ParseOrDie(file), options, inline_);
    if (!model.ok()) return {model.status(), {}};
    EXPECT_RAN_ON(*model);
    DecoderState state = State(*model);
    const std::vector<int32_t> tokens = {1, 36, 7, 20};
    return {absl::OkStatus(),
            Forward(state, {{*state.NewSequence(), tokens}}, inline_)};
  }
};

TEST_P(PackedModelTest, SameBitsAsFromMemory) {
  for (const std::string& architecture : TestArchitectures()) {
    constexpr auto kExact = DecoderActivations::kExact;
    constexpr auto kInt8 = DecoderActivations::kInt8;
    for (const auto& [type, weights, rows] :
         {std::tuple(GgufTensorType::kBF16, DecoderWeights::kAsInFile, kExact),
          {GgufTensorType::kQ8_0, DecoderWeights::kAsInFile, kExact},
          {GgufTensorType::kQ4_0, DecoderWeights::kAsInFile, kExact},
          {GgufTensorType::kMXFP4, DecoderWeights::kAsInFile, kExact},
          {GgufTensorType::kMXFP4, DecoderWeights::kAsInFile, kInt8},
          {GgufTensorType::kF32, DecoderWeights::kInt8, kExact}}) {
      TestRng rng;
      SmallDecoder shape;
      shape.architecture = architecture;
      shape.type = type;
      const std::string file = SmallDecoderFile(rng, shape);
      const std::string path = PathOf("model");
      const Made memory = Make(file, weights, "", rows);
      const Made written = Make(file, weights, path, rows);
      const Made mapped = Make(file, weights, path, rows);
      ASSERT_TRUE(mapped.status.ok()) << mapped.status;
      EXPECT_EQ(written.logits, memory.logits) << architecture;
      EXPECT_EQ(mapped.logits, memory.logits) << architecture;
      EXPECT_FALSE(mapped.logits.empty());
    }
  }
}

TEST_P(PackedModelTest, RefusesAFileOfAnotherModel) {
  TestRng rng;
  const std::string file = SmallDecoderFile(rng, SmallDecoder());
  const std::string other = SmallDecoderFile(rng, SmallDecoder());
  const std::string path = PathOf("model");
  ASSERT_TRUE(Make(file, DecoderWeights::kAsInFile, path).status.ok());
  const std::string before = FileBytes(path);
  SmallDecoder in_blocks;
  in_blocks.type = GgufTensorType::kQ8_0;
  const std::string blocks = SmallDecoderFile(rng, in_blocks);
  const std::string path_of_blocks = PathOf("model_in_blocks");
  ASSERT_TRUE(
      Make(blocks, DecoderWeights::kAsInFile, path_of_blocks).status.ok());
  for (const auto& [name, status] :
       std::vector<std::pair<std::string, absl::Status>>{
           {"other weights",
            Make(other, DecoderWeights::kAsInFile, path).status},
           {"another form", Make(file, DecoderWeights::kInt8, path).status},
           {"blocks for other rows",
            Make(blocks, DecoderWeights::kAsInFile, path_of_blocks,
                 DecoderActivations::kInt8)
                .status}}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("decoder: packed_path=", path)));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(" was packed from another file"));
  }
  EXPECT_EQ(FileBytes(path), before);
  // A file of another kind must not be replaced either.
  WriteBytes(path, std::string(100, 'x'));
  EXPECT_EQ(Make(file, DecoderWeights::kAsInFile, path).status.code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FileBytes(path), std::string(100, 'x'));
  EXPECT_EQ(Make(file, DecoderWeights::kAsInFile, "/nonexistent/folder/f")
                .status.code(),
            absl::StatusCode::kNotFound);
}

TEST_P(PackedModelTest, RefusesMatricesOfAnotherVersion) {
  TestRng rng;
  const std::string file = SmallDecoderFile(rng, SmallDecoder());
  const std::string path = PathOf("model");
  ASSERT_TRUE(Make(file, DecoderWeights::kAsInFile, path).status.ok());
  std::string bytes = FileBytes(path);
  const size_t matrix = bytes.find("QuernLin");
  ASSERT_NE(matrix, std::string::npos);
  bytes[matrix + 8] = 1;
  WriteBytes(path, bytes);
  const absl::Status status =
      Make(file, DecoderWeights::kAsInFile, path).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat(" in packed_path=", path, ": ")));
  EXPECT_THAT(std::string(status.message()), HasSubstr("version=1; need 2"));
  EXPECT_EQ(FileBytes(path), bytes);
}

QUERN_INSTANTIATE_ISA_TEST(PackedModelTest);

}  // namespace
}  // namespace quern
