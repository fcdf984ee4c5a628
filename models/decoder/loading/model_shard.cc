#include "quern/models/decoder/loading/model_shard.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/communicator.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

absl::Status CannotDivide(const char* what, int64_t count, int size,
                          int64_t block) {
  return InvalidArgument(kOp, what, "=", count, " cannot be divided over ",
                         size, " ranks in parts of ", block);
}

}  // namespace

absl::StatusOr<ModelShard> ModelShard::Create(const DecoderConfig& c, int rank,
                                              int size, int64_t block) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "ranks", size, 1, int64_t{1} << 16));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "rank", rank, 0, size - 1));
  if (size > 1 && c.HasRecurrent()) {
    return Unimplemented(kOp, "ranks=", size, "; need 1, because ",
                         c.architecture,
                         " has recurrent layers, which are not divided");
  }
  if (size > 1 && c.Has(ModelPart::kLatent)) {
    return Unimplemented(kOp, "ranks=", size, "; need 1, because ",
                         c.architecture,
                         " attends to latents, which are not divided");
  }
  if (size > 1 && c.Has(ModelPart::kWholeNorms)) {
    return Unimplemented(kOp, "ranks=", size, "; need 1, because ",
                         c.architecture,
                         " normalises all heads of q together, and of k");
  }
  ModelShard s;
  s.rank_ = rank;
  s.size_ = size;
  for (size_t e = 0; e < kNumExtents; ++e) {
    s.ranges_[e] = {0, ExtentOf(static_cast<Extent>(e), c)};
  }
  const auto range = [&s](Extent extent) -> ModelRange& {
    return s.ranges_[static_cast<size_t>(extent)];
  };
  s.q_heads_ = c.q_heads / size;
  s.kv_heads_ = std::max<int64_t>(1, c.kv_heads / size);
  const int64_t q_cols = s.q_heads_ * c.head_dim;
  if (c.q_heads % size != 0 || (size > 1 && q_cols % block != 0)) {
    return CannotDivide("the query heads", c.q_heads, size,
                        block == 1 ? 1 : DivCeil(block, c.head_dim));
  }
  if (c.kv_heads % size != 0 && size % c.kv_heads != 0) {
    return CannotDivide("the key/value heads", c.kv_heads, size, 1);
  }
  range(Extent::kQueryCols) = {rank * q_cols, q_cols};
  range(Extent::kQueryHeads) = {rank * s.q_heads_, s.q_heads_};
  // Gates lie between the queries. A model with them is recurrent, so that one
  // rank has them all.
  if (!c.Has(ModelPart::kAttnGate)) {
    range(Extent::kQueryRows) = range(Extent::kQueryCols);
  }
  // The rank's first key/value head is that of its first query head.
  const int64_t kv_head = rank * s.q_heads_ / (c.q_heads / c.kv_heads);
  range(Extent::kKeyCols) = {kv_head * c.head_dim, s.kv_heads_ * c.head_dim};

  const auto divide = [&](Extent extent, int64_t unit) {
    const int64_t total = range(extent).count;
    const ColumnShards shards = {
        total, size == 1 ? total : RoundUp(DivCeil(total, size), unit)};
    range(extent) = {shards.Begin(rank), shards.Count(rank)};
    return shards;
  };
  const auto all_have = [size](const ColumnShards& shards) {
    return shards.Count(size - 1) > 0;
  };
  if (c.Has(ModelPart::kExperts)) {
    if (!all_have(divide(Extent::kExpertFfn, block))) {
      return CannotDivide("expert_feed_forward_length", c.expert_ffn, size,
                          block);
    }
    if (c.Has(ModelPart::kSharedExpert) &&
        !all_have(divide(Extent::kSharedFfn, block))) {
      return CannotDivide("expert_shared_feed_forward_length", c.shared_ffn,
                          size, block);
    }
  }
  if (c.Has(ModelPart::kDense) && !all_have(divide(Extent::kFfn, block))) {
    return CannotDivide("feed_forward_length", c.ffn, size, block);
  }
  // The sizes alone: what a rank reads of joined tensors is not in one piece.
  range(Extent::kQkvRows) = {
      0, range(Extent::kQueryRows).count + 2 * range(Extent::kKeyCols).count};
  range(Extent::kGateUpRows) = {0, 2 * range(Extent::kFfn).count};
  s.vocab_ = divide(Extent::kVocab, 1);
  if (!all_have(s.vocab_)) {
    return CannotDivide("the vocabulary", c.vocab, size, 1);
  }
  return s;
}

}  // namespace quern
