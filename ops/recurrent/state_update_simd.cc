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

// x as a state of S holds it.
template <typename S>
HWY_INLINE VF Rounded(VF x) {
  const DF d;
  if constexpr (hwy::IsSame<S, float>()) {
    return x;
  } else {
    return DecodeCodes<S>(d, EncodeCodes<S>(d, x));
  }
}

template <typename S>
HWY_INLINE void Keep(VF x, bool stream, S* to) {
  if constexpr (hwy::IsSame<S, float>()) {
    if (stream) return hn::Stream(x, DF(), to);
  }
  StoreF32(x, DF(), to);
}

// What the tokens have for one row. Vectors 2 t and 2 t + 1 of `sums` are the
// two sums of token t, as in UpdateRow.
struct DraftRow {
  const float* decay;  // of each token
  const float* dx;     // of each token
  const float* delta;  // of each token, kDraftRows apart
  const float* a;
  float* sums;
};

// kVectors vectors of row p from column i on, or n < lanes columns. kAll: the
// row has no others, and vector 2 t of row.sums becomes the sum of token t's
// two.
template <bool kPerRow, size_t kVectors, bool kTail, bool kAll, typename S>
HWY_INLINE void DraftColumns(const StateUpdateDrafts& drafts,
                             const DraftRow& row, size_t p, size_t i,
                             size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  VF s[kVectors], rates[kVectors];
  const S* const from =
      static_cast<const S*>(drafts.from) + p * drafts.from_stride + i;
  HWY_UNROLL(8)
  for (size_t v = 0; v < kVectors; ++v) {
    if constexpr (kTail) {
      s[v] = LoadNF32(d, from + v * lanes, n);
      if (kPerRow) rates[v] = hn::LoadN(d, row.a + i + v * lanes, n);
    } else {
      s[v] = LoadF32(d, from + v * lanes);
      if (kPerRow) rates[v] = hn::LoadU(d, row.a + i + v * lanes);
    }
  }
  const float* HWY_RESTRICT b = drafts.b + i;
  const float* HWY_RESTRICT c = drafts.c + i;
  const size_t bc_stride = drafts.bc_stride;
  for (size_t t = 0; t < drafts.tokens; ++t) {
    float* const at = row.sums + 2 * t * lanes;
    VF sums[2] = {kAll ? hn::Zero(d) : hn::Load(d, at),
                  kAll ? hn::Zero(d) : hn::Load(d, at + lanes)};
    const auto dx = hn::Set(d, row.dx[t]);
    auto decay = hn::Set(d, kPerRow ? row.delta[t * kDraftRows] : row.decay[t]);
    const auto delta = decay;
    const StateKeep keep = drafts.keep[t];
    HWY_UNROLL(8)
    for (size_t v = 0; v < kVectors; ++v) {
      if (kPerRow) decay = Decay(DF(), hn::Mul(rates[v], delta));
      const auto next =
          hn::MulAdd(decay, s[v], hn::Mul(hn::Load(d, b + v * lanes), dx));
      // Behind the row, 0 times an infinite dx is NaN.
      const auto in_row =
          kTail ? hn::IfThenElseZero(hn::FirstN(d, n), next) : next;
      VF& sum = sums[kTail ? 1 : v % 2];
      sum = hn::MulAdd(in_row, hn::Load(d, c + v * lanes), sum);
      s[v] = Rounded<S>(next);
    }
    if (keep.to != nullptr) {
      S* const to = static_cast<S*>(keep.to) + p * keep.stride + i;
      HWY_UNROLL(8)
      for (size_t v = 0; v < kVectors; ++v) {
        if constexpr (kTail) {
          StoreNF32(s[v], d, to + v * lanes, n);
        } else {
          Keep(s[v], keep.stream, to + v * lanes);
        }
      }
    }
    if (kAll) {
      hn::Store(hn::Add(sums[0], sums[1]), d, at);
    } else {
      hn::Store(sums[0], d, at);
      hn::Store(sums[1], d, at + lanes);
    }
    b += bc_stride;
    c += bc_stride;
  }
}

