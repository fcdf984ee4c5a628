#ifndef QUERN_OPS_PARALLEL_VOCAB_SHARD_H_
#define QUERN_OPS_PARALLEL_VOCAB_SHARD_H_

// Which rows of a vocabulary's table belong to which rank. The vocabulary has
// `original` ids, then `added` ids, and is divided over `size` ranks:
//
//   P_org = original rounded up to padding
//   P     = P_org + added, rounded up to padding
//
//   rank r  owns original ids  [r P_org / size, (r + 1) P_org / size), cut at
//           original, and added ids original + [r Q, (r + 1) Q), cut at
//           original + added, where Q = (P - P_org) / size
//
// A shard of the table has P / size rows: the rank's original ids, their
// padding, its added ids, their padding. The padding is zeros.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/tensor_view.h"

namespace quern {

struct VocabSpec {
  // Upper bound of the number of ids, so that an id fits in 32 bits.
  static constexpr int64_t kMaxIds = (int64_t{1} << 30);

  int64_t original = 0;  // >= 1
  int64_t added = 0;     // such as those of LoRA adapters
  int64_t padding = 64;

  int64_t ids() const { return original + added; }
  int64_t padded_original() const;  // P_org
  int64_t padded() const;           // P
};

struct VocabShard {
  // Result of RowOf for an id that another rank has.
  static constexpr int64_t kNotHere = -1;

  int64_t original_begin = 0;
  int64_t original_end = 0;
  int64_t original_padding = 0;
  int64_t added_begin = 0;
  int64_t added_end = 0;
  int64_t added_padding = 0;

  // InvalidArgument if a number of spec is out of range, P_org or P - P_org is
  // not a multiple of size, or rank is outside [0, size).
  static absl::StatusOr<VocabShard> Create(const VocabSpec& spec, int rank,
                                           int size);

  constexpr int64_t originals() const { return original_end - original_begin; }
  constexpr int64_t added() const { return added_end - added_begin; }
  constexpr int64_t rows() const {
    return originals() + original_padding + added() + added_padding;
  }
  // The row of the shard that holds `id`, or kNotHere.
  constexpr int64_t RowOf(int64_t id) const {
    if (original_begin <= id && id < original_end) return id - original_begin;
    if (added_begin <= id && id < added_end) {
      return id - added_begin + originals() + original_padding;
    }
    return kNotHere;
  }
};

// The order of columns in logits that were gathered from whole shards. Taking
// the columns in this order gives all original ids, rank by rank, then all
// added ids, then all padding. Empty if size < 2, because the columns are then
// in order. Refuses what VocabShard::Create refuses.
absl::StatusOr<std::vector<int64_t>> GatheredVocabOrder(const VocabSpec& spec,
                                                        int size);

// Fills a shard of the table: its original rows from table[original, n], zeros
// elsewhere. `to` is [shard.rows(), n], of the dtype of `table`; rows of both
// may have any stride. InvalidArgument for other shapes, or if they overlap.
absl::Status LoadVocabShard(const VocabShard& shard, const AnyTensorView& table,
                            const AnyTensorView& to);

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_VOCAB_SHARD_H_
