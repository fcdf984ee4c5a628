// The calls that a decoder makes besides its matrix products, by name. The
// operators must write what the plans write, bit for bit, in the shapes and
// dtypes of a model: rows of f32 become rows of bf16 before a matrix, heads are
// columns of a wider row, and ids and positions have 64 bits.

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/embedding/vocab_embedding.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/families/rows/logits_ops.h"
#include "quern/ops/registry/families/rows/sampling_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/sampling/sampler.h"
#include "quern/quant/convert.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Floats = std::vector<float>;
using Halves = std::vector<BFloat16>;

constexpr int64_t kTokens = 5;
constexpr int64_t kHidden = 40;
constexpr int64_t kHeads = 3;
constexpr int64_t kHeadDim = 16;
constexpr int64_t kPad = 8;  // columns that belong to another tensor
constexpr int64_t kRow = kHeads * kHeadDim + kPad;

template <typename T>
AnyTensorView Matrix(std::vector<T>& data, int64_t cols) {
  return DenseMatrix(data.data(), static_cast<int64_t>(data.size()) / cols,
                     cols);
}
// The heads that begin at column kPad of rows of kRow elements.
AnyTensorView Heads(Floats& data) {
  return TensorView<float, 3>(data.data() + kPad, {kTokens, kHeads, kHeadDim},
                              {kRow, kHeadDim, 1});
}
template <typename T>
AnyTensorView Vector(const std::vector<T>& data) {
  return DenseVector(data.data(), static_cast<int64_t>(data.size()));
}
template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

const TensorMeta kX = {DType::kF32, {kTokens, kHidden}};
const TensorMeta kWeight = {DType::kF32, {kHidden}};
const TensorMeta kHeadsMeta = {DType::kF32, {kTokens, kHeads, kHeadDim}};

class ModelOpsTest : public OpFixture {
 protected:
  ModelOpsTest() { EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus()); }

  Floats Reals(int64_t count) {
    return UniformReals<float>(rng_, count, -3, 3);
  }
  MadeOp Make(const std::string& op, const NamedArgs& args,
              const std::string& provider = "simd") {
    return OpFixture::Make(provider, op, args);
  }
  void Run(const MadeOp& op, const std::vector<NamedTensor>& named) {
    OpFixture::Run(op, named);
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(ModelOpsTest);

RmsNormSpec NormSpec(int64_t hidden, DType out) {
  RmsNormSpec spec;
  spec.hidden = hidden;
  spec.eps = 1e-5f;
  spec.out_dtype = out;
  return spec;
}

TEST_P(ModelOpsTest, NormsAResidualStreamToNarrowerRows) {
  Floats x = Reals(kTokens * kHidden), w = Reals(kHidden);
  Halves got(x.size()), want(x.size());
  const auto plan = RmsNormPlan::Create(NormSpec(kHidden, DType::kBF16));
  plan->Execute(Matrix(x, kHidden), Vector(w), Matrix(want, kHidden),
                executor_);
  const MadeOp op = Make(
      "rms_norm",
      {{"x", kX}, {"weight", kWeight}, {"eps", 1e-5f}, {"out_dtype", "bf16"}});
  Run(op, {{"x", Matrix(x, kHidden)},
           {"weight", Vector(w)},
           {"out", Matrix(got, kHidden)}});
  EXPECT_TRUE(SameBits(got, want));
}

TEST_P(ModelOpsTest, AddsToTheResidualStreamAndNormsIt) {
  Floats x = Reals(kTokens * kHidden), w = Reals(kHidden);
  Floats stream = Reals(kTokens * kHidden), want_stream = stream;
  Halves got(x.size()), want(x.size());
  const auto plan = RmsNormPlan::Create(NormSpec(kHidden, DType::kBF16));
  plan->ExecuteAdd({Matrix(x, kHidden), Vector(w), Matrix(want, kHidden),
                    Matrix(want_stream, kHidden), Matrix(want_stream, kHidden)},
                   executor_);
  const NamedArgs args = {{"x", kX},
                          {"residual", kX},
                          {"weight", kWeight},
                          {"eps", 1e-5f},
                          {"out_dtype", "bf16"}};
  Run(Make("add_rms_norm", args), {{"out", Matrix(got, kHidden)},
                                   {"x", Matrix(x, kHidden)},
                                   {"weight", Vector(w)},
                                   {"residual", Matrix(stream, kHidden)}});
  EXPECT_TRUE(SameBits(got, want));
  EXPECT_TRUE(SameBits(stream, want_stream));
}

TEST_P(ModelOpsTest, NormsHeadsThatAreColumnsInPlace) {
  Floats w = Reals(kHeadDim), row = Reals(kTokens * kRow), want = row;
  const Floats before = row;
  const auto plan = RmsNormPlan::Create(NormSpec(kHeadDim, DType::kF32));
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto heads =
        DenseMatrix(want.data() + t * kRow + kPad, kHeads, kHeadDim);
    plan->Execute(heads, Vector(w), heads, executor_);
  }
  for (const char* provider : {"simd", "reference"}) {
    row = before;
    const MadeOp op = Make("rms_norm",
                           {{"x", kHeadsMeta},
                            {"weight", TensorMeta{DType::kF32, {kHeadDim}}},
                            {"eps", 1e-5f}},
                           provider);
    Run(op, {{"x", Heads(row)}, {"weight", Vector(w)}, {"out", Heads(row)}});
    for (size_t i = 0; i < row.size(); ++i) {
      // The reference sums in double.
      EXPECT_NEAR(row[i], want[i], provider[0] == 's' ? 0 : 1e-5) << i;
    }
  }
  // The padding columns of each row must be unchanged.
  EXPECT_EQ(row[0], before[0]);
  EXPECT_EQ(row[kRow], before[kRow]);
}

