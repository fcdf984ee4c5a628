#ifndef QUERN_CACHE_PAGE_ALLOCATOR_H_
#define QUERN_CACHE_PAGE_ALLOCATOR_H_

// Which pages of a cache are free. A sequence is a vector of page ids that its
// owner keeps; the allocator lends the ids and takes them back.
//
//   std::vector<int32_t> pages;
//   allocator.Grow(kv_len, pages);   // as the sequence gets longer
//   allocator.Release(pages);        // when it ends
//
// Sequences may share pages, those of a common prefix say. Each holder gives
// its pages back; the last one frees them. Who writes to a page must be its
// only holder:
//
//   allocator.Fork(pages, kv_len, branch);   // both hold kv_len tokens now
//   allocator.GrowForWrite(kv_len, kv_len + 5, branch, copies);
//   CopyPages(cache, cache, copies, executor);   // of every layer
//   (write tokens [kv_len, kv_len + 5) of the branch)
//
// Where all layers of the cache have a window, a sequence gives back the pages
// that its window has left. After a step that ended with kv_len tokens, the
// next query stands at position kv_len and sees nothing before kv_len -
// window_left:
//
//   allocator.ReleaseBefore(kv_len - window_left, pages);
//
// The pages before are kNoPage then (see cache/page_table.h): missing. Grow,
// GrowForWrite, Fork and Release go on working.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace quern {

// The contents of page `from` to page `to`; see cache/copy_pages.h.
struct PageCopy {
  int32_t from;
  int32_t to;
  friend bool operator==(PageCopy a, PageCopy b) {
    return a.from == b.from && a.to == b.to;
  }
};

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
    return num_pages_ - static_cast<int64_t>(holders_.size() - free_.size());
  }

  // Appends pages to `pages` until they hold kv_len tokens; nothing if they do.
  // ResourceExhausted, and nothing changed, if too few are free.
  absl::Status Grow(int64_t kv_len, std::vector<int32_t>& pages);

  // Appends to `branch`, which is empty, the pages of the first kv_len tokens
  // of `pages`: both hold them now. InvalidArgument, and nothing changed, if
  // `branch` is not empty, `pages` hold fewer tokens, or one of these pages is
  // not on loan. Pages that are missing from `pages` are missing from the
  // branch.
  absl::Status Fork(const std::vector<int32_t>& pages, int64_t kv_len,
                    std::vector<int32_t>& branch);

  // Grow(end, pages), and makes `pages` the only holder of those that tokens
  // [begin, end) lie in: a shared one is replaced by a free one. If tokens
  // before `begin` lie in it as well, its copy is appended to `copies`: to be
  // done before anything else is written. ResourceExhausted, and nothing
  // changed, if too few pages are free; InvalidArgument unless
  // 0 <= begin <= end, and where a page to be written is missing.
  absl::Status GrowForWrite(int64_t begin, int64_t end,
                            std::vector<int32_t>& pages,
                            std::vector<PageCopy>& copies);

  // Gives back the pages of `pages` whose tokens all lie before `token`, and
  // puts kNoPage in their places, so that later tokens stay where they are.
  // Returns how many it gave back: 0 if the window has left no further page, or
  // if token <= 0. Another holder keeps its pages. Cost: linear in the pages
  // given back.
  int64_t ReleaseBefore(int64_t token, std::vector<int32_t>& pages);

  // Gives all of `pages` back, those that are not missing, and empties it. They
  // must be on loan: giving a page back more often than it was lent and forked
  // breaks a QUERN_CHECK.
  void Release(std::vector<int32_t>& pages);

  // Sequences that hold `page`; 0 if it is free.
  int64_t holders(int32_t page) const {
    const auto p = static_cast<size_t>(page);
    return p < holders_.size() ? holders_[p] : 0;
  }

 private:
  PageAllocator(int64_t num_pages, int64_t page_size);
  int32_t Take();
  void GiveBack(int32_t page);
  // Gives back the first `count` pages of `pages` that are not missing.
  int64_t ReleaseFirst(int64_t count, std::vector<int32_t>& pages);

  int64_t num_pages_;
  int64_t page_size_;
  // Pages from holders_.size() on were never lent: memory is in proportion to
  // the pages in use, not to num_pages.
  std::vector<int32_t> free_;     // given back, a stack
  std::vector<int32_t> holders_;  // by page id; 0: free
};

}  // namespace quern

#endif  // QUERN_CACHE_PAGE_ALLOCATOR_H_
