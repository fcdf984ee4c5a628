#include "quern/cache/pack_kv_kernels.h"
#include "quern/core/sets/avx3.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cache/pack_kv_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/cache/load_blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// 4 cells of 4 bytes of 16 tokens. In every block, lane i of vector j becomes
// lane j of vector i; blocks hold tokens 4 apart, so that a whole vector is
// consecutive tokens of one cell.
template <bool kStream>
HWY_INLINE void Transpose4(const uint8_t* const* rows, size_t at, uint8_t* to) {
  const Tag<uint32_t> d;
  const hn::Repartition<uint64_t, decltype(d)> dw;
  const size_t lanes = hn::Lanes(d);
  for (size_t t = 0; t < kTokens; t += lanes) {
    const auto v0 = LoadBlocks(d, rows + t, 4, at);
    const auto v1 = LoadBlocks(d, rows + t + 1, 4, at);
    const auto v2 = LoadBlocks(d, rows + t + 2, 4, at);
    const auto v3 = LoadBlocks(d, rows + t + 3, 4, at);
    const auto lower01 = hn::BitCast(dw, hn::InterleaveLower(d, v0, v1));
    const auto upper01 = hn::BitCast(dw, hn::InterleaveUpper(d, v0, v1));
    const auto lower23 = hn::BitCast(dw, hn::InterleaveLower(d, v2, v3));
    const auto upper23 = hn::BitCast(dw, hn::InterleaveUpper(d, v2, v3));
    const auto store = [&](hn::Vec<decltype(dw)> v, size_t cell) HWY_ATTR {
      StoreOrStream<kStream>(
          hn::BitCast(d, v), d,
          reinterpret_cast<uint32_t*>(to) + cell * kTokens + t);
    };
    store(hn::InterleaveLower(dw, lower01, lower23), 0);
    store(hn::InterleaveUpper(dw, lower01, lower23), 1);
    store(hn::InterleaveLower(dw, upper01, upper23), 2);
    store(hn::InterleaveUpper(dw, upper01, upper23), 3);
  }
}

// 8 cells of 2 bytes of 16 tokens, likewise.
template <bool kStream>
HWY_INLINE void Transpose2(const uint8_t* const* rows, size_t at, uint8_t* to) {
  const Tag<uint16_t> d;
  const hn::Repartition<uint32_t, decltype(d)> dw;
  const hn::Repartition<uint64_t, decltype(d)> dq;
  const size_t lanes = hn::Lanes(d);
  for (size_t t = 0; t < kTokens; t += lanes) {
    // Cells 0-3 and 4-7 of tokens 0-3 (and 4-7), two tokens to a lane of 4
    // bytes, then four to a lane of 8.
    const auto four = [&](size_t token, hn::Vec<decltype(dq)>* out) HWY_ATTR {
      const auto v0 = LoadBlocks(d, rows + t + token, 8, at);
      const auto v1 = LoadBlocks(d, rows + t + token + 1, 8, at);
      const auto v2 = LoadBlocks(d, rows + t + token + 2, 8, at);
      const auto v3 = LoadBlocks(d, rows + t + token + 3, 8, at);
      const auto lower01 = hn::BitCast(dw, hn::InterleaveLower(d, v0, v1));
      const auto upper01 = hn::BitCast(dw, hn::InterleaveUpper(d, v0, v1));
      const auto lower23 = hn::BitCast(dw, hn::InterleaveLower(d, v2, v3));
      const auto upper23 = hn::BitCast(dw, hn::InterleaveUpper(d, v2, v3));
      out[0] = hn::BitCast(dq, hn::InterleaveLower(dw, lower01, lower23));
      out[1] = hn::BitCast(dq, hn::InterleaveUpper(dw, lower01, lower23));
      out[2] = hn::BitCast(dq, hn::InterleaveLower(dw, upper01, upper23));
      out[3] = hn::BitCast(dq, hn::InterleaveUpper(dw, upper01, upper23));
    };
    hn::Vec<decltype(dq)> first[4], last[4];
    four(0, first);
    four(4, last);
    for (size_t i = 0; i < 4; ++i) {
      uint16_t* cells = reinterpret_cast<uint16_t*>(to) + 2 * i * kTokens + t;
      StoreOrStream<kStream>(
          hn::BitCast(d, hn::InterleaveLower(dq, first[i], last[i])), d, cells);
      StoreOrStream<kStream>(
          hn::BitCast(d, hn::InterleaveUpper(dq, first[i], last[i])), d,
          cells + kTokens);
    }
  }
}

