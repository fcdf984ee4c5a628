#ifndef QUERN_OPS_REGISTRY_OP_FIXTURE_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_OP_FIXTURE_TESTUTIL_H_

// Fixture of tests of operators by name: makes an operator from a provider, and
// runs it with exactly the workspace that it asks for.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {

class OpFixture : public IsaTest {
 protected:
  MadeOp Make(const std::string& provider, const std::string& op,
              const NamedArgs& args) {
    const OpDispatcher ops(registry_, OpPolicy());
    auto made = ops.MakeFrom(provider, op, args);
    EXPECT_TRUE(made.ok()) << made.status();
    if (provider == "simd") {
      EXPECT_RAN_ON(*made->op);
    }
    return *std::move(made);
  }
  // Binds the tensors and runs the operator, which must not allocate.
  void Run(const MadeOp& op, const std::vector<NamedTensor>& named) {
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(op.Bind(named, tensors), absl::OkStatus());
    const auto bytes = op.WorkspaceBytes(tensors, 1);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    auto memory = AlignedBuffer::Create(*bytes);
    ASSERT_TRUE(memory.ok());
    const Workspace workspace(memory->data(), static_cast<size_t>(*bytes));
    EXPECT_NO_ALLOCATION({
      EXPECT_TRUE(op.Bind(named, tensors).ok());
      op.op->Execute(tensors, workspace, executor_);
    });
  }

  OpRegistry registry_;
  InlineExecutor executor_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_FIXTURE_TESTUTIL_H_
