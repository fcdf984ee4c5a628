#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/parallel/dense_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/registry/families/rows/gated_norm_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

// Any number of ranks and either provider give the same rows within f32's
// rounding, and one more rounding for the reference.
TEST(Mixer2NormOpsTest, IsTheSameOverRanks) {
  OpRegistry registry;
  ASSERT_EQ(RegisterMixer2NormOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  TestRng rng;
  constexpr int64_t kRows = 3, kHidden = 48;
  const auto reals = [&](int64_t count) {
    return ToDoubles(UniformReals(rng, count, -3, 3));
  };
  const Doubles x = reals(kRows * kHidden), z = reals(kRows * kHidden);
  const Doubles w = reals(kHidden);
  for (const bool norm : {true, false}) {
    for (const int64_t groups : {1, 2, 3}) {
      Doubles whole;
      for (const int ranks : {1, 2, 4}) {
        RunRanks(ranks, [&](ThreadCommunicator& c) {
          const int64_t n = kHidden / ranks, begin = c.rank() * n;
          const DType dtype = DType::kF32;
          const AnyMatrix own_x(dtype, Columns(x, kHidden, begin, n), kRows, n,
                                n);
          const AnyMatrix own_z(dtype, Columns(z, kHidden, begin, n), kRows, n,
                                n);
          const AnyMatrix own_w(dtype, Columns(w, kHidden, begin, n), 1, n, n);
          for (const char* provider : {"simd", "reference"}) {
            const TensorMeta meta = {dtype, {kRows, n}};
            NamedArgs args = {{"x", meta},
                              {"gate", meta},
                              {"n_groups", groups},
                              {"ranks", &c}};
            if (norm) args.emplace_back("weight", TensorMeta{dtype, {n}});
            const auto made =
                ops.MakeFrom(provider, "mixer2_gated_rms_norm", args);
            ASSERT_TRUE(made.ok()) << made.status();
            const AnyMatrix out(dtype, kRows, n, n);
            const std::vector<AnyTensorView> tensors = {
                own_x.view(), own_z.view(),
                norm ? own_w.vector() : AnyTensorView(), out.view()};
            ASSERT_EQ(made->op->CheckArgs(tensors), absl::OkStatus());
            InlineExecutor executor;
            auto memory =
                AlignedBuffer::Create(*made->op->WorkspaceBytes(kRows, 1));
            ASSERT_TRUE(memory.ok());
            const Workspace workspace(*memory);
            ExpectNoAllocation(
                c, [&] { made->op->Execute(tensors, workspace, executor); });
            if (whole.empty()) whole = out.doubles();  // of a single rank
            EXPECT_TRUE(AllClose(out.doubles(),
                                 Columns(whole, kHidden, begin, n), 1e-4))
                << provider << groups << c.rank() << "/" << ranks;
          }
        });
      }
    }
  }
}

// Where ranks add up their sums, in f32, nobody can sum a group again in
// double.
TEST(Mixer2NormOpsTest, SumsBeyondF32AreNaNOnlyWhereRanksShareAGroup) {
  OpRegistry registry;
  ASSERT_EQ(RegisterMixer2NormOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  constexpr int64_t kColumns = 4;
  const auto row = [&](double value) {
    return AnyMatrix(DType::kF32, Doubles(kColumns, value), 1, kColumns,
                     kColumns);
  };
  for (const int ranks : {1, 2}) {
    RunRanks(ranks, [&](ThreadCommunicator& c) {
      const AnyMatrix x = row(1e30), gate = row(2.0), weight = row(1.0);
      for (const char* provider : {"simd", "reference"}) {
        const TensorMeta meta = {DType::kF32, {1, kColumns}};
        const auto made =
            ops.MakeFrom(provider, "mixer2_gated_rms_norm",
                         {{"x", meta},
                          {"gate", meta},
                          {"weight", TensorMeta{DType::kF32, {kColumns}}},
                          {"ranks", &c}});
        ASSERT_TRUE(made.ok()) << made.status();
        const AnyMatrix out(DType::kF32, 1, kColumns, kColumns);
        const std::vector<AnyTensorView> tensors = {
            x.view(), gate.view(), weight.vector(), out.view()};
        ASSERT_EQ(made->op->CheckArgs(tensors), absl::OkStatus());
        InlineExecutor executor;
        auto memory = AlignedBuffer::Create(*made->op->WorkspaceBytes(1, 1));
        ASSERT_TRUE(memory.ok());
        made->op->Execute(tensors, Workspace(*memory), executor);
        for (const double value : out.doubles()) {
          if (ranks == 1) {
            EXPECT_NEAR(value, 1.0, 1e-6) << provider;
          } else {
            EXPECT_TRUE(std::isnan(value)) << provider << " " << value;
          }
        }
      }
    });
  }
}

TEST(Mixer2NormOpsTest, RefusesWhatDoesNotFit) {
  OpRegistry registry;
  ASSERT_EQ(RegisterMixer2NormOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const TensorMeta x = {DType::kF32, {3, 8}}, w = {DType::kF32, {8}};
  RunRanks(2, [&](ThreadCommunicator& c) {
    const auto refusal = [&](const NamedArgs& args) {
      return ops.Make("mixer2_gated_rms_norm", args).status();
    };
    ExpectRefusal(
        refusal({{"x", x}, {"gate", TensorMeta{DType::kF32, {3, 7}}}}),
        "gate is f32[3, 7]; need f32[3, 8], as x is");
    ExpectRefusal(
        refusal(
            {{"x", x}, {"gate", x}, {"weight", TensorMeta{DType::kF32, {7}}}}),
        "weight is f32[7]; need [8]");
    ExpectRefusal(
        refusal(
            {{"x", x}, {"gate", x}, {"weight", w}, {"n_groups", int64_t{0}}}),
        "n_groups=0");
    ExpectRefusal(
        refusal(
            {{"x", x}, {"gate", x}, {"weight", w}, {"n_groups", int64_t{3}}}),
        "groups=3; need a divisor of hidden=8");
    // 16 columns over two ranks: the reference's workspace is one sum per row.
    const NamedArgs good = {{"x", x},
                            {"gate", x},
                            {"weight", TensorMeta{DType::kF32, {8}}},
                            {"ranks", &c}};
    const auto made = ops.MakeFrom("reference", "mixer2_gated_rms_norm", good);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(*made->op->WorkspaceBytes(33, 1), 192);
    ExpectRefusal(made->op->WorkspaceBytes(int64_t{1} << 61, 1).status(),
                  "max_rows=2305843009213693952; need fewer than 2^63 bytes");
  });
}

}  // namespace
}  // namespace quern
