#ifndef QUERN_OPS_PARALLEL_PARALLEL_LINEAR_H_
#define QUERN_OPS_PARALLEL_PARALLEL_LINEAR_H_

// Linear layers whose weights are divided over the ranks of a Communicator.
// With W[n, k] and `size` ranks, of which this is `rank`:
//
//   replicated  y = x W^T + b                       every rank has all of it
//   column      y_rank = x W_rank^T + b_rank        W_rank: n / size rows of W
//   row         y = sum over ranks of x_rank W_rank^T, + b once
//                                                   W_rank: k / size columns
//
// A column layer followed by a row layer is a block with one sum over the ranks
// at its end: what the first leaves apart, the second takes apart.
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
// All three are gemm/linear.h within a rank, on weights that are f32, bf16 or
// f16: sums in f32, rounded once. Between ranks a row layer sums as
// Communicator::AllReduceSum: each rank's part is rounded to y's dtype, the
// parts are summed in f32 in the order of ranks, and rounded again. Results are
// the same bits on every rank and in every run, but depend on `size`, as the
// sum over k is cut there.
//
// Create and Execute are called by all ranks, with the same spec. Execute is
// called with the communicator given to Create or one like it. Like
// LinearPlan's, it writes y and nothing else and allocates nothing but what
// oneDNN does; any number of threads may call it at once, each with scratch,
// and a communicator, of its own. y does not overlap x.

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

// What Create is handed: all of the layer's weights, of which it takes what
// belongs to the rank, or that alone. A column layer's bias likewise; a row
// layer's bias is always whole.
enum class WeightPart : uint8_t { kFull, kShard };

// Whether Execute adds the bias or leaves it to the caller, who finds it in
// bias(): the operators after it may be fused with it.
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
  int64_t size = 0;  // its columns of y, over all ranks
  int64_t unit = 1;  // columns that stay together: head_dim
  // Where there are fewer units than ranks, size / unit of them: size() / units
  // ranks after another hold the same one. What keys and values of
  // grouped-query attention need.
  bool replicate = false;
};

struct ColumnParallelLinearSpec {
  // In y, and in a shard of the weights, each rank has its part of the first,
  // then of the second, and so on.
  std::vector<ColumnOutput> outputs;
  int64_t k = 0;  // columns of x
  DType x = DType::kBF16;
  DType w = DType::kBF16;
  DType y = DType::kBF16;
  // Execute leaves all columns of y on every rank, in the order of `outputs`.
  bool gather_output = false;
  BiasUse bias = BiasUse::kAdd;
  // A gated one takes two outputs of equal size, gate and up.
  LinearActivation activation = LinearActivation::kNone;
  WeightPart part = WeightPart::kFull;
  std::string kernels = {};  // see LinearSpec::kernels
};

// The outputs of a fused query, key and value projection. v_head_dim 0: as
// head_dim. Keys and values are replicated where there are fewer of their heads
// than ranks.
std::vector<ColumnOutput> QkvOutputs(int64_t head_dim, int64_t q_heads,
                                     int64_t kv_heads, int64_t v_head_dim = 0);

struct RowParallelLinearSpec {
  int64_t n = 0;  // columns of y
  int64_t k = 0;  // columns of x, over all ranks
  DType x = DType::kBF16;
  DType w = DType::kBF16;
  DType y = DType::kBF16;
  // Whether Execute gets x_rank[m, k / size], or all of x and takes its part.
  bool input_is_parallel = true;
  // Without, each rank keeps its summand; a bias must then be skipped.
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
  // max_workers workers. InvalidArgument: max_m < 0 or max_workers < 1.
  // ResourceExhausted: more than 63 bits.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int max_workers) const {
    return linear_.WorkspaceBytes(max_m, max_workers);
  }
  // The bias that Execute did not add; empty if it did, or there is none.
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
  // weights[sum of sizes, k] and bias of as many, or what Shard(i) tells of
  // each output i. Weights and bias are copied.
  //
  // InvalidArgument: no outputs; a size that is no multiple of its unit; units
  // that cannot be divided over the ranks; gather_output with an output that is
  // replicated; a gated activation that has not two outputs of equal size; an
  // activation with a skipped bias; what LinearPlan::Create refuses.
  static absl::StatusOr<ColumnParallelLinearPlan> Create(
      const ColumnParallelLinearSpec& spec, const AnyTensorView& weights,
      const AnyTensorView& bias, const Communicator& communicator,
      Executor& executor);

  const ColumnParallelLinearSpec& spec() const { return spec_; }
  const LinearPlan* linear() const { return &linear_; }

  // The rank's part of an output: columns [begin, begin + count) of it.
  struct OutputShard {
    int64_t begin = 0;
    int64_t count = 0;
  };
  OutputShard Shard(int64_t output) const {
    return shards_[static_cast<size_t>(output)];
  }
  // Columns of y: this rank's alone, unless gather_output.
  int64_t columns() const { return columns_; }
  // Like ReplicatedLinearPlan::WorkspaceBytes.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int max_workers) const;
  // The rank's part of the bias that Execute did not add; empty if it did, or
  // there is none.
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
  int64_t row_bytes_ = 0;  // where the rank's parts of y lie apart
  LinearPlan linear_;
  AlignedBuffer skipped_bias_;
};

class RowParallelLinearPlan {
 public:
  // weights[n, k] or [n, k / size]; bias[n], the same on all ranks, which rank
  // 0 adds. Weights and bias are copied.
  //
  // InvalidArgument: k that is no multiple of the number of ranks;
  // reduce_results = false with a bias that is not skipped, which every rank or
  // none would then have; what LinearPlan::Create refuses.
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
  // The bias that Execute did not add, all of it, on every rank; empty if it
  // did, or there is none.
  VectorView<const float> bias() const;

  // x[m, k / size], or x[m, k] where not input_is_parallel -> y[m, n].
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
