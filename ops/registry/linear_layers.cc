#include "quern/ops/registry/linear_layers.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/parallel_lm_head.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

using Bias = std::optional<TensorMeta>;

constexpr char kReplicated[] = "replicated_linear";
constexpr char kColumn[] = "column_parallel_linear";
constexpr char kRow[] = "row_parallel_linear";
constexpr char kHead[] = "parallel_lm_head";
constexpr auto kFloats = {DType::kF32, DType::kBF16, DType::kF16};

// Requires that the caller has checked that x and the weight agree in k.
absl::StatusOr<Layer> LayerOf(absl::string_view op, const TensorMeta& x,
                              const TensorMeta& w, const Bias& bias,
                              Communicator* ranks) {
  Layer layer;
  layer.op = op;
  layer.x = layer.y = x;
  layer.w = w;
  layer.bias = bias;
  layer.ranks = ranks;
  if (ranks != nullptr) {
    layer.rank = ranks->rank();
    layer.size = ranks->size();
  }
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(op, "x", x.dtype, kFloats));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(op, "weight", w.dtype, kFloats));
  QUERN_RETURN_IF_ERROR(LastExtent(op, "x", x).status());
  QUERN_RETURN_IF_ERROR(LeadingRows(op, "x", x).status());
  if (w.extents.size() != 2) {
    return InvalidArgument(op, "weight has rank ", w.extents.size(),
                           "; need 2");
  }
  for (const int64_t extent : w.extents) {
    QUERN_RETURN_IF_ERROR(CheckRange(op, "an extent of weight", extent, 1,
                                     LinearWeights::kMaxExtent));
  }
  layer.n = w.extents[0];
  layer.k = w.extents[1];
  if (!bias.has_value()) return layer;
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(op, "bias", bias->dtype, kFloats));
  QUERN_RETURN_IF_ERROR(CheckExtents(op, "bias", *bias, {layer.n}));
  return layer;
}

// The number of rows or columns that belong to this rank, of `given`: all of
// them if the argument is the rank's shard, or else its part of the whole.
absl::StatusOr<int64_t> OwnOf(const Layer& layer, absl::string_view field,
                              int64_t given, bool is_shard) {
  if (is_shard) return given;
  if (given % layer.size == 0) return given / layer.size;
  return InvalidArgument(layer.op, field, "=", given,
                         "; need a multiple of the ", layer.size, " ranks");
}

template <class Spec>
Described<Spec> Describe(const Layer& layer, bool weight_is_shard) {
  Spec spec;
  spec.x = spec.y = layer.x.dtype;
  spec.w = layer.w.dtype;
  spec.part = weight_is_shard ? WeightPart::kShard : WeightPart::kFull;
  return {layer, spec};
}

}  // namespace

absl::StatusOr<Described<ReplicatedLinearSpec>> DescribeReplicated(
    const TensorMeta& x, const TensorMeta& w, const Bias& bias) {
  QUERN_ASSIGN_OR_RETURN(Layer layer,
                         LayerOf(kReplicated, x, w, bias, nullptr));
  layer.y.extents.back() = layer.n;
  ReplicatedLinearSpec spec;
  spec.n = layer.n;
  spec.k = layer.k;
  spec.x = spec.y = x.dtype;
  spec.w = w.dtype;
  QUERN_RETURN_IF_ERROR(CheckEqual(kReplicated, "columns of x",
                                   x.extents.back(), layer.k, "weight has"));
  return Described<ReplicatedLinearSpec>{layer, spec};
}

