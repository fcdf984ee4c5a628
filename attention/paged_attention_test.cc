#include "attention/paged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "attention/attention_spec.h"
#include "attention/schedule.h"
#include "cache/kv_cache_view.h"
#include "cache/kv_layout.h"
#include "cache/page_table.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/hwy_executor.h"
#include "core/math_util.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/no_alloc.h"
#include "testing/reference_attention.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kLn2 = 0.6931471805599453;

struct Heads {
  int64_t q_heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 16;
  int64_t v_head_dim = 0;  // 0: head_dim
  float scale = 0;
};

struct Lengths {
  int64_t q_len;
  int64_t kv_len;
};

// One sequence: its queries, and all its keys and values, as numbers.
struct Sequence {
  Lengths length;
  std::vector<double> q;  // [q_len, q_heads, head_dim]
  std::vector<double> k;  // [kv_len, kv_heads, head_dim]
  std::vector<double> v;  // [kv_len, kv_heads, v_head_dim]
};

// How the same numbers are laid out and computed.
struct Variant {
  int64_t page_size = 16;
  int schedule_workers = 1;
  uint64_t page_order = 1;  // seed of the page ids
  Executor* executor = nullptr;
};

template <typename Out>
struct Result {
  std::vector<Out> out;    // [tokens, q_heads, v_head_dim]
  std::vector<float> lse;  // [tokens, q_heads]
};

// `batch` through the public interface. Everything that the computation may not
// touch is poison or a guard page: slots beyond kv_len, pages of no sequence,
// gaps between the rows of q and out, what follows each buffer.
template <typename Q, typename Kv, typename Out>
class Attention {
 public:
  Attention(const Heads& heads, const Variant& variant,
            const std::vector<Sequence>& batch) {
    KvLayoutSpec layout;
    layout.dtype = DTypeOf<Kv>;
    layout.kv_heads = heads.kv_heads;
    layout.head_dim = heads.head_dim;
    layout.v_head_dim = heads.v_head_dim;
    layout.page_size = variant.page_size;
    spec_.kv = KvLayout::Create(layout).value();
    spec_.q_heads = heads.q_heads;
    spec_.q_dtype = DTypeOf<Q>;
    spec_.out_dtype = DTypeOf<Out>;
    spec_.scale = heads.scale;
    plan_ = std::make_unique<PagedAttentionPlan>(
        PagedAttentionPlan::Create(spec_).value());
    FillCache(variant, batch);
    FillQueries(batch);
    args_.schedule =
        AttentionSchedule::Build(spec_, q_lens_, kv_lens_,
                                 variant.schedule_workers, storage_)
            .value();
    InlineExecutor inline_executor;
    Executor& executor =
        variant.executor == nullptr ? inline_executor : *variant.executor;
    const int64_t bytes =
        plan_->WorkspaceBytes(args_.schedule, executor.num_workers()).value();
    workspace_ = std::make_unique<GuardBuffer<uint8_t>>(bytes);
    const absl::Status status = plan_->CheckArgs(args_);
    EXPECT_TRUE(status.ok()) << status;
    const Workspace workspace(workspace_->data(),
                              static_cast<size_t>(workspace_->size()));
    EXPECT_NO_ALLOCATION(plan_->Execute(args_, workspace, executor));
    // Dirty scratch must not matter.
    plan_->Execute(args_, workspace, executor);
  }

  const PagedAttentionPlan& plan() const { return *plan_; }
  const PagedAttentionArgs& args() const { return args_; }

  Result<Out> result() const { return {out_->ToDense(), lse_->ToDense()}; }

 private:
  void FillCache(const Variant& variant, const std::vector<Sequence>& batch) {
    const KvLayout& layout = spec_.kv;
    int64_t used = 0;
    for (const Sequence& s : batch) {
      used += DivCeil(s.length.kv_len, layout.page_size());
    }
    const int64_t num_pages = used + 3;
    std::vector<int32_t> ids;
    for (int64_t p = 0; p < num_pages; ++p) {
      ids.push_back(static_cast<int32_t>(p));
    }
    Rng(variant.page_order).Shuffle(ids);
    for (const Sequence& s : batch) {
      for (int64_t t = 0; t < s.length.kv_len; t += layout.page_size()) {
        pages_.page_ids.push_back(ids.back());
        ids.pop_back();
      }
      pages_.indptr.push_back(static_cast<int64_t>(pages_.page_ids.size()));
    }
    cache_ = std::make_unique<GuardBuffer<Kv>>(
        num_pages * layout.page_bytes() / static_cast<int64_t>(sizeof(Kv)));
    args_.kv = KvCacheView(layout, num_pages, cache_->data());
    args_.pages = pages_.Build(layout.page_size(), num_pages).value();
    for (size_t i = 0; i < batch.size(); ++i) {
      for (int64_t t = 0; t < batch[i].length.kv_len; ++t) {
        const int64_t slot = args_.pages.Slot(static_cast<int64_t>(i), t);
        for (int64_t h = 0; h < layout.kv_heads(); ++h) {
          const int64_t row = t * layout.kv_heads() + h;
          Put(batch[i].k, row, layout.head_dim(),
              args_.kv.K(slot / layout.page_size(), h),
              slot % layout.page_size());
          Put(batch[i].v, row, layout.v_head_dim(),
              args_.kv.V(slot / layout.page_size(), h),
              slot % layout.page_size());
        }
      }
    }
  }

