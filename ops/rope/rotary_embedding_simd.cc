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

template <typename T>
void Halves(const RotaryHeads& args) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const size_t half = args.rot_dim / 2;
  for (size_t h = 0; h < args.heads; ++h) {
    const T* x = static_cast<const T*>(args.x) + h * args.x_stride;
    T* out = static_cast<T*>(args.out) + h * args.out_stride;
    size_t j = 0;
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
}

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
    kernels.halves = &Halves<BFloat16>;
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
