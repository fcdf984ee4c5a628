// Each argument of a schema must reach its plan: what an operator writes
// equals, bit for bit, what a plan writes whose spec has the same values. The
// tests of the plans check those values.

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/activation/act_and_mul.h"
#include "quern/ops/activation/activation.h"
#include "quern/ops/activation/activation_spec.h"
#include "quern/ops/logits/logits.h"
#include "quern/ops/norm/l2_norm.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/norm/rms_norm_quant.h"
#include "quern/ops/registry/op_args_testutil.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/quant/fp8_quantize.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

using Bytes = std::vector<uint8_t>;

std::string Text(const char* text) { return text; }
AnyTensorView Vector(Floats& data) {
  return DenseVector(data.data(), static_cast<int64_t>(data.size()));
}
AnyTensorView Codes(Bytes& data, DType dtype, int64_t cols) {
  return AnyTensorView(dtype, static_cast<void*>(data.data()), 2,
                       {static_cast<int64_t>(data.size()) / cols, cols},
                       {cols, 1});
}

class OpArgsTest : public OpArgsFixture {};

TEST_F(OpArgsTest, OfActivations) {
  Floats x = Reals(kRows * kCols);
  const auto expect = [&](const char* name, NamedArgs args,
                          ActivationSpec spec) {
    spec.hidden = kCols;
    Floats got(x.size()), want(x.size());
    args.emplace_back("x", F32({kRows, kCols}));
    Run(name, args, {Matrix(x, kCols), Matrix(got, kCols)});
    Made(ActivationPlan::Create(spec))
        .Execute(Matrix(x, kCols), Matrix(want, kCols), executor_);
    EXPECT_EQ(got, want) << name;
  };
  ActivationSpec spec;
  spec.activation = Activation::kGeluTanh;
  expect("gelu", {{"approximate", Text("tanh")}}, spec);
  spec.activation = Activation::kXielu;
  spec.params = XieluParams(0.3f, -0.7f, 0.25f, -0.5f);
  expect("xielu",
         {{"alpha_p", 0.3}, {"alpha_n", -0.7}, {"beta", 0.25}, {"eps", -0.5}},
         spec);
}

TEST_F(OpArgsTest, OfGatedActivations) {
  Floats x = Reals(kRows * 2 * kCols);
  const auto expect = [&](const char* name, NamedArgs args,
                          ActAndMulSpec spec) {
    spec.d = kCols;
    Floats got(static_cast<size_t>(kRows * kCols)), want(got.size());
    args.emplace_back("x", F32({kRows, 2 * kCols}));
    Run(name, args, {Matrix(x, 2 * kCols), Matrix(got, kCols)});
    Made(ActAndMulPlan::Create(spec))
        .Execute(Matrix(x, 2 * kCols), Matrix(want, kCols), executor_);
    EXPECT_EQ(got, want) << name;
  };
  ActAndMulSpec spec;
  expect("silu_and_mul", {}, spec);
  spec.order = GateOrder::kGateSecond;
  expect("mul_and_silu", {}, spec);
  spec = {};
  spec.activation = Activation::kGeluTanh;
  expect("gelu_and_mul", {{"approximate", Text("tanh")}}, spec);
  spec.sparsity = 0.625;
  expect("gelu_and_mul_sparse",
         {{"activation_sparsity", 0.625}, {"approximate", Text("tanh")}}, spec);
  spec = {};
  spec.activation = Activation::kFatrelu;
  spec.params.threshold = 0.75f;
  expect("fatrelu_and_mul", {{"threshold", 0.75}}, spec);
  spec = {};
  spec.activation = Activation::kSwigluOai;
  spec.order = GateOrder::kInterleaved;
  spec.params.alpha = 1.25f;
  spec.params.limit = 2.0f;
  expect("swigluoai_and_mul", {{"alpha", 1.25}, {"limit", 2.0}}, spec);
}

