// The softmax of one chunk: logits to weights, and what both are worth.

// Per-target include guard.
#if defined(QUERN_ATTENTION_KERNELS_CHUNK_SOFTMAX_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_KERNELS_CHUNK_SOFTMAX_INL_H_
#undef QUERN_ATTENTION_KERNELS_CHUNK_SOFTMAX_INL_H_
#else
#define QUERN_ATTENTION_KERNELS_CHUNK_SOFTMAX_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/attention/kernels/fetcher-inl.h"
#include "quern/attention/kernels/line_arithmetic-inl.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/attention/kernels/softmax_state-inl.h"
#include "quern/core/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// cap * tanh(x / cap); NaN for NaN.
HWY_INLINE VF32 SoftCap(VF32 x, VF32 cap) {
  const LineF32 df;
  const VF32 y = hn::Div(x, cap);
  const VF32 e =
      ExpM1NonPositive(df, hn::Max(hn::Mul(hn::Set(df, -2.0f), hn::Abs(y)),
                                   hn::Set(df, kExpLowest)));
  const VF32 tanh = hn::Div(hn::Neg(e), hn::Add(hn::Set(df, 2.0f), e));
  return hn::IfThenElse(hn::IsNaN(y), y, hn::Mul(cap, hn::CopySign(tanh, y)));
}

// The logits [first, last) of a row, scaled and what else the chunk asks for.
HWY_INLINE void TransformRow(const ChunkArgs& c, size_t row, size_t first,
                             size_t last, float* logits) {
  const LineF32 df;
  for (size_t t = first; t < last; t += kVecLanes) {
    VF32 x = hn::Mul(hn::LoadU(df, logits + t), hn::Set(df, c.scale_log2e));
    if (c.k_scales != nullptr) {
      x = hn::Mul(x, hn::LoadU(df, c.k_scales + t));
    }
    if (c.soft_cap_log2e > 0.0f) {
      x = SoftCap(x, hn::Set(df, c.soft_cap_log2e));
    }
    if (c.slopes != nullptr) {
      const VF32 ahead = hn::Add(
          hn::Set(df, c.ahead[row] + static_cast<float>(t)), hn::Iota(df, 0));
      x = hn::MulAdd(hn::Set(df, c.slopes[row]), ahead, x);
    }
    hn::StoreU(x, df, logits + t);
  }
}

// What is left to multiply the logits of a row by, once they are transformed.
HWY_INLINE bool IsTransformed(const ChunkArgs& c) {
  return c.k_scales != nullptr || c.soft_cap_log2e > 0.0f ||
         c.slopes != nullptr;
}
HWY_INLINE float LogitFactor(const ChunkArgs& c) {
  return IsTransformed(c) ? 1.0f : c.scale_log2e;
}

// Replaces the logits of tokens that are hidden from the row by -inf, among the
// logits [first, last).
HWY_INLINE void HideTokens(const ChunkArgs& c, size_t row, size_t first,
                           size_t last, float* logits) {
  const LineF32 df;
  const LineU32 du;
  const VF32 nothing = hn::Set(df, SoftmaxState().max);
  const auto lane = hn::Shl(hn::Set(du, 1), hn::Iota(du, 0));
  // The vector that holds the first of them may begin before it.
  const size_t begin = HWY_MAX(first, c.hidden_begin / kVecLanes * kVecLanes);
  const size_t end = HWY_MIN(last, c.hidden_begin + 64);
  for (size_t t = begin; t < end; t += kVecLanes) {
    const auto bits = static_cast<uint32_t>(HiddenFrom(c, row, t));
    const auto hide = hn::Ne(hn::And(hn::Set(du, bits), lane), hn::Zero(du));
    hn::StoreU(hn::IfThenElse(hn::RebindMask(df, hide), nothing,
                              hn::LoadU(df, logits + t)),
               df, logits + t);
  }
}

