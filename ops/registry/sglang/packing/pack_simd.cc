#include <cstddef>
#include <cstdint>

#include "quern/core/sets/avx3.h"
#include "quern/core/stores.h"
#include "quern/ops/registry/sglang/packing/pack_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/registry/sglang/packing/pack_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/packing/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D16 = hn::Rebind<uint16_t, D32>;

// Transposes `cols` rows of `bytes` <= kLine bytes to rows of `cols` dwords:
// to[bytes / 4][cols][4]. 16 rows are written at `to` if bytes < kLine.
HWY_INLINE void TransposeCols(const uint8_t* HWY_RESTRICT w,
                              ptrdiff_t row_bytes, size_t cols, size_t bytes,
                              uint8_t* HWY_RESTRICT to) {
  const auto to_stride = static_cast<ptrdiff_t>(cols * 4);
  for (size_t c = 0; c < cols; c += kCols) {
    const uint8_t* from = w + static_cast<ptrdiff_t>(c) * row_bytes;
    if (HWY_LIKELY(bytes == kLine)) {
      Transpose16x16<Stores::kCached>(from, row_bytes, to + c * 4, to_stride);
    } else {
      TransposePartial(from, row_bytes, kCols, bytes, to + c * 4, to_stride);
    }
  }
}

// Calls emit(dwords, count, at) for every stretch of up to 16 dwords of k:
// dwords[count][cols][4] are bytes [at, at + 4 * count) of the rows.
template <typename Emit>
HWY_INLINE void ForEachStretch(const uint8_t* HWY_RESTRICT w,
                               ptrdiff_t row_bytes, size_t cols, size_t bytes,
                               const Emit& emit) {
  alignas(kLine) uint8_t dwords[2 * kSquare];
  for (size_t at = 0; at < bytes; at += kLine) {
    const size_t part = HWY_MIN(kLine, bytes - at);
    TransposeCols(w + at, row_bytes, cols, part, dwords);
    emit(dwords, part / 4, at);
  }
}

void PackDwords(const uint8_t* HWY_RESTRICT w, ptrdiff_t row_bytes, size_t cols,
                size_t bytes, uint8_t* HWY_RESTRICT packed) {
  size_t at = 0;
  for (; at + kLine <= bytes; at += kLine) {
    TransposeCols(w + at, row_bytes, cols, kLine, packed + at * cols);
  }
  if (at == bytes) return;
  alignas(kLine) uint8_t dwords[2 * kSquare];
  TransposeCols(w + at, row_bytes, cols, bytes - at, dwords);
  hwy::CopyBytes(dwords, packed + at * cols, (bytes - at) * cols);
}

// A dword of four k is two pairs: the low halves of a row of dwords are one row
// of pairs, the high halves the next.
void PackBytePairs(const uint8_t* HWY_RESTRICT w, ptrdiff_t row_bytes,
                   size_t cols, size_t bytes, uint8_t* HWY_RESTRICT packed) {
  const auto emit = [&](const uint8_t* dwords, size_t count,
                        size_t at) HWY_ATTR {
    uint8_t* to = packed + at * cols;
    for (size_t i = 0; i < count; ++i, to += cols * 4) {
      for (size_t c = 0; c < cols; c += kLanes) {
        const V32 v = Get(dwords + (i * cols + c) * 4);
        auto* low = reinterpret_cast<uint16_t*>(to + c * 2);
        auto* high = reinterpret_cast<uint16_t*>(to + (cols + c) * 2);
        hn::StoreU(hn::TruncateTo(D16(), v), D16(), low);
        hn::StoreU(hn::TruncateTo(D16(), hn::ShiftRight<16>(v)), D16(), high);
      }
    }
  };
  ForEachStretch(w, row_bytes, cols, bytes, emit);
}

// One byte of column c and of column 16 + c, four codes, become two bytes: the
// codes of column c in the low halves, those of column 16 + c in the high ones.
void PackNibbles(const uint8_t* HWY_RESTRICT w, ptrdiff_t row_bytes,
                 size_t /*cols*/, size_t bytes, uint8_t* HWY_RESTRICT packed) {
  constexpr size_t kBlock = 2 * kCols;
  const auto emit = [&](const uint8_t* dwords, size_t count,
                        size_t at) HWY_ATTR {
    const D32 d;
    const V32 low = hn::Set(d, 0x0Fu);
    const V32 high = hn::Set(d, 0xF0u);
    for (size_t i = 0; i < count; ++i) {
      for (size_t c = 0; c < kCols; c += kLanes) {
        V32 a = Get(dwords + (i * kBlock + c) * 4);
        V32 b = Get(dwords + (i * kBlock + kCols + c) * 4);
        for (size_t j = 0; j < 4; ++j) {
          const V32 even =
              hn::Or(hn::And(a, low), hn::ShiftLeft<4>(hn::And(b, low)));
          const V32 odd = hn::Or(hn::ShiftLeft<4>(hn::And(a, high)),
                                 hn::ShiftLeft<8>(hn::And(b, high)));
          hn::StoreU(hn::TruncateTo(D16(), hn::Or(even, odd)), D16(),
                     reinterpret_cast<uint16_t*>(
                         packed + (at + i * 4 + j) * kBlock + c * 2));
          a = hn::ShiftRight<8>(a);
          b = hn::ShiftRight<8>(b);
        }
      }
    }
  };
  ForEachStretch(w, row_bytes, kBlock, bytes, emit);
}

SglangPackKernels GetKernels() {
  return {hwy::TargetName(HWY_TARGET), &PackDwords, &PackBytePairs,
          &PackNibbles};
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
SglangPackKernels GetSglangPackKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
