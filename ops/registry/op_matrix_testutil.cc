#include "quern/ops/registry/op_matrix_testutil.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using Dims = AnyTensorView::Dims;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr DType kDTypes[] = {DType::kF32,    DType::kBF16,   DType::kF16,
                             DType::kF8E4M3, DType::kF8E5M2, DType::kI32,
                             DType::kI8,     DType::kU8,     DType::kI64};

bool IsIndex(const TensorMeta& meta) {
  return meta.dtype == DType::kI32 || meta.dtype == DType::kI64;
}

// The metadata that a tensor may have instead of `meta`.
struct OtherMeta {
  TensorMeta meta;
  bool resized;  // differs in an extent alone
};
std::vector<OtherMeta> OtherMetas(const TensorMeta& meta) {
  std::vector<OtherMeta> others;
  TensorMeta other = meta;
  if (meta.extents.size() < AnyTensorView::kMaxRank) {
    other.extents.insert(other.extents.begin(), 1);
    others.push_back({other, false});
  }
  if (!meta.extents.empty()) {
    other = meta;
    other.extents.erase(other.extents.begin());
    others.push_back({other, false});
  }
  for (size_t d = 0; d < meta.extents.size(); ++d) {
    for (const int64_t by : {1, -1}) {
      other = meta;
      other.extents[d] += by;
      if (other.extents[d] >= 0) others.push_back({other, true});
    }
  }
  for (const DType dtype : kDTypes) {
    if (dtype != meta.dtype) others.push_back({{dtype, meta.extents}, false});
  }
  return others;
}

// Appends to `changes` those of the strides of one tensor.
void AddStrides(const MatrixOp& op, size_t t, const StepChange& dense,
                std::vector<StepChange>& changes) {
  const TensorMeta& meta = dense.meta;
  for (size_t d = 0; d < meta.extents.size(); ++d) {
    const bool single = meta.extents[d] == 1;
    const int64_t step = dense.strides[d];
    for (const int64_t stride :
         std::set<int64_t>{0, step - 1, step + 1, -1, -step, kHuge}) {
      for (const bool read_only : {false, true}) {
        StepChange change = dense;
        absl::StrAppend(&change.what, "stride(", d, ")=", stride,
                        read_only ? ", read-only" : "");
        change.strides[d] = stride;
        // Dimensions outside it step over what it covers now.
        for (size_t o = d; stride > step && stride != kHuge && o-- > 0;) {
          change.strides[o] = change.strides[o + 1] * meta.extents[o + 1];
        }
        change.read_only = read_only;
        const bool overlaps = !single && stride < step;
        change.backwards = !single && stride < 0;
        if (change.backwards || (!single && stride == kHuge) ||
            (overlaps && IsPackedWeight(op, t))) {
          change.want = Want::kRefused;
        }
        if (read_only && op.given.written[t] && CountOf(meta) > 0) {
          change.want = Want::kInvalid;
        }
        changes.push_back(std::move(change));
      }
    }
  }
}

}  // namespace

const OpRegistry& AllOps() {
  static const OpRegistry* const registry = [] {
    auto* const made = new OpRegistry;
    QUERN_CHECK(RegisterAllOps(*made).ok());
    return made;
  }();
  return *registry;
}

testing::AssertionResult IsRefusalOf(const std::string& op,
                                     const absl::Status& status) {
  if (!absl::IsInvalidArgument(status) && !absl::IsUnimplemented(status)) {
    return testing::AssertionFailure()
           << status << "; need InvalidArgument or Unimplemented";
  }
  if (!absl::StartsWith(status.message(), op + ": ")) {
    return testing::AssertionFailure()
           << status << "; need the name of the operator before it";
  }
  return testing::AssertionSuccess();
}

absl::StatusOr<MadeOp> MatrixOp::Make(const NamedArgs& changed) const {
  static const OpDispatcher* const ops = new OpDispatcher(AllOps(), OpPolicy());
  return ops->MakeFrom(provider, name, changed);
}

