#ifndef QUERN_OPS_REGISTRY_SGLANG_ROWS_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_SGLANG_ROWS_TESTUTIL_H_

// Fixture of the tests of operators on rows by SGLang's names: makes an
// operator for the tensors of a call, and runs it.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/refusal.h"

namespace quern {

inline TensorMeta F32(std::vector<int64_t> extents) {
  return {DType::kF32, std::move(extents)};
}

// A value of the example of f32 that is changed or added, and the words behind
// the operator's name that refuse it.
struct RefusedArg {
  const char* op;
  std::string name;
  OpArg value;
  const char* words;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

class RowsFixture : public testing::Test {
 protected:
  // A matrix whose rows have gaps between them.
  AnyMatrix Random(DType dtype, int64_t rows, int64_t cols, double most = 2,
                   int64_t gap = 3) {
    return AnyMatrix(dtype,
                     ToDoubles(UniformReals(rng_, rows * cols, -most, most)),
                     rows, cols, cols + gap);
  }
  AnyMatrix Empty(DType dtype, int64_t rows, int64_t cols) {
    return AnyMatrix(dtype, rows, cols, cols + 1);
  }

  // Makes the operator for tensors like these, of which those whose names begin
  // with out are returned, and runs it.
  absl::Status Run(const std::string& provider, const std::string& op,
                   const std::vector<NamedTensor>& tensors,
                   NamedArgs args = {}) {
    const OpDispatcher ops(registry_, OpPolicy());
    for (const auto& [name, view] : tensors) {
      if (name.substr(0, 3) == "out") continue;
      TensorMeta meta{view.dtype(), {}};
      for (int d = 0; d < view.rank(); ++d) {
        meta.extents.push_back(view.extent(d));
      }
      args.emplace_back(name, meta);
    }
    auto made = ops.MakeFrom(provider, op, args);
    if (!made.ok()) return made.status();
    std::vector<AnyTensorView> views;
    const absl::Status bound = made->Bind(tensors, views);
    if (!bound.ok()) return bound;
    const absl::Status checked = made->CheckArgs(views);
    if (!checked.ok()) return checked;
    made->op->Execute(views, Workspace(), executor_);
    return absl::OkStatus();
  }

  void ExpectRefused(const std::vector<RefusedArg>& cases) {
    const OpDispatcher ops(registry_, OpPolicy());
    for (const RefusedArg& c : cases) {
      SCOPED_TRACE(c.words);
      NamedArgs args = registry_.Find(c.op)->example(DType::kF32);
      bool found = false;
      for (auto& [field, old] : args) {
        if (field != c.name) continue;
        old = c.value;
        found = true;
      }
      if (!found) args.emplace_back(c.name, c.value);
      ExpectRefusal(ops.Make(c.op, args).status(), c.code,
                    std::string(c.op) + ": " + c.words);
    }
  }

  OpRegistry registry_;
  ManyWorkers executor_{3};
  TestRng rng_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_ROWS_TESTUTIL_H_
