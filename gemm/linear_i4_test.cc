// Weights of kI4Group in every layout, and of kI8Group.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/linear_codes_testutil.h"
#include "quern/gemm/testing/linear_weights_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

using BF = BFloat16;
using F16 = Float16;
using Layout = WeightLayout;

// What weights mean: q[n, k], and scales and zeros [groups, n].
struct Meaning {
  int64_t n = 0, k = 0, group_size = 0;
  bool int8 = false;  // else codes have four bits
  std::vector<int> q;
  std::vector<double> scales;
  std::vector<int> zeros;      // or empty: 8
  std::vector<int32_t> g_idx;  // or empty
  std::vector<float> bias;

  int64_t groups() const { return DivCeil(k, group_size); }
  int64_t group(int64_t i) const {
    return g_idx.empty() ? i / group_size : g_idx[static_cast<size_t>(i)];
  }
  int code(int64_t col, int64_t i) const {
    return q[static_cast<size_t>(col * k + i)];
  }
  double scale(int64_t g, int64_t col) const {
    return scales[static_cast<size_t>(g * n + col)];
  }
  int zero(int64_t g, int64_t col) const {
    return zeros.empty() ? 8 : zeros[static_cast<size_t>(g * n + col)];
  }

  DecodedWeights Decoded() const {
    const int middle = int8 ? 0 : 8;  // a code that is decoded to 0
    DecodedWeights w;
    w.bias = bias;
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t g = group(i);
        const int z = int8 ? 0 : zero(g, col);
        const double s = scale(g, col);
        w.values.push_back(s * (code(col, i) - z));
        w.magnitudes.push_back(
            s * (std::abs(code(col, i) - middle) + std::abs(z - middle)));
      }
    }
    return w;
  }
};

void ShuffleGroups(Rng& rng, Meaning& m) {
  for (int64_t i = 0; i < m.k; ++i) {
    m.g_idx.push_back(static_cast<int32_t>(i / m.group_size));
  }
  rng.Shuffle(m.g_idx);
}

Meaning Random(Rng& rng, int64_t n, int64_t k, int64_t group_size, bool zeros,
               bool exact, int lo = 0, int hi = 15) {
  Meaning m;
  m.n = n;
  m.k = k;
  m.group_size = group_size;
  m.int8 = lo < 0;
  for (int64_t i = 0; i < n * k; ++i) {
    m.q.push_back(static_cast<int>(rng.Integer(lo, hi)));
  }
  for (int64_t i = 0; i < m.groups() * n; ++i) {
    m.scales.push_back(
        exact ? std::ldexp(1.0, static_cast<int>(rng.Integer(-2, 2)))
              : ToDouble(FromDouble<F16>(rng.Uniform(0.01, 1))));
    if (zeros) m.zeros.push_back(static_cast<int>(rng.Integer(0, 15)));
  }
  m.bias = SmallIntegers<float>(rng, k % 2 == 0 ? n : 0, -99, 99);
  return m;
}

int32_t Word(const std::vector<int>& codes) {
  uint32_t word = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    word |= static_cast<uint32_t>(codes[i]) << (4 * i);
  }
  return static_cast<int32_t>(word);
}

// The column at each code of AWQ's words.
constexpr int64_t kAwqColumns[] = {0, 2, 4, 6, 1, 3, 5, 7};

