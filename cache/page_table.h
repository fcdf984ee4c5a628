#ifndef QUERN_CACHE_PAGE_TABLE_H_
#define QUERN_CACHE_PAGE_TABLE_H_

// Which pages, in order, hold each sequence, as compressed sparse rows:
//
//   pages of sequence s = page_ids[indptr[s] .. indptr[s + 1])
//   token t of s lies in slot  page_ids[indptr[s] + t / page_size] * page_size
//                              + t % page_size
//
// One table serves all layers that keep the same tokens. Pages may be shared by
// sequences and in any order; slots beyond a sequence's last token are never
// read.
//
// The first pages of a sequence may be missing: kNoPage stands in their place
// where a window has left their tokens and PageAllocator::ReleaseBefore gave
// the pages back. Layers with a window then have a table of their own, beside
// that of the layers which see all tokens. The tokens keep their numbers.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/tensor_view.h"

namespace quern {

// Stands in a table for a page that was given back.
inline constexpr int32_t kNoPage = -1;

// A borrowed, validated table: the arrays outlive it and do not change.
class PageTable {
 public:
  // No sequences.
  PageTable() = default;

  // indptr[sequences + 1], ascending from 0 to at most page_ids.size(); page
  // ids in [0, num_pages), or kNoPage before the first page that a sequence
  // has. InvalidArgument names the sequence and the value. Cost: one pass over
  // both. Allocates nothing.
  static absl::StatusOr<PageTable> Build(absl::Span<const int64_t> indptr,
                                         absl::Span<const int32_t> page_ids,
                                         int64_t page_size, int64_t num_pages);

  int64_t num_sequences() const {
    return indptr_.empty() ? 0 : static_cast<int64_t>(indptr_.size()) - 1;
  }
  int64_t page_size() const { return page_size_; }
  // The bound that the page ids were checked against.
  int64_t num_pages() const { return num_pages_; }

  absl::Span<const int32_t> Pages(int64_t sequence) const {
    const auto s = static_cast<size_t>(sequence);
    return page_ids_.subspan(static_cast<size_t>(indptr_[s]),
                             static_cast<size_t>(indptr_[s + 1] - indptr_[s]));
  }
  // Whether the page of this token is there: 0 <= token < Capacity(sequence).
  // Pages are missing at the beginning of a sequence alone, so a page that is
  // there means that the pages of all later tokens are there.
  bool HasToken(int64_t sequence, int64_t token) const {
    return Pages(sequence)[static_cast<size_t>(token / page_size_)] != kNoPage;
  }
  // Whether any page of any sequence is missing.
  bool has_missing_pages() const { return has_missing_pages_; }
  // Tokens that the pages of `sequence` can hold, missing pages included.
  int64_t Capacity(int64_t sequence) const {
    const auto s = static_cast<size_t>(sequence);
    return (indptr_[s + 1] - indptr_[s]) * page_size_;
  }
  // 0 <= token < Capacity(sequence), and the page of the token is there.
  int64_t Slot(int64_t sequence, int64_t token) const {
    const auto page = static_cast<size_t>(token / page_size_);
    return Pages(sequence)[page] * page_size_ + token % page_size_;
  }

  // InvalidArgument unless there is one length for each sequence and its pages
  // hold that many tokens.
  absl::Status CheckKvLens(absl::Span<const int64_t> kv_lens) const;

  // The slots of the last q_lens[s] of kv_lens[s] tokens, sequence by sequence:
  // where a step writes its new keys and values. Writes all of `slots`, whose
  // size must be the sum of q_lens. InvalidArgument also where CheckKvLens
  // refuses, q_lens[s] is not in [0, kv_lens[s]], or a new token's page is
  // missing.
  absl::Status SlotMapping(absl::Span<const int64_t> q_lens,
                           absl::Span<const int64_t> kv_lens,
                           absl::Span<int64_t> slots) const;

 private:
  PageTable(absl::Span<const int64_t> indptr,
            absl::Span<const int32_t> page_ids, int64_t page_size,
            int64_t num_pages, bool has_missing_pages)
      : indptr_(indptr),
        page_ids_(page_ids),
        page_size_(page_size),
        num_pages_(num_pages),
        has_missing_pages_(has_missing_pages) {}

  absl::Span<const int64_t> indptr_;
  absl::Span<const int32_t> page_ids_;
  int64_t page_size_ = 0;
  int64_t num_pages_ = 0;
  bool has_missing_pages_ = false;
};

// The arrays of a table, filled sequence by sequence and kept from step to
// step, so that only growth allocates.
struct PageTableStorage {
  std::vector<int64_t> indptr = {0};
  std::vector<int32_t> page_ids;

  void Clear() {
    indptr.resize(1);
    page_ids.clear();
  }
  // The next sequence.
  void Append(absl::Span<const int32_t> pages) {
    page_ids.insert(page_ids.end(), pages.begin(), pages.end());
    indptr.push_back(static_cast<int64_t>(page_ids.size()));
  }
  // Instead of what is here: the rows of a padded table [sequences, max_pages],
  // as block tables of vLLM and SGLang are, of which row s holds the pages of
  // kv_lens[s] tokens. What lies beyond those is padding and is not read.
  // InvalidArgument, and nothing changed, if kv_lens has another size, a length
  // is negative or its pages are more than a row has, page_size < 1, or strides
  // are negative. Page ids are checked by Build; kNoPage stands for a missing
  // page here as well.
  absl::Status SetPadded(MatrixView<const int32_t> table,
                         absl::Span<const int64_t> kv_lens, int64_t page_size);
  absl::StatusOr<PageTable> Build(int64_t page_size, int64_t num_pages) const {
    return PageTable::Build(indptr, page_ids, page_size, num_pages);
  }
};

}  // namespace quern

#endif  // QUERN_CACHE_PAGE_TABLE_H_
