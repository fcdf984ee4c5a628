#ifndef QUERN_OPS_PARALLEL_PARALLEL_LINEAR_H_
#define QUERN_OPS_PARALLEL_PARALLEL_LINEAR_H_

// Linear layers whose weights are divided over the ranks of a Communicator.
// With W[n, k], and with this process or thread being `rank` of `size` ranks:
//
//   replicated  y = x W^T + b                       every rank has all of it
//   column      y_rank = x W_rank^T + b_rank        W_rank: n / size rows of W
//   row         y = sum over ranks of x_rank W_rank^T, + b once
//                                                   W_rank: k / size columns
//
// A column layer followed by a row layer is a block with a single sum over the
// ranks, at its end: the row layer takes its input divided as the column layer
// leaves it.
//
//   ColumnParallelLinearSpec up;
//   up.outputs = {{14336}, {14336}};
//   up.k = 4096;
//   up.activation = LinearActivation::kSiluAndMul;
//
//   RowParallelLinearSpec down;
//   down.n = 4096;
//   down.k = 14336;
//
//   ... Create(up, weights, bias, communicator, executor), the same for down
//   up_plan.Execute(x, h, scratch, communicator, executor);    h: 14336 / size
//   down_plan.Execute(h, y, scratch, communicator, executor);  y: all of it
//
// Within a rank each layer is gemm/linear.h, on weights that are f32, bf16 or
// f16: sums in f32, rounded once. Between ranks, a row layer sums as
// Communicator::AllReduceSum does: each rank's part is rounded to the dtype of
// y, the parts are summed in f32 in the order of ranks, and the sum is rounded
// again. Results have the same bits on every rank and in every run, but depend
// on `size`, because the sum over k is divided differently.
//
// Create and Execute are collective, and every rank gives the same spec.
// Execute takes the communicator given to Create, or one of the same rank and
// size. Execute writes y, which must not overlap x, and nothing else. It
// allocates nothing, except in oneDNN. Several threads of a rank may call it at
// once, each with its own scratch and communicator.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"

namespace quern {

// Whether Create is given all of the layer's weights and takes the rank's part,
// or is given that part alone. The same holds for a column layer's bias; a row
// layer's bias is always whole.
enum class WeightPart : uint8_t { kFull, kShard };

// Whether Execute adds the bias, or leaves that to the caller, who gets it from
// bias() and may fuse it with a later operator.
enum class BiasUse : uint8_t { kAdd, kSkip };

struct ReplicatedLinearSpec {
  int64_t n = 0;  // columns of y
  int64_t k = 0;  // columns of x
  DType x = DType::kBF16;
  DType w = DType::kBF16;
  DType y = DType::kBF16;
  BiasUse bias = BiasUse::kAdd;
  std::string kernels = {};  // see LinearSpec::kernels
};

// One of the matrices that are merged into a column layer, such as gate and up,
// or query, key and value.
struct ColumnOutput {
  int64_t size = 0;  // columns of y, over all ranks
  int64_t unit = 1;  // columns that stay together, such as head_dim
  // If true, and there are fewer units (size / unit) than ranks, each unit is
  // held by size() / units consecutive ranks. Keys and values of grouped-query
  // attention need this.
  bool replicate = false;
};

struct ColumnParallelLinearSpec {
  // The merged matrices. In y, and in a shard of the weights, a rank has its
  // part of the first, then its part of the second, and so on.
  std::vector<ColumnOutput> outputs;
  int64_t k = 0;  // columns of x
  DType x = DType::kBF16;
  DType w = DType::kBF16;
  DType y = DType::kBF16;
  // If true, Execute leaves all columns of y on every rank, in the order of
  // `outputs`.
  bool gather_output = false;
  BiasUse bias = BiasUse::kAdd;
  // A gated activation needs two outputs of equal size, gate and up.
  LinearActivation activation = LinearActivation::kNone;
  WeightPart part = WeightPart::kFull;
  std::string kernels = {};  // see LinearSpec::kernels
};

// The outputs of a fused query, key and value projection. v_head_dim 0 means
// head_dim. Keys and values are replicated if they have fewer heads than there
// are ranks.
std::vector<ColumnOutput> QkvOutputs(int64_t head_dim, int64_t q_heads,
                                     int64_t kv_heads, int64_t v_head_dim = 0);

struct RowParallelLinearSpec {
  int64_t n = 0;  // columns of y
  int64_t k = 0;  // columns of x, over all ranks
  DType x = DType::kBF16;
  DType w = DType::kBF16;
  DType y = DType::kBF16;
  // If true, Execute gets x_rank[m, k / size]; otherwise it gets all of x and
  // uses its part.
  bool input_is_parallel = true;
  // If false, each rank keeps its summand, and a bias must be skipped.
  bool reduce_results = true;
  BiasUse bias = BiasUse::kAdd;
  WeightPart part = WeightPart::kFull;
  std::string kernels = {};  // see LinearSpec::kernels
};

class ReplicatedLinearPlan {
 public:
  // weights[n, k]; bias[n] is f32, bf16 or f16, or of rank 0 for none. Weights
  // and bias are copied.
  //
  // InvalidArgument: weights or bias of another shape; what LinearPlan::Create
  // refuses. Unimplemented: weights that are not f32, bf16 or f16.
  static absl::StatusOr<ReplicatedLinearPlan> Create(
      const ReplicatedLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& bias, Executor& executor);

