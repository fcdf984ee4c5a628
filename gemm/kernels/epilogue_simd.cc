#include <cstddef>

#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/kernels/epilogue_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/epilogue_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/core/activation-inl.h"
#include "quern/quant/convert-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_HAVE_SCALABLE
using DF = hn::FixedTag<float, 4>;
#else
using DF = hn::CappedTag<float, 16>;
#endif
constexpr size_t kFloats = HWY_MAX_LANES_D(DF);
constexpr float kSwigluOaiLimit = 7.0f;

template <LinearActivation kActivation>
void Activate(float* v, size_t n) {
  const DF df;
  for (size_t i = 0; i < n; i += kFloats) {
    const auto x = hn::LoadU(df, v + i);
    if constexpr (kActivation == LinearActivation::kSilu) {
      hn::StoreU(Silu(df, x), df, v + i);
    } else if constexpr (kActivation == LinearActivation::kGelu) {
      hn::StoreU(Gelu(df, x), df, v + i);
    } else if constexpr (kActivation == LinearActivation::kSwigluOaiAndMul) {
      hn::StoreU(SlopedSilu(df, 1.702f, AtMost(df, x, kSwigluOaiLimit)), df,
                 v + i);
    } else {
      hn::StoreU(GeluTanh(df, x), df, v + i);
    }
  }
}

void SwigluOaiUp(float* v, size_t n) {
  const DF df;
  for (size_t i = 0; i < n; i += kFloats) {
    const auto x = AtLeast(df, hn::LoadU(df, v + i), -kSwigluOaiLimit);
    hn::StoreU(hn::Add(AtMost(df, x, kSwigluOaiLimit), hn::Set(df, 1.0f)), df,
               v + i);
  }
}

// residual may be c: no restrict.
template <typename T>
void Store(const float* v, const float* up, const void* residual, void* c,
           size_t n) {
  const DF df;
  const T* from = static_cast<const T*>(residual);
  T* to = static_cast<T*>(c);
  for (size_t i = 0; i < n; i += kFloats) {
    const size_t left = HWY_MIN(n - i, kFloats);
    auto x = hn::LoadU(df, v + i);
    if (from == nullptr) {
      if (up != nullptr) x = hn::Mul(x, hn::LoadU(df, up + i));
    } else {
      const auto r = LoadNF32(df, from + i, left);
      x = up == nullptr ? hn::Add(x, r)
                        : hn::MulAdd(x, hn::LoadU(df, up + i), r);
    }
    if (HWY_LIKELY(left == kFloats)) {
      StoreF32(x, df, to + i);
    } else {
      StoreNF32(x, df, to + i, left);
    }
  }
}

EpilogueKernels GetKernels(LinearActivation activation, DType c) {
  EpilogueKernels kernels = {};
  switch (activation) {
    case LinearActivation::kNone:
      break;
    case LinearActivation::kSilu:
    case LinearActivation::kSiluAndMul:
      kernels.activate = &Activate<LinearActivation::kSilu>;
      break;
    case LinearActivation::kGelu:
    case LinearActivation::kGeluAndMul:
      kernels.activate = &Activate<LinearActivation::kGelu>;
      break;
    case LinearActivation::kGeluTanh:
    case LinearActivation::kGeluTanhAndMul:
      kernels.activate = &Activate<LinearActivation::kGeluTanh>;
      break;
    case LinearActivation::kSwigluOaiAndMul:
      kernels.activate = &Activate<LinearActivation::kSwigluOaiAndMul>;
      kernels.up = &SwigluOaiUp;
      break;
  }
  kernels.store = WithFloatType(c, [](auto t) { return &Store<decltype(t)>; });
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
EpilogueKernels GetEpilogueKernels(LinearActivation activation, DType c) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(activation, c);
}
}  // namespace quern
#endif  // HWY_ONCE
