// Every operator through the C interface with one tensor that is not as it
// should be, or with two in one memory: the cases of
// ops/registry/op_matrix_test.cc. Each call has the outcome that it has in C++:
// the same bits, or a refusal of the same kind that names the operator.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/arguments_testutil.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/op_objects_testutil.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_matrix_testutil.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/guard_buffer.h"

namespace quern {
namespace {

using Views = std::vector<AnyTensorView>;

// The least number of cases for each given tensor, as in C++.
constexpr int64_t kCasesPerTensor = 20;

// What a call on an operator came to.
struct Outcome {
  quern_status status;
  std::string message;
};

class OpMatrixInCTest : public testing::TestWithParam<std::string> {
 protected:
  // Made with `args`; null if the call is refused, as `outcome` says, or if an
  // object is not to be had.
  quern_op* Make(const MatrixOp& op, const NamedArgs& args, Outcome& outcome);
  // Prepares and executes.
  Outcome Run(const MatrixOp& op, quern_op* made, const Views& views,
              int64_t workspace_bytes);
  // Runs a step in both interfaces, and compares the outcomes; whether it was
  // executed in both.
  bool RunBoth(const MatrixOp& op, const MadeOp& in_cpp, quern_op* in_c,
               const Views& cpp, const Views& c, bool backwards);
  void ExpectSame(const MatrixOp& op, const absl::Status& cpp,
                  const Outcome& c);

  void TryStep(const MatrixOp& op, const StepChange& change);
  void TryMake(const MatrixOp& op, const MakeChange& change);
  void TryPair(const MatrixOp& op, const SharedPair& pair);