  static void Put(const std::vector<double>& from, int64_t row, int64_t dim,
                  uint8_t* block, int64_t offset) {
    for (int64_t d = 0; d < dim; ++d) {
      reinterpret_cast<Kv*>(block)[offset * dim + d] =
          FromDouble<Kv>(from.at(static_cast<size_t>(row * dim + d)));
    }
  }

  // q and out have gaps between heads, and between tokens.
  void FillQueries(const std::vector<Sequence>& batch) {
    const int64_t heads = spec_.q_heads;
    const int64_t dim = spec_.kv.head_dim(), v_dim = spec_.kv.v_head_dim();
    std::vector<Q> q;
    int64_t tokens = 0;
    for (const Sequence& s : batch) {
      q_lens_.push_back(s.length.q_len);
      kv_lens_.push_back(s.length.kv_len);
      tokens += s.length.q_len;
      for (const double x : s.q) q.push_back(FromDouble<Q>(x));
    }
    q_ = std::make_unique<StridedMatrix<Q>>(q, tokens * heads, dim, dim + 3);
    out_ =
        std::make_unique<StridedMatrix<Out>>(tokens * heads, v_dim, v_dim + 5);
    lse_ = std::make_unique<StridedMatrix<float>>(tokens, heads, heads + 1);
    args_.q = TensorView<const Q, 3>(q_->view().data(), {tokens, heads, dim},
                                     {heads * (dim + 3), dim + 3, 1});
    args_.out = TensorView<Out, 3>(out_->view().data(), {tokens, heads, v_dim},
                                   {heads * (v_dim + 5), v_dim + 5, 1});
    args_.lse = lse_->view();
  }

  AttentionSpec spec_;
  std::unique_ptr<PagedAttentionPlan> plan_;
  PageTableStorage pages_;
  std::unique_ptr<GuardBuffer<Kv>> cache_;
  std::vector<int64_t> q_lens_, kv_lens_;
  std::unique_ptr<StridedMatrix<Q>> q_;
  std::unique_ptr<StridedMatrix<Out>> out_;
  std::unique_ptr<StridedMatrix<float>> lse_;
  AttentionScheduleStorage storage_;
  std::unique_ptr<GuardBuffer<uint8_t>> workspace_;
  PagedAttentionArgs args_;
};

int64_t ValueDim(const Heads& heads) {
  return heads.v_head_dim == 0 ? heads.head_dim : heads.v_head_dim;
}

// Reals in [-1, 1), representable in the types.
template <typename Q, typename Kv>
Sequence RandomSequence(Rng& rng, const Heads& heads, const Lengths& length) {
  return {length,
          ToDoubles(UniformReals<Q>(
              rng, length.q_len * heads.q_heads * heads.head_dim)),
          ToDoubles(UniformReals<Kv>(
              rng, length.kv_len * heads.kv_heads * heads.head_dim)),
          ToDoubles(UniformReals<Kv>(
              rng, length.kv_len * heads.kv_heads * ValueDim(heads)))};
}

ReferenceAttentionResult Reference(const Heads& heads,
                                   const std::vector<Sequence>& batch) {
  ReferenceAttentionResult all;
  for (const Sequence& s : batch) {
    ReferenceAttentionSpec spec;
    spec.q_len = s.length.q_len;
    spec.kv_len = s.length.kv_len;
    spec.q_heads = heads.q_heads;
    spec.kv_heads = heads.kv_heads;
    spec.head_dim = heads.head_dim;
    spec.v_head_dim = heads.v_head_dim;
    spec.scale = heads.scale != 0.0f
                     ? static_cast<double>(heads.scale)
                     : 1.0 / std::sqrt(static_cast<double>(heads.head_dim));
    const ReferenceAttentionResult one =
        ReferenceAttention(spec, s.q, s.k, s.v);
    all.out.insert(all.out.end(), one.out.begin(), one.out.end());
    all.lse.insert(all.lse.end(), one.lse.begin(), one.lse.end());
  }
  return all;
}

