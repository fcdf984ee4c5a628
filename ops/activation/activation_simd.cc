#include <cstddef>
#include <cstdint>

#include "quern/core/prefetch.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/activation/activation_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/activation/activation_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/core/activation-inl.h"
#include "quern/core/exp-inl.h"
#include "quern/ops/activation/moderate_exp-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_NATIVE_FMA
// v / (1 + e^-w) where |v| <= kMost, which implies |w| <= 64, and General(v)
// elsewhere. The error bounds of activation-inl.h hold for both paths.
template <class Of>
struct MostlyModerate {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    const DF d;
    const auto near = hn::Le(hn::Abs(v), hn::Set(d, Of::kMost));
    const auto moderate = Moderate(v);
    if (HWY_LIKELY(hn::AllTrue(d, near))) return moderate;
    return hn::IfThenElse(near, moderate, Of::General(v));
  }
  HWY_INLINE VF Moderate(VF v) const {
    return hn::Div(v, ModerateExp().PlusOne(Of::W(v)));
  }
};
struct SiluParts {
  static constexpr float kMost = 64.0f;
  template <class V>
  static HWY_INLINE V W(const V& v) {
    return v;
  }
  static HWY_INLINE VF General(VF v) { return Silu(DF(), v); }
};
struct GeluTanhParts {
  static constexpr float kMost = 8.0f;
  static HWY_INLINE VF W(VF v) { return hn::Mul(v, GeluTanhSlope(DF(), v)); }
#if !(HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3)
  static HWY_INLINE Four W(const Four& v) {
    return {W(v.a), W(v.b), W(v.c), W(v.d)};
  }
#endif
  static HWY_INLINE VF General(VF v) { return GeluTanh(DF(), v); }
};
using SiluOf = MostlyModerate<SiluParts>;
using GeluTanhOf = MostlyModerate<GeluTanhParts>;
#else
struct SiluOf {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    return Silu(DF(), v);
  }
};
struct GeluTanhOf {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    return GeluTanh(DF(), v);
  }
};
#endif

struct GeluOf {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    return Gelu(DF(), v);
  }
};

struct QuickGeluOf {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    return SlopedSilu(DF(), 1.702f, v);
  }
};

struct Relu2Of {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    const auto positive = AtLeast(DF(), v, 0.0f);
    return hn::Mul(positive, positive);
  }
};
struct FatreluOf {
  HWY_INLINE VF operator()(const ActivationParams& p, VF v) const {
    const DF d;
    return hn::IfThenElse(hn::Le(v, hn::Set(d, p.threshold)), hn::Zero(d), v);
  }
};
struct XieluOf {
  HWY_INLINE VF operator()(const ActivationParams& p, VF v) const {
    const DF d;
    const auto linear = hn::Mul(v, hn::Set(d, p.beta));
    const auto square = hn::Mul(hn::Mul(v, hn::Set(d, p.alpha_p)), v);
    const auto e =
        ExpM1NonPositive(d, AtLeastExpLowest(d, AtMost(d, v, p.eps)));
    const auto below = hn::Mul(hn::Sub(e, v), hn::Set(d, p.alpha_n));
    return hn::Add(hn::IfThenElse(hn::Gt(v, hn::Zero(d)), square, below),
                   linear);
  }
};

// Works on two vectors at a time, which hides the latency of one.
template <class Of>
void Apply(const ActivationParams& params, size_t n, float* g, float*) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const Of of;
  size_t i = 0;
  for (; i + lanes < n; i += 2 * lanes) {
    const auto a = of(params, hn::Load(d, g + i));
    const auto b = of(params, hn::Load(d, g + i + lanes));
    hn::Store(a, d, g + i);
    hn::Store(b, d, g + i + lanes);
  }
  if (i < n) hn::Store(of(params, hn::Load(d, g + i)), d, g + i);
}

