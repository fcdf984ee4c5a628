#include "quern/quant/s8s8_compensation.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

// b[k, n], dense.
struct Weights {
  int64_t k, n;
  std::vector<int8_t> b;

  int8_t At(int64_t row, int64_t col) const {
    return b[static_cast<size_t>(row * n + col)];
  }
  std::vector<int8_t> Transposed() const {
    std::vector<int8_t> t;
    for (int64_t c = 0; c < n; ++c) {
      for (int64_t r = 0; r < k; ++r) t.push_back(At(r, c));
    }
    return t;
  }
  // The formula of Vnni4Panels; what no column owns is 0x55.
  std::vector<int8_t> Panels(int64_t cols, int64_t stride) const {
    const int64_t panels = (n + cols - 1) / cols;
    std::vector<int8_t> packed(static_cast<size_t>(panels * stride), 0x55);
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < (k + 3) / 4 * 4; ++row) {
        packed[static_cast<size_t>(col / cols * stride + row / 4 * cols * 4 +
                                   col % cols * 4 + row % 4)] =
            row < k ? At(row, col) : int8_t{0};
      }
    }
    return packed;
  }
  std::vector<int32_t> Oracle() const {
    std::vector<int32_t> comp;
    for (int64_t col = 0; col < n; ++col) {
      int64_t sum = 0;
      for (int64_t row = 0; row < k; ++row) sum += At(row, col);
      comp.push_back(static_cast<int32_t>(128 * sum));
    }
    return comp;
  }
};

Weights RandomWeights(int64_t k, int64_t n) {
  std::mt19937 random(static_cast<uint32_t>(k * 1000 + n));
  Weights w = {k, n, std::vector<int8_t>(static_cast<size_t>(k * n))};
  for (int8_t& x : w.b) x = static_cast<int8_t>(random());
  return w;
}

Weights ConstantWeights(int64_t k, int64_t n, int8_t value) {
  return {k, n, std::vector<int8_t>(static_cast<size_t>(k * n), value)};
}

class S8S8CompensationTest : public IsaTest {
 protected:
  // All three sources; `slack` is the distance between rows and panels, and
  // every buffer ends at a page that may not be touched.
  void ExpectExact(const Weights& w, int64_t slack, Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << "k=" << w.k << " n=" << w.n << " slack=" << slack);
    S8S8CompensationSpec spec;
    spec.k = w.k;
    spec.n = w.n;
    const auto plan = S8S8CompensationPlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    const std::vector<int32_t> want = w.Oracle();
    const int64_t shift = slack % 3;

    const StridedMatrix<int8_t> kn(w.b, w.k, w.n, w.n + slack, Edge::kEnd,
                                   shift);
    GuardBuffer<int32_t> comp(w.n);
    ASSERT_TRUE(plan->CheckKN(kn.view(), comp.view()).ok());
    EXPECT_NO_ALLOCATION(plan->FromKN(kn.view(), comp.view(), executor));
    EXPECT_EQ(comp.ToVector(), want) << "from [k, n]";

    const StridedMatrix<int8_t> nk(w.Transposed(), w.n, w.k, w.k + slack,
                                   Edge::kEnd, shift);
    comp.FillWithPoison();
    ASSERT_TRUE(plan->CheckNK(nk.view(), comp.view()).ok());
    EXPECT_NO_ALLOCATION(plan->FromNK(nk.view(), comp.view(), executor));
    EXPECT_EQ(comp.ToVector(), want) << "from [n, k]";

    for (const int64_t cols : {1, 7, 16, 32}) {
      const int64_t stride = (w.k + 3) / 4 * cols * 4 + 4 * slack;
      // The buffer ends with the last column of the last line.
      std::vector<int8_t> packed = w.Panels(cols, stride);
      if (w.k > 0 && w.n > 0) {
        const int64_t unused = 4 * slack + 4 * (cols - 1 - (w.n - 1) % cols);
        packed.resize(packed.size() - static_cast<size_t>(unused));
      }
      const GuardBuffer<int8_t> guarded(packed, Edge::kEnd, shift);
      const Vnni4Panels panels = {guarded.data(), cols, stride};
      comp.FillWithPoison();
      ASSERT_TRUE(plan->CheckPanels(panels, comp.view()).ok())
          << plan->CheckPanels(panels, comp.view());
      EXPECT_NO_ALLOCATION(plan->FromPanels(panels, comp.view(), executor));
      EXPECT_EQ(comp.ToVector(), want) << "from panels of " << cols;
    }
  }

  InlineExecutor inline_executor_;
};
QUERN_INSTANTIATE_ISA_TEST(S8S8CompensationTest);

TEST_P(S8S8CompensationTest, IsExactOnEveryRemainder) {
  for (const int64_t k :
       {1, 2, 3, 4, 5, 7, 15, 16, 17, 63, 64, 65, 255, 256, 257, 521}) {
    for (const int64_t n : {1, 3, 15, 16, 17, 33, 64, 65, 127, 129, 257}) {
      ExpectExact(RandomWeights(k, n), (k + n) % 5, inline_executor_);
    }
  }
}

TEST_P(S8S8CompensationTest, DoesNotSaturateAtTheExtremes) {
  for (const int8_t x : {int8_t{-128}, int8_t{127}}) {
    ExpectExact(ConstantWeights(1023, 131, x), 0, inline_executor_);
    ExpectExact(ConstantWeights(S8S8CompensationPlan::kMaxK, 3, x), 1,
                inline_executor_);
  }
}