// Bounds for |q|, |k|, |v| <= 1. With eps = 2^-23, twice the unit roundoff:
//
//   logit    in log2 units, a dot product of head_dim + 1 roundings (the scale
//            is one) of at most head_dim * c; the subtraction of the maximum
//            is one rounding of twice that
//   weight   relative: ln2 times the error of the logit, and that of exp2
//   merge    each of the chunks again: a subtraction, an exp2, two roundings
//   sums     kv_len roundings each in numerator and denominator
//   output   the division, and the output's type
struct Bounds {
  Bounds(const Heads& heads, int64_t kv_len, double out_roundoff) {
    constexpr double kEps = 1.0 / (1 << 23);
    constexpr double kExp2 = 1.0 / (1 << 22);
    const double dim = static_cast<double>(heads.head_dim);
    const double keys = static_cast<double>(kv_len);
    const double scale = heads.scale != 0.0f
                             ? std::abs(static_cast<double>(heads.scale))
                             : 1.0 / std::sqrt(dim);
    const double largest = dim * scale / kLn2;
    const double logit = largest * (dim + 1) * kEps;
    const double subtraction = 2 * largest * kEps;
    const double chunks =
        std::ceil(keys / static_cast<double>(AttentionSchedule::kChunkTokens));
    const double weight = kLn2 * (logit + subtraction) + kExp2 +
                          chunks * (kLn2 * subtraction + kExp2 + 2 * kEps);
    out = 2 * (weight + keys * kEps) + kEps + out_roundoff;
    lse = kLn2 * logit + weight + keys * kEps +
          (kLn2 * largest + std::log(keys + 1)) * 2 * kEps;
  }
  double out;
  double lse;
};

int64_t LongestKv(const std::vector<Sequence>& batch) {
  int64_t longest = 0;
  for (const Sequence& s : batch) longest = std::max(longest, s.length.kv_len);
  return longest;
}

// One instance per instruction set that this CPU has.
class PagedAttentionTest : public IsaTest {
 protected:
  template <typename Q, typename Kv, typename Out>
  void ExpectMatchesReference(const Heads& heads, const Variant& variant,
                              const std::vector<Lengths>& lengths, Rng& rng) {
    SCOPED_TRACE(testing::Message()
                 << "q_heads " << heads.q_heads << " kv_heads "
                 << heads.kv_heads << " head_dim " << heads.head_dim
                 << " v_head_dim " << heads.v_head_dim << " page_size "
                 << variant.page_size);
    std::vector<Sequence> batch;
    for (const Lengths& length : lengths) {
      batch.push_back(RandomSequence<Q, Kv>(rng, heads, length));
    }
    const Attention<Q, Kv, Out> attention(heads, variant, batch);
    EXPECT_RAN_ON(attention.plan());
    const ReferenceAttentionResult want = Reference(heads, batch);
    const Bounds bounds(heads, LongestKv(batch), UnitRoundoff<Out>());
    EXPECT_TRUE(AllClose(attention.result().out, want.out, bounds.out));
    EXPECT_TRUE(AllClose(attention.result().lse, want.lse, bounds.lse));
  }
};
QUERN_INSTANTIATE_ISA_TEST(PagedAttentionTest);

// Keys of zero give all visible tokens the same weight, exactly 1: the output
// is the correctly rounded mean of small integers.
TEST_P(PagedAttentionTest, IsTheExactMeanWhereKeysAreZero) {
  TestRng rng;
  for (const int64_t dim : {1, 4, 15, 16, 17, 33, 40}) {
    for (const int64_t group : {1, 2, 3, 5, 8}) {
      Heads heads;
      heads.kv_heads = 2;
      heads.q_heads = 2 * group;
      heads.head_dim = 3;
      heads.v_head_dim = dim;
      for (const Lengths length :
           {Lengths{1, 1}, Lengths{1, 17}, Lengths{5, 5}, Lengths{3, 255},
            Lengths{2, 256}, Lengths{7, 261}, Lengths{40, 530}}) {
        Variant variant;
        variant.page_size = group == 3 ? 1 : 7 + group;
        variant.schedule_workers = group % 2 == 0 ? 8 : 1;
        Sequence s = RandomSequence<float, BFloat16>(rng, heads, length);
        std::fill(s.k.begin(), s.k.end(), 0.0);
        s.v = ToDoubles(SmallIntegers(rng, length.kv_len * heads.kv_heads * dim,
                                      -100, 100));
        const Attention<float, BFloat16, float> attention(heads, variant, {s});
        EXPECT_RAN_ON(attention.plan());
        std::vector<float> want;
        for (int64_t i = 0; i < length.q_len; ++i) {
          const int64_t visible = length.kv_len - length.q_len + i + 1;
          for (int64_t h = 0; h < heads.q_heads; ++h) {
            for (int64_t d = 0; d < dim; ++d) {
              double sum = 0;
              for (int64_t t = 0; t < visible; ++t) {
                sum += s.v[static_cast<size_t>(
                    (t * heads.kv_heads + h / group) * dim + d)];
              }
              want.push_back(static_cast<float>(sum) /
                             static_cast<float>(visible));
            }
          }
        }
        ASSERT_TRUE(AllEqual(attention.result().out, want))
            << "v_head_dim " << dim << " group " << group << " q_len "
            << length.q_len << " kv_len " << length.kv_len;
      }
    }
  }
}

