#ifndef QUERN_GEMM_GROUPED_LINEAR_H_
#define QUERN_GEMM_GROUPED_LINEAR_H_

// Linear layers of one shape, each on rows of its own: the experts of a
// mixture.
//
//   for each group g, and r in [offsets[g], offsets[g + 1]):
//     c[r] = linear_g(a[index[r] / rows_per_index])   a[r] where there is no
//     index
//
// linear_g is gemm/linear.h with weights[g], bias and activation included, and
// gives the bits of its packed kernels, whatever the other groups have.
//
// Every group's weights are read at most once for 256 of its rows, and not at
// all if it has none. Two parallel regions: all rows are packed; then all
// panels of all groups are claimed from one line, longest first
// (gemm/schedule/group_line.h), so that workers end together even if one expert
// has most of the rows.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"

namespace quern {

class PackedLayer;

struct GroupedLinearSpec {
  // f32, bf16 or f16. Where weights are kI8Channel, each row of a becomes int8
  // with a scale of its own and no zero point.
  DType a = DType::kBF16;
  DType c = DType::kBF16;  // f32, bf16 or f16
  LinearActivation activation = LinearActivation::kNone;
  LinearActivations activations = LinearActivations::kExact;
};

struct GroupedLinearArgs {
  AnyTensorView a;  // [rows of a, k], with any row stride
  // [r of c or more]: not negative, and index / rows_per_index is a row of a.
  // Null: the rows of a are those of c.
  VectorView<const int32_t> index;
  int64_t rows_per_index = 1;  // top_k where indices are routes; <= kMaxRows
  // [groups + 1]: from 0, ascending, to rows of c or fewer. Further rows of c
  // are not touched.
  VectorView<const int32_t> offsets;
  AnyTensorView c;  // [rows, ColumnsOfC(activation, n)], with any row stride
};

class GroupedLinearPlan {
 public:
  static constexpr int64_t kMaxGroups = 65536;
  static constexpr int kMaxWorkers = 1 << 16;
  static constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;

  // One LinearWeights for each group. They may be dropped afterwards; bytes
  // that they adopted may not.
  //
  // InvalidArgument: no weights, or more than kMaxGroups; weights whose n, k,
  // format, group_size, gated, zero points, order of k or bias are not those of
  // the first group; what LinearPlan::Create refuses of activation and weights.
  // Unimplemented: a or c of another dtype.
  static absl::StatusOr<GroupedLinearPlan> Create(
      const GroupedLinearSpec& spec, absl::Span<const LinearWeights> weights);

  GroupedLinearPlan(GroupedLinearPlan&&) noexcept;
  GroupedLinearPlan& operator=(GroupedLinearPlan&&) noexcept;
  ~GroupedLinearPlan();

  const GroupedLinearSpec& spec() const { return spec_; }
  // The spec of every group's weights.
  const LinearWeightsSpec& weights() const { return weights_; }
  int64_t groups() const;
  int64_t n() const { return weights_.n; }
  int64_t k() const { return weights_.k; }
  // Bytes of all weights, with scales and biases.
  int64_t packed_bytes() const;

  // Instruction set of the kernels, e.g. "AVX3_ZEN4".
  const char* target() const;
  // What a linear layer of so many rows runs: "packed AVX3_ZEN4 bf16 dot, tiles
  // of 8 x 32". A group has the same kernels, in as few tiles as there must be.
  std::string Explain(int64_t rows) const;

  // Bytes of workspace that Execute needs for up to max_rows rows in all groups
  // together, on up to max_workers workers. InvalidArgument: max_rows < 0, or
  // max_workers outside [1, kMaxWorkers]. ResourceExhausted: more than kMaxRows
  // rows, or 2^63 bytes or more.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const;

  // Whether Execute may be called with these: dtypes, shapes, every offset and
  // index; c overlaps nothing that is read. O(rows).
  absl::Status CheckArgs(const GroupedLinearArgs& args) const;

  // Writes rows [0, offsets[groups]) of c and nothing else. Allocates nothing;
  // any number of threads may call it at once, each with its own workspace of
  // WorkspaceBytes(offsets[groups], executor.num_workers()) or more: with less,
  // aborts. Neither the number of workers nor the other rows change a bit.
  void Execute(const GroupedLinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept;

 private:
  GroupedLinearPlan();

  GroupedLinearSpec spec_;
  LinearWeightsSpec weights_;
  std::vector<std::unique_ptr<const PackedLayer>> layers_;
};

}  // namespace quern

#endif  // QUERN_GEMM_GROUPED_LINEAR_H_
