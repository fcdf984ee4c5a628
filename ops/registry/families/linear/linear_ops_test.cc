#include "quern/ops/registry/families/linear/linear_ops.h"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/parallel/dense_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr const char* kProviders[] = {"simd", "onednn", "reference"};

OpRegistry Registry() {
  OpRegistry registry;
  EXPECT_EQ(RegisterLinearOps(registry), absl::OkStatus());
  return registry;
}

// A layer x[m, k] w[n, k]^T + b, and the parts of it that each rank gets and
// returns.
struct Model {
  Model(Rng& rng, int64_t m, int64_t n, int64_t k)
      : m(m),
        n(n),
        k(k),
        x(Integers(rng, m * k)),
        w(Integers(rng, n * k)),
        b(Integers(rng, n)) {}
  // Columns [begin, begin + count) of the expected y.
  Doubles Y(int64_t begin, int64_t count) const {
    return Columns(ReferenceLinear(m, n, k, x, w, b), n, begin, count);
  }

  int64_t m, n, k;
  Doubles x, w, b;
};

TensorMeta MetaOf(const AnyTensorView& v) {
  TensorMeta meta = {v.dtype(), {}};
  for (int d = 0; d < v.rank(); ++d) meta.extents.push_back(v.extent(d));
  return meta;
}

// A workspace for `rows` rows of an operator that has its weights.
AlignedBuffer ScratchOf(const BoundOp& op, int64_t rows) {
  const auto bytes = op.WorkspaceBytes(rows, 1);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  auto memory = AlignedBuffer::Create(bytes.value_or(0));
  EXPECT_TRUE(memory.ok());
  return *std::move(memory);
}

class LinearOpsTest : public IsaTest {
 protected:
  LinearOpsTest() : registry_(Registry()), ops_(registry_, OpPolicy()) {}

  // Runs the operator by `provider` and returns y, [rows of x, y_cols].
  Doubles Run(const char* provider, const char* op, const AnyMatrix& x,
              const AnyMatrix& w, const AnyTensorView& b, int64_t y_cols,
              NamedArgs more) {
    const bool head = std::string(op) == "parallel_lm_head";
    NamedArgs args = {{head ? "hidden" : "x", MetaOf(x.view())},
                      {"weight", MetaOf(w.view())}};
    if (b.rank() > 0) args.emplace_back("bias", MetaOf(b));
    args.insert(args.end(), more.begin(), more.end());
    const auto shapes = registry_.InferShapes(op, args);
    EXPECT_TRUE(shapes.ok()) << shapes.status();
    const int64_t m = x.view().extent(0);
    const DType dtype = x.view().dtype();
    EXPECT_EQ((*shapes)[0], (TensorMeta{dtype, {m, y_cols}}));
    const auto made = ops_.MakeFrom(provider, op, args);
    if (!made.ok()) {
      ADD_FAILURE() << made.status();
      return {};
    }
    if (made->provider == "simd") {
      const std::lock_guard<std::mutex> lock(proof_);  // ranks are threads
      EXPECT_RAN_ON(*made->op);
    }
    const AnyMatrix y(dtype, m, y_cols, y_cols + 3);
    const std::vector<AnyTensorView> tensors = {x.const_view(), w.const_view(),
                                                b, y.view()};
    InlineExecutor executor;
    EXPECT_EQ(made->op->Prepare(tensors, executor), absl::OkStatus());
    EXPECT_EQ(made->op->CheckArgs(tensors), absl::OkStatus());
    AlignedBuffer scratch = ScratchOf(*made->op, m);
    made->op->Execute(tensors, Workspace(scratch), executor);
    return y.doubles();
  }

  OpRegistry registry_;
  OpDispatcher ops_;
  std::mutex proof_;
};
QUERN_INSTANTIATE_ISA_TEST(LinearOpsTest);

TEST_P(LinearOpsTest, ReplicatedIsExactOnSmallIntegers) {
  TestRng rng;
  const Model layer(rng, 3, 17, 60);
  for (const DType dtype : kDTypes) {
    for (const char* provider : kProviders) {
      SCOPED_TRACE(std::string(provider) + " " + std::string(DTypeName(dtype)));
      EXPECT_EQ(Run(provider, "replicated_linear",
                    AnyMatrix(dtype, layer.x, 3, 60, 61),
                    AnyMatrix(dtype, layer.w, 17, 60, 64),
                    AnyMatrix(dtype, layer.b, 1, 17, 17).vector(), 17, {}),
                layer.Y(0, 17));
    }
  }
}