template <size_t kCellBytes, bool kStream>
HWY_INLINE void Transpose(const uint8_t* const* rows, size_t at, uint8_t* to) {
  if constexpr (kCellBytes == 4) {
    Transpose4<kStream>(rows, at, to);
  } else {
    Transpose2<kStream>(rows, at, to);
  }
}

template <size_t kCellBytes, bool kStream>
void PackK(const uint8_t* const* rows, size_t row_bytes, uint8_t* to) {
  if (kStream && !IsVectorAligned(to))
    return PackK<kCellBytes, false>(rows, row_bytes, to);
  const size_t whole = row_bytes / kBlockBytes * kBlockBytes;
  for (size_t at = 0; at < whole; at += kBlockBytes) {
    Transpose<kCellBytes, kStream>(rows, at, to + at * kTokens);
  }
  const size_t rest = row_bytes - whole;
  if (rest == 0) return;
  uint8_t block[kTokens][kBlockBytes] = {};
  const uint8_t* block_rows[kTokens];
  for (size_t t = 0; t < kTokens; ++t) {
    hwy::CopyBytes(rows[t] + whole, block[t], rest);
    block_rows[t] = block[t];
  }
  uint8_t cells[kTokens * kBlockBytes];
  Transpose<kCellBytes, false>(block_rows, 0, cells);
  hwy::CopyBytes(cells, to + whole * kTokens,
                 hwy::RoundUpTo(rest, kCellBytes) * kTokens);
}

template <typename T, bool kStream>
void PackV(const uint8_t* even_bytes, const uint8_t* odd_bytes,
           size_t row_bytes, uint8_t* to_bytes) {
  if (kStream && !IsVectorAligned(to_bytes)) {
    return PackV<T, false>(even_bytes, odd_bytes, row_bytes, to_bytes);
  }
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const size_t count = row_bytes / sizeof(T);
  const T* HWY_RESTRICT even = reinterpret_cast<const T*>(even_bytes);
  const T* HWY_RESTRICT odd = reinterpret_cast<const T*>(odd_bytes);
  T* HWY_RESTRICT to = reinterpret_cast<T*>(to_bytes);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto a = hn::LoadU(d, even + i);
    const auto b = hn::LoadU(d, odd + i);
    StoreOrStream<kStream>(hn::InterleaveWholeLower(d, a, b), d, to + 2 * i);
    StoreOrStream<kStream>(hn::InterleaveWholeUpper(d, a, b), d,
                           to + 2 * i + lanes);
  }
  for (; i < count; ++i) {
    to[2 * i] = even[i];
    to[2 * i + 1] = odd[i];
  }
}

void Flush() { hwy::FlushStream(); }

PackKvKernels GetKernels(size_t element_bytes) {
  PackKvKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.flush = &Flush;
  if (element_bytes == 1) {
    kernels.pack_k = &PackK<2, false>;
    kernels.pack_k_stream = &PackK<2, true>;
    kernels.pack_v = &PackV<uint8_t, false>;
    kernels.pack_v_stream = &PackV<uint8_t, true>;
    return kernels;
  }
  kernels.pack_k = &PackK<4, false>;
  kernels.pack_k_stream = &PackK<4, true>;
  if (element_bytes == 2) {
    kernels.pack_v = &PackV<uint16_t, false>;
    kernels.pack_v_stream = &PackV<uint16_t, true>;
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
PackKvKernels GetPackKvKernels(size_t element_bytes) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(element_bytes);
}
}  // namespace quern
#endif  // HWY_ONCE
