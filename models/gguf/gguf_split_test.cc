// Models that are split into several files.

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_sample_testutil.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

std::string PathOf(const std::string& name, int64_t part, int64_t parts) {
  return absl::StrFormat("%s/%s-%05d-of-%05d.gguf", ::testing::TempDir(), name,
                         part, parts);
}

void Write(const std::string& path, const std::string& bytes) {
  TempFile(path.substr(::testing::TempDir().size() + 1), bytes);
}

// Adds the keys of part `no` of `parts`, which counts from 0.
GgufWriter& AddSplitKeys(GgufWriter& w, uint16_t no, uint16_t parts,
                         int32_t tensors) {
  return w.RawKey("split.no", 2, Raw(no))
      .RawKey("split.count", 2, Raw(parts))
      .Key("split.tensors.count", tensors);
}

// Writes the model in three parts, of which the second has no tensor, and
// returns the path of the first.
std::string WriteSplit(const std::string& name, const std::string& whole,
                       GgufWriter first) {
  const GgufFile file = ParseOrDie(whole);
  GgufWriter parts[] = {std::move(first), GgufWriter(), GgufWriter()};
  const auto tensors = static_cast<int32_t>(file.tensors().size());
  for (uint16_t no = 0; no < 3; ++no) AddSplitKeys(parts[no], no, 3, tensors);
  for (const GgufTensor& tensor : file.tensors()) {
    std::string data(static_cast<size_t>(tensor.bytes), '\0');
    EXPECT_TRUE(
        file.ReadPartBytes(tensor, {0, tensor.rows(), 0, tensor.cols()},
                           absl::MakeSpan(reinterpret_cast<uint8_t*>(&data[0]),
                                          data.size()))
            .ok());
    const bool early = &tensor - file.tensors().data() < tensors / 3;
    parts[early ? 0 : 2].Tensor(
        tensor.name,
        std::vector<uint64_t>(tensor.dims.begin(), tensor.dims.end()),
        tensor.type, data);
  }
  for (int64_t no = 0; no < 3; ++no) {
    Write(PathOf(name, no + 1, 3), parts[no].Finish());
  }
  return PathOf(name, 1, 3);
}

std::vector<float> Logits(const GgufFile& file) {
  InlineExecutor executor;
  const auto model = Decoder::Create(file, {}, executor);
  EXPECT_TRUE(model.ok()) << model.status();
  auto state = DecoderState::Create(*model, {});
  EXPECT_TRUE(state.ok()) << state.status();
  const std::vector<int32_t> tokens = {1, 20, 3};
  const auto logits = state->Forward({{*state->NewSequence(), tokens}},
                                     LogitsOf::kLastTokens, executor);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return std::vector<float>(logits->Row(0), logits->Row(0) + logits->extent(1));
}

TEST(GgufSplitTest, PartsAreOneModel) {
  const SmallDecoder shape;
  TestRng rng;
  const std::string whole = SmallDecoderFile(rng, shape);
  const std::string path = WriteSplit("model", whole, SmallDecoderKeys(shape));
  auto opened = GgufFile::Open(path);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const GgufFile file = *std::move(opened);  // moving keeps the parts
  const GgufFile one = ParseOrDie(whole);
  EXPECT_EQ(file.tensors().size(), one.tensors().size());
  EXPECT_EQ((*file.FindTensor("token_embd.weight"))->part, 0);
  EXPECT_EQ((*file.FindTensor("output.weight"))->part, 2);
  EXPECT_GT(file.file_bytes(), one.file_bytes());
  EXPECT_EQ(Logits(file), Logits(one));
}

TEST(GgufSplitTest, RefusalsNameThePart) {
  const SmallDecoder shape;
  TestRng rng;
  const std::string whole = SmallDecoderFile(rng, shape);
  const auto write = [&] {
    return WriteSplit("bad", whole, SmallDecoderKeys(shape));
  };
  const auto refuse = [](const std::string& path, absl::StatusCode code,
                         const std::string& words) {
    const absl::Status status = GgufFile::Open(path).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  using Code = absl::StatusCode;
  const std::string first = write();
  const std::string second = PathOf("bad", 2, 3), third = PathOf("bad", 3, 3);
  ASSERT_TRUE(GgufFile::Open(first).ok());
  refuse(second, Code::kInvalidArgument,
         "is part 2 of 3 of a split model; need the first, whose name ends in "
         "'-00001-of-00003.gguf'");
  std::remove(third.c_str());
  refuse(first, Code::kNotFound, "' is part 3 of 3 of a split model");
  Write(third, "GGUF");
  refuse(first, Code::kInvalidArgument, "' is part 3 of 3 of a split model");
  // The second part in place of the third.
  GgufWriter again;
  Write(third, AddSplitKeys(again, 1, 3, 1).Finish());
  refuse(first, Code::kInvalidArgument,
         "is part 2 of 3 of a split model; need part 3 of 3");
  // A tensor that an earlier part has, and one too few.
  GgufWriter twice;
  AddSplitKeys(twice, 2, 3, 1)
      .Tensor("token_embd.weight", {1}, GgufTensorType::kF32,
              BytesOf<float>({1}));
  Write(third, twice.Finish());
  refuse(first, Code::kInvalidArgument,
         "tensor 'token_embd.weight' of part 3 of 3 of a split model is in a "
         "part before it, too");
  GgufWriter empty;
  Write(third, AddSplitKeys(empty, 2, 3, 1).Finish());
  refuse(first, Code::kInvalidArgument, "gguf: split.tensors.count=");
  // Names that do not tell where the others are, and bytes in memory.
  GgufWriter lone;
  const std::string bytes = AddSplitKeys(lone, 0, 2, 0).Finish();
  refuse(TempFile("lone.gguf", bytes), Code::kInvalidArgument,
         "is part 1 of 2 of a split model; need a name that ends in "
         "'-00001-of-00002.gguf'");
  const absl::Status parsed = ParseString(bytes).status();
  EXPECT_EQ(parsed.code(), Code::kUnimplemented);
  EXPECT_EQ(parsed.message(),
            "gguf: the bytes are part 1 of 2 of a split model; need the path "
            "of its first part");
  GgufWriter outside;
  const std::string far = AddSplitKeys(outside, 2, 2, 0).Finish();
  EXPECT_THAT(std::string(ParseString(far).status().message()),
              HasSubstr("gguf: split.no=2; need 0 <= split.no <= 1"));
  // A model of one part is like any other.
  GgufWriter single;
  EXPECT_TRUE(ParseString(AddSplitKeys(single, 0, 1, 0).Finish()).ok());
}

}  // namespace
}  // namespace quern