TEST_P(LinearOpsTest, ColumnIsExactOnSmallIntegers) {
  TestRng rng;
  const Model layer(rng, 3, 20, 60);
  for (const int ranks : {1, 2, 4}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool shard : {false, true}) {
        for (const bool gather : {false, true}) {
          RunRanks(ranks, [&](ThreadCommunicator& c) {
            const int64_t own = 20 / c.size(), begin = c.rank() * own;
            const int64_t row = shard ? begin : 0, rows = shard ? own : 20;
            for (const char* provider : kProviders) {
              EXPECT_EQ(Run(provider, "column_parallel_linear",
                            AnyMatrix(dtype, layer.x, 3, 60, 61),
                            AnyMatrix(dtype, Rows(layer.w, 60, row, rows), rows,
                                      60, 60),
                            AnyMatrix(dtype, Rows(layer.b, 1, row, rows), 1,
                                      rows, rows)
                                .vector(),
                            gather ? 20 : own,
                            {{"ranks", &c},
                             {"weight_is_shard", shard},
                             {"gather_output", gather}}),
                        gather ? layer.Y(0, 20) : layer.Y(begin, own))
                  << provider << c.rank() << c.size() << shard << gather;
            }
          });
        }
      }
    }
  }
}

TEST_P(LinearOpsTest, RowIsExactOnSmallIntegers) {
  TestRng rng;
  const Model layer(rng, 3, 20, 60);
  for (const int ranks : {1, 2, 4}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool shard : {false, true}) {
        for (const bool parallel : {false, true}) {
          RunRanks(ranks, [&](ThreadCommunicator& c) {
            const int64_t own = 60 / c.size(), begin = c.rank() * own;
            const int64_t x_cols = parallel ? own : 60;
            const int64_t w_cols = shard ? own : 60;
            for (const char* provider : kProviders) {
              EXPECT_EQ(
                  Run(provider, "row_parallel_linear",
                      AnyMatrix(
                          dtype,
                          Columns(layer.x, 60, parallel ? begin : 0, x_cols), 3,
                          x_cols, x_cols),
                      AnyMatrix(dtype,
                                Columns(layer.w, 60, shard ? begin : 0, w_cols),
                                20, w_cols, w_cols),
                      AnyMatrix(dtype, layer.b, 1, 20, 20).vector(), 20,
                      {{"ranks", &c},
                       {"weight_is_shard", shard},
                       {"input_is_parallel", parallel}}),
                  layer.Y(0, 20))
                  << provider << c.rank() << c.size() << shard << parallel;
            }
          });
        }
      }
    }
  }
}

// Each rank keeps its summand; the summands add up to y without bias.
TEST_P(LinearOpsTest, RowLeavesTheSumToTheCaller) {
  TestRng rng;
  const Model layer(rng, 3, 20, 60);
  RunRanks(2, [&](ThreadCommunicator& c) {
    Model part = layer;
    part.k = 30;
    part.x = Columns(layer.x, 60, 30 * c.rank(), 30);
    part.w = Columns(layer.w, 60, 30 * c.rank(), 30);
    part.b.assign(20, 0.0);
    for (const char* provider : kProviders) {
      const DType dtype = DType::kF32;
      EXPECT_EQ(Run(provider, "row_parallel_linear",
                    AnyMatrix(dtype, part.x, 3, 30, 30),
                    AnyMatrix(dtype, layer.w, 20, 60, 60), AnyTensorView(), 20,
                    {{"ranks", &c}, {"reduce_results", false}}),
                part.Y(0, 20))
          << provider << c.rank();
    }
  });
}

