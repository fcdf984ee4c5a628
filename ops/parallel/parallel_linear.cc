#include "quern/ops/parallel/parallel_linear.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/parallel/bias_f32.h"
#include "quern/ops/parallel/rank_linear.h"

namespace quern {
namespace {

constexpr char kReplicated[] = "replicated_linear";
constexpr char kColumn[] = "column_parallel_linear";
constexpr char kRow[] = "row_parallel_linear";
constexpr int64_t kMaxExtent = LinearWeights::kMaxExtent;

template <typename Spec>
LinearSpec LinearOf(const Spec& spec) {
  LinearSpec linear;
  linear.a = spec.x;
  linear.c = spec.y;
  linear.kernels = spec.kernels;
  return linear;
}

absl::Status CheckOutput(const ColumnOutput& output, absl::string_view field) {
  QUERN_RETURN_IF_ERROR(CheckRange(kColumn, absl::StrCat(field, ".size"),
                                   output.size, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(kColumn, absl::StrCat(field, ".unit"),
                                   output.unit, 1, output.size));
  if (output.size % output.unit != 0) {
    return InvalidArgument(kColumn, field, ".size=", output.size,
                           "; need a multiple of unit=", output.unit);
  }
  return absl::OkStatus();
}

// The part of `output` that belongs to a rank.
absl::StatusOr<ColumnParallelLinearPlan::OutputShard> ShardOf(
    const ColumnOutput& output, absl::string_view field, int rank, int size) {
  QUERN_RETURN_IF_ERROR(CheckOutput(output, field));
  const int64_t units = output.size / output.unit;
  if (units % size == 0) {
    const int64_t count = output.size / size;
    return ColumnParallelLinearPlan::OutputShard{rank * count, count};
  }
  if (output.replicate && units < size && size % units == 0) {
    const int64_t unit = rank / (size / units);
    return ColumnParallelLinearPlan::OutputShard{unit * output.unit,
                                                 output.unit};
  }
  return InvalidArgument(
      kColumn, field, " has ", units, " units of ", output.unit,
      " columns; need a multiple of the ", size, " ranks",
      output.replicate ? ", or a number that divides them" : "");
}

bool IsWhole(const ColumnOutput& output, int size) {
  return output.size / output.unit % size == 0;
}

absl::Status CheckColumnSpec(const ColumnParallelLinearSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(
      kColumn, "outputs", static_cast<int64_t>(spec.outputs.size()), 1));
  QUERN_RETURN_IF_ERROR(CheckRange(kColumn, "k", spec.k, 1, kMaxExtent));
  if (IsGated(spec.activation) &&
      (spec.outputs.size() != 2 ||
       spec.outputs[0].size != spec.outputs[1].size)) {
    return InvalidArgument(kColumn,
                           "activation is gated; need two outputs of "
                           "equal size, gate and up");
  }
  if (spec.activation != LinearActivation::kNone &&
      spec.bias == BiasUse::kSkip) {
    return InvalidArgument(kColumn,
                           "bias is skipped; need activation=none, because an "
                           "activation comes after the bias");
  }
  return absl::OkStatus();
}

// Concatenates the ranges `rows` of a bias. n is their total length.
absl::StatusOr<AlignedBuffer> Join(
    const AlignedBuffer& bias,
    const std::vector<ColumnParallelLinearPlan::OutputShard>& rows, int64_t n) {
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer joined, AlignedBuffer::Create(n * 4));
  float* to = joined.data<float>();
  for (const auto& run : rows) {
    to = std::copy_n(bias.data<float>() + run.begin, run.count, to);
  }
  return joined;
}

absl::Status CheckRows(absl::string_view op, const AnyTensorView& x,
                       const AnyTensorView& y, const LinearSpec& linear,
                       int64_t x_columns, int64_t y_columns) {
  QUERN_RETURN_IF_ERROR(
      CheckInput(op, "x", x, linear.a, {kAnyExtent, x_columns}));
  QUERN_RETURN_IF_ERROR(
      quern::CheckOutput(op, "y", y, linear.c, {x.extent(0), y_columns}));
  return CheckApart(op, "x", x, "y", y);
}

}  // namespace

std::vector<ColumnOutput> QkvOutputs(int64_t head_dim, int64_t q_heads,
                                     int64_t kv_heads, int64_t v_head_dim) {
  if (v_head_dim == 0) v_head_dim = head_dim;
  return {{q_heads * head_dim, head_dim, false},
          {kv_heads * head_dim, head_dim, true},
          {kv_heads * v_head_dim, v_head_dim, true}};
}

// ---- replicated

ReplicatedLinearPlan::ReplicatedLinearPlan(const ReplicatedLinearSpec& spec,
                                           LinearPlan linear)
    : spec_(spec), linear_(std::move(linear)) {}

