#ifndef QUERN_OPS_REGISTRY_REFERENCE_EXPERTS_H_
#define QUERN_OPS_REGISTRY_REFERENCE_EXPERTS_H_

// The experts of ops/moe/experts.h as plain loops over their packed weights, on
// the calling thread, for the provider called "reference".

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/reference/linear.h"

namespace quern {

class NativeExperts {
 public:
  // `spec` and `weights` are such that ExpertsPlan::Create accepts them.
  static absl::StatusOr<NativeExperts> Create(const ExpertsSpec& spec,
                                              const ExpertWeights& weights);

  int64_t WorkspaceBytes() const;
  // `args` are such that ExpertsPlan::CheckArgs accepts them.
  void Run(const ExpertsArgs& args, Workspace workspace) const noexcept;

 private:
  NativeExperts(const ExpertsSpec& spec, int64_t hidden, int64_t inter)
      : spec_(spec), hidden_(hidden), inter_(inter) {}

  // Arrays of one row.
  struct Scratch {
    float* x;
    float* h;
    float* y;
    float* sum;
  };
  template <typename Allocator>
  Scratch LayOut(Allocator& allocator) const;

  ExpertsSpec spec_;
  int64_t hidden_, inter_;
  std::vector<NativeLinear> gate_up_, down_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_EXPERTS_H_
