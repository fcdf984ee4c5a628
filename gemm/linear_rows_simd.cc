#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "gemm/linear_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/linear_rows_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "packing/transpose-inl.h"
#include "quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_HAVE_SCALABLE
using DF = hn::FixedTag<float, 4>;
#else
using DF = hn::CappedTag<float, kCols>;
#endif
constexpr size_t kFloats = HWY_MAX_LANES_D(DF);

// One line of 16 elements for each row of a square, from T to f32.
template <typename T>
HWY_INLINE void LoadLineF32(const T* HWY_RESTRICT from, size_t n, float* to) {
  const DF df;
  for (size_t i = 0; i < kCols; i += kFloats) {
    const size_t left = n > i ? n - i : 0;
    hn::StoreU(
        left >= kFloats ? LoadF32(df, from + i) : LoadNF32(df, from + i, left),
        df, to + i);
  }
}

struct ToPairs {
  using T = BFloat16;
  static constexpr size_t kPer = 2;  // elements of a in 32 bits
  static HWY_INLINE void Line(const T* HWY_RESTRICT from, size_t n,
                              uint8_t* HWY_RESTRICT to) {
    if (HWY_LIKELY(n == 2 * kCols)) {
      hwy::CopyBytes<kLine>(from, to);
    } else {
      hwy::ZeroBytes<kLine>(to);
      hwy::CopyBytes(from, to, n * sizeof(T));
    }
  }
};

template <typename T_>
struct ToF32 {
  using T = T_;
  static constexpr size_t kPer = 1;
  static HWY_INLINE void Line(const T* HWY_RESTRICT from, size_t n,
                              uint8_t* HWY_RESTRICT to) {
    LoadLineF32(from, n, reinterpret_cast<float*>(to));
  }
};

template <class To>
void PackRowsTo(const PackRowsArgs& args) {
  using T = typename To::T;
  constexpr size_t kAtOnce = kCols * To::kPer;  // elements of a in a line
  uint8_t* HWY_RESTRICT to = reinterpret_cast<uint8_t*>(args.to);
  for (size_t at = 0; at < args.elements; at += kCols) {
    const size_t k = at * To::kPer;
    const size_t n = args.k > k ? HWY_MIN(args.k - k, kAtOnce) : 0;
    const size_t elements = HWY_MIN(args.elements - at, kCols);
    alignas(kLine) uint8_t square[kSquare];
    alignas(kLine) uint8_t lines[kSquare];
    const T* row = static_cast<const T*>(args.a) + k;
    for (size_t r = 0; r < args.rows; ++r) {
      To::Line(row, n, square + r * kLine);
      row = reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(row) +
                                       args.row_bytes);
    }
    if (args.rows == 1) {
      hwy::CopyBytes(square, to + at * 4, elements * 4);
    } else if (HWY_LIKELY(elements == kCols)) {
      Transpose16x16<Store::kCached>(square, kLine, to + at * kLine, kLine);
    } else {
      Transpose16x16<Store::kCached>(square, kLine, lines, kLine);
      hwy::CopyBytes(lines, to + at * kLine, elements * kLine);
    }
  }
}

template <typename T>
void FinishTo(const FinishArgs& args) {
  const DF df;
  for (size_t r = 0; r < args.rows; ++r) {
    const float* HWY_RESTRICT sums = args.sums + r * args.sums_stride;
    T* HWY_RESTRICT c =
        reinterpret_cast<T*>(static_cast<uint8_t*>(args.c) +
                             static_cast<ptrdiff_t>(r) * args.c_row_bytes);
    size_t i = 0;
    for (; i + kFloats <= args.cols; i += kFloats) {
      auto v = hn::LoadU(df, sums + i);
      if (args.bias != nullptr) v = hn::Add(v, hn::LoadU(df, args.bias + i));
      StoreF32(v, df, c + i);
    }
    if (i < args.cols) {
      const size_t left = args.cols - i;
      auto v = hn::LoadU(df, sums + i);
      if (args.bias != nullptr) {
        v = hn::Add(v, hn::LoadN(df, args.bias + i, left));
      }
      StoreNF32(v, df, c + i, left);
    }
  }
}

PackRows PackPairs() { return &PackRowsTo<ToPairs>; }
PackRows PackF32(DType a) {
  switch (a) {
    case DType::kBF16:
      return &PackRowsTo<ToF32<BFloat16>>;
    case DType::kF16:
      return &PackRowsTo<ToF32<Float16>>;
    default:
      return &PackRowsTo<ToF32<float>>;
  }
}
Finish FinishOf(DType c) {
  switch (c) {
    case DType::kBF16:
      return &FinishTo<BFloat16>;
    case DType::kF16:
      return &FinishTo<Float16>;
    default:
      return &FinishTo<float>;
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(PackPairs);
HWY_EXPORT(PackF32);
HWY_EXPORT(FinishOf);
}  // namespace
PackRows GetPackPairs() { return HWY_DYNAMIC_DISPATCH(PackPairs)(); }
PackRows GetPackF32(DType a) { return HWY_DYNAMIC_DISPATCH(PackF32)(a); }
Finish GetFinish(DType c) { return HWY_DYNAMIC_DISPATCH(FinishOf)(c); }
}  // namespace quern
#endif  // HWY_ONCE