template <class Of>
struct GatedF32 {
  HWY_INLINE VF operator()(VF g, VF u) const {
    const Of of;
    return hn::Mul(of(ActivationParams(), g), u);
  }
  HWY_INLINE void Two(VF& g0, VF& g1, VF u0, VF u1) const {
    g0 = (*this)(g0, u0);
    g1 = (*this)(g1, u1);
  }
};

// round(Of(g) * u) for bf16 codes. The even and the odd elements are widened to
// one f32 vector each.
template <class Of>
struct GatedResult {
  HWY_INLINE hn::Vec<DC> operator()(hn::Vec<DC> g, hn::Vec<DC> u) const {
    const DF d;
    const Of of;
    const ActivationParams none;
    return EncodeBF16Pairs(d, hn::Mul(of(none, EvenF32(d, g)), EvenF32(d, u)),
                           hn::Mul(of(none, OddF32(d, g)), OddF32(d, u)));
  }
  // Leaves results in g0 and g1.
  HWY_INLINE void Two(hn::Vec<DC>& g0, hn::Vec<DC>& g1, hn::Vec<DC> u0,
                      hn::Vec<DC> u1) const {
    g0 = (*this)(g0, u0);
    g1 = (*this)(g1, u1);
  }
};

#if HWY_NATIVE_FMA
// A fast path for moderate gates, which gives them the same results.
template <class Parts>
struct GatedResult<MostlyModerate<Parts>> {
#if !(HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3)
  HWY_INLINE void Two(hn::Vec<DC>& g0, hn::Vec<DC>& g1, hn::Vec<DC> u0,
                      hn::Vec<DC> u1) const {
    const DF d;
    const Four g = {EvenF32(d, g0), OddF32(d, g0), EvenF32(d, g1),
                    OddF32(d, g1)};
    const Four of = Div(g, ModerateExp().PlusOne(Parts::W(g)));
    const Four v =
        Mul(of, {EvenF32(d, u0), OddF32(d, u0), EvenF32(d, u1), OddF32(d, u1)});
    hn::Vec<DC> codes0, codes1;
    g0 = HWY_LIKELY(Encode(g0, v.a, v.b, &codes0)) ? codes0 : General(g0, u0);
    g1 = HWY_LIKELY(Encode(g1, v.c, v.d, &codes1)) ? codes1 : General(g1, u1);
  }
#else
  HWY_INLINE void Two(hn::Vec<DC>& g0, hn::Vec<DC>& g1, hn::Vec<DC> u0,
                      hn::Vec<DC> u1) const {
    g0 = (*this)(g0, u0);
    g1 = (*this)(g1, u1);
  }
#endif
  HWY_INLINE hn::Vec<DC> operator()(hn::Vec<DC> g, hn::Vec<DC> u) const {
    const DF d;
    const MostlyModerate<Parts> of;
    const auto even = hn::Mul(of.Moderate(EvenF32(d, g)), EvenF32(d, u));
    const auto odd = hn::Mul(of.Moderate(OddF32(d, g)), OddF32(d, u));
    hn::Vec<DC> codes;
    if (HWY_LIKELY(Encode(g, even, odd, &codes))) return codes;
    return General(g, u);
  }