// 100 ids make 128 rows over 4 ranks, of which the last has 4 ids; of 70 ids it
// has none.
TEST_P(LinearOpsTest, HeadIsExactOnSmallIntegers) {
  TestRng rng;
  for (const int64_t vocab : {100, 64, 33}) {
    const Model layer(rng, 3, vocab, 60);
    const int64_t padded = (vocab + 63) / 64 * 64;
    Doubles w = layer.w, b = layer.b;
    w.resize(static_cast<size_t>(padded * 60), 7);
    b.resize(static_cast<size_t>(padded), 7);
    for (const int ranks : {1, 2, 4}) {
      for (const bool shard : {false, true}) {
        RunRanks(ranks, [&](ThreadCommunicator& c) {
          const int64_t rows = shard ? padded / c.size() : vocab;
          const int64_t row = shard ? c.rank() * rows : 0;
          for (const char* provider : kProviders) {
            const DType dtype = DType::kF32;
            EXPECT_EQ(
                Run(provider, "parallel_lm_head",
                    AnyMatrix(dtype, layer.x, 3, 60, 61),
                    AnyMatrix(dtype, Rows(w, 60, row, rows), rows, 60, 60),
                    AnyMatrix(dtype, Rows(b, 1, row, rows), 1, rows, rows)
                        .vector(),
                    vocab,
                    {{"ranks", &c},
                     {"vocab", vocab},
                     {"weight_is_shard", shard}}),
                layer.Y(0, vocab))
                << provider << c.rank() << c.size() << shard;
          }
        });
      }
    }
  }
}

// The life of a layer: it is made, prepared, run, and given other weights.
TEST(LinearOpsLifeTest, RunsOnWhatItWasPreparedWith) {
  TestRng rng;
  const OpRegistry registry = Registry();
  const OpDispatcher ops(registry, OpPolicy());
  InlineExecutor executor;
  const Model one(rng, 6, 17, 60), other(rng, 6, 17, 60);
  const AnyMatrix x(DType::kF32, one.x, 6, 60, 60);
  const AnyMatrix w(DType::kF32, one.w, 17, 60, 60);
  const AnyMatrix w2(DType::kF32, other.w, 17, 60, 60);
  const AnyMatrix y(DType::kF32, 6, 17, 17);
  const AnyTensorView none;
  const auto made =
      ops.Make("replicated_linear", {{"x", TensorMeta{DType::kF32, {2, 3, 60}}},
                                     {"weight", MetaOf(w.view())}});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->provider, "simd");
  // The operator accepts [2, 3, k] as well as [6, k].
  const AnyTensorView x3(DType::kF32, x.view().data(), 3, {2, 3, 60},
                         {180, 60, 1});
  const AnyTensorView y3(DType::kF32, y.view().mutable_data(), 3, {2, 3, 17},
                         {51, 17, 1});
  const std::vector<AnyTensorView> tensors = {x3, w.view(), none, y3};
  BoundOp& op = *made->op;
  ExpectRefusal(op.CheckArgs(tensors), absl::StatusCode::kFailedPrecondition,
                "replicated_linear: has no weights; need a call of Prepare");
  ExpectRefusal(op.WorkspaceBytes(6, 1).status(),
                absl::StatusCode::kFailedPrecondition,
                "need a call of Prepare");
  ASSERT_EQ(op.Prepare(tensors, executor), absl::OkStatus());
  ASSERT_EQ(op.CheckArgs(tensors), absl::OkStatus());
  AlignedBuffer scratch = ScratchOf(op, 7);
  const Workspace workspace(scratch);
  EXPECT_NO_ALLOCATION(op.Execute(tensors, workspace, executor));
  const Doubles want = ReferenceLinear(6, 17, 60, one.x, one.w);
  EXPECT_EQ(y.doubles(), want);

  // Other weights are refused until Prepare has been given them.
  const std::vector<AnyTensorView> with_other = {x.view(), w2.view(), none,
                                                 y.view()};
  ExpectRefusal(op.CheckArgs(with_other),
                "weight or bias is not what Prepare was given");
  ASSERT_EQ(op.Prepare(with_other, executor), absl::OkStatus());
  ASSERT_EQ(op.CheckArgs(with_other), absl::OkStatus());
  op.Execute(with_other, workspace, executor);
  EXPECT_NE(y.doubles(), want);

  // Any number of rows is accepted.
  const std::vector<AnyTensorView> empty = {
      AnyTensorView(DType::kF32, x.view().data(), 2, {0, 60}, {60, 1}),
      w2.view(), none,
      AnyTensorView(DType::kF32, y.view().mutable_data(), 2, {0, 17}, {17, 1})};
  EXPECT_EQ(op.CheckArgs(empty), absl::OkStatus());
  op.Execute(empty, workspace, executor);
  const Model more_rows(rng, 7, 17, 60);
  const AnyMatrix seven(DType::kF32, more_rows.x, 7, 60, 60);
  const AnyMatrix out(DType::kF32, 7, 17, 17);
  const std::vector<AnyTensorView> more = {seven.view(), w2.view(), none,
                                           out.view()};
  ASSERT_EQ(op.CheckArgs(more), absl::OkStatus());
  op.Execute(more, workspace, executor);
  EXPECT_EQ(out.doubles(), ReferenceLinear(7, 17, 60, more_rows.x, other.w));
  const std::vector<AnyTensorView> biased = {x.view(), w.view(), y.vector(),
                                             y.view()};
  ExpectRefusal(op.Prepare(biased, executor), "bias has rank 1; need what");
  const std::vector<AnyTensorView> narrow = {
      x.view(), AnyMatrix(DType::kF32, 17, 59, 59).view(), none, y.view()};
  EXPECT_EQ(op.Prepare(narrow, executor).code(),
            absl::StatusCode::kInvalidArgument);
  // Refused calls have changed nothing.
  EXPECT_EQ(op.CheckArgs(with_other), absl::OkStatus());
}

