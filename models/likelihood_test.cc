#include "quern/models/likelihood.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

TEST(NegativeLogLikelihoodTest, OfEqualLogitsIsTheLogOfTheirNumber) {
  const std::vector<float> logits(2 * 5, 3.0f);
  EXPECT_NEAR(NegativeLogLikelihood(
                  DenseMatrix<const float>(logits.data(), 2, 5), {0, 4}),
              2 * std::log(5.0), 1e-12);
}

TEST(NegativeLogLikelihoodTest, EachRowIsAskedForItsOwnToken) {
  // Probabilities are powers of two: 1/2, 1/4, 1/4 in the first row.
  const float ln2 = std::log(2.0f);
  const std::vector<float> logits = {ln2, 0, 0, 0, 0, ln2};
  const auto rows = DenseMatrix<const float>(logits.data(), 2, 3);
  EXPECT_NEAR(NegativeLogLikelihood(rows, {0, 2}), 2 * std::log(2.0), 1e-6);
  EXPECT_NEAR(NegativeLogLikelihood(rows, {2, 2}), 3 * std::log(2.0), 1e-6);
  EXPECT_NEAR(NegativeLogLikelihood(rows, {1}), std::log(4.0), 1e-6);
  EXPECT_EQ(NegativeLogLikelihood(rows, {}), 0);
}

TEST(NegativeLogLikelihoodTest, LargeLogitsDoNotOverflow) {
  const std::vector<float> logits = {1e4f, 1e4f};
  EXPECT_NEAR(
      NegativeLogLikelihood(DenseMatrix<const float>(logits.data(), 1, 2), {1}),
      std::log(2.0), 1e-6);
}

TEST(NegativeLogLikelihoodTest, NanIsNotHidden) {
  const std::vector<float> logits = {0, std::nanf(""), 0};
  EXPECT_TRUE(std::isnan(NegativeLogLikelihood(
      DenseMatrix<const float>(logits.data(), 1, 3), {0})));
}

}  // namespace
}  // namespace quern