absl::StatusOr<Described<ColumnParallelLinearSpec>> DescribeColumn(
    const TensorMeta& x, const TensorMeta& w, const Bias& bias,
    Communicator* ranks, bool weight_is_shard, bool gather_output) {
  QUERN_ASSIGN_OR_RETURN(Layer layer, LayerOf(kColumn, x, w, bias, ranks));
  QUERN_ASSIGN_OR_RETURN(
      layer.n, OwnOf(layer, "rows of weight", layer.n, weight_is_shard));
  int64_t all = 0;
  if (!CheckedMul(layer.n, layer.size, &all)) {
    return InvalidArgument(kColumn, "y has 2^63 columns or more");
  }
  if (!weight_is_shard) layer.w_row = layer.rank * layer.n;
  if (gather_output) {
    layer.y_column = layer.rank * layer.n;
    layer.join = Join::kGather;
    layer.shards = {all, layer.n};
  }
  layer.y.extents.back() = gather_output ? all : layer.n;
  auto described = Describe<ColumnParallelLinearSpec>(layer, weight_is_shard);
  described.spec.outputs.resize(1);
  described.spec.outputs[0].size = all;
  described.spec.k = layer.k;
  described.spec.gather_output = gather_output;
  QUERN_RETURN_IF_ERROR(CheckEqual(kColumn, "columns of x", x.extents.back(),
                                   layer.k, "weight has"));
  return described;
}

absl::StatusOr<Described<RowParallelLinearSpec>> DescribeRow(
    const TensorMeta& x, const TensorMeta& w, const Bias& bias,
    Communicator* ranks, bool weight_is_shard, bool input_is_parallel,
    bool reduce_results) {
  QUERN_ASSIGN_OR_RETURN(Layer layer, LayerOf(kRow, x, w, bias, ranks));
  QUERN_ASSIGN_OR_RETURN(
      layer.k, OwnOf(layer, "columns of weight", layer.k, weight_is_shard));
  int64_t all = 0;
  if (!CheckedMul(layer.k, layer.size, &all)) {
    return InvalidArgument(kRow, "x has 2^63 columns or more");
  }
  if (!weight_is_shard) layer.w_column = layer.rank * layer.k;
  if (!input_is_parallel) layer.x_column = layer.rank * layer.k;
  if (reduce_results) layer.join = Join::kSum;
  layer.y.extents.back() = layer.n;
  auto described = Describe<RowParallelLinearSpec>(layer, weight_is_shard);
  described.spec.n = layer.n;
  described.spec.k = all;
  described.spec.input_is_parallel = input_is_parallel;
  described.spec.reduce_results = reduce_results;
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kRow, "columns of x", x.extents.back(), input_is_parallel ? layer.k : all,
      input_is_parallel ? "the rank has" : "the ranks have"));
  if (reduce_results || !bias.has_value()) return described;
  return InvalidArgument(kRow,
                         "reduce_results=False with a bias; need none, as only "
                         "rank 0 would add it");
}

absl::StatusOr<Described<ParallelLmHeadSpec>> DescribeHead(
    const TensorMeta& hidden, const TensorMeta& w, const Bias& bias,
    Communicator* ranks, int64_t vocab, int64_t added, bool weight_is_shard) {
  QUERN_ASSIGN_OR_RETURN(Layer layer, LayerOf(kHead, hidden, w, bias, ranks));
  ParallelLmHeadSpec spec;
  spec.vocab.original = vocab;
  spec.vocab.added = added;
  spec.hidden = layer.k;
  spec.hidden_dtype = spec.logits_dtype = hidden.dtype;
  spec.weight_dtype = w.dtype;
  spec.part = weight_is_shard ? WeightPart::kShard : WeightPart::kFull;
  QUERN_ASSIGN_OR_RETURN(
      const VocabShard shard,
      VocabShard::Create(spec.vocab, layer.rank, layer.size));
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kHead, "rows of weight", layer.n, weight_is_shard ? shard.rows() : vocab,
      weight_is_shard ? "the shard has" : "vocab"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kHead, "columns of hidden",
                                   hidden.extents.back(), layer.k,
                                   "weight has"));
  layer.n = shard.originals();
  layer.y_column = shard.original_begin;
  if (!weight_is_shard) layer.w_row = shard.original_begin;
  layer.join = Join::kGather;
  layer.shards = {vocab, spec.vocab.padded_original() / layer.size};
  layer.y.extents.back() = vocab;
  return Described<ParallelLmHeadSpec>{layer, spec};
}

}  // namespace quern