// A named provider is one implementation. The environment variable only affects
// layers made without naming one.
TEST(LinearOpsLifeTest, AProviderIsWhatItsNameSays) {
  const OpRegistry registry = Registry();
  const OpDispatcher ops(registry, OpPolicy());
  const TensorMeta square = {DType::kF32, {4, 4}};
  const auto target = [&](const char* provider) {
    const auto made = ops.MakeFrom(provider, "replicated_linear",
                                   {{"x", square}, {"weight", square}});
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? std::string(made->op->target()) : std::string();
  };
  const std::string simd = target("simd");
  EXPECT_NE(simd, "oneDNN");
  EXPECT_EQ(target("onednn"), "oneDNN");
  ASSERT_EQ(setenv("QUERN_KERNELS", "onednn", 1), 0);
  EXPECT_EQ(target("simd"), simd);
  ASSERT_EQ(setenv("QUERN_KERNELS", "packed", 1), 0);
  EXPECT_EQ(target("onednn"), "oneDNN");
  ASSERT_EQ(unsetenv("QUERN_KERNELS"), 0);
}

TEST(LinearOpsLifeTest, TwoThreadsCallWithAWorkspaceEach) {
  TestRng rng;
  const OpRegistry registry = Registry();
  const OpDispatcher ops(registry, OpPolicy());
  constexpr int64_t kM = 64, kN = 17, kK = 60;
  const Model layer(rng, kM, kN, kK);
  const AnyMatrix w(DType::kF16, layer.w, kN, kK, kK);
  const AnyTensorView none;
  const auto made = ops.Make(
      "row_parallel_linear",
      {{"x", TensorMeta{DType::kF16, {kM, kK}}}, {"weight", MetaOf(w.view())}});
  ASSERT_TRUE(made.ok()) << made.status();
  InlineExecutor executor;
  const std::vector<AnyTensorView> weights = {none, w.view(), none, none};
  ASSERT_EQ(made->op->Prepare(weights, executor), absl::OkStatus());
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    Model own = layer;
    own.x = Integers(rng, kM * kK);
    own.b.assign(kN, 0.0);
    threads.emplace_back([own, &made, &w, &none] {
      const AnyMatrix x(DType::kF16, own.x, kM, kK, kK);
      const AnyMatrix y(DType::kF16, kM, kN, kN);
      const std::vector<AnyTensorView> tensors = {x.view(), w.view(), none,
                                                  y.view()};
      InlineExecutor own_executor;
      AlignedBuffer scratch = ScratchOf(*made->op, kM);
      const Doubles want = own.Y(0, kN);
      for (int call = 0; call < 500; ++call) {
        made->op->Execute(tensors, Workspace(scratch), own_executor);
        ASSERT_EQ(y.doubles(), want);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace quern
