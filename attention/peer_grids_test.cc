// The grids on which vLLM (test_cpu_attn) and SGLang (decode, extend, MLA) test
// their attention, and what these leave out, against the reference in double.
// Data are as theirs, of mean 0 and variance 1; bounds are ours, derived.
//
// The grids' cross product is sampled: each axis is shuffled by itself, so that
// each value has its turn on each instruction set, with other neighbours. Long
// sequences have their full length on the best instruction set where no
// sanitizer watches; elsewhere they are cut to some 300. All rows are computed,
// some of each sequence are compared.
//
// Pages of NaN, gaps between the heads of outputs, and caches of odd sizes are
// in every case: see paged_attention_testutil.h. Every GQA ratio, two callers
// at once and thread counts have tests of their own beside this one.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/cache/write_kv.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/isa.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/core/workspace.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/sanitized.h"

namespace quern {
namespace {

// Four uniforms make nearly a normal variable: mean 0, variance 1, at most
// sqrt(12). Drawn from a table of them, as rounding takes its time.
template <typename T>
std::vector<double> Normals(Rng& rng, int64_t count) {
  std::vector<double> table(4096);
  for (double& e : table) {
    double sum = -2;
    for (int i = 0; i < 4; ++i) sum += rng.Uniform(0, 1);
    e = ToDouble(FromDouble<T>(sum * std::sqrt(3.0)));
  }
  std::vector<double> x(static_cast<size_t>(count));
  for (double& e : x) e = table[rng.Next() % table.size()];
  return x;
}

template <typename Q, typename Kv>
Sequence NormalSequence(Rng& rng, const Heads& heads, const Lengths& length,
                        bool latent) {
  Sequence s = {
      length,
      Normals<Q>(rng, length.q_len * heads.q_heads * heads.head_dim),
      Normals<Kv>(rng, length.kv_len * heads.kv_heads * heads.head_dim),
      {}};
  const int64_t v_dim = ValueDim(heads);
  if (!latent) {
    s.v = Normals<Kv>(rng, length.kv_len * heads.kv_heads * v_dim);
    return s;
  }
  for (size_t row = 0; row < s.k.size(); row += heads.head_dim) {
    const auto key = s.k.begin() + static_cast<int64_t>(row);
    s.v.insert(s.v.end(), key, key + v_dim);
  }
  return s;
}

// The largest Euclidean norm of rows of `dim`.
double LargestNorm(const std::vector<double>& x, int64_t dim) {
  double largest = 0;
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(dim)) {
    double sum = 0;
    for (size_t d = row; d < row + static_cast<size_t>(dim); ++d) {
      sum += x[d] * x[d];
    }
    largest = std::max(largest, sum);
  }
  return std::sqrt(largest);
}

double Rms(const std::vector<double>& x) {
  double sum = 0;
  for (const double e : x) sum += e * e;
  return x.empty() ? 0 : std::sqrt(sum / static_cast<double>(x.size()));
}

std::vector<double> Difference(const std::vector<double>& a,
                               const std::vector<double>& b) {
  std::vector<double> difference;
  for (size_t i = 0; i < a.size(); ++i) difference.push_back(a[i] - b.at(i));
  return difference;
}

// The bounds of the test utilities, which are for elements up to 1: as a dot
// product is at most the product of the norms, those of head_dim elements up to
// 1 and of a scale that makes up for it.
Bounds BoundsFor(const Heads& heads, const std::vector<Sequence>& batch,
                 double out_roundoff, const PagedAttentionPlan& plan) {
  double q = 0, k = 0;
  for (const Sequence& s : batch) {
    q = std::max(q, LargestNorm(s.q, heads.head_dim));
    k = std::max(k, LargestNorm(s.k, heads.head_dim));
  }
  const auto dim = static_cast<double>(heads.head_dim);
  Heads scaled = heads;
  scaled.scale = static_cast<float>(
      (heads.scale != 0.0f ? std::abs(static_cast<double>(heads.scale))
                           : 1 / std::sqrt(dim)) *
      q * k / dim);
  return Bounds(scaled, LongestKv(batch), out_roundoff, plan);
}

// `count` times one of `values`, each about as often as the others.
template <typename T>
std::vector<T> Turns(Rng& rng, size_t count, const std::vector<T>& values) {
  std::vector<T> turns;
  for (size_t i = 0; i < count; ++i) turns.push_back(values[i % values.size()]);
  rng.Shuffle(turns);
  return turns;
}

// One instance per instruction set that this CPU has.
class PeerGridsTest : public IsaTest {
 protected:
  // Runs before a test has chosen its own instruction set.
  static void SetUpTestSuite() {
    best_ = {hwy::SupportedAndGeneratedTargets().front()};
  }
  bool best() const { return GetParam() == best_; }
  bool whole() const { return best() && !kSanitized; }
  // A length of a grid; see above.
  int64_t Cut(int64_t length) const {
    return whole() || length <= 300 ? length : 270 + length % 67;
  }
  // A number of queries, which are no more than keys.
  int64_t CutQ(int64_t length) const { return whole() ? length : 70; }

