// Fetching of the next chunk while one is computed.

// Per-target include guard.
#if defined(QUERN_ATTENTION_FETCHER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_FETCHER_INL_H_
#undef QUERN_ATTENTION_FETCHER_INL_H_
#else
#define QUERN_ATTENTION_FETCHER_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "attention/paged_attention_kernels.h"
#include "core/prefetch.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Fetches the keys and values of the next chunk, and the queries if they are
// others, into the L2 cache, from the first byte to the last, a few lines at
// each of `steps` steps of this one: DRAM is never idle, nor are there more
// requests at once than a core can have, which drops the rest.
class Fetcher {
 public:
  Fetcher(const ChunkArgs& c, size_t k_bytes, size_t v_bytes, size_t steps)
      : c_(c), k_bytes_(k_bytes), v_bytes_(v_bytes) {
    const size_t lines = kChunkGroups * (Lines(k_bytes) + Lines(v_bytes)) +
                         c.next_q_rows * Lines(c.next_q_bytes);
    stride_ = (lines + steps - 1) / HWY_MAX(steps, size_t{1}) * kLine;
    NextGroup();
  }
  HWY_INLINE void Step() {
    if (HWY_UNLIKELY(at_ == nullptr)) return;
    for (size_t i = 0; i < stride_; i += kLine) PrefetchL2(at_ + i);
    if (left_ <= stride_) {
      NextGroup();
    } else {
      at_ += stride_;
      left_ -= stride_;
    }
  }

 private:
  static constexpr size_t kLine = 64;
  static size_t Lines(size_t bytes) { return (bytes + kLine - 1) / kLine; }

  // The next group that there is, the last chunk has fewer; then the queries.
  HWY_INLINE void NextGroup() {
    const size_t groups = v_bytes_ == 0 ? kChunkGroups : 2 * kChunkGroups;
    at_ = nullptr;
    while (at_ == nullptr && next_ < groups + c_.next_q_rows) {
      const size_t i = next_++;
      if (i < kChunkGroups) {
        at_ = c_.next_k[i];
        left_ = k_bytes_;
      } else if (i < groups) {
        at_ = c_.next_v[i - kChunkGroups];
        left_ = v_bytes_;
      } else {
        at_ = c_.next_q[i - groups];
        left_ = c_.next_q_bytes;
      }
    }
  }

  const ChunkArgs& c_;
  size_t k_bytes_;  // of a group
  size_t v_bytes_;
  size_t stride_;
  size_t next_ = 0;
  const uint8_t* at_;  // null: all is fetched
  size_t left_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
