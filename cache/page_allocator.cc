#include "cache/page_allocator.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/check.h"
#include "core/math_util.h"
#include "core/status_macros.h"

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
  for (int64_t i = have; i < need; ++i) {
    auto page = static_cast<int32_t>(lent_.size());
    if (free_.empty()) {
      lent_.push_back(true);
      free_.reserve(lent_.capacity());  // so that Release does not allocate
    } else {
      page = free_.back();
      free_.pop_back();
      lent_[static_cast<size_t>(page)] = true;
    }
    pages.push_back(page);
  }
  return absl::OkStatus();
}

void PageAllocator::Release(std::vector<int32_t>& pages) {
  // The last first, so that growing again gives the same order.
  for (size_t i = pages.size(); i-- > 0;) {
    const int32_t page = pages[i];
    QUERN_CHECK(0 <= page && static_cast<size_t>(page) < lent_.size());
    QUERN_CHECK(lent_[static_cast<size_t>(page)]);
    lent_[static_cast<size_t>(page)] = false;
    free_.push_back(page);
  }
  pages.clear();
}

}  // namespace quern