  template <typename Q, typename Kv, typename Out>
  void ExpectMatchesSample(const Heads& heads, const Variant& variant,
                           const std::vector<Lengths>& lengths, Rng& rng) {
    const bool latent = variant.form == KvForm::kLatent;
    std::vector<Sequence> batch;
    for (const Lengths& length : lengths) {
      batch.push_back(NormalSequence<Q, Kv>(rng, heads, length, latent));
    }
    const Attention<Q, Kv, Out> attention(heads, variant, batch);
    EXPECT_RAN_ON(attention.plan());
    const Result<Out> got = attention.result();
    std::vector<double> out, lse, want_out, want_lse;
    const auto v_dim = static_cast<size_t>(ValueDim(heads));
    int64_t first_token = 0;
    for (const Sequence& s : batch) {
      const int64_t q_len = s.length.q_len;
      for (const int64_t query :
           {int64_t{0}, q_len / 2, rng.Integer(0, q_len), q_len - 1}) {
        if (query < 0 || query >= q_len) continue;
        const int64_t head = rng.Integer(0, heads.q_heads - 1);
        const ReferenceAttentionResult want = OneRow(heads, s, query, head);
        want_out.insert(want_out.end(), want.out.begin(), want.out.end());
        want_lse.push_back(want.lse.at(0));
        const auto row =
            static_cast<size_t>((first_token + query) * heads.q_heads + head);
        for (size_t d = 0; d < v_dim; ++d) {
          out.push_back(ToDouble(got.out.at(row * v_dim + d)));
        }
        lse.push_back(double{got.lse.at(row)});
      }
      first_token += q_len;
    }
    const Bounds bounds =
        BoundsFor(heads, batch, UnitRoundoff<Out>(), attention.plan());
    constexpr double kLargest = 3.47;
    EXPECT_TRUE(AllClose(out, want_out, bounds.out * kLargest));
    EXPECT_TRUE(AllClose(lse, want_lse, bounds.lse));
    // Values are independent of the errors of their weights, which are below
    // the bound relatively: so are, on the average of their squares, the errors
    // of outputs. Twice it, as this is a sample.
    EXPECT_LE(Rms(Difference(out, want_out)), 2 * bounds.out * Rms(want_out));
    for (const Out x : got.out) ASSERT_TRUE(std::isfinite(ToDouble(x)));
  }

  // A causal query sees what the last one of a shorter sequence would.
  static ReferenceAttentionResult OneRow(const Heads& heads, const Sequence& s,
                                         int64_t query, int64_t head) {
    const int64_t group = head / (heads.q_heads / heads.kv_heads);
    Heads one = heads;
    one.q_heads = one.kv_heads = 1;
    const auto at = static_cast<size_t>(head);
    if (!heads.alibi_slopes.empty()) {
      one.alibi_slopes = {heads.alibi_slopes[at]};
    }
    if (!heads.sinks.empty()) one.sinks = {heads.sinks[at]};
    Sequence row = {{1, s.length.kv_len, s.length.causal}, {}, {}, {}};
    if (s.length.causal) {
      row.length.kv_len =
          std::max(int64_t{0}, s.length.kv_len - s.length.q_len + query + 1);
    }
    const auto append = [](const std::vector<double>& from, int64_t index,
                           int64_t dim, std::vector<double>* to) {
      const auto begin = from.begin() + index * dim;
      to->insert(to->end(), begin, begin + dim);
    };
    append(s.q, query * heads.q_heads + head, heads.head_dim, &row.q);
    for (int64_t t = 0; t < row.length.kv_len; ++t) {
      append(s.k, t * heads.kv_heads + group, heads.head_dim, &row.k);
      append(s.v, t * heads.kv_heads + group, ValueDim(heads), &row.v);
    }
    return Reference(one, {row});
  }