class LinearI4Test : public LinearCodesTest {
 protected:
  template <typename A, typename C>
  LinearPlan Plan(const Meaning& m, Layout layout, int64_t group_size = 0) {
    LinearWeightsSpec spec;
    spec.n = m.n;
    spec.k = m.k;
    spec.group_size = group_size == 0 ? m.group_size : group_size;
    spec.format = m.int8 ? WeightFormat::kI8Group : WeightFormat::kI4Group;
    const GuardBuffer<float> bias(m.bias);
    const GuardBuffer<int32_t> g_idx(m.g_idx);
    LinearSource source;
    source.layout = layout;
    if (!m.bias.empty()) source.bias = bias.view();
    if (!m.g_idx.empty()) source.g_idx = g_idx.view();
    const auto create = [&] {
      const auto weights = LinearWeights::Pack(spec, {source}, inline_);
      EXPECT_TRUE(weights.ok()) << weights.status();
      return PlanOf(*weights, SpecOf(DTypeOf<A>, DTypeOf<C>));
    };
    const auto scales = RoundedTo<F16>(m.scales);
    const StridedMatrix<F16> s(scales, m.groups(), m.n, m.n + 3);
    source.scales = s.view();
    if (m.int8) {
      const std::vector<int8_t> q(m.q.begin(), m.q.end());
      const StridedMatrix<int8_t> codes(q, m.n, m.k, m.k + 5);
      source.codes = codes.view();
      return create();
    }
    if (layout == Layout::kNK) {
      const std::vector<uint8_t> q(m.q.begin(), m.q.end());
      const std::vector<uint8_t> z(m.zeros.begin(), m.zeros.end());
      const StridedMatrix<uint8_t> codes(q, m.n, m.k, m.k + 1);
      const StridedMatrix<uint8_t> zeros(z, z.empty() ? 0 : m.groups(), m.n,
                                         m.n + 1);
      source.codes = codes.view();
      if (!z.empty()) source.zeros = zeros.view();
      return create();
    }
    const auto q = Words(m, layout), z = Zeros(m, layout);
    const int64_t cols = layout == Layout::kAwq ? m.n / 8 : m.n;
    const StridedMatrix<int32_t> codes(q, static_cast<int64_t>(q.size()) / cols,
                                       cols, cols + 1);
    const StridedMatrix<int32_t> zeros(z, z.empty() ? 0 : m.groups(), m.n / 8,
                                       m.n / 8 + 2);
    source.codes = codes.view();
    if (!z.empty()) source.zeros = zeros.view();
    return create();
  }

  template <typename A, typename C>
  void Exact(const Meaning& m, Layout layout, const std::vector<int64_t>& rows,
             Executor& executor, int64_t padding = 0) {
    SCOPED_TRACE(testing::Message()
                 << WeightLayoutName(layout) << " group_size=" << m.group_size
                 << " zeros " << !m.zeros.empty() << " g_idx "
                 << !m.g_idx.empty());
    TestRng rng;
    const auto plan = Plan<A, C>(m, layout);
    const auto w = m.Decoded();
    for (const int64_t count : rows) {
      ExpectExact<A, C>(plan, count, w, rng, executor, padding);
    }
  }

  static std::vector<int32_t> Words(const Meaning& m, Layout layout) {
    std::vector<int32_t> words;
    const bool awq = layout == Layout::kAwq;
    for (int64_t r = 0; r < (awq ? m.k : m.k / 8); ++r) {
      for (int64_t c = 0; c < (awq ? m.n / 8 : m.n); ++c) {
        std::vector<int> codes;
        for (int64_t i = 0; i < 8; ++i) {
          codes.push_back(awq ? m.code(8 * c + kAwqColumns[i], r)
                              : m.code(c, 8 * r + i));
        }
        words.push_back(Word(codes));
      }
    }
    return words;
  }

  static std::vector<int32_t> Zeros(const Meaning& m, Layout layout) {
    std::vector<int32_t> words;
    if (m.zeros.empty()) return words;
    for (int64_t g = 0; g < m.groups(); ++g) {
      for (int64_t c = 0; c < m.n / 8; ++c) {
        std::vector<int> codes;
        for (int64_t i = 0; i < 8; ++i) {
          const int64_t col =
              8 * c + (layout == Layout::kAwq ? kAwqColumns[i] : i);
          codes.push_back(m.zero(g, col) - (layout == Layout::kGptq ? 1 : 0));
        }
        words.push_back(Word(codes));
      }
    }
    return words;
  }
};
QUERN_INSTANTIATE_ISA_TEST(LinearI4Test);

TEST_P(LinearI4Test, IsExactOnSmallIntegersAtEveryRemainder) {
  TestRng rng;
  for (const int64_t n : {1, 15, 16, 17, 33, 130}) {
    for (const int64_t k : {1, 2, 5, 7, 8, 9, 16, 31, 67}) {
      const auto m = Random(rng, n, k, 16, k % 3 == 0, true);
      Exact<BF, float>(m, Layout::kNK, {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 29},
                       inline_, n % 4);
      if (HasFailure()) return;
    }
  }
}

