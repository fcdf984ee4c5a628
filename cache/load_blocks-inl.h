// A vector whose blocks of 16 bytes come from different rows.

// clang-format off
#if defined(QUERN_CACHE_LOAD_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_CACHE_LOAD_BLOCKS_INL_H_
#undef QUERN_CACHE_LOAD_BLOCKS_INL_H_
#else
#define QUERN_CACHE_LOAD_BLOCKS_INL_H_
#endif
// clang-format on

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Tokens of a group of keys, and of a transposition in registers.
constexpr size_t kTokens = 16;
constexpr size_t kBlockBytes = 16;

// A vector of at most as many lanes as a group has tokens. Its length is a
// constant, because blocks of other vectors cannot be addressed one by one.
template <typename T>
using Tag =
    hn::FixedTag<T, HWY_MIN(kTokens,
                            (HWY_HAVE_SCALABLE ? kBlockBytes : HWY_MAX_BYTES) /
                                sizeof(T))>;

template <class D>
constexpr size_t BlocksOf() {
  return hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) / kBlockBytes;
}

// The 16 bytes from `at` on of rows 0, step, 2 * step, ..., one in each block.
// (Masked broadcasts would do too; GCC 12 fails to compile them for AVX-512.)
template <class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const uint8_t* const* rows, size_t step,
                                 size_t at) {
  using T = hn::TFromD<D>;
  constexpr size_t kBlocks = BlocksOf<D>();
  if constexpr (kBlocks == 1) {
    return hn::LoadU(d, reinterpret_cast<const T*>(rows[0] + at));
  } else {
    const hn::Half<D> dh;
    return hn::Combine(d, LoadBlocks(dh, rows + kBlocks / 2 * step, step, at),
                       LoadBlocks(dh, rows, step, at));
  }
}

template <bool kStream, class D>
HWY_INLINE void StoreOrStream(hn::Vec<D> v, D d, hn::TFromD<D>* to) {
  if constexpr (kStream) {
    hn::Stream(v, d, to);
  } else {
    hn::StoreU(v, d, to);
  }
}

inline bool IsVectorAligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) %
             hn::Lanes(hn::ScalableTag<uint8_t>()) ==
         0;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
