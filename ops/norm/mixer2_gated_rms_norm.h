#ifndef QUERN_OPS_NORM_MIXER2_GATED_RMS_NORM_H_
#define QUERN_OPS_NORM_MIXER2_GATED_RMS_NORM_H_

// The gated norm at the end of a Mamba-2 mixer whose heads, and so the columns
// of its output, are divided over the ranks of a Communicator:
//
//   h[t, i] = x[t, i] * silu(z[t, i])
//   out[t, i] = round(h[t, i] / rms[t, g] * weight[i])
//   rms[t, g] = sqrt(mean of h[t, :]^2 over the group + eps)
//
// with i over all `hidden` columns and g = i / (hidden / groups). A rank has
// the columns [rank, rank + 1) * hidden / size of x, z, weight and out. Where
// each group lies within a rank, results equal ops/norm/rms_norm_gated.h bit
// for bit and ranks do not communicate. Otherwise the ranks sum their parts of
// each group's squares, `groups` numbers per row, in the order of ranks;
// results then depend on the number of ranks, and a group whose sum of squares
// exceeds 3.4e38 is NaN. Arithmetic is in f32, and the result is rounded once,
// to nearest even.
//
// Mixers without this norm use the gate alone, which is silu_and_mul:
// ActAndMulPlan::ExecuteSplit of ops/activation/act_and_mul.h.

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/norm/rms_norm_gated.h"
#include "quern/ops/norm/rms_norm_gated_kernels.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

struct Mixer2GatedRmsNormSpec {
  int64_t hidden = 0;                // elements of a row, over all ranks
  int64_t groups = 1;                // divides hidden
  float eps = 1e-6f;                 // finite, >= 0
  DType dtype = DType::kF32;         // of x, z and out: f32, bf16 or f16
  DType weight_dtype = DType::kF32;  // f32, bf16 or f16
};

struct Mixer2GatedRmsNormArgs {
  AnyTensorView x, z, out;  // [rows, columns()]; out may be x or z itself
  AnyTensorView weight;     // [columns()]
};

class Mixer2GatedRmsNormPlan {
 public:
  // InvalidArgument unless 1 <= hidden < 2^59, if groups or the number of ranks
  // does not divide hidden, or if eps is negative, infinite or NaN.
  // Unimplemented for other dtypes.
  static absl::StatusOr<Mixer2GatedRmsNormPlan> Create(
      const Mixer2GatedRmsNormSpec& spec, const Communicator& communicator);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }
  const Mixer2GatedRmsNormSpec& spec() const { return spec_; }
  // Number of columns that this rank has.
  int64_t columns() const { return columns_; }

  // Bytes of workspace that Execute needs for up to max_rows rows on up to
  // max_workers workers; 0 where no group is divided over ranks.
  // InvalidArgument if max_rows < 0 or max_workers < 1, ResourceExhausted for
  // 2^63 or more.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const;

  // Whether Execute may be called with these arguments. InvalidArgument names
  // the argument.
  absl::Status CheckArgs(const Mixer2GatedRmsNormArgs& args) const;

  // Collective: every rank calls it, with the same number of rows and with a
  // communicator of the rank and size given to Create. Writes out. Rows may
  // have any stride; rows = 0 does nothing. Allocates nothing. Several threads
  // of a rank may call it at once, each with its own workspace and
  // communicator.
  void Execute(const Mixer2GatedRmsNormArgs& args, Workspace workspace,
               Communicator& communicator, Executor& executor) const noexcept;

 private:
  Mixer2GatedRmsNormPlan(const Mixer2GatedRmsNormSpec& spec, int rank,
                         int size);
  template <typename Allocator>
  float* LayOut(Allocator& a, int64_t rows) const;
  template <typename Fn>
  void ForEachPiece(const Fn& fn) const;

  Mixer2GatedRmsNormSpec spec_;
  int rank_;
  int size_;
  int64_t columns_;
  RmsNormGatedKernels kernels_;
  RowBlockKernels blocks_;
  RowBlockKernels weight_blocks_;
  std::optional<RmsNormGatedPlan> local_;  // set if no group spans ranks
};

}  // namespace quern

#endif  // QUERN_OPS_NORM_MIXER2_GATED_RMS_NORM_H_