TEST_P(LinearI4Test, ReadsEveryLayout) {
  TestRng rng;
  for (const int64_t group_size : {32, 64, 128, 320}) {
    for (const bool zeros : {false, true}) {
      auto m = Random(rng, 40, 320, group_size, zeros, true);
      for (const auto layout : {Layout::kNK, Layout::kAwq, Layout::kGptqV2}) {
        Exact<BF, float>(m, layout, {1, 6}, inline_);
      }
      // Zeros that are stored less one are 1 .. 16.
      for (int& zero : m.zeros) ++zero;
      Exact<BF, float>(m, Layout::kGptq, {1, 6}, inline_);
    }
  }
  for (const int64_t k : {67, 96}) {
    Exact<BF, float>(Random(rng, 37, k, 32, false, true, -128, 127),
                     Layout::kNK, {1, 4, 6}, inline_);
  }
  for (const int64_t group_size : {16, 48, 96}) {
    Exact<BF, float>(Random(rng, 37, 96, group_size, false, true, -128, 127),
                     Layout::kNK, {1, 4, 6}, inline_);
  }
  // Without zeros n may be any.
  Exact<BF, float>(Random(rng, 37, 64, 32, false, true), Layout::kGptq, {1, 6},
                   inline_);
}

TEST_P(LinearI4Test, DecodesEveryCodeWithEveryZeroPoint) {
  Meaning m;
  m.n = 256;
  m.k = m.group_size = 32;
  m.int8 = true;
  m.scales.assign(256, 1.0);
  for (int i = 0; i < 256 * 32; ++i) {
    m.q.push_back((i / 32 + 5 * (i % 32)) % 256 - 128);
  }
  Exact<BF, float>(m, Layout::kNK, {1, 2, 5, 16}, inline_);
  m.int8 = false;
  for (int& code : m.q) code &= 15;
  for (int col = 0; col < 256; ++col) m.zeros.push_back(col / 16);
  for (const auto layout : {Layout::kNK, Layout::kAwq, Layout::kGptqV2}) {
    Exact<BF, float>(m, layout, {1, 2, 5, 16}, inline_);
  }
}

TEST_P(LinearI4Test, FollowsTheGroupsOfActOrder) {
  TestRng rng;
  ManyWorkers many(5);
  for (const bool zeros : {false, true}) {
    auto m = Random(rng, 24, 264, 64, zeros, true);  // the last has 8
    ShuffleGroups(rng, m);
    for (Executor* executor : std::vector<Executor*>{&inline_, &many}) {
      Exact<BF, float>(m, Layout::kGptqV2, {1, 3, 6, 40}, *executor, 2);
      Exact<float, F16>(m, Layout::kNK, {1, 6}, *executor, 2);
      Exact<F16, BF>(m, Layout::kGptqV2, {1, 6}, *executor);
    }
  }
  // In order, it is as if there were none.
  auto m = Random(rng, 24, 128, 32, false, true);
  for (int i = 0; i < 128; ++i) m.g_idx.push_back(i / 32);
  Exact<BF, float>(m, Layout::kGptq, {1, 6}, inline_);
}

TEST_P(LinearI4Test, IsExactForAnyTypes) {
  TestRng rng;
  const auto m = Random(rng, 35, 150, 48, true, true);
  Exact<BF, BF>(m, Layout::kNK, {1, 9}, inline_, 1);
  Exact<BF, F16>(m, Layout::kNK, {1, 9}, inline_, 1);
  Exact<F16, F16>(m, Layout::kNK, {1, 9}, inline_, 1);
  Exact<F16, float>(m, Layout::kNK, {1, 9}, inline_, 1);
  Exact<float, float>(m, Layout::kNK, {1, 9}, inline_, 1);
  Exact<float, BF>(m, Layout::kNK, {1, 9}, inline_, 1);
}

