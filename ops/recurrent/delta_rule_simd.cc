#include "quern/core/float_type.h"
#include "quern/core/prefetch.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/recurrent/delta_rule_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrent/delta_rule_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/ops/recurrent/decay-inl.h"
#include "quern/ops/recurrent/delta_pass-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// x[i] *= factor, up to the end of the last vector.
HWY_INLINE void Scale(float factor, size_t n, float* x) {
  const DF d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(hn::Mul(hn::Load(d, x + i), hn::Set(d, factor)), d, x + i);
  }
}

// Sum of x[i] y[i]. What fills the last vector is zero.
HWY_INLINE float Dot(const float* x, const float* y, size_t n) {
  const DF d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    sum = hn::MulAdd(hn::Load(d, x + i), hn::Load(d, y + i), sum);
  }
  return hn::ReduceSum(d, sum);
}

HWY_INLINE float InverseNorm(const float* x, size_t n, float eps) {
  const hn::CappedTag<float, 1> d1;
  const auto sum = hn::Set(d1, Dot(x, x, n) + eps);
  return 1.0f / hn::GetLane(hn::Sqrt(sum));
}

void Prepare(const float* g, bool g_per_row, size_t dk,
             const DeltaRuleNorm& norm, DeltaRuleToken& token) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  if (norm.l2) {
    Scale(InverseNorm(token.k, dk, norm.eps), dk, token.k);
    Scale(InverseNorm(token.q, dk, norm.eps), dk, token.q);
  }
  Scale(norm.scale, dk, token.q);
  token.kq = Dot(token.k, token.q, dk);
  auto a = Decay(DF(), hn::Set(d, g[0]));
  for (size_t i = 0; i < dk; i += lanes) {
    if (g_per_row) {
      a = Decay(DF(), i + lanes <= dk ? hn::LoadU(d, g + i)
                                      : hn::LoadN(d, g + i, dk - i));
    }
    hn::Store(a, d, token.a + i);
    hn::Store(hn::Mul(a, hn::Load(d, token.k + i)), d, token.ak + i);
    hn::Store(hn::Mul(a, hn::Load(d, token.q + i)), d, token.aq + i);
  }
}

// Sums over rows, in the order of the rows: the bits of a column do not depend
// on how many rows are in flight, nor on the vector that it is in.
struct Sums {
  VF a, b;
};

template <bool kTail, typename S>
HWY_INLINE Sums AddRow(Sums sums, const S* row, size_t n, float ak, float aq) {
  const DF d;
  const auto s = LoadState<kTail>(row, n);
  return {hn::MulAdd(s, hn::Set(d, ak), sums.a),
          hn::MulAdd(s, hn::Set(d, aq), sums.b)};
}

// Four rows in flight: as many streams as a prefetcher follows, and the sums
// are loaded and stored once for all of them.
template <bool kTail, typename S>
HWY_INLINE void GatherRows(const S* s, size_t stride, size_t rows, size_t n,
                           const float* ak, const float* aq, float* a,
                           float* b) {
  const DF d;
  Sums sums = {hn::Load(d, a), hn::Load(d, b)};
  sums = AddRow<kTail>(sums, s, n, ak[0], aq[0]);
  if (rows > 1) sums = AddRow<kTail>(sums, s + stride, n, ak[1], aq[1]);
  if (rows > 2) sums = AddRow<kTail>(sums, s + 2 * stride, n, ak[2], aq[2]);
  if (rows > 3) sums = AddRow<kTail>(sums, s + 3 * stride, n, ak[3], aq[3]);
  hn::Store(sums.a, d, a);
  hn::Store(sums.b, d, b);
}

// The state that is wanted next, row by row. Half of it is asked for during
// each sweep, so that memory is busy in both.
template <typename S>
struct Ahead {
  HWY_INLINE explicit Ahead(const DeltaRuleStep& step)
      : row(static_cast<const S*>(step.next)),
        stride(step.next_stride),
        bytes(step.columns * sizeof(S)),
        left(row == nullptr ? 0 : step.rows) {}
  HWY_INLINE void Row() {
    if (left == 0) return;
    PrefetchL2(row, bytes);
    row += stride;
    --left;
  }
  const S* row;
  size_t stride, bytes, left;
};

