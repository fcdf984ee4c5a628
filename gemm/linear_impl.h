#ifndef QUERN_GEMM_LINEAR_IMPL_H_
#define QUERN_GEMM_LINEAR_IMPL_H_

// Scratch of gemm/linear.h and gemm/scaled_linear.h.

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "core/aligned_buffer.h"
#include "core/executor.h"
#include "core/workspace.h"
#include "gemm/linear_spec.h"

namespace quern {

class LinearPlan;
class ScaledLinearPlan;

// Scratch of Execute: one per thread that calls it, for any number of plans.
class LinearScratch {
 public:
  LinearScratch() = default;

  // Makes room for up to max_m rows of `plan` on the workers of `executor`;
  // what there is already stays, also where this fails. Execute then allocates
  // nothing here, whichever implementation it runs. InvalidArgument if
  // max_m < 0, ResourceExhausted if the memory cannot be had.
  absl::Status Reserve(const LinearPlan& plan, int64_t max_m,
                       const Executor& executor);
  absl::Status Reserve(const ScaledLinearPlan& plan, int64_t max_m,
                       const Executor& executor);

  size_t bytes() const { return buffer_.bytes(); }

 private:
  friend class LinearPlan;
  friend class ScaledLinearPlan;
  absl::Status Grow(int64_t bytes);
  Workspace workspace() { return Workspace(buffer_); }

  AlignedBuffer buffer_;
};

}  // namespace quern

#endif  // QUERN_GEMM_LINEAR_IMPL_H_
