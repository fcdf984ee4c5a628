#ifndef QUERN_GEMM_LINEAR_IMPL_H_
#define QUERN_GEMM_LINEAR_IMPL_H_

// What the front doors gemm/linear.h and gemm/scaled_linear.h share: the
// choice, and scratch.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "core/aligned_buffer.h"
#include "core/executor.h"
#include "core/workspace.h"
#include "gemm/onednn/scratch.h"

namespace quern {

enum class LinearImpl : uint8_t {
  kAuto,    // what was measured to be faster on this CPU
  kPacked,  // our kernels
  kOneDnn,
};

class LinearPlan;
class ScaledLinearPlan;

// Scratch of Execute: one per thread that calls it, for any number of plans.
class LinearScratch {
 public:
  LinearScratch() = default;

  // Makes room for up to max_m rows of `plan` on the workers of `executor`;
  // what there is already stays, also where this fails. InvalidArgument if
  // max_m < 0, ResourceExhausted if the memory cannot be had.
  absl::Status Reserve(const LinearPlan& plan, int64_t max_m,
                       const Executor& executor);
  absl::Status Reserve(const ScaledLinearPlan& plan, int64_t max_m,
                       const Executor& executor);

  size_t bytes() const { return buffer_.bytes() + onednn_.bytes(); }

 private:
  friend class LinearPlan;
  friend class ScaledLinearPlan;
  absl::Status Grow(int64_t bytes);
  Workspace workspace() { return Workspace(buffer_); }

  AlignedBuffer buffer_;
  OneDnnScratch onednn_;  // grows by itself
};

}  // namespace quern

#endif  // QUERN_GEMM_LINEAR_IMPL_H_
