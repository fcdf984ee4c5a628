#include "cache/head_rows.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cache/kv_cache_view.h"
#include "cache/kv_layout.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"

namespace quern {
namespace {

// Whether the blocks [i, j], in whichever order they lie in memory, have
// nothing in common. Their span does not overflow.
bool LieApart(std::array<int64_t, 2> extents, std::array<int64_t, 2> strides,
              int64_t block) {
  const size_t inner = strides[0] < strides[1] ? 0 : 1;
  for (const size_t d : {inner, 1 - inner}) {
    if (extents[d] <= 1) continue;
    if (strides[d] < block) return false;
    block += (extents[d] - 1) * strides[d];
  }
  return true;
}

// The keys or the values of a cache.
struct CacheSide {
  const char* name;
  KvCacheView::Blocks blocks;
  int64_t block_bytes;  // without the padding of KvLayout
};

std::array<CacheSide, 2> SidesOf(const KvCacheView& cache) {
  const KvLayout& layout = cache.layout();
  const auto element = static_cast<int64_t>(SizeOf(layout.dtype()));
  return {{{"keys", cache.k(), layout.k_elements() * element},
           {"values", cache.v(), layout.v_elements() * element}}};
}

// *bytes = from the first byte of a side to the end of its last block; false if
// that is 2^63 or more. There is a page.
bool SpanBytes(const KvCacheView& cache, const CacheSide& side,
               int64_t* bytes) {
  int64_t pages = 0, heads = 0;
  return CheckedMul(cache.num_pages() - 1, side.blocks.page_stride_bytes,
                    &pages) &&
         CheckedMul(cache.layout().kv_heads() - 1,
                    side.blocks.head_stride_bytes, &heads) &&
         CheckedAdd(pages, heads, bytes) &&
         CheckedAdd(*bytes, side.block_bytes, bytes);
}

}  // namespace

absl::Status CheckHeadRows(absl::string_view op, absl::string_view name,
                           const AnyTensorView& view, DType dtype,
                           int64_t tokens, int64_t heads, int64_t head_dim) {
  QUERN_RETURN_IF_ERROR(CheckDType(op, name, view.dtype(), dtype));
  QUERN_RETURN_IF_ERROR(CheckEqual(op, absl::StrCat(name, ".rank"), view.rank(),
                                   3, "[tokens, heads, dim]"));
  const int64_t wanted[] = {tokens, heads, head_dim};
  const char* const kWhat[] = {"the number of tokens", "the number of heads",
                               "the head dim"};
  for (int d = 0; d < 3; ++d) {
    QUERN_RETURN_IF_ERROR(CheckEqual(op, absl::StrCat(name, ".extent(", d, ")"),
                                     view.extent(d), wanted[d], kWhat[d]));
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(op, absl::StrCat(name, ".stride(2)"),
                                   view.stride(2), 1, "rows are contiguous"));
  return CheckInput(op, name, view, dtype, wanted);
}

absl::Status CheckHeadRowsOut(absl::string_view op, absl::string_view name,
                              const AnyTensorView& view, DType dtype,
                              int64_t tokens, int64_t heads, int64_t head_dim) {
  QUERN_RETURN_IF_ERROR(
      CheckHeadRows(op, name, view, dtype, tokens, heads, head_dim));
  if (tokens == 0) return absl::OkStatus();
  if (!view.writable()) return InvalidArgument(op, name, " is read-only");
  if (!LieApart({tokens, heads}, {view.stride(0), view.stride(1)}, head_dim)) {
    return InvalidArgument(op, name, " has strides ", view.stride(0), " and ",
                           view.stride(1), "; need rows of ", head_dim,
                           " that do not overlap");
  }
  return absl::OkStatus();
}

absl::Status CheckCache(absl::string_view op, const KvCacheView& cache) {
  const int64_t pages = cache.num_pages();
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "num_pages of the cache", pages, 0));
  if (pages == 0) return absl::OkStatus();
  for (const CacheSide& side : SidesOf(cache)) {
    if (side.blocks.data == nullptr) {
      return InvalidArgument(op, "the ", side.name,
                             " of the cache are null; need memory for ", pages,
                             " pages");
    }
    int64_t bytes = 0;
    if (side.blocks.page_stride_bytes < 0 ||
        side.blocks.head_stride_bytes < 0 || !SpanBytes(cache, side, &bytes)) {
      return InvalidArgument(op, "the ", side.name, " of the cache are ",
                             side.blocks.page_stride_bytes, " and ",
                             side.blocks.head_stride_bytes,
                             " bytes apart; need 0 or more, and fewer than "
                             "2^63 bytes from first to last");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCacheOut(absl::string_view op, const KvCacheView& cache) {
  QUERN_RETURN_IF_ERROR(CheckCache(op, cache));
  const int64_t pages = cache.num_pages();
  if (pages == 0) return absl::OkStatus();
  for (const CacheSide& side : SidesOf(cache)) {
    if (!LieApart(
            {pages, cache.layout().kv_heads()},
            {side.blocks.page_stride_bytes, side.blocks.head_stride_bytes},
            side.block_bytes)) {
      return InvalidArgument(op, "the ", side.name, " of the cache are ",
                             side.blocks.page_stride_bytes, " and ",
                             side.blocks.head_stride_bytes,
                             " bytes apart; need blocks of ", side.block_bytes,
                             " that do not overlap");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckApartFromCache(absl::string_view op, absl::string_view name,
                                 const AnyTensorView& view,
                                 const KvCacheView& cache) {
  if (cache.num_pages() == 0) return absl::OkStatus();
  for (const CacheSide& side : SidesOf(cache)) {
    int64_t bytes = 0;
    if (!SpanBytes(cache, side, &bytes)) continue;
    QUERN_RETURN_IF_ERROR(
        CheckApart(op, name, view, absl::StrCat(side.name, " of the cache"),
                   DenseVector<const uint8_t>(side.blocks.data, bytes)));
  }
  return absl::OkStatus();
}

}  // namespace quern
