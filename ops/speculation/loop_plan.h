#ifndef QUERN_OPS_SPECULATION_LOOP_PLAN_H_
#define QUERN_OPS_SPECULATION_LOOP_PLAN_H_

// A plan over plain loops. A step of speculation moves a few numbers for each
// request, so its plans need no kernels and no workspace. A pair of types has
// three functions in namespace quern:
//
//   absl::Status Check(const Spec& spec);                    // for Create
//   absl::Status Check(const Spec& spec, const Args& args);  // for CheckArgs
//   void Run(const Spec& spec, const Args& args);            // for Execute

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"

namespace quern {

template <class Spec, class Args>
class LoopPlan {
 public:
  // InvalidArgument if a number of the Spec is out of range.
  static absl::StatusOr<LoopPlan> Create(const Spec& spec) {
    QUERN_RETURN_IF_ERROR(Check(spec));
    return LoopPlan(spec);
  }

  const Spec& spec() const { return spec_; }
  const char* target() const { return "scalar"; }

  // Reads every index that Execute follows: InvalidArgument names the first one
  // that leaves the tensor that it points into. The cost is O(indices), unless
  // the header of the plan states another one.
  absl::Status CheckArgs(const Args& args) const { return Check(spec_, args); }

  // On the calling thread. Allocates nothing.
  void Execute(const Args& args, Executor& /*executor*/) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(args));
    Run(spec_, args);
  }

 private:
  explicit LoopPlan(const Spec& spec) : spec_(spec) {}

  Spec spec_;
};

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_LOOP_PLAN_H_
