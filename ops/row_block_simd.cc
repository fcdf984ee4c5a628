#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/row_block_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/row_block_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// highway.h must follow foreach_target.h.
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The cap keeps every block a multiple of the vector, however long vectors are.
using DF = hn::CappedTag<float, 64>;
using VF = hn::Vec<DF>;

template <typename T>
void Load(const void* x, size_t n, float* HWY_RESTRICT block) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const T* p = static_cast<const T*>(x);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::Store(LoadF32(d, p + i), d, block + i);
  if (i < n) hn::Store(LoadNF32(d, p + i, n - i), d, block + i);
}

template <typename T>
void LoadPairs(const void* x, size_t n, float* HWY_RESTRICT even,
               float* HWY_RESTRICT odd) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const T* p = static_cast<const T*>(x);
  for (size_t i = 0; i < n; i += lanes) {
    auto a = hn::Zero(d), b = a;
    if (i + lanes <= n) {
      a = LoadF32(d, p + 2 * i);
      b = LoadF32(d, p + 2 * i + lanes);
    } else {
      const size_t rest = 2 * (n - i);
      a = LoadNF32(d, p + 2 * i, HWY_MIN(rest, lanes));
      if (rest > lanes) b = LoadNF32(d, p + 2 * i + lanes, rest - lanes);
    }
    hn::Store(hn::ConcatEven(d, b, a), d, even + i);
    hn::Store(hn::ConcatOdd(d, b, a), d, odd + i);
  }
}

// Streams two vectors, because their 16-bit codes fill one vector and half a
// vector cannot be streamed.
HWY_INLINE void StreamF32(VF a, VF b, float* out) {
  const DF d;
  hn::Stream(a, d, out);
  hn::Stream(b, d, out + hn::Lanes(d));
}
template <typename T>
HWY_INLINE void StreamF32(VF a, VF b, T* out) {
  const DF d;
  const hn::Repartition<CodeOf<T>, DF> dc;
  hn::Stream(EncodeCodes2<T>(d, a, b), dc, reinterpret_cast<CodeOf<T>*>(out));
}

// Stores v[i] * u[i] if kGated, v[i] otherwise.
template <typename T, bool kGated>
HWY_INLINE void StoreAll(const float* HWY_RESTRICT v,
                         const float* HWY_RESTRICT u, size_t n, bool stream,
                         void* out) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  T* p = static_cast<T*>(out);
  const auto result = [&](size_t at) HWY_ATTR {
    const auto a = hn::Load(d, v + at);
    return kGated ? hn::Mul(a, hn::Load(d, u + at)) : a;
  };
  size_t i = 0;
  if (stream) {
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      StreamF32(result(i), result(i + lanes), p + i);
    }
  }
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    StoreF32x2(result(i), result(i + lanes), d, p + i);
  }
  for (; i + lanes <= n; i += lanes) StoreF32(result(i), d, p + i);
  if (i < n) StoreNF32(result(i), d, p + i, n - i);
}

template <typename T>
void Store(const float* v, size_t n, bool stream, void* out) {
  StoreAll<T, false>(v, nullptr, n, stream, out);
}
template <typename T>
void MulStore(const float* g, const float* u, size_t n, bool stream,
              void* out) {
  StoreAll<T, true>(g, u, n, stream, out);
}

void Flush() { hwy::FlushStream(); }

template <typename T>
void SetLoads(RowBlockKernels& kernels) {
  kernels.load = &Load<T>;
  kernels.load_pairs = &LoadPairs<T>;
}
template <typename T>
void SetStores(RowBlockKernels& kernels) {
  kernels.store = &Store<T>;
  kernels.mul_store = &MulStore<T>;
}

RowBlockKernels GetKernels(DType x, DType out) {
  RowBlockKernels kernels = {};
  if (x == DType::kF32) {
    SetLoads<float>(kernels);
  } else if (x == DType::kBF16) {
    SetLoads<BFloat16>(kernels);
  } else {
    SetLoads<Float16>(kernels);
  }
  if (out == DType::kF32) {
    SetStores<float>(kernels);
  } else if (out == DType::kBF16) {
    SetStores<BFloat16>(kernels);
  } else {
    SetStores<Float16>(kernels);
  }
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
RowBlockKernels GetRowBlockKernels(DType x, DType out) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(x, out);
}
}  // namespace quern
#endif  // HWY_ONCE