// A key is +-1 by the bits of its position. A query that is 128 times the key
// of position j has a logit there at least 256 above any other: j has all the
// weight, and the output is its value, exactly.
TEST_P(PagedAttentionTest, FindsTheKeyThatIsAskedFor) {
  TestRng rng;
  constexpr int64_t kBits = 10;
  for (const int64_t dim : {10, 15, 16, 17, 31, 64, 67}) {
    Heads heads;
    heads.kv_heads = 2;
    heads.q_heads = 6;
    heads.head_dim = dim;
    heads.v_head_dim = 5;
    heads.scale = 1;
    const Lengths length = {70, 600};
    Sequence s = RandomSequence<float, float>(rng, heads, length);
    const auto key = [&](int64_t position, int64_t head, int64_t d) {
      // Beyond the bits, the same for all: it moves no weight.
      if (d >= kBits) return 1.0;
      const int64_t bit = (d + head) % kBits;
      return ((position >> bit) & 1) != 0 ? 1.0 : -1.0;
    };
    size_t next = 0;
    for (int64_t t = 0; t < length.kv_len; ++t) {
      for (int64_t g = 0; g < heads.kv_heads; ++g) {
        for (int64_t d = 0; d < dim; ++d) s.k[next++] = key(t, g, d);
      }
    }
    std::vector<float> want;
    next = 0;
    for (int64_t i = 0; i < length.q_len; ++i) {
      for (int64_t h = 0; h < heads.q_heads; ++h) {
        const int64_t g = h / 3;
        const int64_t asked = rng.Integer(0, length.kv_len - length.q_len + i);
        for (int64_t d = 0; d < dim; ++d) s.q[next++] = 128 * key(asked, g, d);
        for (int64_t d = 0; d < 5; ++d) {
          want.push_back(static_cast<float>(
              s.v[static_cast<size_t>((asked * 2 + g) * 5 + d)]));
        }
      }
    }
    const Attention<float, float, float> attention(heads, Variant(), {s});
    EXPECT_RAN_ON(attention.plan());
    EXPECT_TRUE(AllEqual(attention.result().out, want)) << "head_dim " << dim;
  }
}

TEST_P(PagedAttentionTest, MatchesTheReferenceForEveryHeadDim) {
  TestRng rng;
  for (const int64_t dim : {1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 80, 96, 128}) {
    for (const int64_t v_dim : {dim, dim + 3}) {
      Heads heads;
      heads.q_heads = 4;
      heads.kv_heads = 2;
      heads.head_dim = dim;
      heads.v_head_dim = v_dim;
      ExpectMatchesReference<float, BFloat16, float>(heads, Variant(),
                                                     {{1, 19}, {3, 33}}, rng);
    }
  }
}

TEST_P(PagedAttentionTest, MatchesTheReferenceForEveryGroup) {
  TestRng rng;
  for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 16, 71}) {
    Heads heads;
    heads.q_heads = 2 * group;
    heads.kv_heads = 2;
    heads.head_dim = 24;
    for (const int workers : {1, 8}) {
      Variant variant;
      variant.schedule_workers = workers;
      ExpectMatchesReference<float, float, float>(
          heads, variant, {{1, 270}, {9, 40}, {3, 3}}, rng);
    }
  }
}

