#include "quern/cache/convert_pages.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "convert_pages";

bool SameElements(const KvLayout& a, const KvLayout& b) {
  return a.dtype() == b.dtype() && a.kv_heads() == b.kv_heads() &&
         a.head_dim() == b.head_dim() && a.v_head_dim() == b.v_head_dim() &&
         a.page_size() == b.page_size() && a.scaling() == b.scaling();
}

void CopyElement(const uint8_t* from, int64_t from_offset, uint8_t* to,
                 int64_t to_offset, size_t element) {
  std::memcpy(to + to_offset * static_cast<int64_t>(element),
              from + from_offset * static_cast<int64_t>(element), element);
}

void ConvertBlocks(const KvCacheView& from, const KvCacheView& to, int64_t page,
                   int64_t head) {
  const KvLayout& a = from.layout();
  const KvLayout& b = to.layout();
  const size_t element = SizeOf(a.dtype());
  uint8_t* k = to.K(page, head);
  if (a.scaling() == KvScaling::kPerBlock) {  // one form has it
    std::memcpy(k, from.K(page, head), static_cast<size_t>(a.k_elements()));
    return;
  }
  if (b.k_row() > b.head_dim()) {
    std::memset(k, 0, static_cast<size_t>(b.k_elements()) * element);
  }
  for (int64_t t = 0; t < a.page_size(); ++t) {
    for (int64_t d = 0; d < a.head_dim(); ++d) {
      CopyElement(from.K(page, head), a.KOffset(t, d), k, b.KOffset(t, d),
                  element);
    }
    // From latent to latent this writes the first dims of the key once more.
    for (int64_t d = 0; d < a.v_head_dim(); ++d) {
      CopyElement(from.V(page, head), a.VOffset(t, d), to.V(page, head),
                  b.VOffset(t, d), element);
    }
  }
  if (a.scaling() != KvScaling::kPerTokenHead) return;
  const size_t bytes = static_cast<size_t>(a.page_size()) * sizeof(float);
  std::memcpy(to.KScales(page, head), from.KScales(page, head), bytes);
  std::memcpy(to.VScales(page, head), from.VScales(page, head), bytes);
}

}  // namespace

absl::Status ConvertPages(const KvCacheView& from, const KvCacheView& to) {
  QUERN_RETURN_IF_ERROR(CheckCache(kOp, from));
  QUERN_RETURN_IF_ERROR(CheckCacheOut(kOp, to));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "num_pages of `to`", to.num_pages(),
                                   from.num_pages(), "those of `from`"));
  if (!SameElements(from.layout(), to.layout())) {
    return InvalidArgument(
        kOp,
        "the layouts differ in more than their form; need the same dtype, "
        "heads, dims, page size and scaling");
  }
  if (to.layout().form() == KvForm::kLatent &&
      from.layout().form() != KvForm::kLatent) {
    return InvalidArgument(
        kOp, "from ", KvFormName(from.layout().form()), " to ",
        KvFormName(to.layout().form()),
        "; need values of their own in `to`, or latent pages in `from`");
  }
  for (int64_t page = 0; page < from.num_pages(); ++page) {
    for (int64_t head = 0; head < from.layout().kv_heads(); ++head) {
      ConvertBlocks(from, to, page, head);
    }
  }
  return absl::OkStatus();
}

}  // namespace quern
