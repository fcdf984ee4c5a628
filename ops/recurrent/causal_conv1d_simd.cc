#include "quern/core/float_type.h"
#include "quern/core/prefetch.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/recurrent/causal_conv1d_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrent/causal_conv1d_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/core/activation-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 64>;
using VF = hn::Vec<DF>;

// Whole vectors; w has room for them.
template <size_t kWidth>
void Transpose(const float* w, size_t channels, ConvWeights& weights) {
  const DF d;
  for (size_t c = 0; c < channels; c += hn::Lanes(d)) {
    VF v0, v1, v2, v3;
    if constexpr (kWidth == 2) {
      hn::LoadInterleaved2(d, w + 2 * c, v0, v1);
    } else if constexpr (kWidth == 3) {
      hn::LoadInterleaved3(d, w + 3 * c, v0, v1, v2);
      hn::Store(v2, d, weights.weight[2] + c);
    } else {
      hn::LoadInterleaved4(d, w + 4 * c, v0, v1, v2, v3);
      hn::Store(v2, d, weights.weight[2] + c);
      hn::Store(v3, d, weights.weight[3] + c);
    }
    hn::Store(v0, d, weights.weight[0] + c);
    hn::Store(v1, d, weights.weight[1] + c);
  }
}

// The bias, the weights and the last inputs of a vector of channels, the oldest
// in h0. Weights and inputs that a narrower width lacks are not used.
template <size_t kWidth, bool kSilu>
struct Channel {
  HWY_INLINE explicit Channel(const ConvWeights& w, size_t c) {
    const DF d;
    bias = hn::Load(d, w.bias + c);
    w0 = hn::Load(d, w.weight[0] + c);
    w1 = hn::Load(d, w.weight[1] + c);
    w2 = kWidth > 2 ? hn::Load(d, w.weight[kWidth > 2 ? 2 : 0] + c) : w1;
    w3 = kWidth > 3 ? hn::Load(d, w.weight[kWidth > 3 ? 3 : 0] + c) : w1;
    h0 = h1 = h2 = hn::Zero(d);
  }
  // The output of input x, which becomes history.
  HWY_INLINE VF Next(VF x) {
    const DF d;
    auto y = hn::MulAdd(w0, h0, bias);
    if constexpr (kWidth == 2) {
      y = hn::MulAdd(w1, x, y);
      h0 = x;
    } else if constexpr (kWidth == 3) {
      y = hn::MulAdd(w2, x, hn::MulAdd(w1, h1, y));
      h0 = h1, h1 = x;
    } else {
      y = hn::MulAdd(w3, x, hn::MulAdd(w2, h2, hn::MulAdd(w1, h1, y)));
      h0 = h1, h1 = h2, h2 = x;
    }
    if constexpr (kSilu) return Silu(d, y);
    return y;
  }
  VF bias, w0, w1, w2, w3, h0, h1, h2;
};

// Up to n elements; fewer than a vector by a mask.
template <typename T>
HWY_INLINE VF LoadUpTo(const T* p, size_t n) {
  const DF d;
  return n >= hn::Lanes(d) ? LoadF32(d, p) : LoadNF32(d, p, n);
}
template <typename T>
HWY_INLINE void StoreUpTo(VF v, T* p, size_t n) {
  const DF d;
  n >= hn::Lanes(d) ? StoreF32(v, d, p) : StoreNF32(v, d, p, n);
}

template <typename T, size_t kWidth, bool kSilu>
HWY_INLINE void LoadHistory(const T* state, size_t stride, size_t n,
                            Channel<kWidth, kSilu>& channel) {
  channel.h0 = LoadUpTo(state, n);
  if constexpr (kWidth > 2) channel.h1 = LoadUpTo(state + stride, n);
  if constexpr (kWidth > 3) channel.h2 = LoadUpTo(state + 2 * stride, n);
}
template <typename T, size_t kWidth, bool kSilu>
HWY_INLINE void StoreHistory(const Channel<kWidth, kSilu>& channel, T* state,
                             size_t stride, size_t n) {
  StoreUpTo(channel.h0, state, n);
  if constexpr (kWidth > 2) StoreUpTo(channel.h1, state + stride, n);
  if constexpr (kWidth > 3) StoreUpTo(channel.h2, state + 2 * stride, n);
}