 private:
  static inline Isa best_ = {0};
};
QUERN_INSTANTIATE_ISA_TEST(PeerGridsTest);

TEST_P(PeerGridsTest, VllmsGrid) {
  TestRng rng;
  // The sequences of q_len 0, and without keys, are ours.
  const std::vector<std::vector<Lengths>> sets = {
      {{1, Cut(213)}, {1, 1}, {1, Cut(312)}, {1, 7}, {1, 0}, {1, Cut(7812)}},
      {{Cut(2345), Cut(2345)}, {5, 5}, {3, 16}, {Cut(134), Cut(5131)}},
      {{CutQ(992), Cut(2456)},
       {1, Cut(1234)},
       {0, 50},
       {98, Cut(1145)},
       {1, Cut(4162)},
       {Cut(2345), Cut(2345)}},
      {{1, 1, false},
       {Cut(678), Cut(678), false},
       {276, 276, false},
       {145, 145, false},
       {36, 36, false},
       {Cut(812), Cut(812), false}}};
  const size_t cases = best() ? 12 : 6;
  const auto set = Turns<size_t>(rng, cases, {0, 1, 2, 3});
  const auto q_heads = Turns<int64_t>(rng, cases, {4, 8, 9});
  const auto dims = Turns<int64_t>(rng, cases, {80, 96, 112, 128, 512});
  const auto pages = Turns<int64_t>(rng, cases, {48, 96, 128});
  const auto dtypes =
      Turns<DType>(rng, cases, {DType::kBF16, DType::kF16, DType::kF32});
  const auto windows = Turns<int64_t>(rng, cases, {kNoWindow, 255});
  const auto caps = Turns<float>(rng, cases, {0.0f, 50.0f});
  const auto alibi = Turns<int>(rng, cases, {0, 1});
  const auto sinks = Turns<int>(rng, cases, {0, 1});
  const auto workers = Turns<int>(rng, cases, {1, 8});
  const auto forms =
      Turns<KvForm>(rng, cases, {KvForm::kPlain, KvForm::kPaired});
  for (size_t i = 0; i < cases; ++i) {
    Heads heads;
    heads.q_heads = q_heads[i];
    heads.kv_heads = q_heads[i] == 8 ? 2 : q_heads[i] == 9 ? 3 : 4;
    heads.head_dim = dims[i];
    heads.soft_cap = caps[i];
    std::vector<Lengths> lengths = sets[set[i]];
    if (lengths[0].causal) heads.window_left = windows[i];
    for (int64_t h = 0; h < heads.q_heads; ++h) {
      if (alibi[i] != 0) {
        heads.alibi_slopes.push_back(std::ldexp(1.0f, -static_cast<int>(h)));
      }
      if (sinks[i] != 0) {
        heads.sinks.push_back(static_cast<float>(rng.Uniform(0, 15)));
      }
    }
    // A bidirectional row stands elsewhere than the last of its sequence.
    if (!lengths[0].causal) heads.alibi_slopes.clear();
    for (Lengths& length : lengths) {
      if (best() && dims[i] != 512) break;
      length.kv_len = std::min(length.kv_len, int64_t{300});
      length.q_len = std::min(length.q_len, int64_t{20});
    }
    Variant variant;
    variant.page_size = pages[i];
    variant.form = forms[i];
    variant.schedule_workers = workers[i];
    SCOPED_TRACE(testing::Message()
                 << "case " << i << ": set " << set[i] << " q_heads "
                 << heads.q_heads << " head_dim " << heads.head_dim << " page "
                 << pages[i] << " " << DTypeName(dtypes[i]) << " window "
                 << windows[i] << " soft cap " << caps[i] << " alibi "
                 << alibi[i] << " sinks " << sinks[i] << " workers "
                 << workers[i]);
    switch (dtypes[i]) {
      case DType::kBF16:
        ExpectMatchesSample<BFloat16, BFloat16, BFloat16>(heads, variant,
                                                          lengths, rng);
        break;
      case DType::kF16:
        ExpectMatchesSample<Float16, Float16, Float16>(heads, variant, lengths,
                                                       rng);
        break;
      default:
        ExpectMatchesSample<float, float, float>(heads, variant, lengths, rng);
    }
  }
}

// Pages of one token. Splits by workers, as they have 8.
TEST_P(PeerGridsTest, SglangsDecodeGrid) {
  TestRng rng;
  struct Case {
    int64_t batch, q_heads, kv_heads, head_dim, v_head_dim;
  };
  const Case cases[] = {
      {2, 16, 16, 64, 64},   {2, 16, 1, 16, 16},   {2, 32, 8, 33, 55},
      {2, 16, 1, 64, 64},    {2, 64, 1, 13, 13},   {2, 128, 1, 80, 80},
      {2, 128, 2, 512, 512}, {1, 16, 1, 576, 512}, {1, 16, 16, 576, 512},
      {1, 22, 1, 576, 512},  {1, 40, 8, 128, 128}};
  int turn = 0;
  for (const Case& c : cases) {
    Heads heads;
    heads.q_heads = c.q_heads;
    heads.kv_heads = c.kv_heads;
    heads.head_dim = c.head_dim;
    heads.v_head_dim = c.v_head_dim;
    if (turn % 2 == 1) {
      for (int64_t h = 0; h < c.q_heads; ++h) {
        heads.sinks.push_back(static_cast<float>(rng.Uniform(-2, 6)));
      }
    }
    if (turn % 3 == 2) heads.window_left = 9;
    Variant variant;
    variant.page_size = turn % 4 == 3 ? 16 : 1;
    variant.schedule_workers = 8;
    // Two chunks, where it would be long.
    const bool large = c.kv_heads * c.head_dim > 600;
    std::vector<Lengths> lengths(static_cast<size_t>(c.batch),
                                 {1, whole() && !large ? 1024 : 270});
    SCOPED_TRACE(testing::Message() << "case " << turn);
    ExpectMatchesSample<BFloat16, BFloat16, BFloat16>(heads, variant, lengths,
                                                      rng);
    ++turn;
  }
}

TEST_P(PeerGridsTest, SglangsExtendGrid) {
  TestRng rng;
  Heads heads;
  const auto run = [&](int64_t q_heads, int64_t kv_heads, int64_t dim,
                       int64_t v_dim, const std::vector<Lengths>& lengths,
                       int64_t window, int64_t page_size) {
    SCOPED_TRACE(testing::Message()
                 << q_heads << " x " << dim << " window " << window);
    heads.q_heads = q_heads;
    heads.kv_heads = kv_heads;
    heads.head_dim = dim;
    heads.v_head_dim = v_dim;
    heads.window_left = window;
    Variant variant;
    variant.page_size = page_size;
    variant.schedule_workers = 4;
    ExpectMatchesSample<BFloat16, BFloat16, BFloat16>(heads, variant, lengths,
                                                      rng);
  };
  run(1, 1, 128, 96, {{61, 123}}, kNoWindow, 1);
  run(16, 1, 128, 96, {{40, 123}}, 9, 1);
  run(16, 1, 128, 96, {{61, 61}}, 127, 1);
  run(16, 4, 128, 96,
      {{17, Cut(1230)}, {CutQ(600), Cut(1230)}, {1, 90}, {8, Cut(611)}},
      kNoWindow, 1);
  run(16, 1, 32, 32, {{CutQ(400), Cut(9000)}}, kNoWindow, 16);
  run(2, 2, 32, 32, {{CutQ(1000), Cut(5000)}}, kNoWindow, 1);
  run(8, 2, 64, 64, {{37, 134}}, kNoWindow, 1);
  // Cross-attention over the keys of an encoder.
  run(8, 2, 64, 64, {{37, 134, false}, {1, 97, false}}, kNoWindow, 1);
  for (int h = 0; h < 8; ++h) heads.sinks.push_back(static_cast<float>(h) - 3);
  run(8, 2, 64, 64, {{37, 134}, {134, 134}}, 9, 1);
}

TEST_P(PeerGridsTest, TheGridsOfMla) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 576;
  heads.v_head_dim = 512;
  Variant variant;
  variant.form = KvForm::kLatent;
  variant.schedule_workers = 8;
  heads.q_heads = 22;
  ExpectMatchesSample<BFloat16, BFloat16, BFloat16>(
      heads, variant, {{1, Cut(888)}, {1, Cut(1024)}, {1, Cut(1064)}, {1, 1}},
      rng);
  std::vector<Lengths> many(40, {1, 20});
  many[7].kv_len = 0;
  many[9].kv_len = Cut(888);
  ExpectMatchesSample<Float16, Float16, Float16>(heads, variant, many, rng);
  heads.q_heads = 16;
  ExpectMatchesSample<float, float, float>(
      heads, variant, {{1, 37}, {1, 300}, {1, 16}, {1, 1}}, rng);
}

