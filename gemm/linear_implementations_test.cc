// Which implementation LinearPlan takes, and that each computes what
// gemm/linear.h says. This program links //gemm/onednn.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/quant/int8_quantize.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

constexpr WeightCase kFloats[] = {
    {WeightFormat::kF32}, {WeightFormat::kBF16}, {WeightFormat::kF16}};
constexpr WeightCase kI8 = {WeightFormat::kI8Channel};

// "" is the default order.
class LinearImplementationsTest : public testing::TestWithParam<const char*> {
 protected:
  bool onednn() const { return std::string(GetParam()) == "onednn"; }
  LinearPlan Plan(LinearSpec spec, const LinearWeights& weights) {
    spec.kernels = GetParam();
    auto plan = LinearPlan::Create(spec, weights, inline_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_STREQ(plan->implementation(), onednn() ? "onednn" : "packed");
    const std::string text = plan->Explain(5);
    EXPECT_TRUE(absl::StartsWith(text, plan->implementation())) << text;
    const std::string names = GetParam();
    EXPECT_TRUE(absl::EndsWith(
        text, names.empty() ? "; first of packed,onednn"
                            : "; first of " + names + ", as the spec asks"))
        << text;
    return *std::move(plan);
  }

  InlineExecutor inline_;
};
INSTANTIATE_TEST_SUITE_P(Kernels, LinearImplementationsTest,
                         testing::Values("", "packed", "onednn"));

TEST_P(LinearImplementationsTest, FloatsAreExactOnSmallIntegers) {
  TestRng rng;
  ManyWorkers executor(3);
  for (const WeightCase& f : kFloats) {
    for (const auto layout : {WeightLayout::kNK, WeightLayout::kKN}) {
      Shape s{0, 35, 70, 1, 0, true};
      const KnownWeights w = ExactWeights(rng, {f.format, layout}, s);
      const auto plan = Plan(SpecOf<BF, float>(), w.Pack(inline_));
      EXPECT_GE(plan.packed_bytes(), s.n * s.k * 2);
      for (const int64_t m : {0, 1, 5, 20}) {
        s.m = m;
        const auto a = SmallIntegers<BF>(rng, m * s.k);
        EXPECT_TRUE(AllEqual(RunLinear<BF, float>(plan, s, a, executor),
                             ProductOf(w, m, ToDoubles(a))))
            << f << " " << s << " " << WeightLayoutName(layout);
      }
    }
  }
}

// The implementations differ by no more than the bounds of both.
TEST_P(LinearImplementationsTest, RealsStayWithinTheDerivedBound) {
  TestRng rng;
  ManyWorkers executor(3);
  const Shape s{17, 100, 700, 0, 0, true};
  for (const WeightCase& f : kFloats) {
    SCOPED_TRACE(testing::Message() << f);
    const KnownWeights w = RealWeights(rng, f, s);
    const auto a = UniformReals<BF>(rng, s.m * s.k);
    const auto packed = w.Pack(inline_);
    EXPECT_TRUE(IsWithinBound(
        RunLinear<BF, float>(Plan(SpecOf<BF, float>(), packed), s, a, executor),
        w, s.m, ToDoubles(a)));
    EXPECT_TRUE(IsWithinBound(
        RunLinear<BF, BF>(Plan(SpecOf<BF, BF>(), packed), s, a, executor), w,
        s.m, ToDoubles(a)));
  }
}

// Scales that are powers of two: every implementation is exact.
TEST_P(LinearImplementationsTest, Int8IsExact) {
  TestRng rng;
  ManyWorkers executor(3);
  const Shape s{19, 35, 70};
  KnownWeights w = CodedWeights(rng, kI8, s, -128, 127, [](Rng& r) {
    return r.Integer(0, 1) == 0 ? 0.5 : 2.0;
  });
  for (const auto granularity :
       {Int8Granularity::kPerToken, Int8Granularity::kPerTensor}) {
    for (const auto zeros : {Int8ZeroPoint::kNone, Int8ZeroPoint::kUsed}) {
      SCOPED_TRACE(testing::Message() << "granularity " << int(granularity)
                                      << " zero points " << int(zeros));
      const bool per_token = granularity == Int8Granularity::kPerToken;
      const bool used = zeros == Int8ZeroPoint::kUsed;
      LinearSpec spec = SpecOf<int8_t, float>();
      spec.granularity = granularity;
      spec.zero_points = zeros;
      if (!per_token) {
        spec.a_scale = 0.25f;
        spec.a_zero_point = used ? -5 : 0;
      }
      // Codes and, for bf16, values that have exactly these codes: the extremes
      // of each row are -128 and 127, or -127 and 127.
      auto q = SmallIntegers<int8_t>(rng, s.m * s.k, -100, 100);
      RowTerms rows;
      for (int64_t i = 0; i < s.m; ++i) {
        rows.scales.push_back(!per_token ? 0.25f : i % 3 == 0 ? 1.0f : 4.0f);
        rows.zero_points.push_back(!used ? 0 : per_token ? -1 : -5);
        q[static_cast<size_t>(i * s.k)] = 127;
        q[static_cast<size_t>(i * s.k + 1)] = used ? -128 : -127;
      }
      const auto exact_a = Dequantised(q, rows);
      const auto want = ProductOf(w, s.m, exact_a);
      if (!per_token) rows.scales.clear();
      if (!per_token || !used) rows.zero_points.clear();
      const auto packed = w.Pack(inline_);
      EXPECT_TRUE(AllEqual(
          RunLinear<int8_t, float>(Plan(spec, packed), s, q, executor, rows),
          want));
      spec.a = DType::kBF16;
      EXPECT_TRUE(
          AllEqual(RunLinear<BF, float>(Plan(spec, packed), s,
                                        RoundedTo<BF>(exact_a), executor),
                   want));
    }
  }
}

TEST_P(LinearImplementationsTest, HasNoResidualInOneDnn) {
  std::vector<BF> a(6), c(8);
  TestRng rng;
  const Shape s{2, 4, 3};
  for (const WeightCase& f : {kFloats[1], kI8}) {
    const LinearWeights weights = ExactWeights(rng, f, s).Pack(inline_);
    LinearArgs args;
    args.a = DenseMatrix(a.data(), 2, 3);
    args.c = args.residual = DenseMatrix(c.data(), 2, 4);
    ExpectRefusal(Plan(SpecOf<BF, BF>(), weights).CheckArgs(args),
                  "linear: residual is given; need a spec that allows it");
    LinearSpec spec = SpecOf<BF, BF>();
    spec.residual = true;
    if (!onednn()) {
      EXPECT_EQ(Plan(spec, weights).CheckArgs(args), absl::OkStatus());
      continue;
    }
    spec.kernels = "onednn";
    ExpectRefusal(LinearPlan::Create(spec, weights, inline_).status(),
                  kUnimplemented,
                  "linear: none of onednn can run this, as the spec asks; "
                  "onednn: adds no residual");
    spec.kernels = "onednn,packed";
    const auto plan = LinearPlan::Create(spec, weights, inline_);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_STREQ(plan->implementation(), "packed");
  }
}

// QUERN_KERNELS, while it lives; null for none.
class KernelsVariable {
 public:
  explicit KernelsVariable(const char* value) {
    if (value != nullptr) setenv("QUERN_KERNELS", value, 1);
  }
  ~KernelsVariable() { unsetenv("QUERN_KERNELS"); }
  KernelsVariable(const KernelsVariable&) = delete;
  KernelsVariable& operator=(const KernelsVariable&) = delete;
};

class LinearChoiceTest : public testing::Test {
 protected:
  static constexpr LinearActivation kNone = LinearActivation::kNone;
  static constexpr LinearActivation kSilu = LinearActivation::kSilu;

