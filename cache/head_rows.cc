#include "quern/cache/head_rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

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

// What has a block for each page and head: keys, values, their scales.
struct CacheSide {
  const char* name;  // "keys of the cache"
  KvCacheView::Blocks blocks;
  int64_t block_bytes;  // without the padding of KvLayout
  size_t element_bytes;
};

CacheSide ScaleSide(const char* name, const KvScales& scales,
                    const KvLayout& layout) {
  constexpr auto kElement = static_cast<int64_t>(sizeof(float));
  CacheSide side = {name,
                    {reinterpret_cast<uint8_t*>(scales.data), 0, 0},
                    layout.page_size() * kElement,
                    sizeof(float)};
  // Strides so large that their bytes overflow are refused as negative ones.
  if (!CheckedMul(scales.page_stride, kElement,
                  &side.blocks.page_stride_bytes) ||
      !CheckedMul(scales.head_stride, kElement,
                  &side.blocks.head_stride_bytes)) {
    side.blocks.page_stride_bytes = side.blocks.head_stride_bytes = -1;
  }
  return side;
}

absl::InlinedVector<CacheSide, 4> SidesOf(const KvCacheView& cache) {
  const KvLayout& layout = cache.layout();
  const size_t element = SizeOf(layout.dtype());
  const auto bytes = [&](int64_t elements) {
    return elements * static_cast<int64_t>(element);
  };
  // Codes with a scale for each block have bf16 behind them.
  const size_t k_element =
      layout.scaling() == KvScaling::kPerBlock ? 2 : element;
  absl::InlinedVector<CacheSide, 4> sides = {
      {"keys of the cache", cache.k(), bytes(layout.k_elements()), k_element}};
  if (layout.form() != KvForm::kLatent) {
    sides.push_back({"values of the cache", cache.v(),
                     bytes(layout.v_elements()), element});
  }
  if (layout.scaling() == KvScaling::kPerTokenHead) {
    sides.push_back(
        ScaleSide("scales of keys of the cache", cache.k_scales(), layout));
    sides.push_back(
        ScaleSide("scales of values of the cache", cache.v_scales(), layout));
  }
  return sides;
}

bool IsAligned(const void* data, size_t element) {
  return reinterpret_cast<uintptr_t>(data) % element == 0;
}

absl::Status NotAligned(absl::string_view op, absl::string_view what,
                        size_t element) {
  return InvalidArgument(op, "the ", what,
                         " are not aligned to their elements of ", element,
                         " bytes");
}

// The scales of the caller's.
absl::Status CheckScales(absl::string_view op, absl::string_view name,
                         const KvScales& scales, const KvLayout& layout) {
  if (layout.scaling() != KvScaling::kPerTensor &&
      layout.scaling() != KvScaling::kPerHead) {
    return absl::OkStatus();
  }
  const bool per_head = layout.scaling() == KvScaling::kPerHead;
  const int64_t count = per_head ? layout.kv_heads() : 1;
  if (scales.data == nullptr) {
    return InvalidArgument(op, "the scales of ", name, " are null; need ",
                           count);
  }
  if (!IsAligned(scales.data, sizeof(float))) {
    return NotAligned(op, absl::StrCat("scales of ", name), sizeof(float));
  }
  if (per_head && scales.head_stride < 0) {
    return InvalidArgument(op, "the scales of ", name, " are ",
                           scales.head_stride, " apart; need 0 or more");
  }
  for (int64_t head = 0; head < count; ++head) {
    const float scale = scales.data[per_head ? head * scales.head_stride : 0];
    if (!(scale >= KvScales::kMin) || std::isinf(scale)) {
      return InvalidArgument(op, "scale ", head, " of ", name, "=", scale,
                             "; need a finite number >= 2^-125");
    }
  }
  return absl::OkStatus();
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

// Whether there is a whole number q in [first, last] of which at + q * stride
// is in (below, above). stride >= 0.
bool AnyStepWithin(int64_t at, int64_t stride, int64_t first, int64_t last,
                   int64_t below, int64_t above) {
  int64_t q = first;
  if (stride > 0) {
    const int64_t room = above - 1 - at;
    q = room / stride - (room % stride < 0 ? 1 : 0);  // the last one below it
    q = std::clamp(q, first, last);
  }
  const int64_t reached = at + q * stride;
  return below < reached && reached < above;
}

// Whether a block of `a` and one of `b` have a byte in common: exact, but for
// sides of more bytes than a memory has. Equal strides spare a loop, as only
// the difference of two indices matters then. There is a page.
bool Overlap(const KvCacheView& cache, const CacheSide& a, const CacheSide& b) {
  constexpr int64_t kMost = int64_t{1} << 60;
  int64_t a_bytes = 0, b_bytes = 0;
  if (!SpanBytes(cache, a, &a_bytes) || !SpanBytes(cache, b, &b_bytes)) {
    return true;
  }
  const int64_t distance = reinterpret_cast<intptr_t>(b.blocks.data) -
                           reinterpret_cast<intptr_t>(a.blocks.data);
  if (distance >= a_bytes || -distance >= b_bytes) return false;
  if (a_bytes > kMost || b_bytes > kMost) return true;
  const int64_t a_page = a.blocks.page_stride_bytes;
  const int64_t b_page = b.blocks.page_stride_bytes;
  const int64_t a_head = a.blocks.head_stride_bytes;
  const int64_t b_head = b.blocks.head_stride_bytes;
  const int64_t pages = cache.num_pages();
  const int64_t heads = cache.layout().kv_heads();
  const int64_t a_pages = a_page == b_page ? 1 : pages;
  const int64_t first = a_page == b_page ? 1 - pages : 0;
  for (int64_t p = 0; p < a_pages; ++p) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t b_heads = a_head == b_head && h > 0 ? 1 : heads;
      for (int64_t g = 0; g < b_heads; ++g) {
        const int64_t at = distance + g * b_head - h * a_head - p * a_page;
        if (AnyStepWithin(at, b_page, first, pages - 1, -b.block_bytes,
                          a.block_bytes)) {
          return true;
        }
      }
    }
  }
  return false;
}

}  // namespace

