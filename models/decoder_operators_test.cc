// An embedder's operator must run in a model if the policy enables it, and
// policies must change no more than rounding.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/communicator.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/decoder.h"
#include "quern/models/decoder_config.h"
#include "quern/models/decoder_fixture_testutil.h"
#include "quern/models/decoder_testutil.h"
#include "quern/models/gguf.h"
#include "quern/ops/registry/attention_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/largest_difference.h"

namespace quern {
namespace {

// An operator that sets every logit to seven.
class Sevens final : public BoundOp {
 public:
  const char* target() const override { return "scalar"; }
  absl::Status CheckArgs(absl::Span<const AnyTensorView>) const override {
    return absl::OkStatus();
  }
  void Execute(absl::Span<const AnyTensorView> t, Workspace,
               Executor&) const noexcept override {
    auto* logits = static_cast<float*>(t[0].mutable_data());
    for (int64_t row = 0; row < t[0].extent(0); ++row) {
      for (int64_t i = 0; i < t[0].extent(1); ++i) {
        logits[row * t[0].stride(0) + i] = 7;
      }
    }
  }
};

absl::StatusOr<std::unique_ptr<BoundOp>> MakeSevens(const MutatedMeta&, double,
                                                    double) {
  return std::unique_ptr<BoundOp>(new Sevens());
}

// Counts its calls; a model's operators need not compute to be counted.
class Counter final : public BoundOp {
 public:
  explicit Counter(int& calls) : calls_(calls) {}
  const char* target() const override { return "scalar"; }
  absl::Status CheckArgs(absl::Span<const AnyTensorView>) const override {
    return absl::OkStatus();
  }
  void Execute(absl::Span<const AnyTensorView>, Workspace,
               Executor&) const noexcept override {
    ++calls_;
  }

 private:
  int& calls_;
};

int g_linears = 0, g_writes = 0, g_attentions = 0, g_embeddings = 0;

using Made = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

Made CountLinear(const TensorMeta&, const LinearWeights*,
                 const std::optional<MutatedMeta>&, const std::string&,
                 const std::string&) {
  return std::make_unique<Counter>(g_linears);
}
Made CountWrite(const TensorMeta&, const TensorMeta&, const TensorMeta&,
                const MutatedMeta&, const KvLayout*) {
  return std::make_unique<Counter>(g_writes);
}
Made CountAttention(const TensorMeta&, const TensorMeta&, const MaybeMeta&,
                    const MaybeMeta&, const KvLayout*, const AttentionStep*,
                    double, int64_t, int64_t, double, const std::string&) {
  return std::make_unique<Counter>(g_attentions);
}
Made CountEmbedding(const TensorMeta&, const TensorMeta&, Communicator*,
                    int64_t, int64_t, int64_t, double, const std::string&) {
  return std::make_unique<Counter>(g_embeddings);
}

class DecoderOperatorsTest : public DecoderFixture {
 protected:
  DecoderOperatorsTest() {
    EXPECT_EQ(RegisterDecoderOps(registry_), absl::OkStatus());
  }

  Rows Run(const std::string& bytes, const std::vector<int32_t>& tokens,
           const std::string& policy) {
    Load(bytes, DecoderWeights::kF32);  // proves the instruction set
    const auto parsed = OpPolicy::Parse(policy);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    const OpDispatcher ops(registry_, *parsed);
    DecoderOptions options;
    options.weights = DecoderWeights::kF32;
    options.operators = &ops;
    const auto model = Decoder::Create(ParseOrDie(bytes), options, inline_);
    EXPECT_TRUE(model.ok()) << model.status();
    if (!model.ok()) return {};
    DecoderState state = State(*model);
    return Forward(state, {{*state.NewSequence(), tokens}}, inline_);
  }

  OpRegistry registry_;
};

TEST_P(DecoderOperatorsTest, ReferencesComputeTheSame) {
  TestRng rng;
  SmallDecoder shape;
  for (const char* architecture : kTestArchitectures) {
    SCOPED_TRACE(architecture);
    shape.architecture = architecture;
    const std::string bytes = SmallDecoderFile(rng, shape);
    const GgufFile file = ParseOrDie(bytes);
    const auto config = DecoderConfig::Create(file);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto tokens = RandomTokens(rng, 23, shape.vocab);
    const DoubleRows want = ReferenceDecoder(file, *config).Logits(tokens);
    for (const char* policy :
         {"all", "none", "none,+rms_norm",
          "none,-linear,-write_kv,-paged_attention,-vocab_parallel_embedding,"
          "-logits_processor"}) {
      // The bound of decoder_oracle_test.cc also covers the references, which
      // round after each product and sum.
      EXPECT_LE(LargestDifferenceOf(Run(bytes, tokens, policy), want), 2e-4)
          << policy;
    }
  }
}

TEST_P(DecoderOperatorsTest, AnOverrideRunsWhereItIsEnabled) {
  ASSERT_EQ(registry_.Override<&MakeSevens>("logits_processor", "mine"),
            absl::OkStatus());
  TestRng rng;
  const SmallDecoder shape;
  const std::string bytes = SmallDecoderFile(rng, shape);
  const auto tokens = RandomTokens(rng, 5, shape.vocab);
  const Rows sevens(5,
                    std::vector<float>(static_cast<size_t>(shape.vocab), 7.0f));
  EXPECT_EQ(Run(bytes, tokens, "all"), sevens);
  const Rows without = Run(bytes, tokens, "-logits_processor");
  EXPECT_NE(without, sevens);
  EXPECT_EQ(without.size(), 5u);
}

TEST_P(DecoderOperatorsTest, MatricesAttentionAndEmbeddingCanBeReplaced) {
  ASSERT_EQ(registry_.Override<&CountLinear>("linear", "mine"),
            absl::OkStatus());
  ASSERT_EQ(registry_.Override<&CountWrite>("write_kv", "mine"),
            absl::OkStatus());
  ASSERT_EQ(registry_.Override<&CountAttention>("paged_attention", "mine"),
            absl::OkStatus());
  ASSERT_EQ(
      registry_.Override<&CountEmbedding>("vocab_parallel_embedding", "mine"),
      absl::OkStatus());
  TestRng rng;
  SmallDecoder shape;
  shape.architecture = "gemma2";  // layers of two pools
  const std::string bytes = SmallDecoderFile(rng, shape);
  const auto config = DecoderConfig::Create(ParseOrDie(bytes));
  ASSERT_TRUE(config.ok()) << config.status();
  g_linears = g_writes = g_attentions = g_embeddings = 0;
  Run(bytes, RandomTokens(rng, 5, shape.vocab), "none");
  EXPECT_EQ(g_linears, 4 * config->layers + 1);
  EXPECT_EQ(g_writes, config->layers);
  EXPECT_EQ(g_attentions, config->layers);
  EXPECT_EQ(g_embeddings, 1);
}

QUERN_INSTANTIATE_ISA_TEST(DecoderOperatorsTest);

TEST(DecoderOperatorsRefusalTest, ARegistryWithoutAnOperator) {
  TestRng rng;
  InlineExecutor executor;
  const std::string bytes = SmallDecoderFile(rng, {});
  const OpRegistry empty;
  const OpDispatcher ops(empty, OpPolicy());
  DecoderOptions options;
  options.operators = &ops;
  const auto model = Decoder::Create(ParseOrDie(bytes), options, executor);
  EXPECT_EQ(model.status().code(), absl::StatusCode::kNotFound)
      << model.status();
}

}  // namespace
}  // namespace quern
