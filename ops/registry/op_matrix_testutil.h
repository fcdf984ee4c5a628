#ifndef QUERN_OPS_REGISTRY_OP_MATRIX_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_OP_MATRIX_TESTUTIL_H_

// Test utility: what can be wrong with one tensor, or with two, of any operator
// of the registry. A matrix test makes each operator by its example and tries
// every case in turn, in C++ (op_matrix_test.cc) and in C
// (c/op_matrix_test.cc):
//
//   for (const MatrixOp& op : MatrixOpsOf("rms_norm")) {
//     for (const StepChange& change : StepChanges(op)) {
//       StepTensors step(op, change);
//       const absl::Status status = RunStep(*op.Make(), step.views(),
//       executor);
//     }
//   }

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/guard_buffer.h"

namespace quern {

// What RegisterAllOps registers; made once.
const OpRegistry& AllOps();

// Whether `status` is InvalidArgument or Unimplemented and begins with the name
// of the operator.
testing::AssertionResult IsRefusalOf(const std::string& op,
                                     const absl::Status& status);

// An operator of one provider in one dtype, which its example can make.
struct MatrixOp {
  // Another operator each time: some keep what Prepare was given.
  absl::StatusOr<MadeOp> Make() const { return Make(args); }
  absl::StatusOr<MadeOp> Make(const NamedArgs& changed) const;
  const OpDefinition& definition() const;
  // The operator of other arguments; an error if no tensors follow from them.
  absl::StatusOr<MatrixOp> With(const NamedArgs& changed) const;
  // "rms_norm of simd, f32".
  std::string Print() const;

  std::string name, provider;
  DType dtype = DType::kF32;
  NamedArgs args;
  GivenTensors given;
  std::vector<std::vector<uint8_t>> elements;  // of each given tensor
};

// The operator of each provider, made in f32 and in bf16. Fails the running
// test if none can be made, or if one is refused without its name.
std::vector<MatrixOp> MatrixOpsOf(const std::string& name);

// Whether tensor t of op.given is a matrix of weights that an implementation
// packs: it is called weight, mat2 or b, and the operator neither looks rows up
// nor keeps a state. None of its elements may overlap, whichever provider runs,
// because packing some of them refuses that.
bool IsPackedWeight(const MatrixOp& op, size_t t);

// What must come of a changed step.
enum class Want : uint8_t {
  kAny,        // a refusal, or the bits of dense tensors
  kLikeDense,  // the same as of the step that has not been changed
  kRefused,
  kInvalid,  // InvalidArgument, whichever implementation runs
};

// How one tensor of a step differs from a dense one that may be written, lies
// at a multiple of its element's size and is as the operator was made.
struct StepChange {
  std::string what;  // "weight: stride(0)=7, read-only"
  size_t place = 0;  // of the tensor, among all tensors of the operator
  TensorMeta meta;
  AnyTensorView::Dims strides{};
  int64_t shift = 0;  // in bytes, from an aligned address
  bool read_only = false;
  bool null = false;
  bool left_out = false;
  bool resized = false;    // has another extent
  bool backwards = false;  // has a negative stride that is used
  Want want = Want::kAny;
};

// For each tensor: another rank, extent and dtype, strides that are zero, too
// small, too large or negative, an address that is misaligned or null, a view
// that may not be written, no view at all; and a view for each tensor that the
// operator was made without. The first case changes nothing.
std::vector<StepChange> StepChanges(const MatrixOp& op);

// The tensors of a step, each in memory of its own with poison between the
// elements.
class StepTensors {
 public:
  explicit StepTensors(const MatrixOp& op);
  StepTensors(const MatrixOp& op, const StepChange& change);

  // Dense tensors that may be written and have these elements.
  StepTensors DenseTwin(
      const std::vector<std::vector<uint8_t>>& elements) const;

  const std::vector<AnyTensorView>& views() const { return views_; }
  // What the tensors have: those of op.given in their order, and then one that
  // is given although the operator was made without it.
  std::vector<std::vector<uint8_t>> Read() const;
  bool GapsAreIntact() const;

 private:
  explicit StepTensors(size_t all) : views_(all) {}
  void Add(const TensorMeta& meta, size_t place,
           const AnyTensorView::Dims& strides, int64_t shift,
           const std::vector<uint8_t>& elements);

  std::vector<TensorMeta> metas_;
  std::vector<size_t> places_;
  std::vector<Tensor> tensors_;
  std::vector<AnyTensorView> views_;
};

// Arguments of which one tensor is not as the example has it.
struct MakeChange {
  std::string what;  // "weight is f32[64, 1]"
  NamedArgs args;
  bool must_be_refused = false;
  bool rank_0 = false;  // a tensor has no dimension
};

// For each tensor among the arguments: another rank, extent and dtype, and no
// tensor.
std::vector<MakeChange> MakeChanges(const MatrixOp& op);

// Two tensors of op.given in one memory: `second` begins `offset` bytes behind
// `first`.
struct SharedPair {
  std::string what;  // "out 64 bytes behind x"
  size_t first = 0, second = 0;
  int64_t offset = 0;
  bool written = false;   // `first` is
  bool declared = false;  // in place, by OpRules
};

// Every tensor that is written with every other one, and all pairs of one dtype
// that are read: at one address, and so that the second begins in the last
// element of the first.
std::vector<SharedPair> SharedPairs(const MatrixOp& op);

// A step of which two tensors share memory, and beside it the same step with
// each tensor in memory of its own.
class SharedStep {
 public:
  SharedStep(const MatrixOp& op, const SharedPair& pair);
  SharedStep(const SharedStep&) = delete;
  SharedStep& operator=(const SharedStep&) = delete;

  const std::vector<AnyTensorView>& views() const { return views_; }
  const std::vector<AnyTensorView>& apart() const { return apart_; }
  // What tensor t has now, in either step.
  std::vector<uint8_t> Read(size_t t) const;
  std::vector<uint8_t> ReadApart(size_t t) const { return apart_of_[t].Read(); }
  // Whether the memory that is shared has what it had at first.
  bool SharedIsUnchanged() const;

 private:
  int64_t OffsetOf(size_t t) const { return t == pair_.second ? offset_ : 0; }

  std::vector<TensorMeta> metas_;
  SharedPair pair_;
  int64_t offset_;
  GuardBuffer<uint8_t> memory_;
  std::vector<uint8_t> before_;
  std::vector<Tensor> beside_, apart_of_;
  std::vector<AnyTensorView> views_, apart_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_MATRIX_TESTUTIL_H_