// Speculative decoding, and more rows of a key than any tile has, in blocks
// that are cut.
TEST_P(PeerGridsTest, FewQueriesWithSplits) {
  TestRng rng;
  for (const int64_t group : {4, 71}) {
    Heads heads;
    heads.q_heads = 2 * group;
    heads.kv_heads = 2;
    heads.head_dim = 48;
    heads.scale = 0.11f;
    std::vector<Lengths> lengths;
    for (int64_t q_len = 2; q_len <= 8; q_len += group == 4 ? 1 : 3) {
      lengths.push_back({q_len, 500 + 97 * q_len});
    }
    lengths.push_back({0, 0});
    lengths.push_back({0, 300});
    Variant variant;
    variant.schedule_workers = 16;
    variant.form = KvForm::kPaired;
    ExpectMatchesSample<BFloat16, BFloat16, BFloat16>(heads, variant, lengths,
                                                      rng);
    heads.window_left = 333;
    ExpectMatchesSample<float, BFloat16, float>(heads, variant, lengths, rng);
  }
}

// [heads, tokens, dim] as [tokens, heads, dim]: the inner stride is the longer.
TEST_P(PeerGridsTest, HeadsMayLieOutsideTokens) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 6;
  heads.kv_heads = 2;
  heads.head_dim = 20;
  constexpr int64_t kTokens = 14, kHeads = 6, kDim = 20;
  const std::vector<Sequence> batch = {
      RandomSequence<BFloat16, BFloat16>(rng, heads, {3, 600}),
      RandomSequence<BFloat16, BFloat16>(rng, heads, {11, 30})};
  Variant variant;
  variant.schedule_workers = 5;
  const Attention<BFloat16, BFloat16, float> run(heads, variant, batch);
  EXPECT_RAN_ON(run.plan());
  const Result<float> want = run.result();

  std::vector<BFloat16> q(kTokens * kHeads * kDim);
  const auto from = run.args().q.As<const BFloat16, 3>();
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      std::copy_n(from.At(t, h, 0), kDim, q.begin() + (h * kTokens + t) * kDim);
    }
  }
  const GuardBuffer<BFloat16> guarded_q(q);
  GuardBuffer<float> out(kTokens * kHeads * kDim);
  PagedAttentionArgs args = run.args();
  args.q = TensorView<const BFloat16, 3>(
      guarded_q.data(), {kTokens, kHeads, kDim}, {kDim, kTokens * kDim, 1});
  args.out = TensorView<float, 3>(out.data(), {kTokens, kHeads, kDim},
                                  {kDim, kTokens * kDim, 1});
  args.lse = {};
  ASSERT_TRUE(run.plan().CheckArgs(args).ok()) << run.plan().CheckArgs(args);
  InlineExecutor executor;
  AlignedBuffer memory =
      AlignedBuffer::Create(run.plan().WorkspaceBytes(args.schedule, 1).value())
          .value();
  run.plan().Execute(args, Workspace(memory), executor);
  std::vector<float> got;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t d = 0; d < kDim; ++d) {
        got.push_back(out[(h * kTokens + t) * kDim + d]);
      }
    }
  }
  EXPECT_TRUE(AllBitsEqual(got, want.out));
}