 private:
  static HWY_INLINE hn::Vec<DC> General(hn::Vec<DC> g, hn::Vec<DC> u) {
    const DF d;
    const MostlyModerate<Parts> of;
    const ActivationParams none;
    return EncodeBF16Pairs(d, hn::Mul(of(none, EvenF32(d, g)), EvenF32(d, u)),
                           hn::Mul(of(none, OddF32(d, g)), OddF32(d, u)));
  }
  // Encodes the results if all gates are moderate.
  static HWY_INLINE bool Encode(hn::Vec<DC> g, VF even, VF odd,
                                hn::Vec<DC>* codes) {
    const DC dc;
    const auto most_bits = hwy::BitCastScalar<uint32_t>(Parts::kMost);
#if QUERN_NATIVE_BF16
    // A zero in the result may be a flushed denormal, as in EncodeBF16Pairs.
    // Testing for it together with large gates saves a cycle per 16 results.
    // Doubling a code drops its sign bit.
    const auto large = hn::Gt(
        hn::Add(g, g), hn::Set(dc, static_cast<uint16_t>(most_bits >> 15)));
    const hn::Repartition<hwy::bfloat16_t, DF> dbf16;
    const auto halves = hn::BitCast(dc, hn::OrderedDemote2To(dbf16, even, odd));
    const hn::Mask<DC> zero{
        _mm512_testn_epi16_mask(halves.raw, hn::Set(dc, 0x7FFF).raw)};
    if (!hn::AllFalse(dc, hn::Or(large, zero))) return false;
    const hn::RebindToUnsigned<DF> du;
    const auto i = hn::Iota(du, 0);
    const auto order =
        hn::Or(i, hn::ShiftLeft<16>(hn::Add(i, hn::Set(du, uint32_t{16}))));
    *codes = hn::TableLookupLanes(
        halves, hn::IndicesFromVec(dc, hn::BitCast(dc, order)));
#else
    // A NaN comes from a column, whose lower half was 0, or from none.
    const hn::RebindToSigned<DC> di;
    const auto magnitude = hn::BitCast(di, hn::And(g, hn::Set(dc, 0x7FFF)));
    const auto large =
        hn::Gt(magnitude, hn::Set(di, static_cast<int16_t>(most_bits >> 16)));
    if (!hn::AllFalse(di, large)) return false;
    *codes = EncodeBF16NumberPairs(DF(), even, odd);
#endif
    return true;
  }
};
#endif

// One row, in one pass: Result gives a vector from one of gates and one of up,
// all with lanes of D. A functor, because GCC 12 does not inline a lambda that
// is called twice.
template <class Result, class D>
struct GatedRow {
  using T = hn::TFromD<D>;
  // Two vectors, and at least what one cache line holds.
  static constexpr size_t kStep =
      HWY_MAX(64 / sizeof(T), 2 * hn::MaxLanes(D()));

  template <bool kStream>
  HWY_INLINE void Step(size_t i, T* out) const {
    const D d;
    if (next_gate != nullptr) {
      PrefetchL2(next_gate + i, kStep * sizeof(T));
      PrefetchL2(next_up + i, kStep * sizeof(T));
    }
    const size_t lanes = hn::Lanes(d);
    for (size_t j = 0; j < kStep; j += 2 * lanes) {
      const size_t at0 = i + j, at1 = i + j + lanes;
      auto v0 = hn::LoadU(d, gate + at0);
      auto v1 = hn::LoadU(d, gate + at1);
      result.Two(v0, v1, hn::LoadU(d, up + at0), hn::LoadU(d, up + at1));
      kStream ? hn::Stream(v0, d, out + at0) : hn::StoreU(v0, d, out + at0);
      kStream ? hn::Stream(v1, d, out + at1) : hn::StoreU(v1, d, out + at1);
    }
  }
  HWY_INLINE void Part(size_t i, size_t count, T* out) const {
    const D d;
    hn::StoreN(
        result(hn::LoadN(d, gate + i, count), hn::LoadN(d, up + i, count)), d,
        out + i, count);
  }
  const T* gate;
  const T* up;
  const T* next_gate;
  const T* next_up;
  Result result;
};

// One pass takes 15 cycles for 16 elements of silu; going through f32 blocks
// took 33, because the stores and loads of the blocks limit overlap (Zen 4,
// 2026).
template <class Result, class D>
void Gated(const void* gate, const void* up, size_t n, const void* next_gate,
           const void* next_up, bool stream, void* out) {
  using T = hn::TFromD<D>;
  const size_t lanes = hn::Lanes(D());
  const GatedRow<Result, D> row = {static_cast<const T*>(gate),
                                   static_cast<const T*>(up),
                                   static_cast<const T*>(next_gate),
                                   static_cast<const T*>(next_up),
                                   {}};
  T* to = static_cast<T*>(out);
  size_t i = 0;
  if (stream) {
    // Streaming stores start at a cache line, because a line that is written in
    // parts is read first.
    const size_t head = HWY_MIN(
        n, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64 / sizeof(T));
    for (; i < head; i += HWY_MIN(lanes, head - i)) {
      row.Part(i, HWY_MIN(lanes, head - i), to);
    }
    for (; i + row.kStep <= n; i += row.kStep) {
      row.template Step<true>(i, to);
    }
  }
  for (; i + row.kStep <= n; i += row.kStep) row.template Step<false>(i, to);
  for (; i < n; i += HWY_MIN(lanes, n - i)) {
    row.Part(i, HWY_MIN(lanes, n - i), to);
  }
}

