#ifndef QUERN_CACHE_CONVERT_PAGES_H_
#define QUERN_CACHE_CONVERT_PAGES_H_

// Pages from one layout to another of the same elements, bit by bit:
//
//   to.K(page, head)[to.layout().KOffset(t, d)] =
//       from.K(page, head)[from.layout().KOffset(t, d)]
//
// for all pages, heads, tokens and dims, V the same, and the scales where the
// layout has one for each token. Two tensors k[pages, kv_heads, page_size,
// head_dim] and v are a view of the plain form: this is the converter to and
// from them. A value of the latent form is part of its key: pages go from it to
// the others, and not back. Simple and slow: for tests, tools and debugging.

#include "absl/status/status.h"
#include "quern/cache/kv_cache_view.h"

namespace quern {

// InvalidArgument, and nothing written, unless both have memory for the same
// number of pages, and layouts that differ in their form at most; also where
// `to` is latent and `from` is not. The pages of `to` do not overlap one
// another nor those of `from`. The zero that an odd head_dim has in a paired K
// block is written.
absl::Status ConvertPages(const KvCacheView& from, const KvCacheView& to);

}  // namespace quern

#endif  // QUERN_CACHE_CONVERT_PAGES_H_
