#ifndef QUERN_OPS_REGISTRY_VLLM_NAMED_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_VLLM_NAMED_TESTUTIL_H_

// Fixture of tests of vLLM's operators: makes an operator for the tensors that
// it is called with, prepares it, checks it and runs it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {

// `Ran` is called with the target of an operator of the provider simd.
template <class Base>
class VllmOps : public Base {
 protected:
  static TensorMeta MetaOf(const AnyTensorView& view) {
    TensorMeta meta{view.dtype(), {}};
    for (int d = 0; d < view.rank(); ++d)
      meta.extents.push_back(view.extent(d));
    return meta;
  }

  // `args`: those that are not tensors; `returned`: tensors that the operator
  // returns.
  absl::Status Try(const std::string& provider, const std::string& op,
                   const std::vector<NamedTensor>& tensors, NamedArgs args = {},
                   const std::vector<std::string>& returned = {}) {
    for (const auto& [name, view] : tensors) {
      if (std::find(returned.begin(), returned.end(), name) == returned.end()) {
        args.emplace_back(name, MetaOf(view));
      }
    }
    const OpDispatcher ops(registry_, OpPolicy());
    QUERN_ASSIGN_OR_RETURN(const MadeOp made, ops.MakeFrom(provider, op, args));
    if (provider == "simd") Ran(*made.op);
    std::vector<AnyTensorView> views;
    QUERN_RETURN_IF_ERROR(made.tensors.Arrange(tensors, views));
    QUERN_RETURN_IF_ERROR(made.Prepare(views, executor_));
    QUERN_RETURN_IF_ERROR(made.CheckArgs(views));
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes, made.WorkspaceBytes(views, 1));
    QUERN_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Create(bytes));
    const Workspace workspace(memory.data(), static_cast<size_t>(bytes));
    EXPECT_NO_ALLOCATION(made.op->Execute(views, workspace, executor_));
    return absl::OkStatus();
  }
  virtual void Ran(const BoundOp&) {}

  OpRegistry registry_;
  InlineExecutor executor_;
  TestRng rng_;
};

// On every instruction set.
class VllmOpFixture : public VllmOps<IsaTest> {
  void Ran(const BoundOp& op) override { EXPECT_RAN_ON(op); }
};
// For operators with plain loops alone.
using VllmLoopFixture = VllmOps<testing::Test>;

// A dense tensor of these extents in a vector.
template <typename T>
AnyTensorView Over(std::vector<T>& data, const std::vector<int64_t>& extents) {
  AnyTensorView::Dims dims{}, strides{};
  int64_t stride = 1;
  for (size_t d = extents.size(); d-- > 0;) {
    dims[d] = extents[d];
    strides[d] = stride;
    stride *= extents[d];
  }
  return AnyTensorView(DTypeOf<T>, static_cast<void*>(data.data()),
                       static_cast<int>(extents.size()), dims, strides);
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_NAMED_TESTUTIL_H_
