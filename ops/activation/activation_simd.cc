#include <cstddef>
#include <cstdint>

#include "quern/core/prefetch.h"
#include "quern/ops/activation/activation_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/activation/activation_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/core/activation-inl.h"
#include "quern/core/exp-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The cap keeps every block a multiple of the vector, however long vectors are.
using DF = hn::CappedTag<float, 64>;
using VF = hn::Vec<DF>;
using DC = hn::Repartition<uint16_t, DF>;

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
// Computes e^-w + 1 for |w| <= 64 by the table of ExpByTable. In this range no
// power of two overflows, so an integer addition sets the exponent in place of
// the scaling instruction, which takes two cycles.
class ModerateExp {
 public:
  HWY_INLINE ModerateExp() {
    const DI di;
    const DF d;
    // Table entries less their index: PlusOne adds the exponent and, in the
    // bits below it, the index.
    const auto i = hn::ShiftLeft<18>(hn::Iota(di, 0));
    lower_ = hn::Sub(hn::BitCast(di, hn::Load(d, kExpTable)), i);
    upper_ = hn::Sub(hn::BitCast(di, hn::Load(d, kExpTable + 16)),
                     hn::Add(i, hn::Set(di, 16 << 18)));
  }
  HWY_INLINE VF PlusOne(VF w) const {
    const DF d;
    const DI di;
    const auto round = hn::Set(d, 0x1.8p18f);
    const auto rounded = hn::MulAdd(w, hn::Set(d, -1.44269504f), round);
    const auto bits = hn::BitCast(di, rounded);
    const auto entry = hn::Vec<DI>{
        _mm512_permutex2var_epi32(lower_.raw, bits.raw, upper_.raw)};
    const auto power = hn::BitCast(d, hn::Add(entry, hn::ShiftLeft<18>(bits)));
    const auto k = hn::Sub(rounded, round);
    const auto minus_r = hn::MulAdd(k, hn::Set(d, 0.693147182f), w);
    const auto s = hn::Sub(hn::Set(d, 1.00002204f), minus_r);
    const auto q = hn::MulAdd(s, s, hn::Set(d, 0.99997062f));
    return hn::MulAdd(q, power, hn::Set(d, 1.0f));
  }

 private:
  using DI = hn::RebindToSigned<DF>;
  hn::Vec<DI> lower_, upper_;
};
#elif HWY_NATIVE_FMA
// e^-w + 1 for |w| <= 64 by the polynomial of ExpNonPositive, of -r. In this
// range an integer addition sets the exponent.
class ModerateExp {
 public:
  HWY_INLINE VF PlusOne(VF w) const {
    const DF d;
    const hn::RebindToSigned<DF> di;
    // Its unit in the last place is 1, so that the lower bits are k.
    const auto round = hn::Set(d, 0x1.8p23f);
    const auto rounded = hn::MulAdd(w, hn::Set(d, -1.44269504f), round);
    const auto k = hn::Sub(rounded, round);
    const auto minus_r = hn::MulAdd(k, hn::Set(d, 0.693147182f), w);
    auto p = hn::Set(d, -0.00831251037f);
    p = hn::MulAdd(p, minus_r, hn::Set(d, 0.0418902472f));
    p = hn::MulAdd(p, minus_r, hn::Set(d, -0.16667115f));
    p = hn::MulAdd(p, minus_r, hn::Set(d, 0.499992309f));
    p = hn::MulAdd(p, minus_r, hn::Set(d, -1.0f));
    p = hn::MulAdd(p, minus_r, hn::Set(d, 1.0f));
    const auto power = hn::ShiftLeft<23>(hn::BitCast(di, rounded));
    const auto e = hn::BitCast(d, hn::Add(hn::BitCast(di, p), power));
    return hn::Add(e, hn::Set(d, 1.0f));
  }
};
#endif

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
  static HWY_INLINE VF W(VF v) { return v; }
  static HWY_INLINE VF General(VF v) { return Silu(DF(), v); }
};
struct GeluTanhParts {
  static constexpr float kMost = 8.0f;
  static HWY_INLINE VF W(VF v) { return hn::Mul(v, GeluTanhSlope(DF(), v)); }
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
};