  const ReplicatedLinearSpec& spec() const { return spec_; }
  const LinearPlan* linear() const { return &linear_; }
  // Bytes of workspace that Execute needs for up to max_m rows on up to
  // max_workers workers. InvalidArgument if max_m < 0 or max_workers < 1.
  // ResourceExhausted for 2^63 bytes or more.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int max_workers) const {
    return linear_.WorkspaceBytes(max_m, max_workers);
  }
  // The bias if BiasUse::kSkip left it to the caller; otherwise empty.
  VectorView<const float> bias() const;

  // x[m, k] -> y[m, n].
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& y) const;
  void Execute(const AnyTensorView& x, const AnyTensorView& y,
               Workspace workspace, Executor& executor) const noexcept;

 private:
  ReplicatedLinearPlan(const ReplicatedLinearSpec& spec, LinearPlan linear);

  ReplicatedLinearSpec spec_;
  LinearPlan linear_;
  AlignedBuffer skipped_bias_;  // f32[n]
};

class ColumnParallelLinearPlan {
 public:
  // weights[sum of sizes, k] and bias[sum of sizes]; with WeightPart::kShard
  // the rows of Shard(i) for each output i. Weights and bias are copied.
  //
  // InvalidArgument: no outputs; a size that is not a multiple of its unit;
  // units that cannot be divided over the ranks; gather_output with an output
  // that is replicated; a gated activation without two outputs of equal size;
  // an activation with a skipped bias; what LinearPlan::Create refuses.
  static absl::StatusOr<ColumnParallelLinearPlan> Create(
      const ColumnParallelLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& bias, const Communicator& communicator,
      Executor& executor);

  const ColumnParallelLinearSpec& spec() const { return spec_; }
  const LinearPlan* linear() const { return &linear_; }

  // The columns [begin, begin + count) of an output, which belong to this rank.
  struct OutputShard {
    int64_t begin = 0;
    int64_t count = 0;
  };
  OutputShard Shard(int64_t output) const {
    return shards_[static_cast<size_t>(output)];
  }
  // Columns of y: those of this rank, or all with gather_output.
  int64_t columns() const { return columns_; }
  // Like ReplicatedLinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int max_workers) const;
  // The rank's part of the bias if BiasUse::kSkip left it to the caller;
  // otherwise empty.
  VectorView<const float> bias() const;

  // x[m, k] -> y[m, columns()].
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& y) const;
  void Execute(const AnyTensorView& x, const AnyTensorView& y,
               Workspace workspace, Communicator& communicator,
               Executor& executor) const noexcept;

 private:
  ColumnParallelLinearPlan(const ColumnParallelLinearSpec& spec,
                           LinearPlan linear);

  ColumnParallelLinearSpec spec_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<OutputShard> shards_;
  int64_t columns_ = 0;
  int64_t row_bytes_ = 0;  // > 0 if the rank's parts of y are apart
  LinearPlan linear_;
  AlignedBuffer skipped_bias_;
};

class RowParallelLinearPlan {
 public:
  // weights[n, k] or [n, k / size]; bias[n], the same on all ranks, is added by
  // rank 0. Weights and bias are copied.
  //
  // InvalidArgument: k is not a multiple of the number of ranks; reduce_results
  // = false with a bias that is not skipped, because every rank's summand or
  // none would then contain it; what LinearPlan::Create refuses.
  static absl::StatusOr<RowParallelLinearPlan> Create(
      const RowParallelLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& bias, const Communicator& communicator,
      Executor& executor);

  const RowParallelLinearSpec& spec() const { return spec_; }
  const LinearPlan* linear() const { return &linear_; }
  // Like ReplicatedLinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int max_workers) const {
    return linear_.WorkspaceBytes(max_m, max_workers);
  }
  // The whole bias, on every rank, if BiasUse::kSkip left it to the caller;
  // otherwise empty.
  VectorView<const float> bias() const;

  // x[m, k / size], or x[m, k] if input_is_parallel is false, -> y[m, n].
  absl::Status CheckArgs(const AnyTensorView& x, const AnyTensorView& y) const;
  void Execute(const AnyTensorView& x, const AnyTensorView& y,
               Workspace workspace, Communicator& communicator,
               Executor& executor) const noexcept;

 private:
  RowParallelLinearPlan(const RowParallelLinearSpec& spec, LinearPlan linear);
  AnyTensorView OwnColumns(const AnyTensorView& x) const;

  RowParallelLinearSpec spec_;
  int rank_ = 0;
  int size_ = 1;
  LinearPlan linear_;
  AlignedBuffer skipped_bias_;
};

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_PARALLEL_LINEAR_H_
