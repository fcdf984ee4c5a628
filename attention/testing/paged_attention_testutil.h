#ifndef QUERN_ATTENTION_TESTING_PAGED_ATTENTION_TESTUTIL_H_
#define QUERN_ATTENTION_TESTING_PAGED_ATTENTION_TESTUTIL_H_

// What the tests of paged attention share: random sequences, their layout in a
// cache full of poison, one call through the public interface, the reference,
// and the bound on the difference.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"

namespace quern {

constexpr double kLn2 = 0.6931471805599453;

struct Heads {
  int64_t q_heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 16;
  int64_t v_head_dim = 0;  // 0: head_dim
  float scale = 0;
  int64_t window_left = kNoWindow;
  int64_t window_right = kNoWindow;
  float soft_cap = 0;
  std::vector<float> alibi_slopes = {};
  std::vector<float> sinks = {};
};

struct Lengths {
  int64_t q_len;
  int64_t kv_len;
  bool causal = true;
};

// One sequence: its queries, and all its keys and values, as numbers.
struct Sequence {
  Lengths length;
  std::vector<double> q;                   // [q_len, q_heads, head_dim]
  std::vector<double> k;                   // [kv_len, kv_heads, head_dim]
  std::vector<double> v;                   // [kv_len, kv_heads, v_head_dim]
  std::vector<uint64_t> draft_masks = {};  // of the last queries
};

// How the same numbers are laid out and computed.
struct Variant {
  int64_t page_size = 16;
  std::optional<KvForm> form = KvForm::kPlain;
  int schedule_workers = 1;
  uint64_t page_order = 1;  // seed of the page ids
  KvScaling scaling = KvScaling::kNone;
  Executor* executor = nullptr;  // whose threads have started: see Workers
  // Sequences that begin with the pages of the first of their group.
  std::vector<PrefixGroup> prefix_groups = {};
  std::vector<int32_t> prefix_members = {};
  bool plan_prefixes = true;  // whether the schedule knows of them
  // Whether the pages before the first key that is seen are missing. The cache
  // then begins where memory may not be touched, so that a page before the
  // first one is an event.
  bool give_back = false;
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
    layout.form = variant.form;
    layout.scaling = variant.scaling;
    spec_.kv = KvLayout::Create(layout).value();
    spec_.q_heads = heads.q_heads;
    spec_.q_dtype = DTypeOf<Q>;
    spec_.out_dtype = DTypeOf<Out>;
    spec_.scale = heads.scale;
    spec_.window_left = heads.window_left;
    spec_.window_right = heads.window_right;
    spec_.soft_cap = heads.soft_cap;
    args_.alibi_slopes = heads.alibi_slopes;
    args_.sinks = heads.sinks;
    plan_ = std::make_unique<PagedAttentionPlan>(
        PagedAttentionPlan::Create(spec_).value());
    FillCache(variant, batch);
    FillQueries(batch);
    AttentionBatch lengths = {q_lens_, kv_lens_, causal_, {}, {}};
    if (!draft_masks_.empty()) {
      lengths.draft_lens = draft_lens_;
      lengths.draft_masks = draft_masks_;
    }
    if (variant.plan_prefixes) {
      lengths.prefix_groups = variant.prefix_groups;
      lengths.prefix_members = variant.prefix_members;
    }
    args_.schedule =
        AttentionSchedule::Build(spec_, lengths, AttentionTiles(),
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
      used += DivCeil(s.length.kv_len, layout.page_size()) -
              MissingPages(variant, s.length);
    }
    const int64_t num_pages = used + 3;
    std::vector<int32_t> ids;
    for (int64_t p = 0; p < num_pages; ++p) {
      ids.push_back(static_cast<int32_t>(p));
    }
    Rng(variant.page_order).Shuffle(ids);
    for (size_t i = 0; i < batch.size(); ++i) {
      const auto [leader, tokens] = SharedWith(variant, i);
      for (int64_t t = 0; t < batch[i].length.kv_len; t += layout.page_size()) {
        if (t < tokens) {
          const auto first = static_cast<size_t>(pages_.indptr.at(leader));
          const auto page = static_cast<size_t>(t / layout.page_size());
          pages_.page_ids.push_back(pages_.page_ids.at(first + page));
          continue;
        }
        if (t / layout.page_size() < MissingPages(variant, batch[i].length)) {
          pages_.page_ids.push_back(kNoPage);
          continue;
        }
        pages_.page_ids.push_back(ids.back());
        ids.pop_back();
      }
      pages_.indptr.push_back(static_cast<int64_t>(pages_.page_ids.size()));
    }
    cache_ = std::make_unique<GuardBuffer<Kv>>(
        num_pages * layout.page_bytes() / static_cast<int64_t>(sizeof(Kv)),
        variant.give_back ? Edge::kBegin : Edge::kEnd);
    args_.kv = KvCacheView(layout, num_pages, cache_->data());
    if (layout.scaling() == KvScaling::kPerTensor ||
        layout.scaling() == KvScaling::kPerHead) {
      args_.kv.set_scales({scales_[0], 0, 1}, {scales_[1], 0, 1});
    }
    args_.pages = pages_.Build(layout.page_size(), num_pages).value();
    for (size_t i = 0; i < batch.size(); ++i) {
      for (int64_t t = 0; t < batch[i].length.kv_len; ++t) {
        if (!args_.pages.HasToken(static_cast<int64_t>(i), t)) continue;
        const int64_t slot = args_.pages.Slot(static_cast<int64_t>(i), t);
        for (int64_t h = 0; h < layout.kv_heads(); ++h) {
          const int64_t row = t * layout.kv_heads() + h;
          const int64_t page = slot / layout.page_size();
          const int64_t token = slot % layout.page_size();
          auto* k = reinterpret_cast<Kv*>(args_.kv.K(page, h));
          const double k_scale = Scale(args_.kv.KScales(page, h), token, t + h);
          for (int64_t d = 0; d < layout.head_dim(); ++d) {
            k[layout.KOffset(token, d)] = Code(
                batch[i].k.at(static_cast<size_t>(row * layout.head_dim() + d)),
                k_scale);
          }
          // What write_kv does for an odd head_dim.
          if (layout.k_row() > layout.head_dim()) {
            k[layout.KOffset(token, layout.head_dim())] = Code(0.0, 1.0);
          }
          auto* v = reinterpret_cast<Kv*>(args_.kv.V(page, h));
          const double v_scale =
              Scale(args_.kv.VScales(page, h), token, t + h + 1);
          for (int64_t d = 0; d < layout.v_head_dim(); ++d) {
            v[layout.VOffset(token, d)] =
                Code(batch[i].v.at(
                         static_cast<size_t>(row * layout.v_head_dim() + d)),
                     v_scale);
          }
        }
      }
    }
  }