  absl::StatusOr<LinearPlan> Create(const std::string& kernels,
                                    const char* variable, WeightCase f,
                                    LinearActivation act) {
    const KernelsVariable set(variable);
    TestRng rng;
    LinearSpec spec = SpecOf<BF, BF>(act);
    spec.kernels = kernels;
    return LinearPlan::Create(
        spec, ExactWeights(rng, f, {1, 4, 32}).Pack(executor_), executor_);
  }

  InlineExecutor executor_;
};

constexpr WeightCase kBF16 = kFloats[1];
constexpr WeightCase kE4M3 = {WeightFormat::kE4M3Block};

TEST_F(LinearChoiceTest, ExplainsTheChoice) {
  const struct {
    const char* kernels;
    const char* variable;
    WeightCase format;
    LinearActivation act;
    std::string implementation, why;
  } kCases[] = {
      {"", nullptr, kBF16, kNone, "packed", "; first of packed,onednn"},
      {"", "", kBF16, kNone, "packed", "; first of packed,onednn"},
      {"", "onednn", kI8, kNone, "onednn",
       "; first of onednn, as QUERN_KERNELS asks"},
      {"", "onednn,packed", kE4M3, kNone, "packed",
       "; onednn: has no kernel for e4m3_block; second of onednn,packed, as "
       "QUERN_KERNELS asks"},
      {"packed", "onednn", kBF16, kNone, "packed",
       "; first of packed, as the spec asks"},
      {" onednn , packed", "packed", kBF16, kNone, "onednn",
       "; first of onednn,packed, as the spec asks"},
      {"onednn,packed", nullptr, kBF16, kSilu, "packed",
       "; onednn: has no activation; second of onednn,packed, as the spec "
       "asks"},
      {"packed,onednn", "amx", kI8, kSilu, "packed",
       "; first of packed,onednn, as the spec asks"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.why);
    const auto plan = Create(c.kernels, c.variable, c.format, c.act);
    ASSERT_EQ(plan.status(), absl::OkStatus());
    EXPECT_EQ(plan->implementation(), c.implementation);
    EXPECT_EQ(plan->target() == std::string("oneDNN"),
              c.implementation == "onednn");
    const std::string text = plan->Explain(3);
    EXPECT_EQ(text.find(';'), text.size() - c.why.size()) << text;
    EXPECT_TRUE(absl::EndsWith(text, c.why)) << text;
  }
}

// A program that names no implementation, run under QUERN_KERNELS=onednn.
TEST_F(LinearChoiceTest, TheVariableChangesNoMoreThanTheBoundAllows) {
  TestRng rng;
  const Shape s{17, 100, 700, 0, 0, true};
  const auto a = UniformReals<BF>(rng, s.m * s.k);
  for (const WeightCase& f : kFloats) {
    SCOPED_TRACE(testing::Message() << f);
    const KnownWeights w = RealWeights(rng, f, s);
    const LinearWeights packed = w.Pack(executor_);
    for (const std::string name : {"onednn", "packed"}) {
      const KernelsVariable set(name.c_str());
      const auto plan =
          LinearPlan::Create(SpecOf<BF, float>(), packed, executor_);
      ASSERT_EQ(plan.status(), absl::OkStatus());
      EXPECT_EQ(plan->implementation(), name);
      EXPECT_TRUE(IsWithinBound(RunLinear<BF, float>(*plan, s, a, executor_), w,
                                s.m, ToDoubles(a)));
    }
  }
}

// The codes of int8 rows are exact, so that both implementations give the bits
// of one arithmetic (gemm/linear.h) where oneDNN leaves the scales to it.
TEST_F(LinearChoiceTest, TheVariableChangesNoBitOfInt8PerToken) {
  TestRng rng;
  const Shape s{17, 100, 700, 0, 0, true};
  const auto a = UniformReals<BF>(rng, s.m * s.k);
  const LinearWeights packed = RealWeights(rng, kI8, s).Pack(executor_);
  LinearSpec spec = SpecOf<BF, BF>();
  spec.zero_points = Int8ZeroPoint::kUsed;
  std::vector<std::vector<BF>> results;
  for (const std::string name : {"onednn", "packed"}) {
    const KernelsVariable set(name.c_str());
    const auto plan = LinearPlan::Create(spec, packed, executor_);
    ASSERT_EQ(plan.status(), absl::OkStatus());
    EXPECT_EQ(plan->implementation(), name);
    results.push_back(RunLinear<BF, BF>(*plan, s, a, executor_));
  }
  EXPECT_TRUE(AllBitsEqual(results[0], results[1]));
}

TEST_F(LinearChoiceTest, RefusesWhatNothingThatMayBeTriedCanRun) {
  ExpectRefusal(Create("onednn", nullptr, kBF16, kSilu).status(),
                kUnimplemented,
                "linear: none of onednn can run this, as the spec asks; "
                "onednn: has no activation");
  for (const WeightCase& f : kEveryFormat) {
    if (f.format <= WeightFormat::kI8Channel) continue;
    ExpectRefusal(Create("", "onednn", f, kNone).status(), kUnimplemented,
                  "linear: none of onednn can run this, as QUERN_KERNELS asks; "
                  "onednn: has no kernel for " +
                      std::string(WeightFormatName(f.format)));
  }
}

TEST_F(LinearChoiceTest, RefusesANameThatNoImplementationHas) {
  const struct {
    const char* names;
    std::string name;
  } kCases[] = {{"amx", "amx"},  {"packed,amx", "amx"}, {"onednn,,packed", ""},
                {"packed,", ""}, {"Packed", "Packed"},  {"packed, amx", "amx"}};
  for (const auto& c : kCases) {
    const std::string words =
        " names \"" + c.name + "\"; need packed or onednn";
    ExpectRefusal(Create(c.names, "packed", kBF16, kNone).status(),
                  "linear: kernels" + words);
    ExpectRefusal(Create("", c.names, kBF16, kNone).status(),
                  "linear: QUERN_KERNELS" + words);
  }
}

}  // namespace
}  // namespace quern