// a[c] = sum over i of s[i, c] ak[i], b[c] that of s[i, c] aq[i].
template <typename S>
HWY_INLINE void Gather(const DeltaRuleToken& token, const DeltaRuleStep& step,
                       Ahead<S>& ahead, float* a, float* b) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const size_t columns = step.columns;
  for (size_t c = 0; c < columns; c += lanes) {
    hn::Store(hn::Zero(d), d, a + c);
    hn::Store(hn::Zero(d), d, b + c);
  }
  const S* s = static_cast<const S*>(step.from);
  const size_t stride = step.from_stride;
  for (size_t i = 0; i < step.rows; i += 4, s += 4 * stride) {
    const float* const ak = token.ak + i;
    const float* const aq = token.aq + i;
    const size_t rows = HWY_MIN(step.rows - i, size_t{4});
    ahead.Row();
    ahead.Row();
    size_t c = 0;
    if (rows == 4) {
      for (; c + lanes <= columns; c += lanes) {
        GatherRows<false>(s + c, stride, 4, lanes, ak, aq, a + c, b + c);
      }
    }
    for (; c + lanes <= columns; c += lanes) {
      GatherRows<false>(s + c, stride, rows, lanes, ak, aq, a + c, b + c);
    }
    if (c < columns) {
      GatherRows<true>(s + c, stride, rows, columns - c, ak, aq, a + c, b + c);
    }
  }
}

// to[c] = a s[c] + k delta[c], where `to` may be s.
template <typename S>
HWY_INLINE void UpdateRow(const S* s, size_t columns, float a, float k,
                          const float* delta, S* to) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto va = hn::Set(d, a);
  const auto vk = hn::Set(d, k);
  size_t c = 0;
  for (; c + 2 * lanes <= columns; c += 2 * lanes) {
    const auto x0 = hn::Mul(vk, hn::Load(d, delta + c));
    const auto x1 = hn::Mul(vk, hn::Load(d, delta + c + lanes));
    StoreF32x2(hn::MulAdd(va, LoadF32(d, s + c), x0),
               hn::MulAdd(va, LoadF32(d, s + c + lanes), x1), d, to + c);
  }
  for (; c < columns; c += lanes) {
    const size_t n = HWY_MIN(lanes, columns - c);
    const auto x = hn::Mul(vk, hn::Load(d, delta + c));
    StoreNF32(hn::MulAdd(va, LoadNF32(d, s + c, n), x), d, to + c, n);
  }
}

// The second sweep finds in L2 what the first has read.
template <typename S>
void Step(const DeltaRuleToken& token, const DeltaRuleStep& step) {
  const DF d;
  HWY_ALIGN float a[kDeltaColumns];
  HWY_ALIGN float b[kDeltaColumns];
  Ahead<S> ahead(step);
  Gather<S>(token, step, ahead, a, b);
  const auto beta = hn::Set(d, token.beta);
  const auto kq = hn::Set(d, token.kq);
  for (size_t c = 0; c < step.columns; c += hn::Lanes(d)) {
    const auto delta =
        hn::Mul(beta, hn::Sub(hn::Load(d, step.v + c), hn::Load(d, a + c)));
    hn::Store(delta, d, a + c);
    hn::Store(hn::MulAdd(kq, delta, hn::Load(d, b + c)), d, step.out + c);
  }
  const S* s = static_cast<const S*>(step.from);
  S* to = static_cast<S*>(step.to);
  for (size_t i = 0; i < step.rows; ++i) {
    if (i % 2 == 0) ahead.Row();
    UpdateRow(s, step.columns, token.a[i], token.k[i], a, to);
    s += step.from_stride;
    to += step.to_stride;
  }
}

void Flush() { hwy::FlushStream(); }

DeltaRuleKernels GetKernels(DType state) {
  DeltaRuleKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.prepare = &Prepare;
  kernels.step =
      WithFloatType(state, [](auto type) { return &Step<decltype(type)>; });
  kernels.pass =
      WithFloatType(state, [](auto type) { return &Pass<decltype(type)>; });
  kernels.flush = &Flush;
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
DeltaRuleKernels GetDeltaRuleKernels(DType state) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(state);
}
}  // namespace quern
#endif  // HWY_ONCE
