#include "quern/cache/page_allocator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/cache/page_table.h"
#include "quern/core/check.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "page_allocator";

}  // namespace

absl::StatusOr<PageAllocator> PageAllocator::Create(int64_t num_pages,
                                                    int64_t page_size) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "num_pages", num_pages, 0,
                                   std::numeric_limits<int32_t>::max()));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "page_size", page_size, 1));
  return PageAllocator(num_pages, page_size);
}

PageAllocator::PageAllocator(int64_t num_pages, int64_t page_size)
    : num_pages_(num_pages), page_size_(page_size) {}

int32_t PageAllocator::Take() {
  if (free_.empty()) {
    holders_.push_back(1);
    free_.reserve(holders_.capacity());  // so that Release does not allocate
    return static_cast<int32_t>(holders_.size() - 1);
  }
  const int32_t page = free_.back();
  free_.pop_back();
  holders_[static_cast<size_t>(page)] = 1;
  return page;
}

void PageAllocator::GiveBack(int32_t page) {
  QUERN_CHECK(0 <= page && static_cast<size_t>(page) < holders_.size());
  int32_t& holders = holders_[static_cast<size_t>(page)];
  QUERN_CHECK(holders > 0);
  if (--holders == 0) free_.push_back(page);
}

absl::Status PageAllocator::Grow(int64_t kv_len, std::vector<int32_t>& pages) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "kv_len", kv_len, 0));
  const int64_t have = static_cast<int64_t>(pages.size());
  const int64_t need = DivCeil(kv_len, page_size_);
  if (need - have > free_pages()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": kv_len=", kv_len, " needs ", need - have,
                     " more pages of ", page_size_, " tokens; ", free_pages(),
                     " of ", num_pages_, " are free"));
  }
  for (int64_t i = have; i < need; ++i) pages.push_back(Take());
  return absl::OkStatus();
}

absl::Status PageAllocator::Fork(const std::vector<int32_t>& pages,
                                 int64_t kv_len, std::vector<int32_t>& branch) {
  const auto have = static_cast<int64_t>(pages.size());
  if (kv_len < 0 || DivCeil(kv_len, page_size_) > have) {
    return InvalidArgument(kOp, "kv_len=", kv_len,
                           "; need 0 <= kv_len <= ", have * page_size_,
                           ", what the pages hold");
  }
  if (!branch.empty()) {
    return InvalidArgument(kOp, "the branch has ", branch.size(),
                           " pages; need none");
  }
  const auto forked = static_cast<size_t>(DivCeil(kv_len, page_size_));
  size_t missing = 0;
  while (missing < forked && pages[missing] == kNoPage) ++missing;
  for (size_t i = missing; i < forked; ++i) {
    if (holders(pages[i]) == 0) {
      return InvalidArgument(kOp, "pages[", i, "]=", pages[i],
                             " is not on loan; need pages that are");
    }
  }
  branch.assign(missing, kNoPage);
  for (size_t i = missing; i < forked; ++i) {
    ++holders_[static_cast<size_t>(pages[i])];
    branch.push_back(pages[i]);
  }
  return absl::OkStatus();
}

absl::Status PageAllocator::GrowForWrite(int64_t begin, int64_t end,
                                         std::vector<int32_t>& pages,
                                         std::vector<PageCopy>& copies) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "begin", begin, 0));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "end", end, begin));
  if (begin == end) return Grow(end, pages);
  const auto have = static_cast<int64_t>(pages.size());
  const int64_t need = DivCeil(end, page_size_);
  const int64_t first = begin / page_size_;
  if (first < have && pages[static_cast<size_t>(first)] == kNoPage) {
    return InvalidArgument(kOp, "tokens [", begin, ", ", end, "): page ", first,
                           " of the sequence is missing; need the pages of all "
                           "tokens to be written");
  }
  int64_t shared = 0;
  for (int64_t i = first; i < std::min(have, need); ++i) {
    if (holders(pages[static_cast<size_t>(i)]) > 1) ++shared;
  }
  const int64_t missing = std::max(need - have, int64_t{0}) + shared;
  if (missing > free_pages()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": tokens [", begin, ", ", end, ") need ", missing,
                     " more pages of ", page_size_, " tokens, ", shared,
                     " of them for shared ones; ", free_pages(), " of ",
                     num_pages_, " are free"));
  }
  for (int64_t i = first; i < std::min(have, need); ++i) {
    int32_t& page = pages[static_cast<size_t>(i)];
    if (holders(page) <= 1) continue;
    const int32_t copy = Take();
    if (i * page_size_ < begin) copies.push_back({page, copy});
    GiveBack(page);
    page = copy;
  }
  return Grow(end, pages);
}

int64_t PageAllocator::ReleaseFirst(int64_t count,
                                    std::vector<int32_t>& pages) {
  int64_t released = 0;
  // The last first, so that growing again gives the same order.
  for (int64_t i = count - 1; i >= 0; --i) {
    int32_t& page = pages[static_cast<size_t>(i)];
    if (page == kNoPage) break;  // and so are all before it
    GiveBack(page);
    page = kNoPage;
    ++released;
  }
  return released;
}

int64_t PageAllocator::ReleaseBefore(int64_t token,
                                     std::vector<int32_t>& pages) {
  return ReleaseFirst(
      std::min(static_cast<int64_t>(pages.size()), token / page_size_), pages);
}

void PageAllocator::Release(std::vector<int32_t>& pages) {
  ReleaseFirst(static_cast<int64_t>(pages.size()), pages);
  pages.clear();
}

}  // namespace quern
