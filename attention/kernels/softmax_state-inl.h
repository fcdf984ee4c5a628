// The softmax of a row, piece by piece: exp2, the state of one piece, and the
// merge of two. Logits are in units of log2.
//
//   max = the largest logit           -inf if there is none
//   sum = sum of exp2(logit - max)    0 if there is none, or all are -inf
//
// A logit of -inf has weight 0, also where every logit is -inf: never
// -inf - -inf. A NaN among the logits makes the sum NaN, and a NaN in a state
// makes every merge with it NaN.

// Per-target include guard.
#if defined(QUERN_ATTENTION_KERNELS_SOFTMAX_STATE_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_KERNELS_SOFTMAX_STATE_INL_H_
#undef QUERN_ATTENTION_KERNELS_SOFTMAX_STATE_INL_H_
#else
#define QUERN_ATTENTION_KERNELS_SOFTMAX_STATE_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "quern/attention/kernels/softmax_state.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 2^x for x <= 0, within 2^-22 of it, relatively; exactly 1 for 0; 0 below
// 2^-126; NaN for NaN. With n the integer nearest to x, 2^x = 2^n * 2^(x - n);
// the second factor is a polynomial with relative error 1.6e-8 (minimax, with
// the constant term fixed at 1), which six roundings make 1.5e-7.
template <class DF, class V = hn::Vec<DF>>
HWY_INLINE V Exp2OfNegative(DF df, V x) {
  const hn::RebindToSigned<DF> di;
  // The unit in the last place of the sum is 1, and its lower bits are n.
  const V round = hn::Set(df, 0x1.8p23f);
  const V sum = hn::Add(x, round);
  const V n = hn::Sub(sum, round);
  const V f = hn::Sub(x, n);  // exact
  V p = hn::Set(df, 0.00015353362f);
  p = hn::MulAdd(p, f, hn::Set(df, 0.00133988739f));
  p = hn::MulAdd(p, f, hn::Set(df, 0.00961843692f));
  p = hn::MulAdd(p, f, hn::Set(df, 0.0555033237f));
  p = hn::MulAdd(p, f, hn::Set(df, 0.240226477f));
  p = hn::MulAdd(p, f, hn::Set(df, 0.693147182f));
  p = hn::MulAdd(p, f, hn::Set(df, 1.0f));
  const auto power =
      hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, sum)), hn::Set(di, 127 << 23));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(df, -126.0f)),
                            hn::Mul(p, hn::BitCast(df, power)));
}

// What to subtract from logits whose maximum is `max`: 0 where that is -inf.
HWY_INLINE float FiniteMax(float max) {
  return max == SoftmaxState().max ? 0.0f : max;
}

template <class DF, class V = hn::Vec<DF>>
HWY_INLINE V FiniteMaxV(DF df, V max) {
  return hn::IfThenZeroElse(hn::Eq(max, hn::Set(df, SoftmaxState().max)), max);
}

// The state of logits[tokens], which become exp2(logit - max). Works on whole
// vectors: what is beyond `tokens` in the last one becomes 0.
template <class DF>
HWY_INLINE SoftmaxState SoftmaxOf(DF df, float* HWY_RESTRICT logits,
                                  size_t tokens) {
  const size_t lanes = hn::Lanes(df);
  SoftmaxState state;
  auto max = hn::Set(df, state.max);
  for (size_t t = 0; t < tokens; t += lanes) {
    if (tokens - t < lanes) {
      hn::Store(hn::LoadNOr(hn::Set(df, state.max), df, logits + t, tokens - t),
                df, logits + t);
    }
    max = hn::Max(max, hn::Load(df, logits + t));
  }
  state.max = hn::ReduceMax(df, max);

  const auto finite_max = hn::Set(df, FiniteMax(state.max));
  auto sum = hn::Zero(df);
  for (size_t t = 0; t < tokens; t += lanes) {
    const auto p =
        Exp2OfNegative(df, hn::Sub(hn::Load(df, logits + t), finite_max));
    hn::Store(p, df, logits + t);
    sum = hn::Add(sum, p);
  }
  state.sum = hn::ReduceSum(df, sum);
  return state;
}

// What sums of which the maximum is `a`, or `b`, are to be multiplied by in the
// union of both, whose maximum is `max`.
template <class V>
struct MergeWeights {
  V max;
  V a;
  V b;
};

template <class DF, class V = hn::Vec<DF>>
HWY_INLINE MergeWeights<V> WeightsOf(DF df, V a, V b) {
  const V max = hn::IfThenElse(hn::Gt(b, a), b, a);
  const V finite_max = FiniteMaxV(df, max);
  return {max, Exp2OfNegative(df, hn::Sub(a, finite_max)),
          Exp2OfNegative(df, hn::Sub(b, finite_max))};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