// Moves up to n codes as they are, which is half the work of encoding them.
template <typename T>
HWY_INLINE void CopyUpTo(const T* from, T* to, size_t n) {
  const hn::Rebind<CodeOf<T>, DF> dc;
  const auto* const codes = reinterpret_cast<const CodeOf<T>*>(from);
  auto* const copy = reinterpret_cast<CodeOf<T>*>(to);
  n >= hn::Lanes(dc) ? hn::StoreU(hn::LoadU(dc, codes), dc, copy)
                     : hn::StoreN(hn::LoadN(dc, codes, n), dc, copy, n);
}

// One token of a sequence that goes on. Few bytes in many places: those of the
// sequence that is next are asked for on the way.
template <typename T, size_t kWidth, bool kSilu>
void RunToken(const ConvWeights& weights, const ConvTokens& tokens) {
  const size_t lanes = hn::Lanes(DF());
  const size_t stride = tokens.state_stride;
  const T* const x = static_cast<const T*>(tokens.x);
  T* const out = static_cast<T*>(tokens.out);
  const T* const next_state = static_cast<const T*>(tokens.next_state);
  for (size_t c = 0; c < tokens.channels; c += lanes) {
    const size_t n = HWY_MIN(lanes, tokens.channels - c);
    const T* const from = static_cast<const T*>(tokens.from) + c;
    T* const state = static_cast<T*>(tokens.state) + c;
    Channel<kWidth, kSilu> channel(weights, c);
    LoadHistory(from, tokens.from_stride, n, channel);
    const auto input = LoadUpTo(x + c, n);
    for (size_t r = 0; r + 2 < kWidth; ++r) {
      CopyUpTo(from + (r + 1) * tokens.from_stride, state + r * stride, n);
    }
    // Before out is written, which may be x.
    CopyUpTo(x + c, state + (kWidth - 2) * stride, n);
    StoreUpTo(channel.Next(input), out + c, n);
    if (next_state == nullptr) continue;
    for (size_t r = 0; r + 1 < kWidth; ++r) {
      PrefetchL2(next_state + r * stride + c);
    }
    PrefetchL2(static_cast<const T*>(tokens.next_x) + c);
    PrefetchL2(static_cast<const T*>(tokens.next_out) + c);
  }
}

// Rows of a few tokens at a time, all channels of the block: a row is read in
// the order of memory, and weights and history are loaded once for the tokens.
// The state is where the history is kept between groups: an input that is a
// number is exact in f32 and back.
// Groups of 2, which leave more ways of L1, are slower at every stride (Zen 5,
// 2026).
constexpr size_t kGroup = 8;

template <typename T, size_t kWidth, bool kSilu>
void RunTokens(const ConvWeights& weights, const ConvTokens& tokens) {
  if (tokens.tokens == 1 && !tokens.fresh) {
    return RunToken<T, kWidth, kSilu>(weights, tokens);
  }
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const T* x = static_cast<const T*>(tokens.x);
  T* out = static_cast<T*>(tokens.out);
  T* const state = static_cast<T*>(tokens.state);
  for (size_t t = 0; t < tokens.tokens; t += kGroup) {
    const size_t count = HWY_MIN(kGroup, tokens.tokens - t);
    const size_t ahead = HWY_MIN(kGroup, tokens.tokens - t - count);
    for (size_t c = 0; c < tokens.channels; c += lanes) {
      const size_t n = HWY_MIN(lanes, tokens.channels - c);
      Channel<kWidth, kSilu> channel(weights, c);
      if (t > 0) {
        LoadHistory(state + c, tokens.state_stride, n, channel);
      } else if (!tokens.fresh) {
        LoadHistory(static_cast<const T*>(tokens.from) + c, tokens.from_stride,
                    n, channel);
      }
      const T* from = x + c;
      T* to = out + c;
      for (size_t i = 0; i < count; ++i) {
        const auto y = channel.Next(LoadUpTo(from, n));
        StoreUpTo(y, to, n);
        if (i < ahead) PrefetchL2(from + kGroup * tokens.x_stride);
        from += tokens.x_stride;
        to += tokens.out_stride;
      }
      StoreHistory(channel, state + c, tokens.state_stride, n);
    }
    x += kGroup * tokens.x_stride;
    out += kGroup * tokens.out_stride;
  }
}