// One plan, cache and schedule; two callers, each with its own threads.
TEST_P(PeerGridsTest, TwoCallersWithThreadsOfTheirOwn) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 8;
  heads.kv_heads = 2;
  heads.head_dim = 32;
  const std::vector<Sequence> batch = {
      RandomSequence<BFloat16, BFloat16>(rng, heads, {1, 3500}),
      RandomSequence<BFloat16, BFloat16>(rng, heads, {20, 50})};
  Variant variant;
  variant.schedule_workers = 8;
  const Attention<BFloat16, BFloat16, BFloat16> run(heads, variant, batch);
  EXPECT_RAN_ON(run.plan());
  EXPECT_FALSE(run.args().schedule.merges().empty());
  const auto want = run.result();
  const auto call = [&](std::vector<BFloat16>* out) {
    const auto executor =
        HwyExecutor::Create(3, HwyExecutor::Sharing::kAll).value();
    out->resize(want.out.size());
    PagedAttentionArgs args = run.args();
    args.out = DenseTensor(out->data(), std::array<int64_t, 3>{21, 8, 32});
    args.lse = {};
    AlignedBuffer memory =
        AlignedBuffer::Create(
            run.plan().WorkspaceBytes(args.schedule, 3).value())
            .value();
    for (int i = 0; i < 5; ++i) {
      run.plan().Execute(args, Workspace(memory), *executor);
    }
  };
  std::vector<BFloat16> a, b;
  std::thread other(call, &b);
  call(&a);
  other.join();
  EXPECT_TRUE(AllBitsEqual(a, want.out));
  EXPECT_TRUE(AllBitsEqual(b, want.out));
}