TEST_P(PagedAttentionTest, MatchesTheReferenceForEveryType) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = 40;
  const std::vector<Lengths> lengths = {{1, 77}, {20, 50}, {6, 300}};
  ExpectMatchesReference<float, float, float>(heads, {}, lengths, rng);
  ExpectMatchesReference<float, Float16, float>(heads, {}, lengths, rng);
  ExpectMatchesReference<float, BFloat16, BFloat16>(heads, {}, lengths, rng);
  ExpectMatchesReference<BFloat16, float, BFloat16>(heads, {}, lengths, rng);
  ExpectMatchesReference<BFloat16, BFloat16, float>(heads, {}, lengths, rng);
  ExpectMatchesReference<BFloat16, Float16, BFloat16>(heads, {}, lengths, rng);
}

TEST_P(PagedAttentionTest, MatchesTheReferenceAcrossPagesAndChunks) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 2;
  heads.kv_heads = 1;
  heads.head_dim = 16;
  for (const int64_t page_size : {1, 3, 16, 32, 64, 100, 256, 300}) {
    Variant variant;
    variant.page_size = page_size;
    variant.schedule_workers = 4;
    ExpectMatchesReference<float, BFloat16, float>(heads, variant,
                                                   {{1, 1},
                                                    {2, 15},
                                                    {16, 16},
                                                    {17, 33},
                                                    {1, 255},
                                                    {4, 256},
                                                    {4, 257},
                                                    {33, 513},
                                                    {1, 700}},
                                                   rng);
  }
}

TEST_P(PagedAttentionTest, UsesTheScaleItIsGiven) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 2;
  heads.kv_heads = 2;
  heads.head_dim = 16;
  for (const float scale : {0.03f, 1.0f, 2.5f, -0.5f}) {
    heads.scale = scale;
    ExpectMatchesReference<float, float, float>(heads, Variant(),
                                                {{1, 30}, {5, 20}}, rng);
  }
}

// Logits of +-30000: exp of them, or of a difference, overflows or vanishes.
TEST_P(PagedAttentionTest, SurvivesLargeLogits) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 8;
  heads.scale = 1000;
  std::vector<Sequence> batch = {
      RandomSequence<float, float>(rng, heads, {5, 300})};
  // Integers: the logits are exact, so that large ones are no large errors.
  batch[0].q = ToDoubles(SmallIntegers(rng, 5 * 8, -2, 2));
  batch[0].k = ToDoubles(SmallIntegers(rng, 300 * 8, -2, 2));
  heads.scale = static_cast<float>(1024 * kLn2);
  const Attention<float, float, float> attention(heads, Variant(), batch);
  EXPECT_RAN_ON(attention.plan());
  const ReferenceAttentionResult want = Reference(heads, batch);
  // Distinct logits are at least ln2 * 1024 apart: weights are 0 or equal.
  EXPECT_TRUE(AllClose(attention.result().out, want.out, 300 * 3e-7));
}

TEST_P(PagedAttentionTest, BitsDependOnNothingButTheSequence) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 6;
  heads.kv_heads = 2;
  heads.head_dim = 20;
  std::vector<Sequence> batch;
  for (const Lengths length : {Lengths{1, 900}, Lengths{30, 600}, Lengths{1, 3},
                               Lengths{0, 10}, Lengths{40, 40}}) {
    batch.push_back(RandomSequence<float, BFloat16>(rng, heads, length));
  }
  using Run = Attention<float, BFloat16, float>;
  const Run first(heads, Variant(), batch);
  EXPECT_RAN_ON(first.plan());
  EXPECT_TRUE(first.args().schedule.merges().empty());
  const auto want = first.result();
  const auto expect_same = [&](const Variant& variant, const char* what) {
    const Run run(heads, variant, batch);
    EXPECT_TRUE(AllBitsEqual(run.result().out, want.out)) << what;
    EXPECT_TRUE(AllBitsEqual(run.result().lse, want.lse)) << what;
  };
  Variant variant;
  variant.schedule_workers = 8;
  EXPECT_FALSE(Run(heads, variant, batch).args().schedule.merges().empty());
  expect_same(variant, "8 workers planned, 1 at work");
  for (const int workers : {2, 3, 5}) {
    const auto executor = HwyExecutor::Create(workers).value();
    variant.executor = executor.get();
    variant.schedule_workers = workers;
    expect_same(variant, "several workers");
  }
  for (const int64_t page_size : {1, 13, 256}) {
    variant = Variant();
    variant.page_size = page_size;
    variant.page_order = 99;
    expect_same(variant, "another page size and order");
  }

  // Each alone.
  std::vector<float> out, lse;
  for (const Sequence& s : batch) {
    const Run run(heads, Variant(), {s});
    const auto alone = run.result();
    out.insert(out.end(), alone.out.begin(), alone.out.end());
    lse.insert(lse.end(), alone.lse.begin(), alone.lse.end());
  }
  EXPECT_TRUE(AllBitsEqual(out, want.out)) << "alone";
  EXPECT_TRUE(AllBitsEqual(lse, want.lse)) << "alone";
}

