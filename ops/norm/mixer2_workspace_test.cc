#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/norm/mixer2_gated_rms_norm.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/many_workers.h"

namespace quern {
namespace {

// Two ranks: with 1 or 3 groups a group spans both ranks; with 6 each rank has
// whole groups and needs no workspace.
TEST(Mixer2WorkspaceTest, NormTakesWhatItSaidForEveryNumberOfWorkers) {
  for (const int64_t groups : {1, 3, 6}) {
    Mixer2GatedRmsNormSpec spec;
    spec.hidden = 300;
    spec.groups = groups;
    RunRanks(2, [&](ThreadCommunicator& c) {
      const auto plan = Mixer2GatedRmsNormPlan::Create(spec, c);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const int64_t n = plan->columns();
      Rng rng(static_cast<uint64_t>(7 + c.rank()));
      for (const int64_t rows : {0, 1, 15, 16, 17, 33}) {
        const auto x = UniformReals<float>(rng, rows * n);
        const auto z = UniformReals<float>(rng, rows * n);
        const std::vector<float> weight(static_cast<size_t>(n), 0.5f);
        const auto bytes = plan->WorkspaceBytes(rows, 256);
        ASSERT_TRUE(bytes.ok()) << bytes.status();
        std::vector<float> want;
        for (int workers = 1; workers <= 256; workers += 5) {
          GuardBuffer<uint8_t> memory(*bytes);
          GuardBuffer<float> out(rows * n);
          ManyWorkers executor(workers);
          plan->Execute(
              {DenseMatrix(x.data(), rows, n), DenseMatrix(z.data(), rows, n),
               DenseMatrix(out.data(), rows, n), DenseVector(weight.data(), n)},
              Workspace(memory.data(), static_cast<size_t>(*bytes)), c,
              executor);
          if (want.empty()) want = out.ToVector();
          ASSERT_TRUE(AllBitsEqual(out.ToVector(), want))
              << rows << " rows, " << workers << " workers";
        }
      }
    });
  }
}

}  // namespace
}  // namespace quern