// Keys and values that write_kv rounds into a cache, and the outputs of f32
// queries over them.
class CacheErrorTest : public IsaTest {
 protected:
  static constexpr int64_t kKeys = 600, kQueries = 8, kDim = 128;
  static constexpr int64_t kHeads = 4, kKvHeads = 2;

  std::vector<double> Outputs(const Sequence& s, DType dtype, KvScaling scaling,
                              float scale) {
    KvLayoutSpec layout_spec;
    layout_spec.dtype = dtype;
    layout_spec.kv_heads = kKvHeads;
    layout_spec.head_dim = kDim;
    layout_spec.page_size = 32;
    layout_spec.scaling = scaling;
    const KvLayout layout = KvLayout::Create(layout_spec).value();
    constexpr int64_t kPages = (kKeys + 31) / 32;
    AlignedBuffer pages =
        AlignedBuffer::Create(kPages * layout.page_bytes()).value();
    std::fill_n(pages.data<uint8_t>(), pages.bytes(), uint8_t{0xFF});
    KvCacheView cache(layout, kPages, pages.data());
    float scales[2] = {scale, scale * 1.25f};
    if (scaling == KvScaling::kPerTensor) {
      cache.set_scales({scales, 0, 1}, {scales + 1, 0, 1});
    }
    PageTableStorage storage;
    for (int32_t p = 0; p < kPages; ++p) storage.page_ids.push_back(p);
    storage.indptr.push_back(kPages);
    WriteKvSpec write_spec;
    write_spec.kv = layout;
    const WriteKvPlan write = WriteKvPlan::Create(write_spec).value();
    EXPECT_RAN_ON(write);
    const auto k = RoundedTo<float>(s.k), v = RoundedTo<float>(s.v);
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < kKeys; ++t) slots.push_back(t);
    WriteKvArgs write_args;
    write_args.k =
        DenseTensor(k.data(), std::array<int64_t, 3>{kKeys, kKvHeads, kDim});
    write_args.v =
        DenseTensor(v.data(), std::array<int64_t, 3>{kKeys, kKvHeads, kDim});
    write_args.slots = slots;
    write_args.cache = cache;
    InlineExecutor executor;
    EXPECT_TRUE(write.CheckArgs(write_args).ok())
        << write.CheckArgs(write_args);
    write.Execute(write_args, executor);

    AttentionSpec spec;
    spec.kv = layout;
    spec.q_heads = kHeads;
    const PagedAttentionPlan plan = PagedAttentionPlan::Create(spec).value();
    EXPECT_RAN_ON(plan);
    AttentionScheduleStorage schedule;
    const int64_t q_lens[] = {kQueries}, kv_lens[] = {kKeys};
    const auto q = RoundedTo<float>(s.q);
    std::vector<float> out(kQueries * kHeads * kDim);
    PagedAttentionArgs args;
    args.schedule =
        AttentionSchedule::Build(spec, q_lens, kv_lens, 1, schedule).value();
    args.q =
        DenseTensor(q.data(), std::array<int64_t, 3>{kQueries, kHeads, kDim});
    args.out =
        DenseTensor(out.data(), std::array<int64_t, 3>{kQueries, kHeads, kDim});
    args.kv = cache;
    args.pages = storage.Build(32, kPages).value();
    EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
    AlignedBuffer memory =
        AlignedBuffer::Create(plan.WorkspaceBytes(args.schedule, 1).value())
            .value();
    plan.Execute(args, Workspace(memory), executor);
    const Bounds bounds = BoundsFor(ErrorHeads(), {s}, 0, plan);
    arithmetic_ = 2 * bounds.out;
    return ToDoubles(out);
  }
  static Heads ErrorHeads() {
    Heads heads;
    heads.q_heads = kHeads;
    heads.kv_heads = kKvHeads;
    heads.head_dim = kDim;
    return heads;
  }
  // Error of the sums of the last Outputs, relative to the rms of outputs.
  double arithmetic_ = 0;
};
QUERN_INSTANTIATE_ISA_TEST(CacheErrorTest);