template <class Of>
void SetGated(ActivationKernels& kernels) {
  kernels.gated_bf16 = &Gated<GatedResult<Of>, DC>;
  kernels.gated_f32 = &Gated<GatedF32<Of>, DF>;
}

void SetGatedOf(Activation activation, ActivationKernels& kernels) {
  switch (activation) {
    case Activation::kSilu:
      return SetGated<SiluOf>(kernels);
    case Activation::kGelu:
      return SetGated<GeluOf>(kernels);
    case Activation::kGeluTanh:
      return SetGated<GeluTanhOf>(kernels);
    default:
      return;
  }
}

void ApplySwigluOai(const ActivationParams& params, size_t n, float* g,
                    float* u) {
  const DF d;
  const auto one = hn::Set(d, 1.0f);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto gate = AtMost(d, hn::Load(d, g + i), params.limit);
    const auto up =
        AtMost(d, AtLeast(d, hn::Load(d, u + i), -params.limit), params.limit);
    hn::Store(SlopedSilu(d, params.alpha, gate), d, g + i);
    hn::Store(hn::Add(up, one), d, u + i);
  }
}

void ApplyNothing(const ActivationParams&, size_t, float*, float*) {}

// The mask excludes the zeros after the n elements, which would add center^2
// each.
float SumSquares(const float* v, float center, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto c = hn::Set(d, center);
  auto sum = hn::Zero(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto x = hn::Sub(hn::Load(d, v + i), c);
    sum = hn::MulAdd(x, x, sum);
  }
  if (i < n) {
    const auto x = hn::IfThenElseZero(hn::FirstN(d, n - i),
                                      hn::Sub(hn::Load(d, v + i), c));
    sum = hn::MulAdd(x, x, sum);
  }
  return hn::ReduceSum(d, sum);
}

float Sum(const float* v, size_t n) {
  const DF d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    sum = hn::Add(sum, hn::Load(d, v + i));
  }
  return hn::ReduceSum(d, sum);
}

void Excess(float cutoff, size_t n, float* v) {
  const DF d;
  const auto c = hn::Set(d, cutoff);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hn::Store(AtLeast(d, hn::Sub(hn::Load(d, v + i), c), 0.0f), d, v + i);
  }
}

decltype(ActivationKernels::apply) ApplyOf(Activation activation) {
  switch (activation) {
    case Activation::kIdentity:
      break;
    case Activation::kSilu:
      return &Apply<SiluOf>;
    case Activation::kGelu:
      return &Apply<GeluOf>;
    case Activation::kGeluTanh:
      return &Apply<GeluTanhOf>;
    case Activation::kQuickGelu:
      return &Apply<QuickGeluOf>;
    case Activation::kRelu2:
      return &Apply<Relu2Of>;
    case Activation::kFatrelu:
      return &Apply<FatreluOf>;
    case Activation::kXielu:
      return &Apply<XieluOf>;
    case Activation::kSwigluOai:
      return &ApplySwigluOai;
  }
  return &ApplyNothing;
}

ActivationKernels GetKernels(Activation activation) {
  ActivationKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  SetGatedOf(activation, kernels);
  kernels.apply = ApplyOf(activation);
  kernels.sum = &Sum;
  kernels.sum_squares = &SumSquares;
  kernels.excess = &Excess;
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
ActivationKernels GetActivationKernels(Activation activation) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(activation);
}
}  // namespace quern
#endif  // HWY_ONCE
