#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/moe/router_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/moe/router_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/core/activation-inl.h"
#include "quern/core/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The tag is capped because RouterRow has room for 16 lanes beyond its
// elements.
using DF = hn::CappedTag<float, 16>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;

// Returns x with the lowest finite number in place of NaN and -infinity, and
// the highest in place of +infinity. A comparison with NaN is false.
HWY_INLINE VF Finite(VF x) {
  const DF d;
  const auto lowest = hn::Set(d, hwy::LowestValue<float>());
  const auto highest = hn::Set(d, hwy::HighestValue<float>());
  return hn::Min(hn::IfThenElse(hn::Ge(x, lowest), x, lowest), highest);
}

// Writes a vector of -infinity, which is below every choice, behind n elements.
HWY_INLINE void Pad(float* x, size_t n) {
  const DF d;
  hn::StoreU(hn::Neg(hn::Inf(d)), d, x + n);
}

// Returns the score of logits up to max, which for a softmax has yet to be
// divided by the sum. The score of -infinity is 0.
template <RouterScore kScore>
HWY_INLINE VF Score(VF x, VF max) {
  const DF d;
  if constexpr (kScore == RouterScore::kSoftmax) {
    return ExpNonPositive(d, AtLeastExpLowest(d, hn::Sub(x, max)));
  }
  if constexpr (kScore == RouterScore::kSigmoid) return Sigmoid(d, x);
  const auto log1p = Log1pOfFraction(d, ExpOfMinusAbs(d, x));
  return hn::Sqrt(hn::Add(hn::Max(x, hn::Zero(d)), log1p));
}

// Makes the logits finite and returns the largest.
float MakeFinite(float* logits, size_t n) {
  const DF d;
  auto max = hn::Set(d, hwy::LowestValue<float>());
  Pad(logits, n);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto x = Finite(hn::LoadU(d, logits + i));
    max = hn::Max(max, x);
    hn::StoreU(x, d, logits + i);
  }
  Pad(logits, n);
  return hn::ReduceMax(d, max);
}

// scores[i] = score of logits[i]; returns their sum.
template <RouterScore kScore>
float Scores(const float* logits, size_t n, float max, float* scores) {
  const DF d;
  const auto largest = hn::Set(d, max);
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto s = Score<kScore>(hn::LoadU(d, logits + i), largest);
    sum = hn::Add(sum, s);
    hn::StoreU(s, d, scores + i);
  }
  return hn::ReduceSum(d, sum);
}

// scores[i] /= sum; choice[i] = scores[i] + bias[i], finite.
void AddBias(const float* bias, size_t n, float sum, float* scores,
             float* choice) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto s = hn::Div(hn::LoadU(d, scores + i), hn::Set(d, sum));
    hn::StoreU(s, d, scores + i);
    hn::StoreU(Finite(hn::Add(s, hn::LoadU(d, bias + i))), d, choice + i);
  }
  Pad(choice, n);
}

// ranks[i] = how many of the n values come before values[i]: those that are
// larger, and those that are equal and stand before it. Counting has no chain
// of dependent steps, as picking the largest again and again would.
void Rank(const float* values, size_t n, int32_t* ranks) {
  const DF d;
  const DI di;
  const auto one = hn::Set(di, 1);
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < n; i += lanes) {
    const auto v = hn::LoadU(d, values + i);
    const auto index = hn::Iota(di, static_cast<int32_t>(i));
    auto rank = hn::Zero(di);
    const size_t end = HWY_MIN(i + lanes, n);
    for (size_t j = 0; j < i; ++j) {
      const auto before = hn::Ge(hn::Set(d, values[j]), v);
      rank = hn::MaskedAddOr(rank, hn::RebindMask(di, before), rank, one);
    }
    for (size_t j = i; j < end; ++j) {
      const auto other = hn::Set(d, values[j]);
      const auto behind = hn::Gt(index, hn::Set(di, static_cast<int32_t>(j)));
      const auto before =
          hn::Or(hn::RebindMask(di, hn::Gt(other, v)),
                 hn::And(hn::RebindMask(di, hn::Eq(other, v)), behind));
      rank = hn::MaskedAddOr(rank, before, rank, one);
    }
    for (size_t j = end; j < n; ++j) {
      const auto before = hn::Gt(hn::Set(d, values[j]), v);
      rank = hn::MaskedAddOr(rank, hn::RebindMask(di, before), rank, one);
    }
    hn::StoreU(rank, di, ranks + i);
  }
}