TEST_F(OpArgsTest, OfNorms) {
  Floats x = Reals(kRows * kCols), w = Reals(kCols);
  Floats got(x.size()), want(x.size());
  const TensorMeta meta = F32({kRows, kCols}), weight = F32({kCols});
  RmsNormSpec spec;
  spec.hidden = kCols;
  spec.eps = 0.5f;
  spec.weight = NormWeight::kOnePlus;
  Run("gemma_rms_norm", {{"x", meta}, {"weight", weight}, {"eps", 0.5}},
      {Matrix(x, kCols), Vector(w), Matrix(got, kCols)});
  Made(RmsNormPlan::Create(spec))
      .Execute(Matrix(x, kCols), Vector(w), Matrix(want, kCols), executor_);
  EXPECT_EQ(got, want);

  spec.weight = NormWeight::kPlain;
  const Floats sum_before = Reals(kRows * kCols);
  Floats sum = sum_before, sum_want = sum;
  got = x;
  Run("fused_add_rms_norm",
      {{"x", meta}, {"residual", meta}, {"weight", weight}, {"eps", 0.5}},
      {Matrix(got, kCols), Matrix(sum, kCols), Vector(w)});
  Made(RmsNormPlan::Create(spec))
      .ExecuteAdd({Matrix(x, kCols), Vector(w), Matrix(want, kCols),
                   Matrix(sum_want, kCols), Matrix(sum_want, kCols)},
                  executor_);
  EXPECT_EQ(got, want);
  EXPECT_EQ(sum, sum_want);
  got = x;
  sum = sum_before;
  Run("fused_add_rmsnorm_cpu",
      {{"input", meta}, {"residual", meta}, {"weight", weight}, {"eps", 0.5}},
      {Matrix(got, kCols), Matrix(sum, kCols), Vector(w)});
  EXPECT_EQ(got, want);  // the same of f32
  EXPECT_EQ(sum, sum_want);

  spec.span = 5;
  Run("rms_norm",
      {{"x", meta},
       {"weight", weight},
       {"eps", 0.5},
       {"var_hidden_size", int64_t{5}}},
      {Matrix(x, kCols), Vector(w), Matrix(got, kCols)});
  Made(RmsNormPlan::Create(spec))
      .Execute(Matrix(x, kCols), Vector(w), Matrix(want, kCols), executor_);
  EXPECT_EQ(got, want);

  L2NormSpec l2;
  l2.hidden = kCols;
  l2.eps = 0.5f;
  Run("l2_norm", {{"x", meta}, {"eps", 0.5}},
      {Matrix(x, kCols), Matrix(got, kCols)});
  Made(L2NormPlan::Create(l2))
      .Execute({Matrix(x, kCols), Matrix(want, kCols)}, executor_);
  EXPECT_EQ(got, want);
}

TEST_F(OpArgsTest, OfGatedNorms) {
  Floats x = Reals(kRows * kCols), z = Reals(kRows * kCols), w = Reals(kCols);
  const TensorMeta meta = F32({kRows, kCols});
  for (const bool norm_before_gate : {false, true}) {
    for (const char* activation : {"silu", "swish", "sigmoid"}) {
      Floats got(x.size()), want(x.size());
      Run("rms_norm_gated",
          {{"x", meta},
           {"z", meta},
           {"weight", F32({kCols})},
           {"eps", 0.5},
           {"group_size", int64_t{4}},
           {"norm_before_gate", norm_before_gate},
           {"activation", Text(activation)}},
          {Matrix(x, kCols), Matrix(z, kCols), Vector(w), Matrix(got, kCols)});
      RmsNormGatedSpec spec;
      spec.hidden = kCols;
      spec.group = 4;
      spec.eps = 0.5f;
      spec.gate =
          norm_before_gate ? GateWhen::kNormFirst : GateWhen::kGateFirst;
      spec.activation =
          Text(activation) == "sigmoid" ? NormGate::kSigmoid : NormGate::kSilu;
      Made(RmsNormGatedPlan::Create(spec))
          .Execute(Matrix(x, kCols), Matrix(z, kCols), Vector(w),
                   Matrix(want, kCols), executor_);
      EXPECT_EQ(got, want) << norm_before_gate << activation;
    }
  }
}