// Prefill in one step, in chunks, and one token at a time.
TEST_P(PagedAttentionTest, BitsDoNotDependOnHowASequenceIsCutIntoSteps) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = 16;
  constexpr int64_t kLength = 290;
  const Sequence whole =
      RandomSequence<float, BFloat16>(rng, heads, {kLength, kLength});
  using Run = Attention<float, BFloat16, float>;
  const Run prefill(heads, Variant(), {whole});
  EXPECT_RAN_ON(prefill.plan());
  for (const int64_t step : {1, 7, 64}) {
    std::vector<float> out;
    for (int64_t begin = 0; begin < kLength; begin += step) {
      const int64_t end = std::min(kLength, begin + step);
      const auto head = [](const std::vector<double>& x, int64_t from,
                           int64_t to) {
        return std::vector<double>(x.begin() + from, x.begin() + to);
      };
      const Sequence part = {{end - begin, end},
                             head(whole.q, begin * 64, end * 64),
                             head(whole.k, 0, end * 32),
                             head(whole.v, 0, end * 32)};
      const auto result = Run(heads, Variant(), {part}).result();
      out.insert(out.end(), result.out.begin(), result.out.end());
    }
    EXPECT_TRUE(AllBitsEqual(out, prefill.result().out)) << "steps of " << step;
  }
}

TEST_P(PagedAttentionTest, NanReachesOnlyTheRowsThatSeeIt) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 6;
  heads.kv_heads = 2;
  heads.head_dim = 20;
  const std::vector<Sequence> clean = {
      RandomSequence<float, BFloat16>(rng, heads, {30, 300}),
      RandomSequence<float, BFloat16>(rng, heads, {1, 300})};
  using Run = Attention<float, BFloat16, float>;
  const auto want = Run(heads, Variant(), clean).result();
  // Token 285 of sequence 0 is seen by its queries 15 and up.
  for (const bool in_key : {true, false}) {
    for (const int64_t dim : {0, 19}) {
      std::vector<Sequence> batch = clean;
      auto& rows = in_key ? batch[0].k : batch[0].v;
      // Key/value head 1: query heads 3, 4, 5.
      rows[static_cast<size_t>((285 * 2 + 1) * 20 + dim)] = std::nan("");
      const Run run(heads, Variant(), batch);
      EXPECT_RAN_ON(run.plan());
      const auto got = run.result();
      for (int64_t token = 0; token < 31; ++token) {
        for (int64_t h = 0; h < 6; ++h) {
          const bool sees = token >= 15 && token < 30 && h >= 3;
          for (int64_t d = 0; d < 20; ++d) {
            const auto i = static_cast<size_t>((token * 6 + h) * 20 + d);
            if (sees && (in_key || d == dim)) {
              ASSERT_TRUE(std::isnan(got.out[i])) << token << " " << h;
            } else {
              ASSERT_EQ(got.out[i], want.out[i]) << token << " " << h;
            }
          }
          ASSERT_EQ(std::isnan(got.lse[static_cast<size_t>(token * 6 + h)]),
                    sees && in_key);
        }
      }
    }
  }
}

TEST_P(PagedAttentionTest, NoKeyGivesZero) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = 10;
  const std::vector<Sequence> batch = {
      RandomSequence<float, float>(rng, heads, {1, 0}),
      RandomSequence<float, float>(rng, heads, {2, 5}),
      RandomSequence<float, float>(rng, heads, {3, 0}),
      RandomSequence<float, float>(rng, heads, {0, 0})};
  const Attention<float, float, float> attention(heads, Variant(), batch);
  EXPECT_RAN_ON(attention.plan());
  const auto got = attention.result();
  for (const int64_t token : {0, 3, 4, 5}) {
    for (int64_t i = 0; i < 40; ++i) {
      EXPECT_EQ(BitsOf(got.out[static_cast<size_t>(token * 40 + i)]), 0u);
    }
    for (int64_t h = 0; h < 4; ++h) {
      EXPECT_EQ(ToDouble(got.lse[static_cast<size_t>(token * 4 + h)]), -kInf);
    }
  }
  // Nothing at all.
  const Attention<float, float, float> empty(heads, Variant(), {});
  EXPECT_TRUE(empty.result().out.empty());
}

