// What LinearPlan refuses, on weights of every format, and in what words.

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/weights.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Act = LinearActivation;
using Spec = LinearSpec;
using Args = LinearArgs;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

constexpr WeightCase kI8 = {WeightFormat::kI8Channel};

template <typename T>
AnyTensorView Matrix(std::vector<T>& data, int64_t rows, int64_t cols,
                     int64_t stride) {
  return MatrixView<T>(data.data(), {rows, cols}, {stride, 1});
}

// `data`, a byte later.
template <typename T>
AnyTensorView Askew(std::vector<T>& data, int rank,
                    const AnyTensorView::Dims& extents,
                    const AnyTensorView::Dims& strides) {
  return AnyTensorView(
      DTypeOf<T>,
      static_cast<void*>(reinterpret_cast<uint8_t*>(data.data()) + 1), rank,
      extents, strides);
}

class LinearRefusalTest : public testing::TestWithParam<WeightCase> {
 protected:
  LinearWeights Weights(WeightCase f, int64_t n, int64_t k,
                        Act act = Act::kNone) {
    TestRng rng;
    Shape s{1, n, k};
    s.act = act;
    return ExactWeights(rng, f, s).Pack(executor_);
  }
  absl::Status Create(const Spec& spec, const LinearWeights& weights) {
    return LinearPlan::Create(spec, weights, executor_).status();
  }
  LinearPlan Plan(const Spec& spec, const LinearWeights& weights) {
    auto plan = LinearPlan::Create(spec, weights, executor_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    return *std::move(plan);
  }

  InlineExecutor executor_;
};
INSTANTIATE_TEST_SUITE_P(Format, LinearRefusalTest,
                         testing::ValuesIn(kEveryFormat));

TEST_P(LinearRefusalTest, RefusesABadSpec) {
  const auto weights = Weights(GetParam(), 4, 32);
  const auto gated = Weights(GetParam(), 4, 32, Act::kSiluAndMul);
  const auto refuse = [&](const LinearWeights& w, auto change,
                          absl::StatusCode code, const std::string& words) {
    Spec spec;
    ASSERT_EQ(Create(spec, weights), absl::OkStatus());
    change(spec);
    ExpectRefusal(Create(spec, w), code, "linear: " + words);
  };
  refuse(
      weights, [](Spec& s) { s.a = DType::kU8; }, kUnimplemented, "a is u8");
  refuse(
      weights, [](Spec& s) { s.c = DType::kI8; }, kUnimplemented,
      "c is i8; need f32 or bf16 or f16");
  refuse(
      weights, [](Spec& s) { s.c = DType::kI32; }, kUnimplemented, "c is i32");
  if (GetParam().format != WeightFormat::kI8Channel) {
    refuse(
        weights, [](Spec& s) { s.a = DType::kI8; }, kUnimplemented,
        "a is i8; need f32 or bf16 or f16");
  }
  refuse(
      weights, [](Spec& s) { s.activation = static_cast<Act>(8); }, kInvalid,
      "activation=8; need 0 <= activation <= 7");
  refuse(
      weights, [](Spec& s) { s.activation = Act::kGeluAndMul; }, kInvalid,
      "activation is gelu_and_mul; need one that is not gated");
  refuse(
      gated, [](Spec& s) { s.activation = Act::kNone; }, kInvalid,
      "activation is none; need a gated one");
  refuse(
      gated, [](Spec& s) { s.activation = Act::kSilu; }, kInvalid,
      "activation is silu; need a gated one, as the weights");
  refuse(
      weights, [](Spec& s) { s.kernels = "amx"; }, kInvalid,
      "kernels names \"amx\"; need packed or onednn");
  refuse(
      weights, [](Spec& s) { s.kernels = "packed,"; }, kInvalid,
      "kernels names \"\"; need packed or onednn");
}

TEST_F(LinearRefusalTest, RefusesWeightsOfNothing) {
  ExpectRefusal(Create(Spec(), LinearWeights()),
                "linear: n of the weights=0; need n of the weights >= 1");
}

TEST_F(LinearRefusalTest, RefusesABadSpecOfInt8) {
  const auto weights = Weights(kI8, 4, 3);
  const auto refuse = [&](auto change, const std::string& words) {
    Spec spec;
    change(spec);
    ExpectRefusal(Create(spec, weights), words);
  };
  refuse([](Spec& s) { s.a_scale = 2; }, "scale=2");
  refuse([](Spec& s) { s.a_zero_point = 3; }, "zero_point=3");
  refuse(
      [](Spec& s) {
        s.granularity = Int8Granularity::kPerTensor;
        s.a_scale = -1;
      },
      "scale=-1");
  Spec spec;
  spec.zero_points = Int8ZeroPoint::kUsed;
  EXPECT_EQ(Create(spec, Weights(kI8, 1, 65793)), absl::OkStatus());
  ExpectRefusal(Create(spec, Weights(kI8, 1, 65794)),
                "linear: k=65794; need 1 <= k <= 65793");
  // No other format looks at these.
  spec.a_scale = 2;
  EXPECT_EQ(Create(spec, Weights({WeightFormat::kBF16}, 1, 65794)),
            absl::OkStatus());
}

TEST_P(LinearRefusalTest, RefusesBadArguments) {
  std::vector<BF> a(64), c(16), apart(8);
  const std::vector<BF> constant(8);
  std::vector<float> f32(8);
  std::vector<int8_t> q(64);
  std::vector<int32_t> zero_points(2);
  Spec allows;
  allows.residual = true;
  const auto plan = Plan(allows, Weights(GetParam(), 4, 32));
  Args good;
  good.a = DenseMatrix(a.data(), 2, 32);
  good.c = DenseMatrix(c.data(), 2, 4);
  const auto with = [&](auto change) {
    Args args = good;
    change(args);
    return plan.CheckArgs(args);
  };
  const auto refuse = [&](auto change, const std::string& words) {
    ExpectRefusal(with(change), "linear: " + words);
  };
  EXPECT_EQ(plan.CheckArgs(good), absl::OkStatus());
  refuse([&](Args& x) { x.a = DenseMatrix(a.data(), 3, 2); },
         "a is [3, 2]; need [any, 32]");
  refuse([&](Args& x) { x.a = DenseMatrix(q.data(), 2, 32); },
         "a is i8; need bf16");
  refuse(
      [](Args& x) {
        x.a = MatrixView<BF>(nullptr, {2, 32}, {32, 1});
      },
      "a is null");
  refuse([](Args& x) { x.a = AnyTensorView(); }, "a is");
  refuse(
      [&](Args& x) {
        x.a = Askew(a, 2, {2, 32}, {32, 1});
      },
      "a is not aligned to its elements of 2 bytes");
  refuse([&](Args& x) { x.c = DenseMatrix(c.data(), 1, 4); },
         "c is [1, 4]; need [2, 4]");
  refuse([&](Args& x) { x.c = DenseMatrix(constant.data(), 2, 4); },
         "c is read-only");
  refuse([&](Args& x) { x.c = DenseMatrix(f32.data(), 2, 4); },
         "c is f32; need bf16");
  refuse([&](Args& x) { x.c = DenseMatrix(a.data(), 2, 4); }, "c overlaps a");
  refuse([&](Args& x) { x.c = Matrix(c, 2, 4, 3); }, "c has stride 3");
  refuse(
      [&](Args& x) {
        x.c = Askew(c, 2, {2, 4}, {4, 1});
      },
      "c is not aligned to its elements of 2 bytes");
  refuse([&](Args& x) { x.a_scales = DenseVector(f32.data(), 2); },
         "a_scales is given; need none");
  refuse([&](Args& x) { x.a_zero_points = DenseVector(zero_points.data(), 2); },
         "a_zero_points is given; need none");

  EXPECT_EQ(with([](Args& x) { x.residual = x.c; }), absl::OkStatus());
  EXPECT_EQ(
      with([&](Args& x) { x.residual = DenseMatrix(apart.data(), 2, 4); }),
      absl::OkStatus());
  Args added = good;
  added.residual = good.c;
  ExpectRefusal(Plan(Spec(), Weights(GetParam(), 4, 32)).CheckArgs(added),
                "linear: residual is given; need a spec that allows it");
  refuse([&](Args& x) { x.residual = DenseMatrix(f32.data(), 2, 4); },
         "residual is f32; need bf16");
  refuse([&](Args& x) { x.residual = DenseMatrix(apart.data(), 4, 2); },
         "residual is [4, 2]; need [2, 4]");
  refuse([&](Args& x) { x.residual = DenseVector(apart.data(), 8); },
         "residual is [8]; need [2, 4]");
  refuse(
      [](Args& x) {
        x.residual = MatrixView<const BF>(nullptr, {2, 4}, {4, 1});
      },
      "residual is null");
  refuse([&](Args& x) { x.residual = DenseMatrix(c.data() + 1, 2, 4); },
         "c overlaps residual");
  refuse([&](Args& x) { x.residual = Matrix(c, 2, 4, 5); },
         "c overlaps residual");

  Spec spec;
  spec.activation = Act::kSiluAndMul;
  const auto gated = Plan(spec, Weights(GetParam(), 4, 32, spec.activation));
  ExpectRefusal(gated.CheckArgs(good), "linear: c is [2, 4]; need [2, 2]");
  good.c = DenseMatrix(c.data(), 2, 2);
  EXPECT_EQ(gated.CheckArgs(good), absl::OkStatus());
}

TEST_F(LinearRefusalTest, RefusesBadTermsOfRows) {
  std::vector<int8_t> q(6);
  std::vector<float> scales(4), c(8);
  std::vector<int32_t> zero_points(4);
  Spec spec;
  spec.a = DType::kI8;
  spec.c = DType::kF32;
  spec.zero_points = Int8ZeroPoint::kUsed;
  const auto weights = Weights(kI8, 4, 3);
  const auto plan = Plan(spec, weights);
  Args good;
  good.a = DenseMatrix(q.data(), 2, 3);
  good.c = DenseMatrix(c.data(), 2, 4);
  good.a_scales = DenseVector(scales.data(), 2);
  good.a_zero_points = DenseVector(zero_points.data(), 2);
  EXPECT_EQ(plan.CheckArgs(good), absl::OkStatus());
  const auto refuse = [&](auto change, const std::string& words) {
    Args args = good;
    change(args);
    ExpectRefusal(plan.CheckArgs(args), "linear: " + words);
  };
  refuse([](Args& x) { x.a_scales = AnyTensorView(); }, "a_scales is");
  refuse([&](Args& x) { x.a_scales = DenseVector(scales.data(), 3); },
         "a_scales is [3]; need [2]");
  refuse([&](Args& x) { x.a_scales = DenseVector(zero_points.data(), 2); },
         "a_scales is i32; need f32");
  refuse([&](Args& x) { x.a_scales = Askew(scales, 1, {2}, {1}); },
         "a_scales is not aligned to its elements of 4 bytes");
  refuse([&](Args& x) { x.a_scales = DenseVector(c.data(), 2); },
         "c overlaps a_scales");
  refuse([](Args& x) { x.a_zero_points = AnyTensorView(); },
         "a_zero_points is");
  refuse([&](Args& x) { x.a_zero_points = DenseVector(zero_points.data(), 1); },
         "a_zero_points is [1]; need [2]");

  spec.granularity = Int8Granularity::kPerTensor;
  ExpectRefusal(Plan(spec, weights).CheckArgs(good),
                "linear: a_scales is given; need none");
}

// Blocks of 32 k of a row must not meet two groups of int4 weights.
TEST_F(LinearRefusalTest, RefusesInt8BlocksWhereGroupsEndWithinThem) {
  constexpr int64_t kWholeK = LinearWeightsSpec::kWholeK;
  struct Case {
    int64_t k, group_size;
    const char* words;  // null: not refused
  };
  const Case cases[] = {
      {96, 32, nullptr},
      {320, 128, nullptr},
      {96, 1000, nullptr},
      {96, kWholeK, nullptr},
      {96, 16, "with weights of i4_group, k=96, group_size=16; need multiples"},
      {96, 48, "i4_group, k=96, group_size=48; need multiples of 32, or exact"},
      {80, 32, "k=80, group_size=32; need multiples of 32"},
      {20, kWholeK, "k=20, group_size=20"},
  };
  const std::vector<uint8_t> codes(320);
  const std::vector<float> scales(16, 1.0f);
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << c.k << " " << c.group_size);
    LinearWeightsSpec w;
    w.n = 1;
    w.k = c.k;
    w.format = WeightFormat::kI4Group;
    w.group_size = c.group_size;
    const bool whole = c.group_size < 0;
    LinearSource source;
    source.codes = DenseMatrix(codes.data(), 1, c.k);
    source.scales =
        DenseMatrix(scales.data(), whole ? 1 : DivCeil(c.k, c.group_size), 1);
    const auto packed = LinearWeights::Pack(w, {source}, executor_);
    ASSERT_EQ(packed.status(), absl::OkStatus());
    Spec spec;
    EXPECT_EQ(LinearPlan::Create(spec, *packed, executor_).status(),
              absl::OkStatus());
    spec.activations = LinearActivations::kInt8Blocks;
    const auto status = LinearPlan::Create(spec, *packed, executor_).status();
    EXPECT_EQ(TakesInt8Blocks(packed->spec()), c.words == nullptr);
    if (c.words == nullptr) {
      EXPECT_EQ(status, absl::OkStatus());
    } else {
      ExpectRefusal(status, kUnimplemented, c.words);
    }
  }
}

