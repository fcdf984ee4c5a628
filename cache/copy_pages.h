#ifndef QUERN_CACHE_COPY_PAGES_H_
#define QUERN_CACHE_COPY_PAGES_H_

// Pages from one cache to another of the same layout, or within one:
//
//   to page copies[i].to = from page copies[i].from
//
// all heads, keys, values and the scales of kPerTokenHead. Within one cache it
// is what forked sequences need (PageAllocator::GrowForWrite lists the copies).
// To and from a cache of its own, a KvCache or a KvCacheView over any memory of
// layout.page_bytes() a page, it swaps sequences out and in.

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/page_allocator.h"
#include "quern/core/executor.h"

namespace quern {

// For callers that cannot trust their arguments: InvalidArgument unless both
// have the same layout and memory, pages of `to` do not overlap one another,
// page ids are in range, no page is written twice, and, within one cache, none
// is both read and written. Two caches are taken to be apart. Allocates nothing
// where it accepts. Cost: linear in the copies for every 2^17 pages of `to`.
absl::Status CheckPageCopies(const KvCacheView& from, const KvCacheView& to,
                             absl::Span<const PageCopy> copies);

// Arguments as CheckPageCopies accepts them. Allocates nothing. Safe to call
// concurrently on distinct pages. Cost: a copy at memory speed.
void CopyPages(const KvCacheView& from, const KvCacheView& to,
               absl::Span<const PageCopy> copies, Executor& executor) noexcept;

}  // namespace quern

#endif  // QUERN_CACHE_COPY_PAGES_H_
