// Collective operators by name, on ranks as threads and on one rank.

#include "quern/ops/registry/vllm/collective_ops.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr int kRanks = 3;
constexpr int64_t kRows = 2, kColumns = 5;
using Floats = std::vector<float>;

class VllmCollectiveTest : public testing::Test {
 protected:
  VllmCollectiveTest() {
    EXPECT_EQ(RegisterVllmCollectiveOps(registry_), absl::OkStatus());
  }
  MadeOp Make(const char* op, const NamedArgs& args) {
    const OpDispatcher ops(registry_, OpPolicy());
    auto made = ops.MakeFrom("reference", op, args);
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }
  static void Run(const MadeOp& op, const std::vector<AnyTensorView>& tensors) {
    InlineExecutor executor;
    ASSERT_EQ(op.CheckArgs(tensors), absl::OkStatus());
    op.op->Execute(tensors, executor);
  }
  // Rank r has 100 r + 0, 1, 2, ...
  static Floats DataOf(int rank) {
    Floats data;
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      data.push_back(static_cast<float>(100 * rank + i));
    }
    return data;
  }
  static NamedArgs DataArgs(Communicator& ranks) {
    return {{"data", TensorMeta{DType::kF32, {kRows, kColumns}}},
            {"ranks", &ranks}};
  }
  static AnyTensorView Data(Floats& data) {
    return DenseMatrix(data.data(), kRows, kColumns);
  }

  OpRegistry registry_;
};

TEST_F(VllmCollectiveTest, SumsOverRanks) {
  RunRanks(kRanks, [&](Communicator& ranks) {
    Floats data = DataOf(ranks.rank());
    Run(Make("shm_allreduce", DataArgs(ranks)), {Data(data)});
    for (size_t i = 0; i < data.size(); ++i) {
      EXPECT_EQ(data[i], 300 + 3 * static_cast<float>(i));
    }
  });
}

TEST_F(VllmCollectiveTest, GathersAlongADimension) {
  RunRanks(kRanks, [&](Communicator& ranks) {
    for (const int64_t dim : {0, 1, -1}) {
      Floats data = DataOf(ranks.rank()), all(kRanks * data.size());
      NamedArgs args = DataArgs(ranks);
      args.emplace_back("dim", dim);
      const AnyTensorView out =
          dim == 0 ? DenseMatrix(all.data(), kRanks * kRows, kColumns)
                   : DenseMatrix(all.data(), kRows, kRanks * kColumns);
      Run(Make("shm_allgather", args), {Data(data), out});
      for (int64_t r = 0; r < kRanks; ++r) {
        for (int64_t i = 0; i < kRows; ++i) {
          for (int64_t j = 0; j < kColumns; ++j) {
            const int64_t at = dim == 0 ? (r * kRows + i) * kColumns + j
                                        : (i * kRanks + r) * kColumns + j;
            EXPECT_EQ(all[static_cast<size_t>(at)],
                      static_cast<float>(100 * r + i * kColumns + j));
          }
        }
      }
    }
  });
}

TEST_F(VllmCollectiveTest, GathersToOutput) {
  RunRanks(kRanks, [&](Communicator& ranks) {
    Floats data = DataOf(ranks.rank()), all(kRanks * data.size());
    NamedArgs args = DataArgs(ranks);
    args.emplace_back("output",
                      TensorMeta{DType::kF32, {kRanks, kRows, kColumns}});
    Run(Make("shm_all_gather", args),
        {Data(data), AnyTensorView(DType::kF32, static_cast<void*>(all.data()),
                                   3, {kRanks, kRows, kColumns},
                                   {kRows * kColumns, kColumns, 1})});
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i],
                static_cast<float>(100 * (i / data.size()) + i % data.size()));
    }
  });
}

TEST_F(VllmCollectiveTest, OneRankHasItsOwn) {
  Floats data = DataOf(2), all(data.size());
  Run(Make("shm_allreduce",
           {{"data", TensorMeta{DType::kF32, {kRows, kColumns}}}}),
      {Data(data)});
  EXPECT_EQ(data, DataOf(2));
  Run(Make("shm_allgather",
           {{"data", TensorMeta{DType::kF32, {kRows, kColumns}}},
            {"dim", int64_t{1}}}),
      {Data(data), Data(all)});
  EXPECT_EQ(all, data);
}

TEST_F(VllmCollectiveTest, Refuses) {
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta data = {DType::kF32, {2, 5}};
  ExpectRefusal(
      ops.Make("shm_allreduce", {{"data", data}, {"reduce_op", int64_t{1}}})
          .status(),
      "reduce_op=1; need 0");
  ExpectRefusal(
      ops.Make("shm_allgather", {{"data", data}, {"dim", int64_t{2}}}).status(),
      "dim=2; need -2 to 1");
  ExpectRefusal(
      ops.Make("shm_all_gather",
               {{"data", data}, {"output", TensorMeta{DType::kF32, {2, 2, 5}}}})
          .status(),
      "output is f32[2, 2, 5]; need f32[1, 2, 5]");
}

}  // namespace
}  // namespace quern