TEST_F(OpArgsTest, OfMixerNorms) {
  Floats x = Reals(kRows * kCols), z = Reals(kRows * kCols), w = Reals(kCols);
  Floats got(x.size()), want(x.size());
  const TensorMeta meta = F32({kRows, kCols});
  NamedArgs args = {{"x", meta},
                    {"gate", meta},
                    {"weight", F32({kCols})},
                    {"n_groups", int64_t{4}},
                    {"eps", 0.5}};
  Run("mixer2_gated_rms_norm", args,
      {Matrix(x, kCols), Matrix(z, kCols), Vector(w), Matrix(got, kCols)});
  RmsNormGatedSpec spec;
  spec.hidden = kCols;
  spec.group = kCols / 4;
  spec.eps = 0.5f;
  Made(RmsNormGatedPlan::Create(spec))
      .Execute(Matrix(x, kCols), Matrix(z, kCols), Vector(w),
               Matrix(want, kCols), executor_);
  EXPECT_EQ(got, want);

  Run("mixer2_gated_rms_norm", {{"x", meta}, {"gate", meta}},
      {Matrix(x, kCols), Matrix(z, kCols), AnyTensorView(),
       Matrix(got, kCols)});
  ActAndMulSpec gated;
  gated.d = kCols;
  Made(ActAndMulPlan::Create(gated))
      .ExecuteSplit(Matrix(z, kCols), Matrix(x, kCols), Matrix(want, kCols),
                    executor_);
  EXPECT_EQ(got, want);
}

// The reference rounds the normalised row to the dtype of x, and then the
// product.
TEST_F(OpArgsTest, RoundsTheMixerNormTwice) {
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta meta = {DType::kBF16, {1, 2}};
  const auto made = ops.MakeFrom("reference", "mixer2_gated_rms_norm",
                                 {{"x", meta},
                                  {"gate", meta},
                                  {"weight", TensorMeta{DType::kBF16, {2}}},
                                  {"eps", 0.0}});
  ASSERT_TRUE(made.ok()) << made.status();
  const auto bf16 = [](std::vector<double> values) {
    std::vector<BFloat16> codes;
    for (const double v : values) codes.push_back(FromDouble<BFloat16>(v));
    return codes;
  };
  // Both columns have the gate silu(1), so the norm is of (1, 3), whose rms is
  // sqrt(5).
  auto x = bf16({1, 3}), gate = bf16({1, 1}), w = bf16({1.1171875, 1.1171875});
  auto out = bf16({0, 0});
  const auto row = [](std::vector<BFloat16>& v) {
    return DenseMatrix(v.data(), 1, 2);
  };
  const std::vector<AnyTensorView> tensors = {
      row(x), row(gate), DenseVector(w.data(), 2), row(out)};
  ASSERT_EQ(made->op->CheckArgs(tensors), absl::OkStatus());
  auto memory = AlignedBuffer::Create(*made->op->WorkspaceBytes(kRows, 1));
  ASSERT_TRUE(memory.ok());
  made->op->Execute(tensors, Workspace(*memory), executor_);
  for (const size_t i : {size_t{0}, size_t{1}}) {
    const double normed =
        ToDouble(FromDouble<BFloat16>((i == 0 ? 1.0 : 3.0) / std::sqrt(5.0)));
    EXPECT_EQ(ToDouble(out[i]),
              ToDouble(FromDouble<BFloat16>(normed * 1.1171875)));
  }
}