// The floor is what attention in double makes of keys and values that were
// rounded to nearest, in double. Arithmetic in f32 may add its own bound, no
// more. For e4m3 the floor is 3.6 to 3.7 % of the outputs' rms; a writer that
// truncates has 9.5 %.
TEST_P(CacheErrorTest, IsAtTheFloorOfRounding) {
  TestRng rng;
  const Heads heads = ErrorHeads();
  const Sequence exact =
      NormalSequence<float, float>(rng, heads, {kQueries, kKeys}, false);
  const std::vector<double> want = Reference(heads, {exact}).out;
  const auto expect = [&](const char* name, DType dtype, KvScaling scaling,
                          float scale, double worst, const auto& round) {
    Sequence rounded = exact;
    const auto apply = [&](std::vector<double>& x, double s) {
      for (size_t row = 0; row < x.size(); row += kDim) {
        double most = 0;
        for (size_t d = row; d < row + kDim; ++d) {
          most = std::max(most, std::abs(x[d]));
        }
        for (size_t d = row; d < row + kDim; ++d) x[d] = round(x[d], most, s);
      }
    };
    apply(rounded.k, double{scale});
    apply(rounded.v, double{scale} * 1.25);
    const double unit = Rms(want);
    const double floor =
        Rms(Difference(Reference(heads, {rounded}).out, want)) / unit;
    const std::vector<double> got = Outputs(exact, dtype, scaling, scale);
    const double error = Rms(Difference(got, want)) / unit;
    std::printf("%-9s %-18s error %.3f %% of rms, floor %.3f %%\n", isa(), name,
                100 * error, 100 * floor);
    EXPECT_LE(error, 1.01 * floor + arithmetic_) << name;
    EXPECT_LE(error, worst) << name;
  };
  // Rounding to nearest errs by at most u = 2^-(bits + 1), relatively, and at
  // most by u / sqrt(3) on the average of the squares. A key's errors move its
  // logit, of variance 1, by so much, and with it its weight; a value's add the
  // same: sqrt(2) of that. Twice it for weights that vary by exp(logit), and
  // for e5m2, whose errors are not small.
  const auto worst = [](int bits) {
    return 2 * std::sqrt(2.0 / 3.0) * std::ldexp(1.0, -bits - 1);
  };
  const auto as = [](auto tag) {
    using T = decltype(tag);
    return [](double x, double, double s) {
      return ToDouble(FromDouble<T>(x / s)) * s;
    };
  };
  const auto plain = [](auto tag) {
    using T = decltype(tag);
    return [](double x, double, double) { return ToDouble(FromDouble<T>(x)); };
  };
  expect("bf16", DType::kBF16, KvScaling::kNone, 1, worst(7),
         plain(BFloat16()));
  expect("fp8 e4m3", DType::kF8E4M3, KvScaling::kNone, 1, worst(3),
         plain(Float8E4M3()));
  expect("fp8 e5m2", DType::kF8E5M2, KvScaling::kNone, 1, worst(2),
         plain(Float8E5M2()));
  expect("fp8 e4m3, scaled", DType::kF8E4M3, KvScaling::kPerTensor, 0.013f,
         worst(3), as(Float8E4M3()));
  expect("fp8 e5m2, scaled", DType::kF8E5M2, KvScaling::kPerTensor, 0.013f,
         worst(2), as(Float8E5M2()));
  // Steps of most / 127, with most at most sqrt(12): absolute errors.
  const auto step = [](double x, double s) {
    return std::clamp(std::nearbyint(x / s), -127.0, 127.0) * s;
  };
  const double worst_i8 =
      2 * std::sqrt(2.0 / 3.0) * std::sqrt(12.0) * 1.25 / 127 / 2;
  expect("int8", DType::kI8, KvScaling::kPerTensor, 3.4642f / 127, worst_i8,
         [&](double x, double, double s) { return step(x, s); });
  expect("int8, token-head", DType::kI8, KvScaling::kPerTokenHead, 1, worst_i8,
         [&](double x, double most, double) { return step(x, most / 127); });
}

}  // namespace
}  // namespace quern
