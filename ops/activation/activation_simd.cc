#include <cstddef>
#include <cstdint>

#include "core/prefetch.h"
#include "ops/activation/activation_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/activation/activation_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "core/activation-inl.h"
#include "core/exp-inl.h"
#include "hwy/highway.h"
#include "quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Capped: a block is a multiple of it, however long the vectors are.
using DF = hn::CappedTag<float, 64>;
using VF = hn::Vec<DF>;
using DC = hn::Repartition<uint16_t, DF>;

struct SiluOf {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    return Silu(DF(), v);
  }
};
struct GeluOf {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    return Gelu(DF(), v);
  }
};
struct GeluTanhOf {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    return GeluTanh(DF(), v);
  }
};

// v / (1 + e^(-slope v)). The clamp makes -infinity a number, where e^(slope v)
// is 0 anyhow.
HWY_INLINE VF SlopedSilu(float slope, VF v) {
  const DF d;
  const auto lowest = hn::Set(d, kExpLowest / slope);
  const auto x = hn::IfThenElse(hn::Lt(v, lowest), lowest, v);
  return MulSigmoid(d, x, hn::Mul(x, hn::Set(d, slope)));
}
struct QuickGeluOf {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    return SlopedSilu(1.702f, v);
  }
};

// Selects, not Min and Max: NaN stays.
HWY_INLINE VF AtMost(VF v, float limit) {
  const auto most = hn::Set(DF(), limit);
  return hn::IfThenElse(hn::Gt(v, most), most, v);
}
HWY_INLINE VF AtLeast(VF v, float limit) {
  const auto least = hn::Set(DF(), limit);
  return hn::IfThenElse(hn::Lt(v, least), least, v);
}

struct Relu2Of {
  HWY_INLINE VF operator()(const ActivationParams&, VF v) const {
    const auto positive = AtLeast(v, 0.0f);
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
    const auto e = ExpM1NonPositive(d, AtLeastExpLowest(d, AtMost(v, p.eps)));
    const auto below = hn::Mul(hn::Sub(e, v), hn::Set(d, p.alpha_n));
    return hn::Add(hn::IfThenElse(hn::Gt(v, hn::Zero(d)), square, below),
                   linear);
  }
};

// Two vectors at a time: the latency of one hides behind the other.
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

// A functor, not lambdas: GCC 12 does not inline a lambda that is called twice.
template <class Of>
struct GatedBF16 {
  // Even and odd elements are a vector each.
  HWY_INLINE hn::Vec<DC> Result(hn::Vec<DC> g, hn::Vec<DC> u) const {
    const DF d;
    const Of of;
    const ActivationParams none;
    return EncodeBF16Pairs(d, hn::Mul(of(none, EvenF32(d, g)), EvenF32(d, u)),
                           hn::Mul(of(none, OddF32(d, g)), OddF32(d, u)));
  }
  HWY_INLINE hn::Vec<DC> Whole(size_t i) const {
    const DC d;
    for (size_t b = 0; b < hn::Lanes(d); b += 32) {
      PrefetchL2(next_gate + i + b);
      PrefetchL2(next_up + i + b);
    }
    return Result(hn::LoadU(d, gate + i), hn::LoadU(d, up + i));
  }
  HWY_INLINE void Part(size_t i, size_t count, uint16_t* out) const {
    const DC d;
    hn::StoreN(
        Result(hn::LoadN(d, gate + i, count), hn::LoadN(d, up + i, count)), d,
        out + i, count);
  }
  const uint16_t* gate;
  const uint16_t* up;
  const uint16_t* next_gate;
  const uint16_t* next_up;
};

// 15 cycles for 16 elements of a silu where blocks of f32, which hold back what
// could overlap, took 33 (Zen 4, 2026).
template <class Of>
void Gated(const void* gate, const void* up, size_t n, const void* next_gate,
           const void* next_up, bool stream, void* out) {
  const DC d;
  const size_t lanes = hn::Lanes(d);
  const GatedBF16<Of> gated = {static_cast<const uint16_t*>(gate),
                               static_cast<const uint16_t*>(up),
                               static_cast<const uint16_t*>(next_gate),
                               static_cast<const uint16_t*>(next_up)};
  uint16_t* to = static_cast<uint16_t*>(out);
  size_t i = 0;
  if (stream) {
    // Whole cache lines only: a line written in parts would be read first.
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
    const auto gate = AtMost(hn::Load(d, g + i), params.limit);
    const auto up =
        AtMost(AtLeast(hn::Load(d, u + i), -params.limit), params.limit);
    hn::Store(SlopedSilu(params.alpha, gate), d, g + i);
    hn::Store(hn::Add(up, one), d, u + i);
  }
}

void ApplyNothing(const ActivationParams&, size_t, float*, float*) {}

// The zeros behind n, less the center, must not count.
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
    hn::Store(AtLeast(hn::Sub(hn::Load(d, v + i), c), 0.0f), d, v + i);
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
