#include "quern/cache/copy_pages.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_allocator.h"
#include "quern/core/algorithms/distinct.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"

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
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].from < 0 || copies[i].from >= from.num_pages() ||
        copies[i].to < 0 || copies[i].to >= to.num_pages()) {
      return InvalidArgument(kOp, "copies[", i, "] is from page ",
                             copies[i].from, " to ", copies[i].to,
                             "; need pages below ", from.num_pages(), " and ",
                             to.num_pages());
    }
  }
  const bool within_one = from.k().data == to.k().data;
  int64_t both = kNoNumber;
  const int64_t twice = FindTwice(
      copies.size(), [&](size_t i) { return int64_t{copies[i].to}; },
      [&](const auto& written) {
        if (!within_one) return;
        for (const PageCopy& copy : copies) {
          if (written.Covers(copy.from) && written.Contains(copy.from)) {
            both = copy.from;
          }
        }
      });
  if (twice != kNoNumber) {
    return InvalidArgument(kOp, "page ", twice, " is written twice");
  }
  if (both != kNoNumber) {
    return InvalidArgument(kOp, "page ", both, " is read and written");
  }
  return absl::OkStatus();
}

void CopyPages(const KvCacheView& from, const KvCacheView& to,
               absl::Span<const PageCopy> copies, Executor& executor) noexcept {
  QUERN_DCHECK_OK(CheckPageCopies(from, to, copies));
  const int64_t heads = from.layout().kv_heads();
  executor.ParallelFor(static_cast<int64_t>(copies.size()) * heads,
                       [&](int64_t task, int /*worker*/) {
                         CopyHead(from, to,
                                  copies[static_cast<size_t>(task / heads)],
                                  task % heads);
                       });
}

}  // namespace quern