// The score of each group of `size` choices: the largest, or with a bias the
// sum of the two largest.
void ScoreGroups(const float* choice, size_t groups, size_t size, bool biased,
                 float* scores) {
  const DF d;
  const DI di;
  const auto nothing = hn::Neg(hn::Inf(d));
  for (size_t g = 0; g < groups; ++g) {
    auto first = nothing, second = nothing;  // largest of each lane
    for (size_t i = 0; i < size; i += hn::Lanes(d)) {
      const auto in_group = hn::FirstN(d, size - i);
      const auto x = hn::IfThenElse(
          in_group, hn::LoadU(d, choice + g * size + i), nothing);
      second = hn::Max(second, hn::Min(first, x));
      first = hn::Max(first, x);
    }
    scores[g] = hn::ReduceMax(d, first);
    if (!biased) continue;
    const size_t at =
        hn::FindKnownFirstTrue(d, hn::Eq(first, hn::Set(d, scores[g])));
    const auto lane =
        hn::Eq(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(at)));
    const float sum =
        scores[g] + hn::ReduceMax(d, hn::IfThenElse(hn::RebindMask(d, lane),
                                                    second, first));
    scores[g] = HWY_MAX(hwy::LowestValue<float>(),
                        HWY_MIN(hwy::HighestValue<float>(), sum));
  }
  Pad(scores, groups);
}

// Leaves the choices of the best groups, and their experts, in ascending order.
// Returns how many there are.
size_t KeepGroups(const RouterSpec& spec, RouterRow& row) {
  const DF d;
  const DI di;
  const size_t groups = static_cast<size_t>(spec.groups);
  const size_t size = static_cast<size_t>(spec.GroupExperts());
  ScoreGroups(row.logits, groups, size, spec.biased, row.values);
  Rank(row.values, groups, row.ranks);
  size_t n = 0;
  for (size_t g = 0; g < groups; ++g) {
    if (row.ranks[g] >= spec.top_groups) continue;
    for (size_t i = 0; i < size; i += hn::Lanes(d)) {
      const size_t from = g * size + i;
      hn::StoreU(hn::LoadU(d, row.logits + from), d, row.values + n + i);
      hn::StoreU(hn::Iota(di, static_cast<int32_t>(from)), di, row.ids + n + i);
    }
    n += size;
  }
  Pad(row.values, n);
  return n;
}

constexpr size_t kMaxColumns = 2 * RouterSpec::kMaxTopK;

// Returns a number that at least k of the n > columns values reach: the k-th
// largest of the maxima of `columns` columns, where value i is in column
// i % columns. k <= columns.
float ReachedByK(const float* values, size_t n, size_t columns, int32_t k) {
  const DF d;
  const DI di;
  const size_t lanes = hn::Lanes(d);
  alignas(64) float maxima[kMaxColumns];
  for (size_t c = 0; c < columns; c += lanes) {
    auto max = hn::LoadU(d, values + c);
    for (size_t i = c + columns; i < n; i += columns) {
      max = hn::Max(max, hn::LoadU(d, values + i));
    }
    hn::Store(max, d, maxima + c);
  }
  const auto one = hn::Set(di, 1);
  auto lowest = hn::Inf(d);
  for (size_t c = 0; c < columns; c += lanes) {
    const auto v = hn::Load(d, maxima + c);
    auto above = hn::Zero(di);
    for (size_t j = 0; j < columns; ++j) {
      const auto larger = hn::Gt(hn::Set(d, maxima[j]), v);
      above = hn::MaskedAddOr(above, hn::RebindMask(di, larger), above, one);
    }
    const auto among = hn::RebindMask(d, hn::Lt(above, hn::Set(di, k)));
    lowest = hn::Min(lowest, hn::IfThenElse(among, v, hn::Inf(d)));
  }
  return hn::ReduceMin(d, lowest);
}

// Leaves the values above `least`, and the first k or more of those equal to
// it, in their order. Returns how many there are.
size_t KeepFrom(float least, size_t k, size_t n, float* values, int32_t* ids) {
  const DF d;
  const DI di;
  const auto bound = hn::Set(d, least);
  size_t kept = 0, equal = 0;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, values + i);
    const auto id = hn::LoadU(di, ids + i);
    const auto keep = equal < k ? hn::Ge(v, bound) : hn::Gt(v, bound);
    equal += hn::CountTrue(d, hn::Eq(v, bound));
    // The store may write a whole vector, which ends where this one was read or
    // before.
    hn::CompressStore(id, hn::RebindMask(di, keep), di, ids + kept);
    kept += hn::CompressStore(v, keep, d, values + kept);
  }
  Pad(values, kept);
  return kept;
}

