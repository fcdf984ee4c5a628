// A program that does not link //gemm/onednn, as this one does not: what asks
// for oneDNN alone is refused, everything else runs the packed kernels.

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/oracle.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr char kNotLinked[] =
    "onednn: not in this program; need @quern//gemm/onednn in its deps";

TEST(LinearWithoutOneDnnTest, RefusesOneDnnByNameAndRunsThePackedKernels) {
  InlineExecutor executor;
  TestRng rng;
  const Shape s{1, 2, 32};
  for (const WeightCase& f : kEveryFormat) {
    SCOPED_TRACE(testing::Message() << f);
    const KnownWeights known = ExactWeights(rng, f, s);
    const LinearWeights weights = known.Pack(executor);
    LinearSpec spec = SpecOf<float, float>();
    spec.kernels = "onednn";
    ExpectRefusal(LinearPlan::Create(spec, weights, executor).status(),
                  absl::StatusCode::kUnimplemented,
                  std::string("linear: none of onednn can run this, as the "
                              "spec asks; ") +
                      kNotLinked);
    struct Choice {
      std::string kernels, why;
    };
    for (const Choice& choice :
         {Choice{"", "; first of packed"},
          Choice{"packed", "; first of packed, as the spec asks"},
          Choice{"onednn,packed", std::string("; ") + kNotLinked +
                                      "; second of onednn,packed, as the "
                                      "spec asks"}}) {
      spec.kernels = choice.kernels;
      const auto plan = LinearPlan::Create(spec, weights, executor);
      ASSERT_EQ(plan.status(), absl::OkStatus());
      EXPECT_STREQ(plan->implementation(), "packed");
      EXPECT_TRUE(absl::StartsWith(plan->Explain(1), "packed "));
      EXPECT_TRUE(absl::EndsWith(plan->Explain(1), choice.why))
          << plan->Explain(1) << "\nlacks: " << choice.why;
      std::vector<float> a(32, 127.0f);  // what int8 has codes for
      EXPECT_EQ((RunLinear<float, float>(*plan, s, a, executor)),
                RoundedTo<float>(ProductOf(known, 1, ToDoubles(a))));
    }
  }
}

}  // namespace
}  // namespace quern