TEST_P(PagedAttentionTest, LogitsOfMinusInfinityHaveNoWeight) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 3;
  heads.scale = 1;
  // A query of ones; keys of zero, or -inf in one dimension. The first chunk
  // has none that counts.
  Sequence s = {{1, 300},
                std::vector<double>(3, 1.0),
                std::vector<double>(900, 0.0),
                ToDoubles(SmallIntegers(rng, 900))};
  for (size_t t = 0; t < 298; ++t) s.k[t * 3 + 1] = -kInf;
  const Attention<float, float, float> some(heads, Variant(), {s});
  EXPECT_RAN_ON(some.plan());
  for (size_t d = 0; d < 3; ++d) {
    EXPECT_EQ(ToDouble(some.result().out[d]),
              (s.v[298 * 3 + d] + s.v[299 * 3 + d]) / 2);
  }
  for (size_t t = 0; t < 300; ++t) s.k[t * 3 + 1] = -kInf;
  const auto none =
      Attention<float, float, float>(heads, Variant(), {s}).result();
  EXPECT_TRUE(AllEqual(none.out, std::vector<double>(3, 0.0)));
  EXPECT_TRUE(AllEqual(none.lse, std::vector<double>(1, -kInf)));
}

TEST_P(PagedAttentionTest, ServesTwoCallersAtOnce) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  const std::vector<Sequence> batch = {
      RandomSequence<float, BFloat16>(rng, heads, {20, 400})};
  using Run = Attention<float, BFloat16, float>;
  const Run run(heads, Variant(), batch);
  EXPECT_RAN_ON(run.plan());
  const auto want = run.result();
  const auto call = [&](std::vector<float>* out) {
    PagedAttentionArgs args = run.args();
    out->resize(20 * 4 * 16);
    args.out =
        DenseTensor<float>(out->data(), std::array<int64_t, 3>{20, 4, 16});
    args.lse = {};
    InlineExecutor executor;
    const int64_t bytes = run.plan().WorkspaceBytes(args.schedule, 1).value();
    AlignedBuffer memory = AlignedBuffer::Create(bytes).value();
    for (int i = 0; i < 20; ++i) {
      run.plan().Execute(args, Workspace(memory), executor);
    }
  };
  std::vector<float> a, b;
  std::thread other(call, &b);
  call(&a);
  other.join();
  EXPECT_TRUE(AllBitsEqual(a, want.out));
  EXPECT_TRUE(AllBitsEqual(b, want.out));
}

AttentionSpec GoodSpec() {
  KvLayoutSpec layout;
  layout.kv_heads = 2;
  layout.head_dim = 8;
  layout.v_head_dim = 4;
  layout.page_size = 16;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = 4;
  return spec;
}

TEST(PagedAttentionPlanTest, RefusesASpecThatMakesNoSense) {
  using Change = void (*)(AttentionSpec&);
  const struct {
    Change change;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {[](AttentionSpec& s) { s.kv = KvLayout(); },
       absl::StatusCode::kInvalidArgument, "kv layout is empty"},
      {[](AttentionSpec& s) { s.q_heads = 0; },
       absl::StatusCode::kInvalidArgument, "q_heads=0; need 1 <= q_heads"},
      {[](AttentionSpec& s) { s.q_heads = -4; },
       absl::StatusCode::kInvalidArgument, "q_heads=-4"},
      {[](AttentionSpec& s) { s.q_heads = 5; },
       absl::StatusCode::kInvalidArgument,
       "q_heads=5; need a multiple of kv_heads=2"},
      {[](AttentionSpec& s) { s.q_dtype = DType::kI8; },
       absl::StatusCode::kUnimplemented, "q_dtype is i8; need f32 or bf16"},
      {[](AttentionSpec& s) { s.out_dtype = DType::kF16; },
       absl::StatusCode::kUnimplemented, "out_dtype is f16; need f32 or bf16"},
      {[](AttentionSpec& s) { s.scale = std::nanf(""); },
       absl::StatusCode::kInvalidArgument, "need a finite number"},
  };
  for (const auto& c : kCases) {
    AttentionSpec spec = GoodSpec();
    c.change(spec);
    const absl::Status status = PagedAttentionPlan::Create(spec).status();
    EXPECT_EQ(status.code(), c.code) << c.words;
    EXPECT_THAT(status.message(), HasSubstr(c.words));
    EXPECT_THAT(status.message(), HasSubstr("paged_attention: "));
  }
}

