#include "quern/core/float_type.h"
#include "quern/core/prefetch.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/recurrent/state_update_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrent/state_update_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/core/activation-inl.h"
#include "quern/ops/recurrent/decay-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 64>;
using VF = hn::Vec<DF>;

// ln(1 + e^x) = max(x, 0) + ln(1 + u), u = e^-|x|, within 16 + |x| / 20 units
// of 2^-24, relative. With s = u / (2 + u) <= 1/3, ln(1 + u) = 2 atanh(s),
// whose series through s^13 is within 2^-26 of it, relative.
HWY_INLINE VF Softplus(VF x) {
  const DF d;
  const auto zero = hn::Zero(d);
  const auto u = ExpOfMinusAbs(d, x);
  const auto s = hn::Div(u, hn::Add(u, hn::Set(d, 2.0f)));
  const auto s2 = hn::Mul(s, s);
  auto p = hn::Set(d, 2.0f / 13);
  p = hn::MulAdd(p, s2, hn::Set(d, 2.0f / 11));
  p = hn::MulAdd(p, s2, hn::Set(d, 2.0f / 9));
  p = hn::MulAdd(p, s2, hn::Set(d, 2.0f / 7));
  p = hn::MulAdd(p, s2, hn::Set(d, 2.0f / 5));
  p = hn::MulAdd(p, s2, hn::Set(d, 2.0f / 3));
  p = hn::MulAdd(p, s2, hn::Set(d, 2.0f));
  return hn::MulAdd(p, s, hn::IfThenElse(hn::Gt(x, zero), x, zero));
}

void Delta(const float* dt, const float* bias, bool softplus, size_t rows,
           float* delta) {
  const DF d;
  for (size_t i = 0; i < rows; i += hn::Lanes(d)) {
    const auto x = hn::Add(hn::Load(d, dt + i), hn::Load(d, bias + i));
    hn::Store(softplus ? Softplus(x) : x, d, delta + i);
  }
}

void Finish(const float* dp, const float* x, const float* z, size_t rows,
            float* y) {
  const DF d;
  for (size_t i = 0; i < rows; i += hn::Lanes(d)) {
    auto v =
        hn::MulAdd(hn::Load(d, dp + i), hn::Load(d, x + i), hn::Load(d, y + i));
    if (z != nullptr) v = hn::Mul(v, Silu(d, hn::Load(d, z + i)));
    hn::Store(v, d, y + i);
  }
}

// A row of the state before the token and after it, with its decays: one for
// all, or a vector at a time.
template <bool kPerRow, typename S>
struct Row {
  HWY_INLINE VF DecayAt(size_t i, size_t n) const {
    const DF d;
    if constexpr (!kPerRow) {
      return decay;
    } else {
      const auto rates =
          n >= hn::Lanes(d) ? hn::LoadU(d, a + i) : hn::LoadN(d, a + i, n);
      return Decay(DF(), hn::Mul(rates, delta));
    }
  }
  HWY_INLINE VF New(VF old, size_t i, size_t n) const {
    const DF d;
    return hn::MulAdd(DecayAt(i, n), old, hn::Mul(hn::Load(d, b + i), dx));
  }
  // The new elements from i on, and sum plus their products with c.
  HWY_INLINE VF Full(size_t i, VF sum) const {
    const DF d;
    const auto next = New(LoadF32(d, s + i), i, hn::Lanes(d));
    StoreF32(next, d, to + i);
    return hn::MulAdd(next, hn::Load(d, c + i), sum);
  }
  // Two vectors, whose codes are made together.
  HWY_INLINE void Full2(size_t i, VF& sum0, VF& sum1) const {
    const DF d;
    const size_t j = i + hn::Lanes(d);
    const auto next0 = New(LoadF32(d, s + i), i, hn::Lanes(d));
    const auto next1 = New(LoadF32(d, s + j), j, hn::Lanes(d));
    StoreF32x2(next0, next1, d, to + i);
    sum0 = hn::MulAdd(next0, hn::Load(d, c + i), sum0);
    sum1 = hn::MulAdd(next1, hn::Load(d, c + j), sum1);
  }
  HWY_INLINE VF Tail(size_t i, size_t n, VF sum) const {
    const DF d;
    const auto next = New(LoadNF32(d, s + i, n), i, n);
    StoreNF32(next, d, to + i, n);
    // Behind the row, 0 times an infinite dx is NaN.
    const auto in_row = hn::IfThenElseZero(hn::FirstN(d, n), next);
    return hn::MulAdd(in_row, hn::Load(d, c + i), sum);
  }
  const S* s;
  S* to;
  const float* a;
  const float* b;
  const float* c;
  VF decay, delta, dx;
};

// Two sums: rows are independent, and several are in flight at once.
template <bool kPerRow, typename S>
HWY_INLINE float UpdateRow(const Row<kPerRow, S>& row, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = sum0;
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    row.Full2(i, sum0, sum1);
  }
  if (i + lanes <= n) {
    sum0 = row.Full(i, sum0);
    i += lanes;
  }
  if (i < n) sum1 = row.Tail(i, n - i, sum1);
  return hn::ReduceSum(d, hn::Add(sum0, sum1));
}

// Rows that follow in memory are asked for this many bytes ahead, also where
// they are rows of the next head.
constexpr size_t kAhead = 4096;

template <bool kPerRow, typename S>
HWY_INLINE void UpdateRows(const StateUpdateStep& step) {
  const DF d;
  Row<kPerRow, S> row;
  row.s = static_cast<const S*>(step.from);
  row.to = static_cast<S*>(step.to);
  row.a = step.a;
  row.b = step.b;
  row.c = step.c;
  row.decay = Decay(DF(), hn::Set(d, step.a_head * step.delta[0]));
  for (size_t p = 0; p < step.rows; ++p) {
    // Integers, because a pointer may not lead out of what was allocated.
    PrefetchL2(reinterpret_cast<const void*>(
                   reinterpret_cast<uintptr_t>(row.s) + kAhead),
               step.n * sizeof(S));
    row.delta = hn::Set(d, step.delta[p]);
    row.dx = hn::Set(d, step.delta[p] * step.x[p]);
    step.y[p] = UpdateRow(row, step.n);
    row.s += step.from_stride;
    row.to += step.to_stride;
    if constexpr (kPerRow) row.a += step.a_stride;
  }
}

template <typename S>
void Step(const StateUpdateStep& step) {
  if (step.a == nullptr) {
    UpdateRows<false, S>(step);
  } else {
    UpdateRows<true, S>(step);
  }
}

StateUpdateKernels GetKernels(DType state) {
  StateUpdateKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.delta = &Delta;
  kernels.step =
      WithFloatType(state, [](auto type) { return &Step<decltype(type)>; });
  kernels.finish = &Finish;
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
StateUpdateKernels GetStateUpdateKernels(DType state) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(state);
}
}  // namespace quern
#endif  // HWY_ONCE