TEST_P(ModelOpsTest, TurnsHeadsByTheFrequenciesOfTheModel) {
  RotaryScaling scaling;
  scaling.kind = RotaryScalingKind::kLongRope;
  scaling.original = scaling.target = 2;
  scaling.short_factors = {1, 1.5, 2, 3, 4, 5, 6, 8};
  scaling.long_factors = scaling.short_factors;
  RotaryEmbeddingSpec spec;
  spec.head_dim = spec.rot_dim = kHeadDim;
  spec.max_positions = 128;
  spec.base = 500000;
  spec.scaling = scaling;
  const auto plan = RotaryEmbeddingPlan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::vector<int64_t> wide = {0, 1, 127, 64, 3};
  const std::vector<int32_t> narrow(wide.begin(), wide.end());
  const Floats q = Reals(kTokens * kRow), k = Reals(kTokens * kRow);
  Floats want_q = q, want_k = k;
  plan->ExecuteQk(DenseVector(wide.data(), kTokens), Heads(want_q),
                  Heads(want_k), executor_);
  for (const char* provider : {"simd", "reference"}) {
    for (const DType dtype : {DType::kI32, DType::kI64}) {
      Floats got_q = q, got_k = k;
      const MadeOp op = Make("rotary_embedding",
                             {{"positions", TensorMeta{dtype, {kTokens}}},
                              {"query", kHeadsMeta},
                              {"key", kHeadsMeta},
                              {"scaling", &scaling},
                              {"max_position", 128},
                              {"base", 500000}},
                             provider);
      Run(op,
          {{"positions", dtype == DType::kI32 ? Vector(narrow) : Vector(wide)},
           {"query", Heads(got_q)},
           {"key", Heads(got_k)}});
      for (size_t i = 0; i < got_q.size(); ++i) {
        const double bound = provider[0] == 's' ? 0 : 1e-5;
        EXPECT_NEAR(got_q[i], want_q[i], bound) << provider << i;
        EXPECT_NEAR(got_k[i], want_k[i], bound) << provider << i;
      }
    }
  }
}

TEST_P(ModelOpsTest, LooksUpNarrowRowsAsScaledF32) {
  constexpr int64_t kVocab = 11;
  Halves table = UniformReals<BFloat16>(rng_, kVocab * kHidden, -3, 3);
  const std::vector<int64_t> ids = {10, 0, 3, 3, 7};
  VocabEmbeddingSpec spec;
  spec.vocab = kVocab;
  spec.hidden = kHidden;
  spec.weight_dtype = DType::kBF16;
  spec.scale = 6.25f;
  Floats want(kTokens * kHidden);
  VocabEmbeddingPlan::Create(spec)->Execute(DenseVector(ids.data(), kTokens),
                                            Matrix(table, kHidden),
                                            Matrix(want, kHidden), executor_);
  for (const char* provider : {"simd", "reference"}) {
    Floats got(want.size());
    const MadeOp op =
        Make("vocab_parallel_embedding",
             {{"ids", TensorMeta{DType::kI64, {kTokens}}},
              {"weight", TensorMeta{DType::kBF16, {kVocab, kHidden}}},
              {"scale", 6.25},
              {"out_dtype", "f32"}},
             provider);
    Run(op, {{"ids", Vector(ids)},
             {"weight", Matrix(table, kHidden)},
             {"out", Matrix(got, kHidden)}});
    EXPECT_TRUE(SameBits(got, want)) << provider;
  }
}