const OpDefinition& MatrixOp::definition() const {
  return *AllOps().Find(name);
}

std::string MatrixOp::Print() const {
  return absl::StrCat(name, " of ", provider, ", ", DTypeName(dtype));
}

absl::StatusOr<MatrixOp> MatrixOp::With(const NamedArgs& changed) const {
  MatrixOp op = *this;
  op.args = changed;
  QUERN_ASSIGN_OR_RETURN(op.given, GivenTensors::Of(AllOps(), name, changed));
  Rng rng(20261127);
  op.elements.clear();
  for (const TensorMeta& meta : op.given.metas) {
    op.elements.push_back(SomeElements(rng, meta));
  }
  return op;
}

std::vector<MatrixOp> MatrixOpsOf(const std::string& name) {
  std::vector<MatrixOp> ops;
  const OpDefinition& definition = *AllOps().Find(name);
  for (const OpImplementation& implementation : definition.implementations) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      MatrixOp op;
      op.name = name;
      op.provider = implementation.provider;
      op.dtype = dtype;
      op.args = definition.example(dtype);
      const absl::Status made = op.Make().status();
      if (!made.ok()) {  // no kernel for these dtypes
        EXPECT_TRUE(IsRefusalOf(name, made)) << op.Print();
        continue;
      }
      auto given = op.With(op.args);
      if (given.ok()) {
        ops.push_back(*std::move(given));
      } else {
        ADD_FAILURE() << op.Print() << ": " << given.status();
      }
    }
  }
  EXPECT_FALSE(ops.empty()) << name << " is not made by its example";
  return ops;
}

bool IsPackedWeight(const MatrixOp& op, size_t t) {
  const std::string& name = op.given.names[t];
  if (name != "weight" && name != "mat2" && name != "b") return false;
  if (op.given.metas[t].extents.size() < 2) return false;
  for (const TensorMeta& meta : op.given.metas) {
    if (IsIndex(meta)) return false;
  }
  for (const OpParam& param : op.definition().schema.params) {
    if (param.mutated) return false;
  }
  return true;
}

std::vector<StepChange> StepChanges(const MatrixOp& op) {
  std::vector<StepChange> changes(1);
  const GivenTensors& given = op.given;
  if (given.size() == 0) return {};
  changes[0].what = "dense";
  changes[0].place = given.places[0];
  changes[0].meta = given.metas[0];
  changes[0].strides = DenseStrides(given.metas[0].extents);
  for (size_t t = 0; t < given.size(); ++t) {
    StepChange dense;
    dense.what = given.names[t] + ": ";
    dense.place = given.places[t];
    dense.meta = given.metas[t];
    dense.strides = DenseStrides(dense.meta.extents);
    const bool empty = CountOf(dense.meta) == 0;
    const auto add = [&](const std::string& what, Want want,
                         const std::function<void(StepChange&)>& change) {
      changes.push_back(dense);
      changes.back().what += what;
      changes.back().want = want;
      change(changes.back());
    };
    for (const OtherMeta& other : OtherMetas(dense.meta)) {
      add(PrintMeta(other.meta), other.resized ? Want::kAny : Want::kInvalid,
          [&](StepChange& change) {
            change.meta = other.meta;
            change.strides = DenseStrides(other.meta.extents);
            change.resized = other.resized;
          });
    }
    add("left out", Want::kInvalid,
        [](StepChange& change) { change.left_out = true; });
    add("read-only",
        given.written[t] && !empty ? Want::kInvalid : Want::kLikeDense,
        [](StepChange& change) { change.read_only = true; });
    add("null", empty ? Want::kAny : Want::kRefused,
        [](StepChange& change) { change.null = true; });
    if (SizeOf(dense.meta.dtype) > 1) {
      add("misaligned", empty ? Want::kAny : Want::kRefused,
          [](StepChange& change) { change.shift = 1; });
    }
    AddStrides(op, t, dense, changes);
  }
  const std::vector<std::string> names =
      OpTensors::NamesOf(op.definition().schema);
  for (size_t place = 0; place < given.all; ++place) {
    if (std::count(given.places.begin(), given.places.end(), place) > 0) {
      continue;
    }
    StepChange change;
    change.what = names[place] + ": given";
    change.place = place;
    change.meta = TensorMeta{DType::kF32, {1}};
    change.strides = DenseStrides(change.meta.extents);
    change.want = Want::kInvalid;
    changes.push_back(std::move(change));
  }
  return changes;
}