// The softmax of a chunk takes three passes over all rows, so that none waits
// for the latency of the one before in the same row.
//
// The first: logits masked, and weights[2 * row] becomes their maximum, not yet
// times LogitFactor: the largest logit must be 1 after exp2, however large it
// is, which it is not where a rounded product is taken from an exact one.
HWY_INLINE void MaxOfRow(const ChunkArgs& c, size_t row, TokenRange groups) {
  const LineF32 df;
  float* logits = c.logits + row * kRowWords;
  const size_t begin = c.seen[row].begin;
  const size_t end = HWY_MAX(c.seen[row].end, c.seen[row].begin);
  const size_t first = groups.begin * kGroupTokens;
  const size_t last = groups.end * kGroupTokens;
  // Whole vectors that the row sees, all of each.
  const size_t inner_begin = (begin + kVecLanes - 1) / kVecLanes * kVecLanes;
  const size_t inner_end = end / kVecLanes * kVecLanes;

  if (IsTransformed(c)) TransformRow(c, row, first, last, logits);

  // A vector that is seen in part gets -inf in the rest.
  const VF32 nothing = hn::Set(df, SoftmaxState().max);
  const auto mask = [&](size_t t) HWY_ATTR {
    const hn::RebindToSigned<LineF32> di;
    const auto token =
        hn::Add(hn::Iota(di, 0), hn::Set(di, static_cast<int>(t)));
    const auto seen =
        hn::And(hn::Ge(token, hn::Set(di, static_cast<int>(begin))),
                hn::Lt(token, hn::Set(di, static_cast<int>(end))));
    hn::StoreU(hn::IfThenElse(hn::RebindMask(df, seen),
                              hn::LoadU(df, logits + t), nothing),
               df, logits + t);
  };
  for (size_t t = first; t < last; t += kVecLanes) {
    if (t >= inner_begin && t < inner_end) {
      t = inner_end - kVecLanes;
      continue;
    }
    mask(t);
  }
  if (c.hidden != nullptr) HideTokens(c, row, first, last, logits);

  VF32 most = nothing;
  VF32 most1 = nothing;
  size_t t = first;
  for (; t + 2 * kVecLanes <= last; t += 2 * kVecLanes) {
    most = hn::Max(most, hn::LoadU(df, logits + t));
    most1 = hn::Max(most1, hn::LoadU(df, logits + t + kVecLanes));
  }
  if (t < last) most = hn::Max(most, hn::LoadU(df, logits + t));
  c.weights[2 * row] = hn::ReduceMax(df, hn::Max(most, most1));
}

// The second: logits in place to weights, zeros in the groups that the row's
// tile has beyond its own; weights[2 * row + 1] becomes their sum.
template <class A>
HWY_INLINE void ExpOfRow(const ChunkArgs& c, Fetcher& fetcher, size_t row,
                         TokenRange groups) {
  const LineF32 df;
  // One memory: the weights of a vector lie at or before its logits.
  float* logits = c.logits + row * kRowWords;
  auto* words = reinterpret_cast<uint32_t*>(logits);
  const VF32 max = hn::Set(df, FiniteMax(c.weights[2 * row]));
  const VF32 scale = hn::Set(df, LogitFactor(c));
  VF32 sum = hn::Zero(df);
  const size_t last = groups.end * kGroupTokens;
  size_t t = groups.begin * kGroupTokens;
  while (t < last) {
    fetcher.Step();
    HWY_UNROLL(4)
    for (size_t v = 0; v < kLineVecs; ++v, t += kVecLanes) {
      const VF32 p =
          A::Exp2(hn::Mul(hn::Sub(hn::LoadU(df, logits + t), max), scale));
      sum = hn::Add(sum, p);
      if (c.v_scales != nullptr) {
        // A scale of NaN is for those who see the token.
        A::StoreWeights(
            hn::IfThenZeroElse(hn::Eq(p, hn::Zero(df)),
                               hn::Mul(p, hn::LoadU(df, c.v_scales + t))),
            words, t);
      } else {
        A::StoreWeights(p, words, t);
      }
    }
  }
  c.weights[2 * row + 1] = hn::ReduceSum(df, sum);
}

// The third, rows in lanes: the chunk's (max, sum) go into the state, and
// `weights` become what to multiply the old output and the chunk's by.
HWY_INLINE void UpdateStates(const ChunkArgs& c) {
  const LineF32 df;
  for (size_t row = 0; row < c.rows; row += kVecLanes) {
    const size_t n = HWY_MIN(kVecLanes, c.rows - row);
    HWY_ALIGN float old_max[kVecLanes] = {}, old_sum[kVecLanes] = {};
    HWY_ALIGN float new_max[kVecLanes] = {}, new_sum[kVecLanes] = {};
    for (size_t i = 0; i < n; ++i) {
      const SoftmaxState old = c.first ? SoftmaxState() : c.state[row + i];
      old_max[i] = old.max;
      old_sum[i] = old.sum;
      new_max[i] = c.weights[2 * (row + i)] * LogitFactor(c);
      new_sum[i] = c.weights[2 * (row + i) + 1];
    }
    const auto weights =
        WeightsOf(df, hn::Load(df, old_max), hn::Load(df, new_max));
    const VF32 theirs = hn::Mul(weights.b, hn::Load(df, new_sum));
    hn::Store(hn::MulAdd(weights.a, hn::Load(df, old_sum), theirs), df,
              new_sum);
    hn::Store(weights.max, df, new_max);
    hn::Store(weights.a, df, old_max);
    hn::Store(weights.b, df, old_sum);
    for (size_t i = 0; i < n; ++i) {
      c.state[row + i] = {new_max[i], new_sum[i]};
      c.weights[2 * (row + i)] = old_max[i];
      c.weights[2 * (row + i) + 1] = old_sum[i];
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