TEST_P(LinearI4Test, IsExactAcrossGroupsAndChunksOfK) {
  TestRng rng;
  const auto executor = Workers(2);
  for (const int64_t k : {127, 129, 511, 512, 513, 1090}) {
    // 48 does not divide the 512 k of a chunk.
    for (const int64_t group_size :
         {int64_t{16}, int64_t{48}, int64_t{128}, k}) {
      const auto m = Random(rng, 150, k, group_size, k % 2 == 1, true);
      Exact<BF, float>(m, Layout::kNK, {1, 4, 17, 40}, *executor);
      if (HasFailure()) return;
    }
  }
  Exact<float, float>(Random(rng, 150, 1090, 128, true, true), Layout::kNK,
                      {1, 17, 40}, *executor);
}

TEST_P(LinearI4Test, TakesMinusOneForAllOfK) {
  TestRng rng;
  const auto m = Random(rng, 20, 600, 600, true, true);
  auto plan = Plan<BF, float>(m, Layout::kNK, LinearWeightsSpec::kWholeK);
  ExpectExact<BF, float>(plan, 2, m.Decoded(), rng, inline_);
}

TEST_P(LinearI4Test, IsExactAcrossBlocksOfRowsAndWorkers) {
  TestRng rng;
  Exact<BF, BF>(Random(rng, 72, 40, 32, true, true), Layout::kNK,
                {255, 256, 257, 513}, inline_, 3);
  for (const int workers : {2, 5, 64}) {
    ManyWorkers executor(workers);
    for (const int64_t n : {3, 16, 100, 400}) {
      Exact<BF, float>(Random(rng, n, 1500, 128, true, true), Layout::kNK,
                       {1, 16, 40}, executor);
    }
  }
}

TEST_P(LinearI4Test, StaysWithinTheDerivedBound) {
  TestRng rng;
  const auto executor = Workers(2);
  const auto bounded = [&](auto a, auto c, const Meaning& m, Layout layout) {
    using A = decltype(a);
    using C = decltype(c);
    const auto plan = Plan<A, C>(m, layout);
    const auto w = m.Decoded();
    for (const int64_t rows : {1, 3, 5, 33}) {
      ExpectWithinBound<A, C>(plan, rows, m.groups() + m.k / 512 + 1, w, rng,
                              *executor);
    }
  };
  bounded(BF(), float(), Random(rng, 200, 1100, 128, true, false), Layout::kNK);
  bounded(BF(), BF(), Random(rng, 136, 704, 32, true, false), Layout::kAwq);
  bounded(float(), float(), Random(rng, 200, 1100, 64, true, false),
          Layout::kNK);
  bounded(F16(), F16(), Random(rng, 40, 320, 32, false, false), Layout::kNK);
  bounded(BF(), float(), Random(rng, 40, 320, 32, false, false, -128, 127),
          Layout::kNK);
}

TEST_P(LinearI4Test, ARowHasTheSameBitsAloneAndInABatch) {
  TestRng rng;
  auto m = Random(rng, 83, 1700, 128, true, false);
  ExpectRowsAlone<BF>(Plan<BF, float>(m, Layout::kNK), 67, rng);
  ShuffleGroups(rng, m);
  ExpectRowsAlone<BF>(Plan<BF, float>(m, Layout::kNK), 37, rng);
  ExpectRowsAlone<float>(Plan<float, float>(m, Layout::kNK), 37, rng);
  ExpectRowsAlone<BF>(
      Plan<BF, float>(Random(rng, 35, 640, 32, false, false, -128, 127),
                      Layout::kNK),
      37, rng);
}

TEST_P(LinearI4Test, ANaNStaysInItsRow) {
  TestRng rng;
  const auto plan =
      Plan<BF, float>(Random(rng, 40, 72, 32, true, true), Layout::kNK);
  ExpectStaysInItsRow(plan, std::numeric_limits<double>::quiet_NaN(), rng,
                      [](float c) { return std::isnan(c); });
}

TEST_P(LinearI4Test, NoRowsAreNoWork) {
  TestRng rng;
  const auto plan =
      Plan<BF, float>(Random(rng, 4, 3, 32, true, true), Layout::kNK);
  EXPECT_TRUE((Run<BF, float>(plan, 0, std::vector<BF>(), inline_)).empty());
}

}  // namespace
}  // namespace quern