TEST_P(LinearRefusalTest, RefusesAWorkspaceThatCannotBe) {
  const auto plan = Plan(Spec(), Weights(GetParam(), 4, 32));
  for (const int64_t m : {int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    ExpectRefusal(plan.WorkspaceBytes(m, 1).status(),
                  "linear: max_m=" + std::to_string(m) + "; need max_m >= 0");
  }
  for (const int workers : {0, -1, 65537, std::numeric_limits<int>::max()}) {
    ExpectRefusal(plan.WorkspaceBytes(1, workers).status(),
                  "linear: max_workers=" + std::to_string(workers) +
                      "; need 1 <= max_workers <= 65536");
  }
  // The packed kernels take rows in blocks: any number needs what some need.
  const auto some = plan.WorkspaceBytes(100000, 3);
  const auto most = plan.WorkspaceBytes(std::numeric_limits<int64_t>::max(), 3);
  ASSERT_EQ(some.status(), absl::OkStatus());
  ASSERT_EQ(most.status(), absl::OkStatus());
  EXPECT_EQ(*some, *most);
}

// The layers behind LinearPlan check nothing (tools/check_execute.sh): whatever
// CheckArgs refuses must stop Execute in debug builds.
TEST_P(LinearRefusalTest, ExecuteChecksItsArgumentsInDebugBuilds) {
#ifndef NDEBUG
  std::vector<BF> a(64), c(16);
  const auto plan = Plan(Spec(), Weights(GetParam(), 4, 32));
  AlignedBuffer memory =
      AlignedBuffer::Create(plan.WorkspaceBytes(2, 1).value()).value();
  Args good;
  good.a = DenseMatrix(a.data(), 2, 32);
  good.c = DenseMatrix(c.data(), 2, 4);
  const auto execute = [&](const Args& args) {
    plan.Execute(args, Workspace(memory), executor_);
  };
  execute(good);
  Args bad = good;
  bad.a = DenseMatrix(a.data(), 2, 31);
  EXPECT_DEATH(execute(bad), "linear: a is \\[2, 31\\]; need \\[any, 32\\]");
  bad = good;
  bad.c = DenseMatrix(a.data(), 2, 4);
  EXPECT_DEATH(execute(bad), "linear: c overlaps a");
#else
  GTEST_SKIP() << "QUERN_DCHECK is off";
#endif
}

}  // namespace
}  // namespace quern