  LibraryInC library_;
  ObjectsInC objects_{library_.get()};
  InlineExecutor executor_;
  // Whether the objects of the operator have the state of those of C++.
  bool alike_ = true;
  int64_t cases_ = 0, executed_ = 0, refused_ = 0;
};

quern_op* OpMatrixInCTest::Make(const MatrixOp& op, const NamedArgs& args,
                                Outcome& outcome) {
  ArgumentsInC arguments;
  outcome = {QUERN_UNIMPLEMENTED, op.name + ": an object is not to be had"};
  if (!arguments.Add(args, [&](const OpObjectRef& ref) {
        return objects_.For(op.name, ref);
      })) {
    return nullptr;
  }
  const quern_op_options options = {sizeof(options), op.provider.c_str()};
  quern_op* made = nullptr;
  outcome.status =
      quern_op_create(library_.get(), op.name.c_str(), &options,
                      arguments.list.data(), arguments.list.size(), &made);
  EXPECT_EQ(outcome.status == QUERN_OK, made != nullptr);
  outcome.message = MessageOf(library_.get());
  return made;
}

Outcome OpMatrixInCTest::Run(const MatrixOp& op, quern_op* made,
                             const Views& views, int64_t workspace_bytes) {
  const std::vector<std::string> names =
      OpTensors::NamesOf(op.definition().schema);
  std::vector<std::unique_ptr<TensorInC>> tensors;
  std::vector<quern_operand> operands;
  for (size_t i = 0; i < views.size(); ++i) {
    const AnyTensorView& view = views[i];
    tensors.push_back(std::make_unique<TensorInC>(view));
    // A tensor of no dimension is given; one without data is left out.
    const bool given = view.rank() != 0 || view.data() != nullptr;
    operands.push_back({names[i].c_str(),
                        given ? tensors.back()->get() : nullptr,
                        uint64_t{view.writable() || view.data() == nullptr
                                     ? 0u
                                     : uint32_t{QUERN_READ_ONLY}}});
  }
  quern_status status =
      quern_op_prepare(made, operands.data(), operands.size(), nullptr);
  if (status == QUERN_OK) {
    GuardBuffer<uint8_t> workspace((workspace_bytes + 63) / 64 * 64);
    status = quern_op_execute(made, operands.data(), operands.size(),
                              workspace_bytes == 0 ? nullptr : workspace.data(),
                              static_cast<size_t>(workspace_bytes), nullptr);
  }
  return {status, status == QUERN_OK ? "" : MessageOf(made)};
}

void OpMatrixInCTest::ExpectSame(const MatrixOp& op, const absl::Status& cpp,
                                 const Outcome& c) {
  if (alike_) {
    EXPECT_EQ(c.status, static_cast<quern_status>(cpp.code()))
        << "C: " << c.message << "\nC++: " << cpp;
  }
  if (c.status == QUERN_OK) return;
  EXPECT_TRUE(c.status == QUERN_INVALID_ARGUMENT ||
              c.status == QUERN_UNIMPLEMENTED ||
              (!alike_ && c.status == QUERN_FAILED_PRECONDITION))
      << c.status << ": " << c.message;
  EXPECT_TRUE(absl::StartsWith(c.message, op.name + ": ")) << c.message;
}

bool OpMatrixInCTest::RunBoth(const MatrixOp& op, const MadeOp& in_cpp,
                              quern_op* in_c, const Views& cpp, const Views& c,
                              bool backwards) {
  const absl::Status status = RunStep(in_cpp, cpp, executor_);
  int64_t bytes = 0;
  if (status.ok()) {
    const auto needed = in_cpp.WorkspaceBytes(cpp, executor_.num_workers());
    EXPECT_TRUE(needed.ok()) << needed.status();
    bytes = needed.value_or(0);
  }
  const Outcome outcome = Run(op, in_c, c, bytes);
  if (backwards) {
    // C refuses a negative stride before the operator is asked.
    EXPECT_EQ(outcome.status, QUERN_INVALID_ARGUMENT) << outcome.message;
    EXPECT_FALSE(status.ok());
  } else {
    ExpectSame(op, status, outcome);
  }
  ++(outcome.status == QUERN_OK ? executed_ : refused_);
  return outcome.status == QUERN_OK && status.ok() && alike_;
}

void OpMatrixInCTest::TryStep(const MatrixOp& op, const StepChange& change) {
  SCOPED_TRACE(op.Print() + ": " + change.what);
  ++cases_;
  Outcome outcome;
  quern_op* const made = Make(op, op.args, outcome);
  ASSERT_NE(made, nullptr) << outcome.message;
  const StepTensors cpp(op, change), c(op, change);
  const std::vector<std::vector<uint8_t>> before = c.Read();
  const bool ran =
      RunBoth(op, *op.Make(), made, cpp.views(), c.views(), change.backwards);
  if (ran) {
    EXPECT_EQ(c.Read(), cpp.Read());
    EXPECT_TRUE(c.GapsAreIntact());
    EXPECT_NE(change.want, Want::kRefused);
    EXPECT_NE(change.want, Want::kInvalid);
  } else if (alike_) {
    EXPECT_EQ(c.Read(), before) << "a refused call wrote: " << MessageOf(made);
  }
  EXPECT_C_OK(quern_destroy(made), library_.get());
}

void OpMatrixInCTest::TryMake(const MatrixOp& op, const MakeChange& change) {
  SCOPED_TRACE(op.Print() + ": " + change.what);
  ++cases_;
  Outcome outcome;
  quern_op* const made = Make(op, change.args, outcome);
  const auto in_cpp = op.Make(change.args);
  if (change.rank_0) {
    // A tensor of C has a dimension at least.
    EXPECT_EQ(outcome.status, QUERN_INVALID_ARGUMENT) << outcome.message;
    EXPECT_TRUE(absl::StartsWith(outcome.message, op.name + ": "))
        << outcome.message;
  } else {
    ExpectSame(op, in_cpp.status(), outcome);
  }
  if (made == nullptr) {
    ++refused_;
    return;
  }
  EXPECT_FALSE(change.must_be_refused);
  const auto changed = op.With(change.args);
  if (in_cpp.ok() && changed.ok()) {
    const StepTensors cpp(*changed), c(*changed);
    if (RunBoth(*changed, *in_cpp, made, cpp.views(), c.views(), false)) {
      EXPECT_EQ(c.Read(), cpp.Read());
    }
  } else {
    ++executed_;
  }
  EXPECT_C_OK(quern_destroy(made), library_.get());
}

void OpMatrixInCTest::TryPair(const MatrixOp& op, const SharedPair& pair) {
  SCOPED_TRACE(op.Print() + ": " + pair.what);
  ++cases_;
  Outcome outcome;
  quern_op* const made = Make(op, op.args, outcome);
  ASSERT_NE(made, nullptr) << outcome.message;
  const SharedStep cpp(op, pair), c(op, pair);
  const bool ran = RunBoth(op, *op.Make(), made, cpp.views(), c.views(), false);
  const std::string message = MessageOf(made);
  if (pair.written && !pair.declared) {
    EXPECT_FALSE(ran) << "a tensor that is written overlaps another";
    EXPECT_TRUE(absl::StrContains(message, " overlaps ")) << message;
  }
  for (size_t t = 0; t < op.given.size() && alike_; ++t) {
    EXPECT_EQ(c.Read(t), cpp.Read(t)) << op.given.names[t] << message;
  }
  EXPECT_C_OK(quern_destroy(made), library_.get());
}

// Types of objects that the C interface does not have.
bool IsUnknownToC(const MatrixOp& op) {
  for (const auto& [name, arg] : op.args) {
    const auto* const ref = std::get_if<OpObjectRef>(&arg);
    if (ref == nullptr) continue;
    const std::string type = ref->type;
    if (type == "MlaWeights" || type == "SamplingStep") return true;
  }
  return false;
}

// Whether the state of a step is among the arguments, which the test does not
// build.
bool TakesStep(const MatrixOp& op) {
  for (const auto& [name, arg] : op.args) {
    const auto* const ref = std::get_if<OpObjectRef>(&arg);
    if (ref == nullptr) continue;
    const std::string type = ref->type;
    if (type == "AttentionStep" || type == "SchedulerMetadata") return true;
  }
  return false;
}

TEST_P(OpMatrixInCTest, HasTheOutcomesOfCpp) {
  int64_t floor = 0;
  std::set<std::string> providers;
  for (const MatrixOp& op : MatrixOpsOf(GetParam())) {
    // One dtype of each provider; MakeChanges has the others.
    if (!providers.insert(op.provider).second) continue;
    Outcome outcome;
    quern_op* const made = Make(op, op.args, outcome);
    ASSERT_EQ(made == nullptr, IsUnknownToC(op))
        << op.Print() << ": " << outcome.message;
    if (made == nullptr) continue;
    EXPECT_C_OK(quern_destroy(made), library_.get());
    alike_ = !TakesStep(op);
    floor += kCasesPerTensor * static_cast<int64_t>(op.given.size());
    for (const StepChange& change : StepChanges(op)) TryStep(op, change);
    for (const MakeChange& change : MakeChanges(op)) TryMake(op, change);
    for (const SharedPair& pair : SharedPairs(op)) TryPair(op, pair);
  }
  std::printf("%s in C: %lld cases, %lld executed, %lld refused\n",
              GetParam().c_str(), static_cast<long long>(cases_),
              static_cast<long long>(executed_),
              static_cast<long long>(refused_));
  const bool unknown =
      GetParam() == "sample" || GetParam() == "multi_head_latent_attention";
  EXPECT_EQ(floor == 0, unknown);
  EXPECT_GE(cases_, floor);
  EXPECT_EQ(cases_, executed_ + refused_);
}

std::string NameOf(const testing::TestParamInfo<std::string>& info) {
  return info.param;
}
INSTANTIATE_TEST_SUITE_P(Ops, OpMatrixInCTest,
                         testing::ValuesIn(AllOps().Names()), NameOf);

}  // namespace
}  // namespace quern