absl::Status CheckHeadRows(absl::string_view op, absl::string_view name,
                           const AnyTensorView& view, DType dtype,
                           int64_t tokens, int64_t heads, int64_t head_dim) {
  QUERN_RETURN_IF_ERROR(CheckDType(op, name, view.dtype(), dtype));
  // Names are joined where they are needed: what is accepted allocates nothing.
  if (view.rank() != 3) {
    return CheckEqual(op, absl::StrCat(name, ".rank"), view.rank(), 3,
                      "[tokens, heads, dim]");
  }
  const int64_t wanted[] = {tokens, heads, head_dim};
  const char* const kWhat[] = {"the number of tokens", "the number of heads",
                               "the head dim"};
  for (int d = 0; d < 3; ++d) {
    if (view.extent(d) == wanted[d]) continue;
    return CheckEqual(op, absl::StrCat(name, ".extent(", d, ")"),
                      view.extent(d), wanted[d], kWhat[d]);
  }
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
                             " are null; need memory for ", pages, " pages");
    }
    int64_t bytes = 0;
    if (side.blocks.page_stride_bytes < 0 ||
        side.blocks.head_stride_bytes < 0 || !SpanBytes(cache, side, &bytes)) {
      return InvalidArgument(op, "the ", side.name, " are ",
                             side.blocks.page_stride_bytes, " and ",
                             side.blocks.head_stride_bytes,
                             " bytes apart; need 0 or more, and fewer than "
                             "2^63 bytes from first to last");
    }
    const auto element = static_cast<int64_t>(side.element_bytes);
    if (!IsAligned(side.blocks.data, side.element_bytes) ||
        (pages > 1 && side.blocks.page_stride_bytes % element != 0) ||
        (cache.layout().kv_heads() > 1 &&
         side.blocks.head_stride_bytes % element != 0)) {
      return NotAligned(op, side.name, side.element_bytes);
    }
  }
  QUERN_RETURN_IF_ERROR(
      CheckScales(op, "keys", cache.k_scales(), cache.layout()));
  return CheckScales(op, "values", cache.v_scales(), cache.layout());
}

absl::Status CheckCacheOut(absl::string_view op, const KvCacheView& cache) {
  QUERN_RETURN_IF_ERROR(CheckCache(op, cache));
  const int64_t pages = cache.num_pages();
  if (pages == 0) return absl::OkStatus();
  const auto sides = SidesOf(cache);
  for (const CacheSide& side : sides) {
    if (!LieApart(
            {pages, cache.layout().kv_heads()},
            {side.blocks.page_stride_bytes, side.blocks.head_stride_bytes},
            side.block_bytes)) {
      return InvalidArgument(op, "the ", side.name, " are ",
                             side.blocks.page_stride_bytes, " and ",
                             side.blocks.head_stride_bytes,
                             " bytes apart; need blocks of ", side.block_bytes,
                             " that do not overlap");
    }
  }
  for (size_t i = 0; i < sides.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (Overlap(cache, sides[j], sides[i])) {
        return InvalidArgument(op, "the ", sides[i].name, " overlap the ",
                               sides[j].name, "; need no byte in common");
      }
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
        CheckApart(op, name, view, side.name,
                   DenseVector<const uint8_t>(side.blocks.data, bytes)));
  }
  return absl::OkStatus();
}

}  // namespace quern