TEST_P(ModelOpsTest, SelectsRowsByNumbersOf64Bits) {
  Halves x = UniformReals<BFloat16>(rng_, kTokens * kHidden, -3, 3);
  const std::vector<int64_t> rows = {4, 1};
  Halves got(2 * kHidden);
  Run(Make("gather_rows", {{"x", TensorMeta{DType::kBF16, {kTokens, kHidden}}},
                           {"rows", TensorMeta{DType::kI64, {2}}}}),
      {{"x", Matrix(x, kHidden)},
       {"rows", Vector(rows)},
       {"out", Matrix(got, kHidden)}});
  const Halves want = [&] {
    Halves all(x.begin() + 4 * kHidden, x.end());
    all.insert(all.end(), x.begin() + kHidden, x.begin() + 2 * kHidden);
    return all;
  }();
  EXPECT_TRUE(SameBits(got, want));
}

TEST_P(ModelOpsTest, ConvertsQueriesThatAreColumns) {
  Floats row = Reals(kTokens * kRow);
  constexpr int64_t kCols = kHeads * kHeadDim;
  const AnyTensorView x =
      MatrixView<const float>(row.data() + kPad, {kTokens, kCols}, {kRow, 1});
  Halves got(kTokens * kCols), want(got.size());
  ConvertPlan::Create(ConvertSpec())
      ->Execute(x, Matrix(want, kCols), executor_);
  for (const char* provider : {"simd", "reference"}) {
    const MadeOp op = Make("convert",
                           {{"x", TensorMeta{DType::kF32, {kTokens, kCols}}},
                            {"out_dtype", "bf16"}},
                           provider);
    Run(op, {{"x", x}, {"out", Matrix(got, kCols)}});
    EXPECT_TRUE(SameBits(got, want)) << provider;
  }
}

TEST_P(ModelOpsTest, RefusesTensorsInEachOthersPlaces) {
  Floats x = Reals(kTokens * kHidden), stream = x, w = Reals(kHidden);
  Halves out(x.size());
  const MadeOp op = Make("add_rms_norm", {{"x", kX},
                                          {"residual", kX},
                                          {"weight", kWeight},
                                          {"out_dtype", "bf16"}});
  const AnyTensorView input =
      DenseMatrix<const float>(x.data(), kTokens, kHidden);
  const AnyTensorView residual = Matrix(stream, kHidden);
  const AnyTensorView y = Matrix(out, kHidden);
  EXPECT_EQ(op.CheckArgs({input, residual, Vector(w), y}), absl::OkStatus());
  ExpectRefusal(op.CheckArgs({residual, input, Vector(w), y}),
                "add_rms_norm: residual is read-only");
  ExpectRefusal(op.CheckArgs({input, residual, AnyTensorView(), y}),
                "weight is missing; need what the operator was made with");
  ExpectRefusal(op.CheckArgs({input, residual, Vector(w), residual}),
                "out is f32; need bf16, as the operator was made");
  ExpectRefusal(op.CheckArgs({input, residual, Vector(w)}),
                "tensors=3; need 4");
  std::vector<AnyTensorView> tensors;
  ExpectRefusal(op.Bind({{"x", input}, {"y", y}}, tensors),
                "has no tensor y; need x, residual, weight, out");
  ExpectRefusal(op.Bind({{"x", input}, {"x", input}}, tensors),
                "x is given twice");
  const MadeOp bare = Make("rms_norm", {{"x", kX}});
  ExpectRefusal(
      bare.Bind({{"x", input}, {"weight", Vector(w)}, {"out", residual}},
                tensors),
      "weight is given; need what the operator was made with");
}

TEST_P(ModelOpsTest, RefusesDtypesThatAreNone) {
  const OpDispatcher ops(registry_, OpPolicy());
  Make("rms_norm", {{"x", kX}, {"out_dtype", "bf16"}, {"eps", 1}});
  ExpectRefusal(
      ops.Make("rms_norm", {{"x", kX}, {"out_dtype", "half"}}).status(),
      "rms_norm: out_dtype: dtype 'half' is unknown; need one of f32");
  // An index of another dtype is refused as a dtype without a kernel.
  ExpectRefusal(ops.Make("gather_rows",
                         {{"x", kX}, {"rows", TensorMeta{DType::kI8, {2}}}})
                    .status(),
                absl::StatusCode::kUnimplemented,
                "gather_rows: rows is i8; need i32 or i64");
}

