#include "quern/cache/page_table.h"

#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "page_table";

int64_t SizeOf(size_t size) { return static_cast<int64_t>(size); }

}  // namespace

absl::StatusOr<PageTable> PageTable::Build(absl::Span<const int64_t> indptr,
                                           absl::Span<const int32_t> page_ids,
                                           int64_t page_size,
                                           int64_t num_pages) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "page_size", page_size, 1));
  // Page ids are 32-bit, and slots must fit 64 bits.
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "page_size", page_size, 1, kMaxInt32));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "num_pages", num_pages, 0, kMaxInt32));
  if (indptr.empty()) {
    return InvalidArgument(kOp, "indptr is empty; need sequences + 1 entries");
  }
  if (indptr[0] != 0) {
    return InvalidArgument(kOp, "indptr[0]=", indptr[0], "; need 0");
  }
  bool has_missing_pages = false;
  for (size_t s = 0; s + 1 < indptr.size(); ++s) {
    if (indptr[s + 1] < indptr[s] || indptr[s + 1] > SizeOf(page_ids.size())) {
      return InvalidArgument(kOp, "sequence ", s, ": indptr[", s + 1,
                             "]=", indptr[s + 1], "; need ", indptr[s],
                             " <= indptr <= ", page_ids.size(),
                             ", the number of page ids");
    }
    int64_t i = indptr[s];
    for (; i < indptr[s + 1]; ++i) {
      if (page_ids[static_cast<size_t>(i)] != kNoPage) break;
      has_missing_pages = true;
    }
    for (; i < indptr[s + 1]; ++i) {
      const int32_t page = page_ids[static_cast<size_t>(i)];
      if (page < 0 || page >= num_pages) {
        return InvalidArgument(
            kOp, "sequence ", s, ": page_ids[", i, "]=", page,
            "; need 0 <= page < ", num_pages, ", or ", kNoPage,
            " for pages before the first one that the sequence has");
      }
    }
  }
  return PageTable(indptr, page_ids, page_size, num_pages, has_missing_pages);
}

absl::Status PageTable::CheckKvLens(absl::Span<const int64_t> kv_lens) const {
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "kv_lens.size()",
                                   SizeOf(kv_lens.size()), num_sequences(),
                                   "the number of sequences"));
  for (int64_t s = 0; s < num_sequences(); ++s) {
    const int64_t kv_len = kv_lens[static_cast<size_t>(s)];
    if (kv_len < 0 || kv_len > Capacity(s)) {
      return InvalidArgument(kOp, "sequence ", s, ": kv_len=", kv_len,
                             "; need 0 <= kv_len <= ", Capacity(s), ", what ",
                             Pages(s).size(), " pages of ", page_size_,
                             " tokens hold");
    }
  }
  return absl::OkStatus();
}

absl::Status PageTable::SlotMapping(absl::Span<const int64_t> q_lens,
                                    absl::Span<const int64_t> kv_lens,
                                    absl::Span<int64_t> slots) const {
  QUERN_RETURN_IF_ERROR(CheckKvLens(kv_lens));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "q_lens.size()", SizeOf(q_lens.size()),
                                   num_sequences(), "the number of sequences"));
  int64_t tokens = 0;
  for (size_t s = 0; s < q_lens.size(); ++s) {
    if (q_lens[s] < 0 || q_lens[s] > kv_lens[s]) {
      return InvalidArgument(kOp, "sequence ", s, ": q_len=", q_lens[s],
                             "; need 0 <= q_len <= ", kv_lens[s],
                             ", its kv_len");
    }
    const int64_t first = kv_lens[s] - q_lens[s];
    if (q_lens[s] > 0 && !HasToken(static_cast<int64_t>(s), first)) {
      return InvalidArgument(kOp, "sequence ", s, ": its new token ", first,
                             " lies in page ", first / page_size_,
                             " of the sequence, which is missing; need the "
                             "pages of all new tokens");
    }
    tokens += q_lens[s];
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "slots.size()", SizeOf(slots.size()),
                                   tokens, "the sum of q_lens"));
  size_t next = 0;
  for (int64_t s = 0; s < num_sequences(); ++s) {
    const int64_t kv_len = kv_lens[static_cast<size_t>(s)];
    for (int64_t t = kv_len - q_lens[static_cast<size_t>(s)]; t < kv_len; ++t) {
      slots[next++] = Slot(s, t);
    }
  }
  return absl::OkStatus();
}

absl::Status PageTableStorage::SetPadded(MatrixView<const int32_t> table,
                                         absl::Span<const int64_t> kv_lens,
                                         int64_t page_size) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "page_size", page_size, 1));
  const int64_t want[] = {SizeOf(kv_lens.size()), kAnyExtent};
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "table", table, DType::kI32, want));
  for (int64_t s = 0; s < table.extent(0); ++s) {
    const int64_t kv_len = kv_lens[static_cast<size_t>(s)];
    if (kv_len < 0 || DivCeil(kv_len, page_size) > table.extent(1)) {
      return InvalidArgument(kOp, "sequence ", s, ": kv_len=", kv_len,
                             "; need 0 <= kv_len, in at most ", table.extent(1),
                             " pages of ", page_size,
                             " tokens, the columns of the table");
    }
  }
  Clear();
  for (int64_t s = 0; s < table.extent(0); ++s) {
    const int64_t pages = DivCeil(kv_lens[static_cast<size_t>(s)], page_size);
    Append(pages == 0 ? absl::Span<const int32_t>()
                      : absl::MakeConstSpan(table.At(s, 0),
                                            static_cast<size_t>(pages)));
  }
  return absl::OkStatus();
}

}  // namespace quern
