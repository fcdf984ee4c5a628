#ifndef QUERN_CACHE_PAGE_ALLOCATOR_H_
#define QUERN_CACHE_PAGE_ALLOCATOR_H_

// Which pages of a cache are free. A sequence is a vector of page ids that its
// owner keeps; the allocator lends the ids and takes them back.
//
//   std::vector<int32_t> pages;
//   allocator.Grow(kv_len, pages);   // as the sequence gets longer
//   allocator.Release(pages);        // when it ends

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace quern {

// Not thread-safe. The pages last given back are lent first: their memory is
// the likeliest to be in a cache.
class PageAllocator {
 public:
  // InvalidArgument unless 0 <= num_pages < 2^31 and page_size >= 1.
  static absl::StatusOr<PageAllocator> Create(int64_t num_pages,
                                              int64_t page_size);

  int64_t num_pages() const { return num_pages_; }
  int64_t page_size() const { return page_size_; }
  int64_t free_pages() const {
    return num_pages_ - static_cast<int64_t>(lent_.size() - free_.size());
  }

  // Appends pages to `pages` until they hold kv_len tokens; nothing if they do.
  // ResourceExhausted, and nothing changed, if too few are free.
  absl::Status Grow(int64_t kv_len, std::vector<int32_t>& pages);

  // Gives all of `pages` back and empties it. They must be on loan: giving a
  // page back twice breaks a QUERN_CHECK.
  void Release(std::vector<int32_t>& pages);

 private:
  PageAllocator(int64_t num_pages, int64_t page_size);

  int64_t num_pages_;
  int64_t page_size_;
  // Pages from lent_.size() on were never lent: memory is in proportion to the
  // pages in use, not to num_pages.
  std::vector<int32_t> free_;  // given back, a stack
  std::vector<bool> lent_;     // by page id
};

}  // namespace quern

#endif  // QUERN_CACHE_PAGE_ALLOCATOR_H_
