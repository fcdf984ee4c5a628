// An embedder's operator must run in a model if the policy enables it, and
// policies must change no more than rounding.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
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
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/testing/decoder_fixture_testutil.h"
#include "quern/models/testing/decoder_testutil.h"
#include "quern/models/testing/reference_decoder_testutil.h"
#include "quern/ops/registry/families/attention/attention_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"
#include "quern/testing/errors/largest_difference.h"
#include "quern/testing/isa_test.h"

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

int g_calls = 0;  // of all counters

// Counts its calls, and writes all of the workspace that it asks for; a model's
// operators need not compute to be counted.
class Counter final : public BoundOp {
 public:
  const char* target() const override { return "scalar"; }
  absl::Status CheckArgs(absl::Span<const AnyTensorView>) const override {
    return absl::OkStatus();
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows, int) const override {
    WorkspaceLayout layout;
    LayOut(layout, max_rows);
    return layout.bytes();
  }
  void Execute(absl::Span<const AnyTensorView> t, Workspace workspace,
               Executor&) const noexcept override {
    ++g_calls;
    const int64_t rows = t[0].extent(0);
    std::fill_n(LayOut(workspace, rows), kRowBytes * rows, uint8_t{1});
  }

 private:
  // More than all other operators of the small model need.
  static constexpr int64_t kRowBytes = 1 << 20;
  template <typename Allocator>
  static uint8_t* LayOut(Allocator& a, int64_t rows) {
    return a.template Allocate<uint8_t>("counter", kRowBytes * rows);
  }
};

using Made = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

Made CountLinear(const TensorMeta&, const LinearWeights*,
                 const std::optional<MutatedMeta>&, const std::string&,
                 const std::string&, const std::string&) {
  return std::make_unique<Counter>();
}
Made CountWrite(const TensorMeta&, const TensorMeta&, const TensorMeta&,
                const MutatedMeta&, const KvLayout*) {
  return std::make_unique<Counter>();
}
Made CountAttention(const TensorMeta&, const TensorMeta&, const MaybeMeta&,
                    const MaybeMeta&, const std::optional<MutatedMeta>&,
                    const KvLayout*, const AttentionStep*, double, int64_t,
                    int64_t, double, const std::string&) {
  return std::make_unique<Counter>();
}
Made CountEmbedding(const TensorMeta&, const TensorMeta&, Communicator*,
                    int64_t, int64_t, int64_t, double, const std::string&) {
  return std::make_unique<Counter>();
}

Made CountShortConv(const TensorMeta&, const LinearWeights*,
                    const LinearWeights*, const TensorMeta&, const MaybeMeta&,
                    const MutatedMeta&, const TensorMeta&, const MaybeMeta&,
                    const MaybeMeta&, int64_t, const std::string&) {
  return std::make_unique<Counter>();
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
  for (const std::string& architecture : TestArchitectures()) {
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

// One operator is replaced at a time, so that no other's workspace suffices.
TEST_P(DecoderOperatorsTest, MatricesAttentionAndEmbeddingCanBeReplaced) {
  TestRng rng;
  SmallDecoder shape;
  shape.architecture = "gemma2";  // layers of two pools
  const std::string bytes = SmallDecoderFile(rng, shape);
  const auto config = DecoderConfig::Create(ParseOrDie(bytes));
  ASSERT_TRUE(config.ok()) << config.status();
  const auto tokens = RandomTokens(rng, 5, shape.vocab);
  const auto calls_of = [&](const absl::Status& replaced) {
    EXPECT_EQ(replaced, absl::OkStatus());
    g_calls = 0;
    Run(bytes, tokens, "none");
    registry_ = OpRegistry();
    EXPECT_EQ(RegisterDecoderOps(registry_), absl::OkStatus());
    return g_calls;
  };
  EXPECT_EQ(calls_of(registry_.Override<&CountLinear>("linear", "mine")),
            4 * config->layers + 1);
  EXPECT_EQ(calls_of(registry_.Override<&CountWrite>("write_kv", "mine")),
            config->layers);
  EXPECT_EQ(
      calls_of(registry_.Override<&CountAttention>("paged_attention", "mine")),
      config->layers);
  EXPECT_EQ(calls_of(registry_.Override<&CountEmbedding>(
                "vocab_parallel_embedding", "mine")),
            1);
}

// Its workspace is the largest of the model, too.
TEST_P(DecoderOperatorsTest, ARecurrentLayerCanBeReplaced) {
  TestRng rng;
  SmallDecoder shape;
  shape.architecture = "lfm2";
  shape.kinds = "rarr";
  shape.layers = 4;
  const std::string bytes = SmallDecoderFile(rng, shape);
  const auto tokens = RandomTokens(rng, 5, shape.vocab);
  ASSERT_EQ(registry_.Override<&CountShortConv>("short_conv", "mine"),
            absl::OkStatus());
  g_calls = 0;
  Run(bytes, tokens, "none");
  EXPECT_EQ(g_calls, 3);
}

QUERN_INSTANTIATE_ISA_TEST(DecoderOperatorsTest);

// Kernels that the environment asks for and this program does not have are
// refused; the reference does not run in their place.
TEST(DecoderOperatorsRefusalTest, KernelsThatAreNotLinked) {
  TestRng rng;
  InlineExecutor executor;
  const std::string bytes = SmallDecoderFile(rng, {});
  ASSERT_EQ(setenv("QUERN_KERNELS", "onednn", 1), 0);
  const auto model = Decoder::Create(ParseOrDie(bytes), {}, executor);
  ASSERT_EQ(unsetenv("QUERN_KERNELS"), 0);
  EXPECT_EQ(model.status().code(), absl::StatusCode::kFailedPrecondition)
      << model.status();
}

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
