#include "quern/ops/parallel/vocab_shard.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "vocab_shard";

}  // namespace

int64_t VocabSpec::padded_original() const {
  return RoundUp(original, padding);
}

int64_t VocabSpec::padded() const {
  return RoundUp(padded_original() + added, padding);
}

absl::StatusOr<VocabShard> VocabShard::Create(const VocabSpec& spec, int rank,
                                              int size) {
  constexpr int64_t kMax = VocabSpec::kMaxIds;
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "original", spec.original, 1, kMax));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "added", spec.added, 0, kMax - spec.original));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "padding", spec.padding, 1, kMax));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "size", size, 1));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "rank", rank, 0, size - 1));
  const int64_t originals = spec.padded_original();
  const int64_t others = spec.padded() - originals;
  if (originals % size != 0 || others % size != 0) {
    return InvalidArgument(kOp, originals, " padded original ids and ", others,
                           " others; need multiples of the ", size, " ranks");
  }
  VocabShard shard;
  const int64_t p = originals / size, q = others / size;
  shard.original_begin = std::min(rank * p, spec.original);
  shard.original_end = std::min((rank + 1) * p, spec.original);
  shard.original_padding = p - shard.originals();
  shard.added_begin = spec.original + std::min(rank * q, spec.added);
  shard.added_end = spec.original + std::min((rank + 1) * q, spec.added);
  shard.added_padding = q - shard.added();
  return shard;
}

absl::StatusOr<std::vector<int64_t>> GatheredVocabOrder(const VocabSpec& spec,
                                                        int size) {
  QUERN_RETURN_IF_ERROR(VocabShard::Create(spec, 0, size).status());
  std::vector<int64_t> originals, added, padding;
  for (int rank = 0; rank < size; ++rank) {
    QUERN_ASSIGN_OR_RETURN(const VocabShard shard,
                           VocabShard::Create(spec, rank, size));
    int64_t column = rank * shard.rows();
    const auto take = [&column](int64_t count, std::vector<int64_t>& to) {
      while (count-- > 0) to.push_back(column++);
    };
    take(shard.originals(), originals);
    take(shard.original_padding, padding);
    take(shard.added(), added);
    take(shard.added_padding, padding);
  }
  if (size < 2) return std::vector<int64_t>();
  originals.insert(originals.end(), added.begin(), added.end());
  originals.insert(originals.end(), padding.begin(), padding.end());
  return originals;
}

absl::Status LoadVocabShard(const VocabShard& shard, const AnyTensorView& table,
                            const AnyTensorView& to) {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "table", table, table.dtype(), {kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "rows of table", table.extent(0), shard.original_end));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "to", to, table.dtype(),
                                    {shard.rows(), table.extent(1)}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "table", table, "to", to));
  CopyColumns(RowSlice(table, shard.original_begin, shard.originals()),
              RowSlice(to, 0, shard.originals()));
  const auto size = static_cast<int64_t>(SizeOf(to.dtype()));
  for (int64_t i = shard.originals(); i < shard.rows(); ++i) {
    std::memset(static_cast<char*>(to.mutable_data()) + i * to.stride(0) * size,
                0, static_cast<size_t>(to.extent(1) * size));
  }
  return absl::OkStatus();
}

}  // namespace quern