// A row of any length.
template <bool kPerRow, typename S>
HWY_INLINE void DraftPanels(const StateUpdateDrafts& drafts,
                            const DraftRow& row, size_t p) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  for (size_t t = 0; t < 2 * drafts.tokens; ++t) {
    hn::Store(hn::Zero(d), d, row.sums + t * lanes);
  }
  size_t i = 0;
  for (; i + 8 * lanes <= drafts.n; i += 8 * lanes) {
    DraftColumns<kPerRow, 8, false, false, S>(drafts, row, p, i, lanes);
  }
  for (; i + 2 * lanes <= drafts.n; i += 2 * lanes) {
    DraftColumns<kPerRow, 2, false, false, S>(drafts, row, p, i, lanes);
  }
  if (i + lanes <= drafts.n) {
    DraftColumns<kPerRow, 1, false, false, S>(drafts, row, p, i, lanes);
    i += lanes;
  }
  if (i < drafts.n) {
    DraftColumns<kPerRow, 1, true, false, S>(drafts, row, p, i, drafts.n - i);
  }
  for (size_t t = 0; t < drafts.tokens; ++t) {
    float* const at = row.sums + 2 * t * lanes;
    hn::Store(hn::Add(hn::Load(d, at), hn::Load(d, at + lanes)), d, at);
  }
}

template <bool kPerRow, typename S>
void DraftRows(const StateUpdateDrafts& drafts) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  HWY_ALIGN float sums[2 * kDraftTokens * 16];
  HWY_ALIGN float decay[kDraftTokens];
  HWY_ALIGN float dx[kDraftTokens];
  DraftRow row;
  row.decay = decay;
  row.dx = dx;
  row.sums = sums;
  row.a = drafts.a;
  if (!kPerRow) {
    for (size_t t = 0; t < drafts.tokens; ++t) {
      decay[t] = hn::GetLane(Decay(
          DF(), hn::Set(d, drafts.a_head * drafts.delta[t * kDraftRows])));
    }
  }
  for (size_t p = 0; p < drafts.rows; ++p) {
    // Integers, because a pointer may not lead out of what was allocated.
    PrefetchL2(
        reinterpret_cast<const void*>(
            reinterpret_cast<uintptr_t>(static_cast<const S*>(drafts.from) +
                                        p * drafts.from_stride) +
            kAhead),
        drafts.n * sizeof(S));
    row.delta = drafts.delta + p;
    for (size_t t = 0; t < drafts.tokens; ++t) {
      const size_t at = t * kDraftRows + p;
      dx[t] = drafts.delta[at] * drafts.x[at];
    }
    if (drafts.n == 8 * lanes) {
      DraftColumns<kPerRow, 8, false, true, S>(drafts, row, p, 0, lanes);
    } else {
      DraftPanels<kPerRow, S>(drafts, row, p);
    }
    for (size_t t = 0; t < drafts.tokens; ++t) {
      drafts.y[t * kDraftRows + p] =
          hn::ReduceSum(d, hn::Load(d, sums + 2 * t * lanes));
    }
    if (kPerRow) row.a += drafts.a_stride;
  }
}

template <typename S>
void Drafts(const StateUpdateDrafts& drafts) {
  if (drafts.a == nullptr) {
    DraftRows<false, S>(drafts);
  } else {
    DraftRows<true, S>(drafts);
  }
}

void Flush() { hwy::FlushStream(); }

StateUpdateKernels GetKernels(DType state) {
  StateUpdateKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.delta = &Delta;
  kernels.step =
      WithFloatType(state, [](auto type) { return &Step<decltype(type)>; });
  kernels.drafts =
      WithFloatType(state, [](auto type) { return &Drafts<decltype(type)>; });
  kernels.flush = &Flush;
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