absl::StatusOr<ReplicatedLinearPlan> ReplicatedLinearPlan::Create(
    const ReplicatedLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& bias, Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckRange(kReplicated, "n", spec.n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(kReplicated, "k", spec.k, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kReplicated, "weights", weights, spec.w, {spec.n, spec.k}));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer f32_bias,
                         BiasAsF32(kReplicated, bias, spec.n));
  const bool add = spec.bias == BiasUse::kAdd;
  LinearSource source;
  source.codes = weights;
  if (add) source.bias = BiasView(f32_bias);
  QUERN_ASSIGN_OR_RETURN(
      LinearPlan linear,
      CreateRankLinear(kReplicated, LinearOf(spec), {source}, executor));
  ReplicatedLinearPlan plan(spec, std::move(linear));
  if (!add) plan.skipped_bias_ = std::move(f32_bias);
  return plan;
}

VectorView<const float> ReplicatedLinearPlan::bias() const {
  return BiasVector(skipped_bias_);
}

absl::Status ReplicatedLinearPlan::CheckArgs(const AnyTensorView& x,
                                             const AnyTensorView& y) const {
  QUERN_RETURN_IF_ERROR(
      CheckRows(kReplicated, x, y, linear_.spec(), spec_.k, spec_.n));
  return linear_.CheckArgs({x, y});
}

void ReplicatedLinearPlan::Execute(const AnyTensorView& x,
                                   const AnyTensorView& y, Workspace workspace,
                                   Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, y));
  linear_.Execute({x, y}, workspace, executor);
}

// ---- column parallel

ColumnParallelLinearPlan::ColumnParallelLinearPlan(
    const ColumnParallelLinearSpec& spec, LinearPlan linear)
    : spec_(spec), linear_(std::move(linear)) {}

absl::StatusOr<ColumnParallelLinearPlan> ColumnParallelLinearPlan::Create(
    const ColumnParallelLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& bias, const Communicator& communicator,
    Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckColumnSpec(spec));
  const int rank = communicator.rank(), size = communicator.size();
  const bool full = spec.part == WeightPart::kFull;
  std::vector<OutputShard> shards, rows;  // of each output; of the weights
  int64_t all = 0, own = 0;
  for (size_t i = 0; i < spec.outputs.size(); ++i) {
    const std::string field = absl::StrCat("outputs[", i, "]");
    QUERN_ASSIGN_OR_RETURN(const OutputShard shard,
                           ShardOf(spec.outputs[i], field, rank, size));
    if (spec.gather_output && !IsWhole(spec.outputs[i], size)) {
      return InvalidArgument(kColumn, field,
                             " is replicated; need gather_output=false");
    }
    shards.push_back(shard);
    rows.push_back({full ? all + shard.begin : own, shard.count});
    all += spec.outputs[i].size;
    own += shard.count;
  }
  if (IsGated(spec.activation) && shards[0].count != shards[1].count) {
    return InvalidArgument(kColumn, "activation is gated; the rank has ",
                           shards[0].count, " columns of gate and ",
                           shards[1].count, " of up; need equal numbers");
  }
  const int64_t given = full ? all : own;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kColumn, "weights", weights, spec.w, {given, spec.k}));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer f32_bias,
                         BiasAsF32(kColumn, bias, given));
  const bool add = spec.bias == BiasUse::kAdd;
  std::vector<LinearSource> sources(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    sources[i].codes = RowSlice(weights, rows[i].begin, rows[i].count);
    if (add && !f32_bias.empty()) {
      sources[i].bias =
          DenseVector(f32_bias.data<float>() + rows[i].begin, rows[i].count);
    }
  }
  LinearSpec linear_spec = LinearOf(spec);
  linear_spec.activation = spec.activation;
  QUERN_ASSIGN_OR_RETURN(
      LinearPlan linear,
      CreateRankLinear(kColumn, linear_spec, sources, executor));
  ColumnParallelLinearPlan plan(spec, std::move(linear));
  plan.rank_ = rank;
  plan.size_ = size;
  plan.shards_ = std::move(shards);
  plan.columns_ = ColumnsOfC(spec.activation, spec.gather_output ? all : own);
  if (spec.gather_output && size > 1 && spec.outputs.size() > 1 &&
      !IsGated(spec.activation)) {
    plan.row_bytes_ = own * static_cast<int64_t>(SizeOf(spec.y));
  }
  if (!add && !f32_bias.empty()) {
    QUERN_ASSIGN_OR_RETURN(plan.skipped_bias_, Join(f32_bias, rows, own));
  }
  return plan;
}

absl::StatusOr<int64_t> ColumnParallelLinearPlan::WorkspaceBytes(
    int64_t max_m, int max_workers) const {
  return RankWorkspaceBytes(kColumn, row_bytes_, &linear_, max_m, max_workers);
}

VectorView<const float> ColumnParallelLinearPlan::bias() const {
  return BiasVector(skipped_bias_);
}