// The history of a channel side by side in memory. Without further elements
// between channels, vectors of channels are transposed.
template <typename T, size_t kWidth>
void LoadDense(const void* dense, size_t stride, size_t channels, void* rows,
               size_t row_stride) {
  const hn::Rebind<CodeOf<T>, DF> d;
  const size_t lanes = hn::Lanes(d);
  const auto* const from = static_cast<const CodeOf<T>*>(dense);
  auto* const to = static_cast<CodeOf<T>*>(rows);
  size_t c = 0;
  for (; stride + 1 == kWidth && c + lanes <= channels; c += lanes) {
    hn::Vec<decltype(d)> v0, v1, v2;
    if constexpr (kWidth == 2) {
      v0 = hn::LoadU(d, from + c);
    } else if constexpr (kWidth == 3) {
      hn::LoadInterleaved2(d, from + 2 * c, v0, v1);
      hn::StoreU(v1, d, to + row_stride + c);
    } else {
      hn::LoadInterleaved3(d, from + 3 * c, v0, v1, v2);
      hn::StoreU(v1, d, to + row_stride + c);
      hn::StoreU(v2, d, to + 2 * row_stride + c);
    }
    hn::StoreU(v0, d, to + c);
  }
  for (; c < channels; ++c) {
    for (size_t i = 0; i + 1 < kWidth; ++i) {
      to[i * row_stride + c] = from[c * stride + i];
    }
  }
}
template <typename T, size_t kWidth>
void StoreDense(const void* rows, size_t row_stride, size_t channels,
                void* dense, size_t stride) {
  const hn::Rebind<CodeOf<T>, DF> d;
  const size_t lanes = hn::Lanes(d);
  const auto* const from = static_cast<const CodeOf<T>*>(rows);
  auto* const to = static_cast<CodeOf<T>*>(dense);
  size_t c = 0;
  for (; stride + 1 == kWidth && c + lanes <= channels; c += lanes) {
    const auto v0 = hn::LoadU(d, from + c);
    if constexpr (kWidth == 2) {
      hn::StoreU(v0, d, to + c);
    } else if constexpr (kWidth == 3) {
      const auto v1 = hn::LoadU(d, from + row_stride + c);
      hn::StoreInterleaved2(v0, v1, d, to + 2 * c);
    } else {
      const auto v1 = hn::LoadU(d, from + row_stride + c);
      const auto v2 = hn::LoadU(d, from + 2 * row_stride + c);
      hn::StoreInterleaved3(v0, v1, v2, d, to + 3 * c);
    }
  }
  for (; c < channels; ++c) {
    for (size_t i = 0; i + 1 < kWidth; ++i) {
      to[c * stride + i] = from[i * row_stride + c];
    }
  }
}

template <size_t kWidth, bool kSilu>
void ChooseType(DType dtype, CausalConv1dKernels& kernels) {
  kernels.transpose = &Transpose<kWidth>;
  kernels.run = WithFloatType(dtype, [](auto type) {
    return &RunTokens<decltype(type), kWidth, kSilu>;
  });
  kernels.load_dense = WithFloatType(
      dtype, [](auto type) { return &LoadDense<decltype(type), kWidth>; });
  kernels.store_dense = WithFloatType(
      dtype, [](auto type) { return &StoreDense<decltype(type), kWidth>; });
}

template <bool kSilu>
void ChooseWidth(DType dtype, int64_t width, CausalConv1dKernels& kernels) {
  if (width == 2) return ChooseType<2, kSilu>(dtype, kernels);
  if (width == 3) return ChooseType<3, kSilu>(dtype, kernels);
  ChooseType<4, kSilu>(dtype, kernels);
}

CausalConv1dKernels GetKernels(DType dtype, int64_t width,
                               ConvActivation activation) {
  CausalConv1dKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  activation == ConvActivation::kSilu
      ? ChooseWidth<true>(dtype, width, kernels)
      : ChooseWidth<false>(dtype, width, kernels);
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
CausalConv1dKernels GetCausalConv1dKernels(DType dtype, int64_t width,
                                           ConvActivation activation) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(dtype, width, activation);
}
}  // namespace quern
#endif  // HWY_ONCE