TEST(PagedAttentionPlanTest, RefusesArgumentsThatDoNotFit) {
  const AttentionSpec spec = GoodSpec();
  const auto plan = PagedAttentionPlan::Create(spec).value();
  AttentionScheduleStorage storage, other_storage;
  PageTableStorage pages, few_pages, many_pages;
  pages.Append({1, 0});
  pages.Append({2});
  few_pages.Append({1});
  few_pages.Append({2});
  many_pages.Append({1, 7});
  many_pages.Append({2});
  std::vector<float> q(3 * 4 * 8), out(3 * 4 * 4), lse(3 * 4);
  std::vector<BFloat16> bf16(3 * 4 * 8);
  std::vector<uint8_t> cache(static_cast<size_t>(3 * spec.kv.page_bytes()));
  PagedAttentionArgs good;
  good.q = TensorView<const float, 3>(q.data(), {3, 4, 8}, {32, 8, 1});
  good.out = TensorView<float, 3>(out.data(), {3, 4, 4}, {16, 4, 1});
  good.lse = DenseMatrix(lse.data(), 3, 4);
  good.kv = KvCacheView(spec.kv, 3, cache.data());
  good.pages = pages.Build(16, 3).value();
  good.schedule =
      AttentionSchedule::Build(spec, {1, 2}, {20, 16}, 1, storage).value();
  ASSERT_TRUE(plan.CheckArgs(good).ok()) << plan.CheckArgs(good);

  const auto expect_refused = [&](const PagedAttentionArgs& args,
                                  const char* words) {
    const absl::Status status = plan.CheckArgs(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(status.message(), HasSubstr(words));
  };
  PagedAttentionArgs args = good;
  args.q = TensorView<const float, 3>(q.data(), {2, 4, 8}, {32, 8, 1});
  expect_refused(args, "q.extent(0)=2; need 3");
  args.q = TensorView<const float, 3>(q.data(), {3, 2, 8}, {32, 8, 1});
  expect_refused(args, "q.extent(1)=2; need 4");
  args.q = TensorView<const float, 3>(q.data(), {3, 4, 4}, {32, 8, 1});
  expect_refused(args, "q.extent(2)=4; need 8");
  args.q = DenseMatrix<const float>(q.data(), 3, 32);
  expect_refused(args, "q.rank=2; need 3");
  args.q = TensorView<const BFloat16, 3>(bf16.data(), {3, 4, 8}, {32, 8, 1});
  expect_refused(args, "q is bf16; need f32");
  args.q = AnyTensorView(DType::kF32, static_cast<const void*>(q.data()), 3,
                         {3, 4, 8}, {32, 1, 4});
  expect_refused(args, "q.stride(2)=4; need 1");
  args = good;
  args.out = TensorView<const float, 3>(out.data(), {3, 4, 4}, {16, 4, 1});
  expect_refused(args, "out is read-only");
  args.out = TensorView<float, 3>(q.data(), {3, 4, 8}, {32, 8, 1});
  expect_refused(args, "out.extent(2)=8; need 4");
  args = good;
  args.lse = DenseMatrix(lse.data(), 4, 3);
  expect_refused(args, "lse.extent(0)=4; need 3");
  args = good;
  KvLayoutSpec other_layout;
  other_layout.dtype = DType::kF16;
  other_layout.kv_heads = 2;
  other_layout.head_dim = 8;
  other_layout.v_head_dim = 4;
  other_layout.page_size = 16;
  args.kv =
      KvCacheView(KvLayout::Create(other_layout).value(), 3, cache.data());
  expect_refused(args, "another layout");
  args = good;
  args.pages = pages.Build(8, 3).value();
  expect_refused(args, "pages.page_size=8; need 16");
  args.pages = many_pages.Build(16, 8).value();
  expect_refused(args, "pages.num_pages=8");
  args.pages = few_pages.Build(16, 3).value();
  expect_refused(args, "sequence 0: kv_len=20; need kv_len <= 16");
  args.pages = PageTable();
  expect_refused(args, "pages.num_sequences=0; need 2");
  args = good;
  AttentionSpec other = spec;
  other.q_heads = 8;
  args.schedule =
      AttentionSchedule::Build(other, {1, 2}, {20, 16}, 1, other_storage)
          .value();
  expect_refused(args, "schedule.group=4; need 2");
}

TEST(PagedAttentionPlanTest, RefusesAWorkspaceForNobody) {
  const auto plan = PagedAttentionPlan::Create(GoodSpec()).value();
  const auto bytes = plan.WorkspaceBytes(AttentionSchedule(), 0);
  EXPECT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(bytes.status().message(), HasSubstr("num_workers=0"));
  EXPECT_EQ(plan.WorkspaceBytes(AttentionSchedule(), 2).value(), 0);
}

}  // namespace
}  // namespace quern
