#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/sampling/sampler.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/many_workers.h"

namespace quern {
namespace {

TEST(SamplerWorkspaceTest, SamplerTakesWhatItSaidForEveryNumberOfWorkers) {
  TestRng rng;
  for (const int64_t vocab : {1, 7, 100, 257}) {
    SamplerSpec spec;
    spec.vocab = vocab;
    const auto plan = SamplerPlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    // Greedy, unfiltered, top-k and top-p sampling, with more rows than workers
    // and with fewer.
    constexpr int64_t kRows = 40;
    std::vector<SamplingParams> params(kRows);
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].temperature = i % 4 == 0 ? 0.0f : 0.8f;
      params[i].top_k = i % 4 == 2 ? 5 : 0;
      params[i].top_p = i % 4 == 3 ? 0.7f : 1.0f;
      params[i].seed = i;
    }
    const GuardBuffer<float> logits(
        UniformReals<float>(rng, kRows * vocab, -3, 3));
    const MatrixView<const float> view(logits.data(), {kRows, vocab},
                                       {vocab, 1});
    std::vector<int32_t> want;
    int64_t fewer = 0;
    for (int workers = 1; workers <= 256; ++workers) {
      const int64_t bytes = *plan->WorkspaceBytes(1, workers);
      ASSERT_GE(bytes, fewer) << workers << " workers";
      fewer = bytes;
      GuardBuffer<uint8_t> memory(bytes);
      std::vector<int32_t> tokens(kRows);
      ManyWorkers executor(workers);
      plan->Execute(view, params, absl::MakeSpan(tokens),
                    Workspace(memory.data(), static_cast<size_t>(bytes)),
                    executor);
      if (want.empty()) want = tokens;
      ASSERT_EQ(tokens, want) << workers << " workers, vocab " << vocab;
    }
  }
}

TEST(SamplerWorkspaceTest, RefusesASizeThatOverflows) {
  constexpr int kMost = std::numeric_limits<int32_t>::max();
  const auto plan = SamplerPlan::Create({kMost});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->WorkspaceBytes(1, 1).ok());
  const absl::Status status = plan->WorkspaceBytes(1, kMost).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(),
            "sampler: vocab=2147483647, max_workers=2147483647; their "
            "workspace has 2^63 bytes or more");
}

}  // namespace
}  // namespace quern
