#include <cstddef>
#include <cstdint>

#include "hwy/cache_control.h"  // FlushStream
#include "quern/core/prefetch.h"
#include "quern/core/sets/avx3.h"
#include "quern/core/stores.h"
#include "quern/packing/vnni_pack_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "packing/vnni_pack_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/packing/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// ---- [N, K]: the rows of the plain side are the columns of one panel. ----

template <Stores kStores>
void PackRows(const VnniPlainBlock<const uint8_t>& plain,
              const VnniPackedBlock<uint8_t>& packed) {
  uint8_t* HWY_RESTRICT to = packed.data;
  size_t at = 0;
  if (HWY_LIKELY(plain.rows == kCols)) {
    for (; at + kLine <= plain.cols_bytes; at += kLine, to += kSquare) {
      Transpose16x16<kStores>(plain.data + at, plain.row_bytes, to, kLine);
    }
  }
  // The last panel of a matrix and the end of k go through a zero-padded
  // square.
  while (at < plain.cols_bytes) {
    const size_t bytes = HWY_MIN(kLine, plain.cols_bytes - at);
    const size_t lines_bytes = hwy::DivCeil(bytes, size_t{4}) * kLine;
    alignas(kLine) uint8_t lines[kSquare];
    TransposePartial(plain.data + at, plain.row_bytes, plain.rows, bytes, lines,
                     kLine);
    hwy::CopyBytes(lines, to, lines_bytes);
    at += bytes;
    to += lines_bytes;
  }
  if constexpr (kStores == Stores::kStream) hwy::FlushStream();
}

void UnpackRows(const VnniPlainBlock<uint8_t>& plain,
                const VnniPackedBlock<const uint8_t>& packed) {
  const uint8_t* HWY_RESTRICT from = packed.data;
  size_t at = 0;
  if (HWY_LIKELY(plain.rows == kCols)) {
    for (; at + kLine <= plain.cols_bytes; at += kLine, from += kSquare) {
      Transpose16x16<Stores::kCached>(from, kLine, plain.data + at,
                                      plain.row_bytes);
    }
  }
  while (at < plain.cols_bytes) {
    const size_t bytes = HWY_MIN(kLine, plain.cols_bytes - at);
    const size_t lines_bytes = hwy::DivCeil(bytes, size_t{4}) * kLine;
    alignas(kLine) uint8_t square[kSquare];
    alignas(kLine) uint8_t lines[kSquare];
    hwy::ZeroBytes<kSquare>(lines);
    hwy::CopyBytes(from, lines, lines_bytes);
    Transpose16x16<Stores::kCached>(lines, kLine, square, kLine);
    for (size_t r = 0; r < plain.rows; ++r) {
      hwy::CopyBytes(
          square + r * kLine,
          plain.data + static_cast<ptrdiff_t>(r) * plain.row_bytes + at, bytes);
    }
    at += bytes;
    from += lines_bytes;
  }
}

// ---- [K, N]: v rows of the plain side interleave into one line. ----

// T is the unsigned type of the element's size.
template <typename T>
using DSmall = hn::Rebind<T, D32>;

template <typename T>
HWY_INLINE V32 Widened(const uint8_t* HWY_RESTRICT from) {
  if constexpr (sizeof(T) == 4) {
    return Get(from);
  } else {
    return hn::PromoteTo(
        D32(), hn::LoadU(DSmall<T>(), reinterpret_cast<const T*>(from)));
  }
}

// One line from the v rows at `from`: lane c is row 0 in the low bits,
// the following rows above it.
template <typename T, Stores kStores>
HWY_INLINE void PackLine(const uint8_t* HWY_RESTRICT from, ptrdiff_t row_bytes,
                         uint8_t* HWY_RESTRICT to) {
  for (size_t c = 0; c < kCols; c += kLanes) {
    const uint8_t* row = from + c * sizeof(T);
    V32 v = Widened<T>(row);
    if constexpr (sizeof(T) == 2) {
      v = hn::Or(v, hn::ShiftLeft<16>(Widened<T>(row + row_bytes)));
    } else if constexpr (sizeof(T) == 1) {
      const V32 v1 = hn::ShiftLeft<8>(Widened<T>(row + row_bytes));
      const V32 v2 = hn::ShiftLeft<16>(Widened<T>(row + 2 * row_bytes));
      const V32 v3 = hn::ShiftLeft<24>(Widened<T>(row + 3 * row_bytes));
      v = hn::Or(hn::Or3(v, v1, v2), v3);
    }
    Put<kStores>(v, to + c * 4);
  }
}

// Packs a line whose plain side has `rows` <= v rows of `cols_bytes` bytes, at
// most 16 elements.
template <typename T>
HWY_INLINE void PackPartialLine(const uint8_t* HWY_RESTRICT from,
                                ptrdiff_t row_bytes, size_t rows,
                                size_t cols_bytes, uint8_t* HWY_RESTRICT to) {
  constexpr size_t kRow = kCols * sizeof(T);
  alignas(kLine) uint8_t block[kLine];  // v rows
  hwy::ZeroBytes<kLine>(block);
  for (size_t r = 0; r < rows; ++r) {
    hwy::CopyBytes(from + static_cast<ptrdiff_t>(r) * row_bytes,
                   block + r * kRow, cols_bytes);
  }
  PackLine<T, Stores::kCached>(block, kRow, to);
}

