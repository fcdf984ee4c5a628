#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/rope/rotary_embedding_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rope/rotary_embedding_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

// Rotates the pairs (j, half + j) of one head, j >= first.
template <typename T>
HWY_INLINE void HalvesOfHead(const RotaryHeads& args, size_t first, const T* x,
                             T* out) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const size_t half = args.rot_dim / 2;
  size_t j = first;
  for (; j + lanes <= half; j += lanes) {
    const auto c = hn::LoadU(d, args.cos + j);
    const auto s = hn::LoadU(d, args.sin + j);
    const auto a = LoadF32(d, x + j);
    const auto b = LoadF32(d, x + half + j);
    StoreF32(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, out + j);
    StoreF32(hn::MulAdd(a, s, hn::Mul(b, c)), d, out + half + j);
  }
  if (j < half) {
    const size_t n = half - j;
    const auto c = hn::LoadN(d, args.cos + j, n);
    const auto s = hn::LoadN(d, args.sin + j, n);
    const auto a = LoadNF32(d, x + j, n);
    const auto b = LoadNF32(d, x + half + j, n);
    StoreNF32(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, out + j, n);
    StoreNF32(hn::MulAdd(a, s, hn::Mul(b, c)), d, out + half + j, n);
  }
}

template <typename T>
void Halves(const RotaryHeads& args) {
  for (size_t h = 0; h < args.heads; ++h) {
    HalvesOfHead(args, 0, static_cast<const T*>(args.x) + h * args.x_stride,
                 static_cast<T*>(args.out) + h * args.out_stride);
  }
}

#if QUERN_SHORT_VECTORS
using DC = hn::Repartition<uint16_t, DF>;

// Two vectors of angles of the even and of the odd elements.
struct EvenOdd {
  HWY_INLINE explicit EvenOdd(const float* p)
      : even(hn::Load(DF(), p)), odd(hn::Load(DF(), p + hn::Lanes(DF()))) {}
  VF even, odd;
};

// Halves of bf16, whose even and odd elements are widened and rounded without
// leaving their 32-bit lanes. The angles of the token are put into that order
// once for all heads.
void HalvesOfPairs(const RotaryHeads& args) {
  constexpr size_t kMostHalf = 256;
  constexpr size_t kFewHeads = 4;
  const DF d;
  const DC dc;
  const size_t lanes = hn::Lanes(dc);
  const size_t half = args.rot_dim / 2;
  const size_t whole = half / lanes * lanes;
  if (half > kMostHalf || args.heads < kFewHeads) {
    return Halves<BFloat16>(args);
  }
  HWY_ALIGN float cos[kMostHalf], sin[kMostHalf];
  for (size_t j = 0; j < whole; j += lanes) {
    VF even, odd;
    hn::LoadInterleaved2(d, args.cos + j, even, odd);
    hn::Store(even, d, cos + j);
    hn::Store(odd, d, cos + j + lanes / 2);
    hn::LoadInterleaved2(d, args.sin + j, even, odd);
    hn::Store(even, d, sin + j);
    hn::Store(odd, d, sin + j + lanes / 2);
  }
  for (size_t h = 0; h < args.heads; ++h) {
    const auto* x = static_cast<const uint16_t*>(args.x) + h * args.x_stride;
    auto* out = static_cast<uint16_t*>(args.out) + h * args.out_stride;
    for (size_t j = 0; j < whole; j += lanes) {
      const EvenOdd c(cos + j), s(sin + j);
      const auto a = hn::LoadU(dc, x + j);
      const auto b = hn::LoadU(dc, x + half + j);
      const auto a0 = EvenF32(d, a), a1 = OddF32(d, a);
      const auto b0 = EvenF32(d, b), b1 = OddF32(d, b);
      const auto turned_a =
          EncodeBF16Pairs(d, hn::NegMulAdd(b0, s.even, hn::Mul(a0, c.even)),
                          hn::NegMulAdd(b1, s.odd, hn::Mul(a1, c.odd)));
      const auto turned_b =
          EncodeBF16Pairs(d, hn::MulAdd(a0, s.even, hn::Mul(b0, c.even)),
                          hn::MulAdd(a1, s.odd, hn::Mul(b1, c.odd)));
      hn::StoreU(turned_a, dc, out + j);
      hn::StoreU(turned_b, dc, out + half + j);
    }
    if (whole < half) {
      HalvesOfHead(args, whole,
                   static_cast<const BFloat16*>(args.x) + h * args.x_stride,
                   static_cast<BFloat16*>(args.out) + h * args.out_stride);
    }
  }
}
#else
void HalvesOfPairs(const RotaryHeads& args) { Halves<BFloat16>(args); }
#endif

// Rotates neighbouring lanes x = (a, b): x * (c, c) + (b, a) * (-s, s).
template <typename T>
void Pairs(const RotaryHeads& args) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const size_t rot_dim = args.rot_dim;
  for (size_t h = 0; h < args.heads; ++h) {
    const T* x = static_cast<const T*>(args.x) + h * args.x_stride;
    T* out = static_cast<T*>(args.out) + h * args.out_stride;
    size_t j = 0;
    for (; j + lanes <= rot_dim; j += lanes) {
      const auto v = LoadF32(d, x + j);
      const auto turned =
          hn::MulAdd(hn::Shuffle2301(v), hn::LoadU(d, args.sin + j),
                     hn::Mul(v, hn::LoadU(d, args.cos + j)));
      StoreF32(turned, d, out + j);
    }
    if (j < rot_dim) {
      const size_t n = rot_dim - j;
      const auto v = LoadNF32(d, x + j, n);
      const auto turned =
          hn::MulAdd(hn::Shuffle2301(v), hn::LoadN(d, args.sin + j, n),
                     hn::Mul(v, hn::LoadN(d, args.cos + j, n)));
      StoreNF32(turned, d, out + j, n);
    }
  }
}

RotaryEmbeddingKernels GetKernels(DType dtype) {
  RotaryEmbeddingKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  if (dtype == DType::kF32) {
    kernels.halves = &Halves<float>;
    kernels.pairs = &Pairs<float>;
  } else if (dtype == DType::kBF16) {
    kernels.halves = &HalvesOfPairs;
    kernels.pairs = &Pairs<BFloat16>;
  } else {
    kernels.halves = &Halves<Float16>;
    kernels.pairs = &Pairs<Float16>;
  }
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
RotaryEmbeddingKernels GetRotaryEmbeddingKernels(DType dtype) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(dtype);
}
}  // namespace quern
#endif  // HWY_ONCE