TEST(SamplingOpsTest, SamplesEachRowAsTheStepSays) {
  constexpr int64_t kVocab = 100;
  TestRng rng;
  Floats logits = UniformReals<float>(rng, 2 * kVocab, -3, 3);
  std::vector<SamplingParams> params(2);
  params[1].temperature = 0.8f;
  params[1].top_k = 20;
  params[1].top_p = 0.9f;
  params[1].seed = 7;
  SamplingStep step;
  OpRegistry registry;
  ASSERT_EQ(RegisterSamplingOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, *OpPolicy::Parse("none"));
  const auto op = ops.Make(
      "sample",
      {{"logits", TensorMeta{DType::kF32, {2, kVocab}}}, {"step", &step}});
  ASSERT_TRUE(op.ok()) << op.status();
  SamplerSpec spec;
  spec.vocab = kVocab;
  const auto plan = SamplerPlan::Create(spec);
  EXPECT_EQ(*op->op->WorkspaceBytes(2, 3), *plan->WorkspaceBytes(2, 3));
  auto memory = AlignedBuffer::Create(*plan->WorkspaceBytes(2, 1));
  ASSERT_TRUE(memory.ok());
  InlineExecutor executor;
  std::vector<AnyTensorView> tensors;
  for (uint64_t draw = 0; draw < 5; ++draw) {
    params[1].step = draw;
    step.params = params;
    std::vector<int32_t> got(2, -9), want(2, -7);
    ASSERT_EQ(op->Bind({{"logits", Matrix(logits, kVocab)},
                        {"out", DenseVector(got.data(), 2)}},
                       tensors),
              absl::OkStatus());
    EXPECT_NO_ALLOCATION(
        op->op->Execute(tensors, Workspace(*memory), executor));
    plan->Execute(DenseMatrix<const float>(logits.data(), 2, kVocab), params,
                  absl::MakeSpan(want), Workspace(*memory), executor);
    EXPECT_EQ(got, want);
  }
  step.params = {};
  ExpectRefusal(op->op->CheckArgs(tensors), "params.size=0; need 2");
}

TEST(SamplingOpsTest, AdjustsLogitsAsTheReferenceDoes) {
  constexpr int64_t kVocab = 40;
  TestRng rng;
  const Floats before = UniformReals<float>(rng, 2 * kVocab, -9, 9);
  OpRegistry registry;
  ASSERT_EQ(RegisterLogitsOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const std::vector<int32_t> mask = {-2, 0x7f}, rows = {-1, 0}, ids = {1, 5, 2};
  const std::vector<int32_t> starts = {0, 2, 3}, counts = {2, 0, 1};
  const std::vector<float> penalty = {1.5f, 0.7f};
  const auto ints = [](int64_t n) { return TensorMeta{DType::kI32, {n}}; };
  const TensorMeta floats = {DType::kF32, {2}};
  const NamedArgs args = {{"logits", TensorMeta{DType::kF32, {2, kVocab}}},
                          {"bitmask", TensorMeta{DType::kI32, {1, 2}}},
                          {"mask_rows", ints(2)},
                          {"output_ids", ints(3)},
                          {"output_counts", ints(3)},
                          {"output_starts", ints(3)},
                          {"repetition", floats},
                          {"presence", floats},
                          {"frequency", floats}};
  Floats results[2];
  for (const int reference : {0, 1}) {
    const auto op = ops.MakeFrom(reference == 1 ? "reference" : "simd",
                                 "adjust_logits", args);
    ASSERT_TRUE(op.ok()) << op.status();
    Floats logits = before;
    std::vector<AnyTensorView> tensors;
    const auto list = [](const std::vector<int32_t>& v) {
      return DenseVector(v.data(), static_cast<int64_t>(v.size()));
    };
    const auto of_rows = DenseVector(penalty.data(), 2);
    ASSERT_EQ(op->Bind({{"logits", DenseMatrix(logits.data(), 2, kVocab)},
                        {"bitmask", DenseMatrix(mask.data(), 1, 2)},
                        {"mask_rows", list(rows)},
                        {"output_ids", list(ids)},
                        {"output_counts", list(counts)},
                        {"output_starts", list(starts)},
                        {"repetition", of_rows},
                        {"presence", of_rows},
                        {"frequency", of_rows}},
                       tensors),
              absl::OkStatus());
    ASSERT_EQ(op->CheckArgs(tensors), absl::OkStatus());
    InlineExecutor executor;
    op->op->Execute(tensors, executor);
    results[reference] = logits;
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_NE(results[0], before);
}

}  // namespace
}  // namespace quern
