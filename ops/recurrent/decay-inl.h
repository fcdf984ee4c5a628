// Per-target include: the factor by which a step of a recurrence decays a
// state.

// clang-format off
#if defined(QUERN_OPS_RECURRENT_DECAY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_OPS_RECURRENT_DECAY_INL_H_
#undef QUERN_OPS_RECURRENT_DECAY_INL_H_
#else
#define QUERN_OPS_RECURRENT_DECAY_INL_H_
#endif
// clang-format on

#include "hwy/highway.h"
#include "quern/core/activation-inl.h"
#include "quern/core/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// exp(min(x, 0)), which is exactly 1 where x >= 0; NaN for NaN.
template <class D>
HWY_INLINE hn::Vec<D> Decay(D d, hn::Vec<D> x) {
  const auto none = hn::Ge(x, hn::Zero(d));
  const auto negative = hn::IfThenElse(none, hn::Zero(d), x);
  return hn::IfThenElse(none, hn::Set(d, 1.0f),
                        ExpNonPositive(d, AtLeastExpLowest(d, negative)));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
