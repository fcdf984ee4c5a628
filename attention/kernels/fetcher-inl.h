// Fetching of what is read next while a chunk is computed.

// Per-target include guard.
#if defined(QUERN_ATTENTION_KERNELS_FETCHER_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_KERNELS_FETCHER_INL_H_
#undef QUERN_ATTENTION_KERNELS_FETCHER_INL_H_
#else
#define QUERN_ATTENTION_KERNELS_FETCHER_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/core/prefetch.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Fetches what is read next into the L2 cache, from the first byte to the last,
// a few lines at each of `steps` steps of the work at hand: DRAM is never idle,
// nor are there more requests at once than a core can have, which drops the
// rest.
class Fetcher {
 public:
  Fetcher(const ChunkArgs& c, size_t steps)
      : list_(c.next), end_(list_ + kFetchLists) {
    size_t lines = 0;
    for (const FetchList& list : c.next) {
      lines += list.count * ((list.bytes + kLine - 1) / kLine);
    }
    steps = HWY_MAX(steps, size_t{1});
    due_of_step_ = (lines * kDue + steps - 1) / steps;
    NextRow();
  }
  HWY_INLINE void Step() {
    due_ += due_of_step_;
    for (; due_ >= kDue && at_ != nullptr; due_ -= kDue) {
      PrefetchL2(at_);
      if (left_ <= kLine) {
        NextRow();
      } else {
        at_ += kLine;
        left_ -= kLine;
      }
    }
  }

 private:
  static constexpr size_t kLine = 64;
  static constexpr size_t kDue = 1024;  // of one line

  HWY_INLINE void NextRow() {
    at_ = nullptr;
    while (at_ == nullptr && list_ != end_) {
      if (row_ == list_->count) {
        row_ = 0;
        ++list_;
        continue;
      }
      at_ = list_->rows[row_++];
      left_ = list_->bytes;
    }
  }

  const FetchList* list_;
  const FetchList* end_;
  size_t row_ = 0;  // the next one of the list
  // In units of 1 / kDue lines: what a step adds, and what is due by now.
  size_t due_of_step_;
  size_t due_ = 0;
  const uint8_t* at_;  // null: all is fetched
  size_t left_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