absl::Status ColumnParallelLinearPlan::CheckArgs(const AnyTensorView& x,
                                                 const AnyTensorView& y) const {
  QUERN_RETURN_IF_ERROR(
      CheckRows(kColumn, x, y, linear_.spec(), spec_.k, columns_));
  const int64_t own = ColumnsOfC(spec_.activation, linear_.n());
  return linear_.CheckArgs({x, ColumnSlice(y, 0, own)});
}

void ColumnParallelLinearPlan::Execute(const AnyTensorView& x,
                                       const AnyTensorView& y,
                                       Workspace workspace,
                                       Communicator& communicator,
                                       Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, y));
  QUERN_DCHECK(communicator.rank() == rank_ && communicator.size() == size_);
  if (!spec_.gather_output || size_ == 1) {
    linear_.Execute({x, y}, workspace, executor);
    return;
  }
  if (row_bytes_ == 0) {
    // The rank's columns are one range of y, so the layer writes them in place.
    const int64_t width = columns_ / size_;
    const AnyTensorView own = ColumnSlice(y, rank_ * width, width);
    linear_.Execute({x, own}, workspace, executor);
    communicator.AllGatherColumns(own, y, {columns_, width});
    return;
  }
  const int64_t m = x.extent(0), n = linear_.n();
  void* rows = workspace.Allocate<uint8_t>("rows", m * row_bytes_);
  const AnyTensorView own(spec_.y, rows, 2, {m, n}, {n, 1});
  linear_.Execute({x, own}, workspace, executor);
  int64_t from = 0, to = 0;
  for (const ColumnOutput& output : spec_.outputs) {
    const int64_t width = output.size / size_;
    communicator.AllGatherColumns(ColumnSlice(own, from, width),
                                  ColumnSlice(y, to, output.size),
                                  {output.size, width});
    from += width;
    to += output.size;
  }
}

// ---- row parallel

RowParallelLinearPlan::RowParallelLinearPlan(const RowParallelLinearSpec& spec,
                                             LinearPlan linear)
    : spec_(spec), linear_(std::move(linear)) {}

absl::StatusOr<RowParallelLinearPlan> RowParallelLinearPlan::Create(
    const RowParallelLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& bias, const Communicator& communicator,
    Executor& executor) {
  const int rank = communicator.rank(), size = communicator.size();
  QUERN_RETURN_IF_ERROR(CheckRange(kRow, "n", spec.n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(kRow, "k", spec.k, 1, kMaxExtent));
  if (spec.k % size != 0) {
    return InvalidArgument(kRow, "k=", spec.k, "; need a multiple of the ",
                           size, " ranks");
  }
  const bool add = spec.bias == BiasUse::kAdd;
  if (!spec.reduce_results && add && bias.rank() != 0) {
    return InvalidArgument(
        kRow,
        "reduce_results=false with a bias; need it to be skipped, as "
        "only rank 0 would add it");
  }
  const int64_t own = spec.k / size;
  const bool full = spec.part == WeightPart::kFull;
  QUERN_RETURN_IF_ERROR(CheckInput(kRow, "weights", weights, spec.w,
                                   {spec.n, full ? spec.k : own}));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer f32_bias, BiasAsF32(kRow, bias, spec.n));
  LinearSource source;
  source.codes = full ? ColumnSlice(weights, rank * own, own) : weights;
  if (add && rank == 0) source.bias = BiasView(f32_bias);
  QUERN_ASSIGN_OR_RETURN(
      LinearPlan linear,
      CreateRankLinear(kRow, LinearOf(spec), {source}, executor));
  RowParallelLinearPlan plan(spec, std::move(linear));
  plan.rank_ = rank;
  plan.size_ = size;
  if (!add) plan.skipped_bias_ = std::move(f32_bias);
  return plan;
}

VectorView<const float> RowParallelLinearPlan::bias() const {
  return BiasVector(skipped_bias_);
}

AnyTensorView RowParallelLinearPlan::OwnColumns(const AnyTensorView& x) const {
  const int64_t own = spec_.k / size_;
  return spec_.input_is_parallel ? x : ColumnSlice(x, rank_ * own, own);
}

absl::Status RowParallelLinearPlan::CheckArgs(const AnyTensorView& x,
                                              const AnyTensorView& y) const {
  QUERN_RETURN_IF_ERROR(
      CheckRows(kRow, x, y, linear_.spec(),
                spec_.input_is_parallel ? spec_.k / size_ : spec_.k, spec_.n));
  return linear_.CheckArgs({OwnColumns(x), y});
}

void RowParallelLinearPlan::Execute(const AnyTensorView& x,
                                    const AnyTensorView& y, Workspace workspace,
                                    Communicator& communicator,
                                    Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, y));
  QUERN_DCHECK(communicator.rank() == rank_ && communicator.size() == size_);
  linear_.Execute({OwnColumns(x), y}, workspace, executor);
  if (spec_.reduce_results) communicator.AllReduceSum(y);
}

}  // namespace quern
