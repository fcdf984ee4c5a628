// Files whose tables and caches would be large are refused before these are
// allocated.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fuzz_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

class DecoderLimitsTest : public DecoderFuzzTest {};

// A file of 0.6 MB whose rotary table would take 17 GB: one element per row,
// one head of 65536, and a context that costs the file nothing to claim.
TEST_F(DecoderLimitsTest, ALongContextOfALongHeadIsRefusedBeforeItsTable) {
  TestRng rng;
  SmallDecoder shape;
  shape.vocab = shape.layers = shape.ffn = shape.hidden = 1;
  shape.q_heads = shape.kv_heads = 1;
  shape.head_dim = shape.rope_dim = 65536;
  shape.context = 1 << 28;
  shape.type = GgufTensorType::kBF16;
  const std::string bytes = SmallDecoderFile(rng, shape);
  EXPECT_LT(bytes.size(), 650000u);
  InlineExecutor executor;
  const GgufFile file = ParseOrDie(bytes);
  const auto model = Decoder::Create(file, {}, executor);
  EXPECT_EQ(model.status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* words :
       {"decoder: loading takes up to 1718",
        "17179869184 of the rotary table for ",
        "context=32768, rope.dimension_count=65536; need at most max_bytes=29",
        ", which is 268435456 + 47 times the file's "}) {
    EXPECT_THAT(std::string(model.status().message()), HasSubstr(words));
  }
  DecoderOptions options;
  options.max_context = 16;
  EXPECT_TRUE(Decoder::Create(file, options, executor).ok());
}

// The default size of the cache follows from the context.
TEST_F(DecoderLimitsTest, ACacheOfManyWideLayersIsRefused) {
  TestRng rng;
  SmallDecoder shape;
  shape.vocab = shape.ffn = shape.hidden = 1;
  shape.layers = 4;
  shape.q_heads = shape.kv_heads = 1024;
  shape.head_dim = shape.rope_dim = 16;
  shape.context = 1 << 20;
  InlineExecutor executor;
  const std::string bytes = SmallDecoderFile(rng, shape);
  const GgufFile file = ParseOrDie(bytes);
  const auto model = Decoder::Create(file, {}, executor);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto state = DecoderState::Create(*model, {});
  EXPECT_EQ(state.status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* words :
       {"decoder: a cache of 32768 tokens takes 8589934592 bytes in 4 layers, ",
        "; need at most max_bytes=", ", which is 4294967296 + 64 times the "}) {
    EXPECT_THAT(std::string(state.status().message()), HasSubstr(words));
  }
  DecoderStateSpec spec;
  spec.cache_tokens = 64;
  spec.max_step_tokens = 4;
  EXPECT_TRUE(DecoderState::Create(*model, spec).ok());
}

}  // namespace
}  // namespace quern
