#ifndef QUERN_OPS_REGISTRY_LINEAR_LAYERS_H_
#define QUERN_OPS_REGISTRY_LINEAR_LAYERS_H_

// Private: what the arguments of a linear operator mean for this rank.

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/communicator.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/parallel_lm_head.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// How y is made from the ranks' parts.
enum class Join : uint8_t { kNone, kGather, kSum };

// One rank's layer x[.., k], weight[w.extents], bias[w.extents[0]] -> y. It
// multiplies columns [x_column, + k) of x by rows [w_row, + n) and columns
// [w_column, + k) of weight, into columns [y_column, + n) of y.
struct Layer {
  absl::string_view op;  // points to a literal
  TensorMeta x, w, y;
  std::optional<TensorMeta> bias;
  Communicator* ranks = nullptr;
  int rank = 0, size = 1;
  int64_t n = 0, k = 0;
  int64_t w_row = 0, w_column = 0, x_column = 0, y_column = 0;
  Join join = Join::kNone;
  ColumnShards shards;  // used by Join::kGather
};

template <class Spec>
struct Described {
  Layer layer;
  Spec spec;
};
// Takes the arguments of the schemas in linear_ops.cc. InvalidArgument names
// the argument that does not fit. Unimplemented for a dtype other than f32,
// bf16 and f16.
absl::StatusOr<Described<ReplicatedLinearSpec>> DescribeReplicated(
    const TensorMeta& x, const TensorMeta& w,
    const std::optional<TensorMeta>& bias);
absl::StatusOr<Described<ColumnParallelLinearSpec>> DescribeColumn(
    const TensorMeta& x, const TensorMeta& w,
    const std::optional<TensorMeta>& bias, Communicator* ranks,
    bool weight_is_shard, bool gather_output);
absl::StatusOr<Described<RowParallelLinearSpec>> DescribeRow(
    const TensorMeta& x, const TensorMeta& w,
    const std::optional<TensorMeta>& bias, Communicator* ranks,
    bool weight_is_shard, bool input_is_parallel, bool reduce_results);
absl::StatusOr<Described<ParallelLmHeadSpec>> DescribeHead(
    const TensorMeta& hidden, const TensorMeta& w,
    const std::optional<TensorMeta>& bias, Communicator* ranks, int64_t vocab,
    int64_t added, bool weight_is_shard);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_LINEAR_LAYERS_H_
