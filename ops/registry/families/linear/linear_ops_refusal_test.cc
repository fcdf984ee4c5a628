#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/registry/families/linear/linear_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

TEST(LinearOpsRefusalTest, NamesWhatDoesNotFit) {
  OpRegistry registry;
  ASSERT_EQ(RegisterLinearOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const auto meta = [](std::vector<int64_t> extents,
                       DType dtype = DType::kBF16) {
    return TensorMeta{dtype, std::move(extents)};
  };
  RunRanks(2, [&](ThreadCommunicator& c) {
    struct Case {
      const char* op;
      NamedArgs args;
      const char* words;
    };
    const int64_t huge = int64_t{1} << 62;
    for (const Case& r : std::vector<Case>{
             {"replicated_linear",
              {{"x", meta({3, 8})}, {"weight", meta({4, 9})}},
              "columns of x=8"},
             {"replicated_linear",
              {{"x", meta({})}, {"weight", meta({4, 9})}},
              "x has rank 0"},
             {"replicated_linear",
              {{"x", meta({3, 8})}, {"weight", meta({8})}},
              "weight is bf16[8]; need [n, n]"},
             {"replicated_linear",
              {{"x", meta({3, 8})}, {"weight", meta({0, 8})}},
              "an extent of weight=0"},
             {"replicated_linear",
              {{"x", meta({-1, 8})}, {"weight", meta({4, 8})}},
              "x has an extent of -1; need 0 or more"},
             {"replicated_linear",
              {{"x", meta({huge, 4, 8})}, {"weight", meta({4, 8})}},
              "x has 2^63 rows or more"},
             {"replicated_linear",
              {{"x", meta({3, 8})},
               {"weight", meta({4, 8})},
               {"bias", meta({5})}},
              "[5]; need [4]"},
             {"column_parallel_linear",
              {{"x", meta({3, 8})}, {"weight", meta({5, 8})}, {"ranks", &c}},
              "rows of weight=5; need a multiple of the 2 ranks"},
             {"column_parallel_linear",
              {{"x", meta({3, 7})}, {"weight", meta({4, 8})}, {"ranks", &c}},
              "columns of x=7"},
             {"row_parallel_linear",
              {{"x", meta({3, 4})}, {"weight", meta({4, 9})}, {"ranks", &c}},
              "columns of weight=9; need a multiple of the 2 ranks"},
             {"row_parallel_linear",
              {{"x", meta({3, 8})}, {"weight", meta({4, 8})}, {"ranks", &c}},
              "columns of x=8"},
             {"row_parallel_linear",
              {{"x", meta({3, 4})},
               {"weight", meta({4, 8})},
               {"ranks", &c},
               {"input_is_parallel", false}},
              "columns of x=4"},
             {"row_parallel_linear",
              {{"x", meta({3, 4})},
               {"weight", meta({4, 8})},
               {"bias", meta({4})},
               {"ranks", &c},
               {"reduce_results", false}},
              "reduce_results=False with a bias"},
             {"parallel_lm_head",
              {{"hidden", meta({3, 8})},
               {"weight", meta({99, 8})},
               {"ranks", &c},
               {"vocab", int64_t{100}}},
              "rows of weight=99"},
             {"parallel_lm_head",
              {{"hidden", meta({3, 8})},
               {"weight", meta({100, 8})},
               {"ranks", &c},
               {"vocab", int64_t{100}},
               {"weight_is_shard", true}},
              "rows of weight=100"},
             {"parallel_lm_head",
              {{"hidden", meta({3, 7})},
               {"weight", meta({100, 8})},
               {"vocab", int64_t{100}}},
              "columns of hidden=7"},
         }) {
      SCOPED_TRACE(r.words);
      ExpectRefusal(registry.InferShapes(r.op, r.args).status(), r.words);
      for (const char* provider : {"simd", "onednn", "reference"}) {
        ExpectRefusal(ops.MakeFrom(provider, r.op, r.args).status(), r.words);
      }
    }
    for (const char* provider : {"simd", "onednn", "reference"}) {
      ExpectRefusal(ops.MakeFrom(provider, "replicated_linear",
                                 {{"x", meta({3, 8}, DType::kI8)},
                                  {"weight", meta({4, 8})}})
                        .status(),
                    absl::StatusCode::kUnimplemented, "x");
    }
  });
}

// The reference reads the weights when it runs; the other providers have
// copies.
TEST(LinearOpsRefusalTest, ReferenceWritesNoWeights) {
  OpRegistry registry;
  ASSERT_EQ(RegisterLinearOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const TensorMeta square = {DType::kF32, {4, 4}};
  const auto made = ops.MakeFrom("reference", "replicated_linear",
                                 {{"x", square},
                                  {"weight", square},
                                  {"bias", TensorMeta{DType::kF32, {4}}}});
  ASSERT_TRUE(made.ok()) << made.status();
  std::vector<float> x(16), w(16), y(16);
  const auto matrix = [](std::vector<float>& data) {
    return DenseMatrix(data.data(), 4, 4);
  };
  const auto check = [&](std::vector<float>& bias, std::vector<float>& out) {
    const std::vector<AnyTensorView> tensors = {
        matrix(x), matrix(w), DenseVector(bias.data(), 4), matrix(out)};
    return made->CheckArgs(tensors);
  };
  EXPECT_EQ(check(x, y), absl::OkStatus());
  ExpectRefusal(check(x, w), "out overlaps weight");
  ExpectRefusal(check(y, y), "out overlaps bias");
}

}  // namespace
}  // namespace quern