// Leaves some of the values, the k first among them, for Rank to put in order.
// No more than half of the columns have a maximum above the bound, so a turn
// takes about half of many values away or more, and usually all but few. It
// costs less than ranking from 24 values on (docs/performance_notes.md).
size_t Narrow(size_t n, size_t k, float* values, int32_t* ids) {
  size_t columns = 16;
  while (columns < 2 * k) columns *= 2;
  while (2 * n > 3 * columns) {
    const float least = ReachedByK(values, n, columns, static_cast<int32_t>(k));
    const size_t before = n;
    n = KeepFrom(least, k, n, values, ids);
    if (4 * n > 3 * before) break;  // too little for another turn
  }
  return n;
}

// weights = score(x) for x of the first k ranked experts, divided and scaled.
template <RouterScore kScore>
void WriteWeights(const RouterSpec& spec, RouterRow& row, float sum,
                  float* weights) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const size_t k = static_cast<size_t>(spec.top_k);
  float* const x = row.ranked;
  if (spec.biased) {
    for (size_t j = 0; j < k; ++j) x[j] = row.scores[row.ranked_ids[j]];
    hn::StoreU(hn::Zero(d), d, x + k);
  } else {
    Pad(x, k);
    // x[0] is the largest of all logits, because its group is the best.
    const auto largest = hn::Set(d, x[0]);
    for (size_t j = 0; j < k; j += lanes) {
      hn::StoreU(Score<kScore>(hn::LoadU(d, x + j), largest), d, x + j);
    }
  }
  if (spec.renormalize) {
    auto total = hn::Zero(d);
    for (size_t j = 0; j < k; j += lanes) {
      total = hn::Add(total, hn::LoadU(d, x + j));
    }
    sum = hn::ReduceSum(d, total);
    if (sum == 0.0f) sum = 1.0f;
  }
  for (size_t j = 0; j < k; j += lanes) {
    const auto w = hn::Div(hn::LoadU(d, x + j), hn::Set(d, sum));
    hn::StoreN(hn::Mul(w, hn::Set(d, spec.scale)), d, weights + j,
               HWY_MIN(lanes, k - j));
  }
}

template <RouterScore kScore>
void Route(const RouterSpec& spec, RouterRow& row, float* weights,
           int32_t* ids) {
  const DI di;
  const size_t experts = static_cast<size_t>(spec.experts);
  const size_t k = static_cast<size_t>(spec.top_k);
  constexpr bool kSoftmax = kScore == RouterScore::kSoftmax;
  const float max = MakeFinite(row.logits, experts);
  float sum = 1.0f;
  if (spec.biased || (kSoftmax && !spec.renormalize)) {
    const float all = Scores<kScore>(row.logits, experts, max, row.scores);
    if (kSoftmax) sum = all;
  }
  float* values = row.logits;
  if (spec.biased) {
    AddBias(row.bias, experts, sum, row.scores, values);
    sum = 1.0f;
  }
  size_t n = experts;
  if (spec.groups > 1) {
    values = row.values;
    n = KeepGroups(spec, row);
  } else {
    for (size_t i = 0; i < n; i += hn::Lanes(di)) {
      hn::StoreU(hn::Iota(di, static_cast<int32_t>(i)), di, row.ids + i);
    }
  }
  n = Narrow(n, k, values, row.ids);
  Rank(values, n, row.ranks);
  // All, because a branch on the rank would often be mispredicted.
  for (size_t i = 0; i < n; ++i) {
    const size_t rank = static_cast<size_t>(row.ranks[i]);
    row.ranked[rank] = values[i];
    row.ranked_ids[rank] = row.ids[i];
  }
  for (size_t j = 0; j < k; j += hn::Lanes(di)) {
    hn::StoreN(hn::LoadU(di, row.ranked_ids + j), di, ids + j,
               HWY_MIN(hn::Lanes(di), k - j));
  }
  WriteWeights<kScore>(spec, row, sum, weights);
}

RouterKernels GetKernels(RouterScore score) {
  RouterKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.route = score == RouterScore::kSoftmax ? &Route<RouterScore::kSoftmax>
                  : score == RouterScore::kSigmoid
                      ? &Route<RouterScore::kSigmoid>
                      : &Route<RouterScore::kSqrtSoftplus>;
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
RouterKernels GetRouterKernels(RouterScore score) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(score);
}
}  // namespace quern
#endif  // HWY_ONCE