#if HWY_NATIVE_FMA
// A fast path for moderate gates, which gives them the same results.
template <class Parts>
struct GatedResult<MostlyModerate<Parts>> {
  HWY_INLINE hn::Vec<DC> operator()(hn::Vec<DC> g, hn::Vec<DC> u) const {
    const DF d;
    const MostlyModerate<Parts> of;
    const auto even = hn::Mul(of.Moderate(EvenF32(d, g)), EvenF32(d, u));
    const auto odd = hn::Mul(of.Moderate(OddF32(d, g)), OddF32(d, u));
    hn::Vec<DC> codes;
    if (HWY_LIKELY(Encode(g, u, even, odd, &codes))) return codes;
    const ActivationParams none;
    return EncodeBF16Pairs(d, hn::Mul(of(none, EvenF32(d, g)), EvenF32(d, u)),
                           hn::Mul(of(none, OddF32(d, g)), OddF32(d, u)));
  }

 private:
  // Encodes the results if all gates are moderate.
  static HWY_INLINE bool Encode(hn::Vec<DC> g, hn::Vec<DC> u, VF even, VF odd,
                                hn::Vec<DC>* codes) {
    const DF d;
    const DC dc;
    // Doubling a code drops its sign bit.
    const auto most2 =
        hn::Set(dc, static_cast<uint16_t>(
                        hwy::BitCastScalar<uint32_t>(Parts::kMost) >> 15));
#if QUERN_NATIVE_BF16
    // A zero in the result may be a flushed denormal, as in EncodeBF16Pairs.
    // Testing for it together with large gates saves a cycle per 16 results.
    (void)u;
    const auto large = hn::Gt(hn::Add(g, g), most2);
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
    // With finite u no result is NaN, which saves the test of each.
    const auto more =
        hn::Or(hn::SaturatedSub(hn::Add(g, g), most2),
               hn::SaturatedSub(hn::Add(u, u), hn::Set(dc, uint16_t{0xFEFF})));
    if (!hn::AllTrue(dc, hn::Eq(more, hn::Zero(dc)))) return false;
    *codes = EncodeBF16NumberPairs(d, even, odd);
#endif
    return true;
  }
};
#endif

// GatedBF16 is a functor because GCC 12 does not inline a lambda that is called
// twice.
template <class Of>
struct GatedBF16 {
  HWY_INLINE hn::Vec<DC> Whole(size_t i) const {
    const DC d;
    if (next_gate != nullptr) {
      for (size_t b = 0; b < hn::Lanes(d); b += 32) {
        PrefetchL2(next_gate + i + b);
        PrefetchL2(next_up + i + b);
      }
    }
    return result(hn::LoadU(d, gate + i), hn::LoadU(d, up + i));
  }
  HWY_INLINE void Part(size_t i, size_t count, uint16_t* out) const {
    const DC d;
    hn::StoreN(
        result(hn::LoadN(d, gate + i, count), hn::LoadN(d, up + i, count)), d,
        out + i, count);
  }
  const uint16_t* gate;
  const uint16_t* up;
  const uint16_t* next_gate;
  const uint16_t* next_up;
  GatedResult<Of> result;
};

// One pass takes 15 cycles for 16 elements of silu; going through f32 blocks
// took 33, because the stores and loads of the blocks limit overlap (Zen 4,
// 2026).
template <class Of>
void Gated(const void* gate, const void* up, size_t n, const void* next_gate,
           const void* next_up, bool stream, void* out) {
  const DC d;
  const size_t lanes = hn::Lanes(d);
  const GatedBF16<Of> gated = {static_cast<const uint16_t*>(gate),
                               static_cast<const uint16_t*>(up),
                               static_cast<const uint16_t*>(next_gate),
                               static_cast<const uint16_t*>(next_up),
                               {}};
  uint16_t* to = static_cast<uint16_t*>(out);
  size_t i = 0;
  if (stream) {
    // Streaming stores start at a cache line, because a line that is written in
    // parts is read first.
    const size_t head =
        HWY_MIN(n, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64 / 2);
    for (; i < head; i += HWY_MIN(lanes, head - i)) {
      gated.Part(i, HWY_MIN(lanes, head - i), to);
    }
    for (; i + lanes <= n; i += lanes) hn::Stream(gated.Whole(i), d, to + i);
  }
  for (; i + lanes <= n; i += lanes) hn::StoreU(gated.Whole(i), d, to + i);
  if (i < n) gated.Part(i, n - i, to);
}

decltype(ActivationKernels::gated_bf16) GatedOf(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return &Gated<SiluOf>;
    case Activation::kGelu:
      return &Gated<GeluOf>;
    case Activation::kGeluTanh:
      return &Gated<GeluTanhOf>;
    default:
      return nullptr;
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
  kernels.gated_bf16 = GatedOf(activation);
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