  // Whole pages before the first key that a query of the sequence sees.
  int64_t MissingPages(const Variant& variant, const Lengths& length) const {
    if (!variant.give_back || spec_.window_left == kNoWindow) return 0;
    const int64_t first = length.kv_len - length.q_len - spec_.window_left;
    return std::max(int64_t{0}, first) / spec_.kv.page_size();
  }

  // The sequence whose pages this one begins with, and for how many tokens: 0,
  // if it has its own.
  static std::pair<size_t, int64_t> SharedWith(const Variant& variant,
                                               size_t sequence) {
    for (const PrefixGroup& group : variant.prefix_groups) {
      const auto first = static_cast<size_t>(group.begin);
      const auto leader = static_cast<size_t>(variant.prefix_members.at(first));
      for (int32_t i = group.begin + 1; i < group.end; ++i) {
        const auto at = static_cast<size_t>(i);
        if (static_cast<size_t>(variant.prefix_members.at(at)) == sequence) {
          return {leader, group.tokens};
        }
      }
    }
    return {0, 0};
  }

  // The scale of a token, which this chooses and writes: 2^-6 or 2^-7, of which
  // the numbers of bytes in the tests are multiples.
  double Scale(float* scales, int64_t token, int64_t choice) const {
    if (scales == nullptr) return 1.0;
    const bool each = spec_.kv.scaling() == KvScaling::kPerTokenHead;
    float& scale = scales[each ? token : 0];
    scale = each && choice % 2 != 0 ? 0x1p-7f : 0x1p-6f;
    return static_cast<double>(scale);
  }
  static Kv Code(double x, double scale) {
    if constexpr (std::is_same_v<Kv, int8_t>) {
      return static_cast<int8_t>(std::lrint(x / scale));
    } else {
      return FromDouble<Kv>(x / scale);
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
      causal_.push_back(s.length.causal ? 1 : 0);
      draft_lens_.push_back(static_cast<int64_t>(s.draft_masks.size()));
      draft_masks_.insert(draft_masks_.end(), s.draft_masks.begin(),
                          s.draft_masks.end());
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
  std::vector<int64_t> q_lens_, kv_lens_, draft_lens_;
  std::vector<uint8_t> causal_;
  std::vector<uint64_t> draft_masks_;
  float scales_[2][64];
  std::unique_ptr<StridedMatrix<Q>> q_;
  std::unique_ptr<StridedMatrix<Out>> out_;
  std::unique_ptr<StridedMatrix<float>> lse_;
  AttentionScheduleStorage storage_;
  std::unique_ptr<GuardBuffer<uint8_t>> workspace_;
  PagedAttentionArgs args_;
};

inline int64_t ValueDim(const Heads& heads) {
  return heads.v_head_dim == 0 ? heads.head_dim : heads.v_head_dim;
}

// Reals in [-1, 1), representable in the type: of bytes, multiples of 2^-6.
template <typename T>
std::vector<double> Reals(Rng& rng, int64_t count) {
  if constexpr (std::is_same_v<T, int8_t>) {
    std::vector<double> x = ToDoubles(SmallIntegers(rng, count, -64, 63));
    for (double& value : x) value /= 64;
    return x;
  } else {
    return ToDoubles(UniformReals<T>(rng, count));
  }
}

template <typename Q, typename Kv>
Sequence RandomSequence(Rng& rng, const Heads& heads, const Lengths& length) {
  return {length, Reals<Q>(rng, length.q_len * heads.q_heads * heads.head_dim),
          Reals<Kv>(rng, length.kv_len * heads.kv_heads * heads.head_dim),
          Reals<Kv>(rng, length.kv_len * heads.kv_heads * ValueDim(heads))};
}

inline ReferenceAttentionResult Reference(const Heads& heads,
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
    spec.causal = s.length.causal;
    spec.window = heads.window_left + 1;
    spec.window_right = s.length.causal ? -1 : heads.window_right;
    spec.soft_cap = static_cast<double>(heads.soft_cap);
    spec.alibi_slopes.assign(heads.alibi_slopes.begin(),
                             heads.alibi_slopes.end());
    spec.sinks.assign(heads.sinks.begin(), heads.sinks.end());
    spec.draft_masks = s.draft_masks;
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
//   weight   relative: ln2 times the error of the logit, and that of exp2;
//            with bf16 dot products it is rounded to bf16 for its value, but
//            not for the sum of the weights
//   merge    each of the chunks again: a subtraction, an exp2, two roundings
//   sums     kv_len roundings each in numerator and denominator
//   output   the division, and the output's type
struct Bounds {
  Bounds(const Heads& heads, int64_t kv_len, double out_roundoff,
         const PagedAttentionPlan& plan) {
    constexpr double kEps = 1.0 / (1 << 23);
    const bool dot = absl::string_view(plan.arithmetic()) == "bf16 dot";
    const double exp2 = dot ? 1.0 / (1 << 18) : 1.0 / (1 << 22);
    const double dim = static_cast<double>(heads.head_dim);
    const double keys = static_cast<double>(kv_len);
    const double scale = heads.scale != 0.0f
                             ? std::abs(static_cast<double>(heads.scale))
                             : 1.0 / std::sqrt(dim);
    // The scale, the cap and the slope are a rounding each, the scale of a
    // key another; tanh is within 8.
    double largest = dim * scale / kLn2;
    double logit =
        largest * (dim + 1 + 2 + (heads.soft_cap > 0 ? 12 : 0)) * kEps;
    for (const float slope : heads.alibi_slopes) {
      largest = std::max(
          largest, dim * scale / kLn2 +
                       std::abs(static_cast<double>(slope)) * keys / kLn2);
    }
    logit += 2 * largest * kEps;
    const double subtraction = 2 * largest * kEps;
    const double chunks =
        std::ceil(keys / static_cast<double>(AttentionSchedule::kChunkTokens));
    const double weight = kLn2 * (logit + subtraction) + exp2 +
                          chunks * (kLn2 * subtraction + exp2 + 2 * kEps);
    // The scale of values and the sink are two roundings more.
    out = 2 * (weight + keys * kEps) + 3 * kEps + out_roundoff +
          (dot ? UnitRoundoff<BFloat16>() : 0.0);
    lse = kLn2 * logit + weight + keys * kEps +
          (kLn2 * largest + std::log(keys + 1)) * 2 * kEps;
  }
  double out;
  double lse;
};

inline int64_t LongestKv(const std::vector<Sequence>& batch) {
  int64_t longest = 0;
  for (const Sequence& s : batch) longest = std::max(longest, s.length.kv_len);
  return longest;
}

// A test of one instruction set.
class AttentionIsaTest : public IsaTest {
 protected:
  // Random sequences of these lengths, against the reference; and if the pages
  // allow for it once more in the paired form, which changes no bit.
  template <typename Q, typename Kv, typename Out>
  void ExpectMatchesReference(const Heads& heads, const Variant& variant,
                              const std::vector<Lengths>& lengths, Rng& rng) {
    SCOPED_TRACE(testing::Message()
                 << "q_heads " << heads.q_heads << " kv_heads "
                 << heads.kv_heads << " head_dim " << heads.head_dim
                 << " v_head_dim " << heads.v_head_dim << " page_size "
                 << variant.page_size << " window " << heads.window_left << " "
                 << heads.window_right);
    std::vector<Sequence> batch;
    for (const Lengths& length : lengths) {
      batch.push_back(RandomSequence<Q, Kv>(rng, heads, length));
    }
    const Attention<Q, Kv, Out> attention(heads, variant, batch);
    EXPECT_RAN_ON(attention.plan());
    const ReferenceAttentionResult want = Reference(heads, batch);
    const Bounds bounds(heads, LongestKv(batch), UnitRoundoff<Out>(),
                        attention.plan());
    EXPECT_TRUE(AllClose(attention.result().out, want.out, bounds.out));
    EXPECT_TRUE(AllClose(attention.result().lse, want.lse, bounds.lse));
    if (variant.page_size % KvLayout::kGroupTokens != 0) return;
    Variant paired = variant;
    paired.form = KvForm::kPaired;
    const Attention<Q, Kv, Out> other(heads, paired, batch);
    EXPECT_TRUE(AllBitsEqual(other.result().out, attention.result().out));
    EXPECT_TRUE(AllBitsEqual(other.result().lse, attention.result().lse));
  }
};

}  // namespace quern

#endif  // QUERN_ATTENTION_TESTING_PAGED_ATTENTION_TESTUTIL_H_