TEST_F(OpArgsTest, OfQuantisedNorms) {
  Floats x = Reals(kRows * kCols), w = Reals(kCols);
  for (const DType q_dtype : {DType::kI8, DType::kF8E4M3}) {
    for (const bool fixed : {false, true}) {
      NamedArgs args = {
          {"x", F32({kRows, kCols})},
          {"weight", F32({kCols})},
          {"q_dtype", Text(q_dtype == DType::kI8 ? "int8" : "fp8")},
          {"eps", 0.5}};
      if (fixed) args.emplace_back("scale", 0.125);
      RmsNormQuantSpec spec;
      spec.norm.hidden = kCols;
      spec.norm.eps = 0.5f;
      spec.q_dtype = q_dtype;
      if (fixed) {
        spec.scale_of = NormScale::kStatic;
        spec.scale = 0.125f;
      }
      const RmsNormQuantPlan plan = Made(RmsNormQuantPlan::Create(spec));
      const std::string kind = fixed ? "static_quant" : "quant";
      for (const bool add : {false, true}) {
        SCOPED_TRACE(kind);
        Floats r = Reals(kRows * kCols), r_want = r;
        Bytes q(x.size()), q_want(x.size());
        Floats scales(kRows), scales_want(kRows);
        std::vector<AnyTensorView> tensors = {Matrix(x, kCols), Vector(w),
                                              Codes(q, q_dtype, kCols)};
        if (!fixed) tensors.push_back(Vector(scales));
        RmsNormQuantArgs plan_args = {Matrix(x, kCols), Vector(w),
                                      Codes(q_want, q_dtype, kCols),
                                      Vector(scales_want)};
        if (add) {
          args.emplace_back("residual", F32({kRows, kCols}));
          tensors.insert(tensors.begin() + 1, Matrix(r, kCols));
          plan_args.residual = plan_args.residual_out = Matrix(r_want, kCols);
          Run("fused_add_rms_norm_" + kind, args, tensors);
          plan.ExecuteAdd(plan_args, executor_);
        } else {
          Run("rms_norm_" + kind, args, tensors);
          plan.Execute(plan_args, executor_);
        }
        EXPECT_EQ(q, q_want);
        EXPECT_EQ(scales, scales_want);
        EXPECT_EQ(r, r_want);
      }
    }
  }
}

TEST_F(OpArgsTest, OfStaticFp8) {
  Floats x = Reals(6 * kCols), scales = UniformReals<float>(rng_, 8, 0.01, 1);
  Bytes got(x.size()), want(x.size());
  Run("static_quant_fp8",
      {{"x", F32({6, kCols})},
       {"scale", F32({2, 4})},
       {"block_rows", int64_t{3}},
       {"block_cols", int64_t{4}}},
      {Matrix(x, kCols), Matrix(scales, 4), Codes(got, DType::kF8E4M3, kCols)});
  Fp8QuantizeSpec spec;
  spec.dtype = DType::kF32;
  spec.granularity = Fp8Granularity::kStatic;
  spec.block_rows = 3;
  spec.block_cols = 4;
  Made(Fp8QuantizePlan::Create(spec))
      .ExecuteStatic(
          Matrix(x, kCols), DenseMatrix<const float>(scales.data(), 2, 4),
          Codes(want, DType::kF8E4M3, kCols).As<Float8E4M3, 2>(), executor_);
  EXPECT_EQ(got, want);
}

TEST_F(OpArgsTest, OfLogits) {
  Floats got = Reals(kRows * kCols), want = got;
  Run("logits_processor",
      {{"logits", F32({kRows, kCols})}, {"soft_cap", 1.5}, {"scale", 0.25}},
      {Matrix(got, kCols)});
  LogitsSpec spec;
  spec.vocab = kCols;
  spec.hidden = 1;
  spec.soft_cap = 1.5f;
  spec.scale = 0.25f;
  Made(LogitsPlan::Create(spec)).Execute(Matrix(want, kCols), executor_);
  EXPECT_EQ(got, want);
}

}  // namespace
}  // namespace quern