TEST_P(S8S8CompensationTest, OfNothingIsZero) {
  for (const int64_t n : {0, 5, 300}) {
    ExpectExact(ConstantWeights(0, n, 1), 0, inline_executor_);
  }
  ExpectExact(ConstantWeights(9, 0, 1), 0, inline_executor_);
}

TEST_P(S8S8CompensationTest, DoesNotDependOnTheWorkers) {
  const auto executor = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(executor.ok()) << executor.status();
  // Threads allocate while they start, which must not count as Execute's.
  (*executor)->ParallelFor(3, [](int64_t, int) {});
  ExpectExact(RandomWeights(300, 1025), 2, **executor);
}

TEST(S8S8CompensationPlanTest, RefusesWhatCouldOverflow) {
  struct Case {
    int64_t k, n;
    std::string words;
  };
  const Case cases[] = {
      {131072, 1, "s8s8_compensation: k=131072; need 0 <= k <= 131071"},
      {-1, 1, "s8s8_compensation: k=-1; need 0 <= k <= 131071"},
      {1, -1, "s8s8_compensation: n=-1; need n >= 0"},
  };
  for (const Case& c : cases) {
    S8S8CompensationSpec spec;
    spec.k = c.k;
    spec.n = c.n;
    const auto status = S8S8CompensationPlan::Create(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), c.words);
  }
}

TEST(S8S8CompensationPlanTest, RefusesArgumentsThatDoNotFit) {
  S8S8CompensationSpec spec;
  spec.k = 5;
  spec.n = 20;
  const auto plan = S8S8CompensationPlan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::vector<int8_t> b(400);
  std::vector<int32_t> comp(20);
  const auto out = DenseVector(comp.data(), 20);
  const auto matrix = [&](int64_t rows, int64_t cols, int64_t stride) {
    return MatrixView<const int8_t>(b.data(), {rows, cols}, {stride, 1});
  };
  const MatrixView<const int8_t> null_kn(nullptr, {5, 20}, {20, 1});
  const VectorView<int32_t> null_out(nullptr, {20}, {1});
  constexpr int64_t kHuge = int64_t{1} << 62;
  const std::pair<absl::Status, std::string> cases[] = {
      {plan->CheckKN(matrix(20, 5, 5), out), "rows of b=20; need 5"},
      {plan->CheckNK(matrix(5, 20, 20), out), "rows of b=5; need 20"},
      {plan->CheckKN(matrix(5, 21, 21), out), "columns of b=21; need 20"},
      {plan->CheckKN(matrix(5, 20, 19), out),
       "b has stride 19 in dimension 0; need 20 or more, as its elements must"},
      {plan->CheckKN(null_kn, out), "b is null; need 5 rows of 20"},
      {plan->CheckKN(matrix(5, 20, 20), DenseVector(comp.data(), 19)),
       "size of comp=19; need 20"},
      {plan->CheckKN(matrix(5, 20, 20), null_out), "comp is null"},
      {plan->CheckPanels({b.data(), 0, 128}, out), "panel_cols=0; need 1"},
      {plan->CheckPanels({b.data(), 16, 127}, out),
       "panel_stride=127; need panel_stride >= 128"},
      {plan->CheckPanels({nullptr, 16, 128}, out), "panels are null"},
      {plan->CheckPanels({b.data(), 16, kHuge}, out),
       "panel_stride=4611686018427387904; need 2 of them within 2^63 bytes"},
      {plan->CheckKN(matrix(5, 20, kHuge), out),
       "row stride of b=4611686018427387904; need 5 of them"},
      {plan->CheckNK(matrix(20, 5, kHuge), out),
       "row stride of b=4611686018427387904; need 20 of them"},
  };
  for (const auto& [status, words] : cases) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_NE(status.message().find(words), std::string::npos)
        << status << "\nlacks: " << words;
  }
}

// The stride of one row or panel is never stepped over.
TEST(S8S8CompensationPlanTest, IgnoresTheStrideOfOneRowOrPanel) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const std::vector<int8_t> b(64, 1);
  InlineExecutor executor;
  for (const int64_t stride : {kHuge, -kHuge, int64_t{0}}) {
    S8S8CompensationSpec spec;
    spec.k = 1;
    spec.n = 16;
    const auto one_k = S8S8CompensationPlan::Create(spec);
    ASSERT_TRUE(one_k.ok()) << one_k.status();
    std::vector<int32_t> comp(16);
    const MatrixView<const int8_t> kn(b.data(), {1, 16}, {stride, 1});
    ASSERT_TRUE(one_k->CheckKN(kn, DenseVector(comp.data(), 16)).ok());
    one_k->FromKN(kn, DenseVector(comp.data(), 16), executor);
    EXPECT_EQ(comp, std::vector<int32_t>(16, 128));
    const Vnni4Panels panels = {b.data(), 16, stride};
    comp.assign(16, 0);
    ASSERT_TRUE(one_k->CheckPanels(panels, DenseVector(comp.data(), 16)).ok());
    one_k->FromPanels(panels, DenseVector(comp.data(), 16), executor);
    EXPECT_EQ(comp[15], 4 * 128);  // b is 1 beyond k as well

    spec.k = 16;
    spec.n = 1;
    const auto one_n = S8S8CompensationPlan::Create(spec);
    ASSERT_TRUE(one_n.ok()) << one_n.status();
    const MatrixView<const int8_t> nk(b.data(), {1, 16}, {stride, 1});
    ASSERT_TRUE(one_n->CheckNK(nk, DenseVector(comp.data(), 1)).ok());
    one_n->FromNK(nk, DenseVector(comp.data(), 1), executor);
    EXPECT_EQ(comp[0], 16 * 128);
  }
}

}  // namespace
}  // namespace quern
