// The tensors that each architecture's files must have, and may not have.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

SmallDecoder Shape(const Architecture& architecture) {
  SmallDecoder shape;
  shape.architecture = std::string(architecture.name);
  shape.mixture = true;
  shape.shared_ffn = 32;
  shape.output = architecture.may.Has(ModelPart::kOutputMatrix);
  return shape;
}

// The names of a model's tensors, without the optional output.weight.
std::vector<std::string> TensorsOf(const SmallDecoder& shape) {
  std::vector<std::string> names;
  EXPECT_TRUE(
      ForEachTensor(SmallDecoderConfig(shape), [&](const TensorEntry& entry,
                                                   int64_t layer) {
        if (entry.id != TensorId::kOutput) {
          names.push_back(TensorName(entry.id, layer));
        }
        return absl::OkStatus();
      }).ok());
  return names;
}

absl::Status StatusOf(const std::string& bytes) {
  return DecoderConfig::Create(ParseOrDie(bytes)).status();
}

TEST(ArchitectureTensorsTest, EveryTensorIsNeeded) {
  for (const Architecture* architecture : Architectures()) {
    SmallDecoder shape = Shape(*architecture);
    TestRng rng;
    ASSERT_TRUE(StatusOf(SmallDecoderFile(rng, shape)).ok())
        << architecture->name;
    for (const std::string& name : TensorsOf(shape)) {
      SCOPED_TRACE(absl::StrCat(architecture->name, " without ", name));
      shape.dropped = name;
      const absl::Status status = StatusOf(SmallDecoderFile(rng, shape));
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("no tensor '", name, "'")));
    }
  }
}

// Tensors of other architectures, and of none.
TEST(ArchitectureTensorsTest, NoOtherTensorIsTaken) {
  for (const Architecture* architecture : Architectures()) {
    const SmallDecoder shape = Shape(*architecture);
    const std::vector<std::string> own = TensorsOf(shape);
    for (const char* name :
         {"blk.1.attn_norm.weight", "blk.1.ffn_norm.weight",
          "blk.1.attn_q_norm.weight", "blk.1.post_ffw_norm.weight",
          "blk.1.attn_qkv.weight", "blk.1.ffn_gate.weight", "blk.1.ffn_up.bias",
          "blk.1.attn_output.bias", "output.bias", "rope_factors_long.weight",
          "x"}) {
      if (std::find(own.begin(), own.end(), name) != own.end()) continue;
      SCOPED_TRACE(absl::StrCat(architecture->name, " with ", name));
      TestRng rng;
      GgufWriter w = SmallDecoderKeys(shape);
      AddSmallDecoderTensors(rng, shape, w);
      w.Tensor(name, {1}, GgufTensorType::kF32, BytesOf<float>({1}));
      const absl::Status status = StatusOf(w.Finish());
      EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("tensor '", name,
                                         "' is not part of a plain ")));
    }
  }
}

// Every number of a model's shape that has no default must be in the file.
TEST(ArchitectureTensorsTest, RequiredKeysAreNeeded) {
  for (const Architecture* architecture : Architectures()) {
    SmallDecoder shape = Shape(*architecture);
    const DecoderConfig config = SmallDecoderConfig(shape);
    for (const ModelKey& key : ModelKeys()) {
      // The keys of parts that a model may have tell that it has them.
      if (key.integer == nullptr || !architecture->always.HasAll(key.needs) ||
          key.fallback(config) > 0) {
        continue;
      }
      const std::string name = absl::StrCat(architecture->name, ".", key.name);
      SCOPED_TRACE(name);
      shape.dropped_key = name;
      TestRng rng;
      const absl::Status status = StatusOf(SmallDecoderFile(rng, shape));
      // Without its key, the number of shared experts is 0.
      EXPECT_FALSE(status.ok());
    }
  }
}

}  // namespace
}  // namespace quern