// Goes down the rows one cache line wide, and meanwhile fetches the second
// cache line to the right (the first was 5-10 % slower, the third to eighth no
// better): up to twice as fast as leaving that to the hardware, whose
// prefetchers see 128 rows. Into L2: rows at a power-of-two stride fall into
// one set of L1 and would push each other out. Going down 16 rows of [N, K]
// they do well, and it is no use there (Zen 4, 2026).
template <typename T, Stores kStores>
void PackCols(const VnniPlainBlock<const uint8_t>& plain,
              const VnniPackedBlock<uint8_t>& packed) {
  constexpr size_t kV = 4 / sizeof(T);
  constexpr size_t kRow = kCols * sizeof(T);
  constexpr size_t kPanels = kLine / kRow;  // panels that a cache line feeds
  const size_t whole = plain.rows / kV;
  const ptrdiff_t step = static_cast<ptrdiff_t>(kV) * plain.row_bytes;
  uint8_t* to = packed.data;
  size_t at = 0;
  for (; at + kLine <= plain.cols_bytes;
       at += kLine, to += kPanels * packed.panel_bytes) {
    const uint8_t* from = plain.data + at;
    for (size_t l = 0; l < whole; ++l, from += step) {
      for (size_t i = 0; i < kV; ++i) {
        PrefetchL2(from + static_cast<ptrdiff_t>(i) * plain.row_bytes +
                   2 * kLine);
      }
      for (size_t p = 0; p < kPanels; ++p) {
        PackLine<T, kStores>(from + p * kRow, plain.row_bytes,
                             to + p * packed.panel_bytes + l * kLine);
      }
    }
  }
  // Panels that do not fill a cache line, and the rows after the last line.
  const size_t whole_cols = at;
  const size_t lines = hwy::DivCeil(plain.rows, kV);
  to = packed.data;
  for (at = 0; at < plain.cols_bytes; at += kRow, to += packed.panel_bytes) {
    const size_t bytes = HWY_MIN(kRow, plain.cols_bytes - at);
    for (size_t l = at < whole_cols ? whole : 0; l < lines; ++l) {
      const size_t rows = HWY_MIN(kV, plain.rows - l * kV);
      PackPartialLine<T>(plain.data + at + static_cast<ptrdiff_t>(l) * step,
                         plain.row_bytes, rows, bytes, to + l * kLine);
    }
  }
  if constexpr (kStores == Stores::kStream) hwy::FlushStream();
}

// The v rows of one line, 16 elements each.
template <typename T>
HWY_INLINE void UnpackLine(const uint8_t* HWY_RESTRICT from,
                           uint8_t* HWY_RESTRICT to, ptrdiff_t row_bytes) {
  for (size_t c = 0; c < kCols; c += kLanes) {
    V32 v = Get(from + c * 4);
    if constexpr (sizeof(T) == 4) {
      Put<Stores::kCached>(v, to + c * 4);
    } else {
      for (size_t i = 0; i < 4 / sizeof(T); ++i) {
        hn::StoreU(
            hn::TruncateTo(DSmall<T>(), v), DSmall<T>(),
            reinterpret_cast<T*>(to + static_cast<ptrdiff_t>(i) * row_bytes +
                                 c * sizeof(T)));
        v = hn::ShiftRight<8 * sizeof(T)>(v);
      }
    }
  }
}

template <typename T>
void UnpackCols(const VnniPlainBlock<uint8_t>& plain,
                const VnniPackedBlock<const uint8_t>& packed) {
  constexpr size_t kV = 4 / sizeof(T);
  constexpr size_t kRow = kCols * sizeof(T);
  const size_t lines = hwy::DivCeil(plain.rows, kV);
  const uint8_t* from = packed.data;
  for (size_t at = 0; at < plain.cols_bytes;
       at += kRow, from += packed.panel_bytes) {
    const size_t bytes = HWY_MIN(kRow, plain.cols_bytes - at);
    for (size_t l = 0; l < lines; ++l) {
      uint8_t* to =
          plain.data + at + static_cast<ptrdiff_t>(l * kV) * plain.row_bytes;
      const size_t rows = HWY_MIN(kV, plain.rows - l * kV);
      if (HWY_LIKELY(rows == kV && bytes == kRow)) {
        UnpackLine<T>(from + l * kLine, to, plain.row_bytes);
        continue;
      }
      alignas(kLine) uint8_t block[kLine];  // v rows
      UnpackLine<T>(from + l * kLine, block, kRow);
      for (size_t r = 0; r < rows; ++r) {
        hwy::CopyBytes(block + r * kRow,
                       to + static_cast<ptrdiff_t>(r) * plain.row_bytes, bytes);
      }
    }
  }
}

template <typename T>
VnniPackKernels::Direction Cols() {
  return {&PackCols<T, Stores::kCached>, &PackCols<T, Stores::kStream>,
          &UnpackCols<T>};
}

VnniPackKernels GetKernels() {
  VnniPackKernels kernels;
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.nk = {&PackRows<Stores::kCached>, &PackRows<Stores::kStream>,
                &UnpackRows};
  kernels.kn32 = Cols<uint32_t>();
  kernels.kn16 = Cols<uint16_t>();
  kernels.kn8 = Cols<uint8_t>();
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
VnniPackKernels GetVnniPackKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