StepTensors::StepTensors(const MatrixOp& op) : StepTensors(op.given.all) {
  for (size_t t = 0; t < op.given.size(); ++t) {
    Add(op.given.metas[t], op.given.places[t],
        DenseStrides(op.given.metas[t].extents), 0, op.elements[t]);
  }
}

StepTensors::StepTensors(const MatrixOp& op, const StepChange& change)
    : StepTensors(op.given.all) {
  Rng rng(20261125);
  const auto add_changed = [&](const std::vector<uint8_t>* elements) {
    Add(change.meta, change.place, change.strides, change.shift,
        elements != nullptr ? *elements : SomeElements(rng, change.meta));
    views_[change.place] =
        change.left_out ? AnyTensorView()
                        : tensors_.back().View(change.read_only, change.null);
  };
  bool given = false;
  for (size_t t = 0; t < op.given.size(); ++t) {
    const TensorMeta& meta = op.given.metas[t];
    if (op.given.places[t] == change.place) {
      given = true;
      add_changed(meta == change.meta ? &op.elements[t] : nullptr);
    } else {
      Add(meta, op.given.places[t], DenseStrides(meta.extents), 0,
          op.elements[t]);
    }
  }
  if (!given) add_changed(nullptr);
}

void StepTensors::Add(const TensorMeta& meta, size_t place, const Dims& strides,
                      int64_t shift, const std::vector<uint8_t>& elements) {
  metas_.push_back(meta);
  places_.push_back(place);
  tensors_.emplace_back(meta, strides, shift);
  tensors_.back().Write(elements);
  views_[place] = tensors_.back().View(false, false);
}

StepTensors StepTensors::DenseTwin(
    const std::vector<std::vector<uint8_t>>& elements) const {
  StepTensors twin(views_.size());
  for (size_t t = 0; t < tensors_.size(); ++t) {
    twin.Add(metas_[t], places_[t], DenseStrides(metas_[t].extents), 0,
             elements[t]);
  }
  return twin;
}

std::vector<std::vector<uint8_t>> StepTensors::Read() const {
  std::vector<std::vector<uint8_t>> elements;
  for (const Tensor& tensor : tensors_) elements.push_back(tensor.Read());
  return elements;
}

bool StepTensors::GapsAreIntact() const {
  return std::all_of(tensors_.begin(), tensors_.end(),
                     [](const Tensor& t) { return t.GapsAreIntact(); });
}

std::vector<MakeChange> MakeChanges(const MatrixOp& op) {
  std::vector<MakeChange> changes;
  for (size_t i = 0; i < op.args.size(); ++i) {
    const auto* const meta = std::get_if<TensorMeta>(&op.args[i].second);
    if (meta == nullptr) continue;
    const std::string name(op.args[i].first);
    for (const OtherMeta& other : OtherMetas(*meta)) {
      MakeChange change;
      change.what = absl::StrCat(name, " is ", PrintMeta(other.meta));
      change.args = op.args;
      change.args[i].second = other.meta;
      change.rank_0 = other.meta.extents.empty();
      changes.push_back(std::move(change));
    }
    MakeChange left_out;
    left_out.what = name + " is left out";
    left_out.args = op.args;
    left_out.args.erase(left_out.args.begin() + static_cast<ptrdiff_t>(i));
    for (const OpParam& param : op.definition().schema.params) {
      if (param.name == name) left_out.must_be_refused = !param.optional;
    }
    changes.push_back(std::move(left_out));
  }
  return changes;
}

}  // namespace quern
