#include "cache/copy_pages.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cache/head_rows.h"
#include "cache/kv_cache_view.h"
#include "cache/kv_layout.h"
#include "cache/page_allocator.h"
#include "core/check.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "copy_pages";

void CopyHead(const KvCacheView& from, const KvCacheView& to, PageCopy copy,
              int64_t head) {
  const KvLayout& layout = from.layout();
  const size_t element = SizeOf(layout.dtype());
  std::memcpy(to.K(copy.to, head), from.K(copy.from, head),
              static_cast<size_t>(layout.k_elements()) * element);
  std::memcpy(to.V(copy.to, head), from.V(copy.from, head),
              static_cast<size_t>(layout.v_elements()) * element);
  if (layout.scaling() != KvScaling::kPerTokenHead) return;
  const size_t bytes = static_cast<size_t>(layout.page_size()) * sizeof(float);
  std::memcpy(to.KScales(copy.to, head), from.KScales(copy.from, head), bytes);
  std::memcpy(to.VScales(copy.to, head), from.VScales(copy.from, head), bytes);
}

}  // namespace

absl::Status CheckPageCopies(const KvCacheView& from, const KvCacheView& to,
                             absl::Span<const PageCopy> copies) {
  if (from.layout() != to.layout()) {
    return InvalidArgument(kOp, "the caches differ in layout; need the same");
  }
  QUERN_RETURN_IF_ERROR(CheckCache(kOp, from));
  QUERN_RETURN_IF_ERROR(CheckCacheOut(kOp, to));
  std::vector<int32_t> read, written;
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].from < 0 || copies[i].from >= from.num_pages() ||
        copies[i].to < 0 || copies[i].to >= to.num_pages()) {
      return InvalidArgument(kOp, "copies[", i, "] is from page ",
                             copies[i].from, " to ", copies[i].to,
                             "; need pages below ", from.num_pages(), " and ",
                             to.num_pages());
    }
    read.push_back(copies[i].from);
    written.push_back(copies[i].to);
  }
  std::sort(written.begin(), written.end());
  const auto twice = std::adjacent_find(written.begin(), written.end());
  if (twice != written.end()) {
    return InvalidArgument(kOp, "page ", *twice, " is written twice");
  }
  if (from.k().data != to.k().data) return absl::OkStatus();
  for (const int32_t page : read) {
    if (std::binary_search(written.begin(), written.end(), page)) {
      return InvalidArgument(kOp, "page ", page, " is read and written");
    }
  }
  return absl::OkStatus();
}

void CopyPages(const KvCacheView& from, const KvCacheView& to,
               absl::Span<const PageCopy> copies, Executor& executor) noexcept {
  QUERN_DCHECK(from.layout() == to.layout());
  const int64_t heads = from.layout().kv_heads();
  executor.ParallelFor(static_cast<int64_t>(copies.size()) * heads,
                       [&](int64_t task, int /*worker*/) {
                         CopyHead(from, to,
                                  copies[static_cast<size_t>(task / heads)],
                                  task % heads);
                       });
}

}  // namespace quern
