#ifndef QUERN_OPS_REGISTRY_OP_TABLE_H_
#define QUERN_OPS_REGISTRY_OP_TABLE_H_

// What a declaration (op_declaration.h) comes to: the steps that read the
// arguments of a call, and the places of the tensors in the plan's Args.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_call.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/ops/registry/op_shape.h"

namespace quern {

// An argument of an example: a tensor, whose dtype is the one that is tried
// unless it is given here, or another value.
struct OpExampleArg {
  OpExampleArg(const char* name, std::initializer_list<int64_t> extents)
      : name(name), value(TensorMeta{DType::kF32, extents}), any_dtype(true) {}
  OpExampleArg(const char* name, std::initializer_list<int64_t> extents,
               DType dtype)
      : name(name), value(TensorMeta{dtype, extents}) {}
  OpExampleArg(const char* name, OpArg value)
      : name(name), value(std::move(value)) {}
  // An object that is made when somebody asks for the example.
  template <class T>
  OpExampleArg(const char* name, T* (*object)())
      : name(name), object([object] { return OpArg(object()); }) {}

  const char* name;
  OpArg value;
  std::function<OpArg()> object;  // or null
  bool any_dtype = false;
};

// The type of a default.
inline OpType OpTypeOf(const OpScalar& value) {
  switch (value.index()) {
    case 0:
      return OpType::kInt;
    case 1:
      return OpType::kFloat;
    case 2:
      return OpType::kBool;
    default:
      return OpType::kString;
  }
}

// A default for a member of type M; 1 stands for 1.0.
template <class M>
OpScalar OpScalarOf(OpScalar value) {
  if constexpr (std::is_floating_point_v<M>) {
    if (const auto* whole = std::get_if<int64_t>(&value)) {
      return static_cast<double>(*whole);
    }
  }
  using T = std::conditional_t<std::is_floating_point_v<M>, double, M>;
  QUERN_CHECK(std::holds_alternative<T>(value));
  return value;
}

// What a declaration derives from its steps; shared by the operators made.
template <class Plan, class Spec, class Args>
struct OpTable {
  using View = AnyTensorView Args::*;
  // A tensor, in the order of the schema and then of what is returned.
  struct Tensor {
    std::string name;
    OpShape<Spec> shape;
    OpDType<Spec> dtype;
    bool returned;
    bool rows;
  };
  // Where a tensor goes.
  struct Place {
    View to;
    View also;  // or null
    bool rows;  // bound as a matrix of rows
  };
  using Step = std::function<absl::Status(OpSpec<Spec>&, const OpCall&)>;
  using Create =
      std::function<absl::StatusOr<Plan>(const Spec&, const OpCall&)>;
  using Native = std::function<void(const Args&)>;
  // Makes the reference of a plan, whose Spec has been filled.
  using Reference =
      std::function<absl::StatusOr<Native>(const Spec&, const Plan&)>;

  void Add(const char* name, std::pair<View, View> to,
           const OpShape<Spec>& shape, const OpDType<Spec>& dtype,
           bool counts_rows, bool is_returned = false) {
    bool has_rows = shape.leading();
    for (const auto& other : tensors) {
      if (shape.like != nullptr && other.name == shape.like) {
        has_rows = other.rows;
      }
    }
    const bool counts = !shape.dims.empty() &&
                        (shape.dims[0].Is(kLeading) || shape.dims[0].Is(kRows));
    if (rules.rows_of.empty() && counts && counts_rows) {
      rules.rows_of = name;
      rules.rows = shape.leading() ? OpRows::kLeading : OpRows::kFirst;
    }
    tensors.push_back({name, shape, dtype, is_returned, has_rows});
    places.push_back({to.first, to.second, has_rows});
  }

  // Fills the Spec and appends the metadata of what is returned.
  absl::StatusOr<Spec> Read(absl::Span<const OpArg> args,
                            std::vector<TensorMeta>* returns) const {
    OpSpec<Spec> filled;
    const OpCall call(schema, args);
    for (const Step& step : steps) {
      QUERN_RETURN_IF_ERROR(step(filled, call));
    }
    if (returns == nullptr) return filled.spec();
    for (const Tensor& t : tensors) {
      if (!t.returned) continue;
      QUERN_ASSIGN_OR_RETURN(const int64_t rows, RowsOf(call));
      returns->push_back(filled.Returned(call, t.shape, t.dtype, rows));
    }
    return filled.spec();
  }

  // The rows of a step with the tensors that the operator is made with.
  absl::StatusOr<int64_t> RowsOf(const OpCall& call) const {
    if (rules.rows_of.empty()) return 0;
    const TensorMeta& meta = *call.Tensor(rules.rows_of);
    if (rules.rows == OpRows::kFirst) return meta.extents[0];
    return LeadingRows(call.op(), rules.rows_of, meta);
  }

  // Called for each step, so it reads nothing but `places`.
  void Bind(absl::Span<const AnyTensorView> views, Args& args) const {
    bool folds = true;
    for (size_t i = 0; i < places.size(); ++i) {
      const Place& place = places[i];
      AnyTensorView& to = args.*place.to;
      if (!place.rows || views[i].rank() == 2) {
        to = views[i];
      } else {
        to = AsRows(views[i]);
        folds = folds && to.rank() == 2;
      }
      if (place.also != nullptr) args.*place.also = to;
    }
    if (!folds && heads) BindUnfolded(views, args);
    for (const auto& step : finish) step(args);
  }
  void BindUnfolded(absl::Span<const AnyTensorView> views, Args& args) const {
    for (size_t i = 0; i < places.size(); ++i) {
      args.*places[i].to = views[i];
      if (places[i].also != nullptr) args.*places[i].also = views[i];
    }
  }

  // InvalidArgument where something is derived from a tensor that a call may
  // leave out.
  absl::Status CheckSources() const {
    const auto check = [this](const char* what, absl::string_view tensor) {
      for (const OpParam& param : schema.params) {
        if (param.name != tensor || !param.optional) continue;
        return InvalidArgument(schema.name, what, " ", tensor,
                               ", which is optional; need one that is not");
      }
      return absl::OkStatus();
    };
    QUERN_RETURN_IF_ERROR(check("rows follow from", rules.rows_of));
    for (const auto& tensor : tensors) {
      const OpShape<Spec>& shape = tensor.shape;
      if (shape.like != nullptr) {
        QUERN_RETURN_IF_ERROR(check("a shape follows from", shape.like));
      }
      if (tensor.dtype.like != nullptr) {
        QUERN_RETURN_IF_ERROR(check("a dtype follows from", tensor.dtype.like));
      }
    }
    return absl::OkStatus();
  }

  OpSchema schema;
  OpRules rules;
  std::vector<Tensor> tensors;
  std::vector<Place> places;  // of the tensors
  std::vector<Step> steps;
  Create create;
  absl::Status (*check)(const Plan&, const Args&) = nullptr;
  void (*execute)(const Plan&, const Args&, Workspace, Executor&) = nullptr;
  Reference reference;  // or null
  // Who makes the operator; without a function of its own by `create`.
  std::vector<std::pair<std::string, Create>> providers;
  OpKind kind = OpKind::kOperator;
  std::vector<OpExampleArg> example;
  OpExample example_of;  // in place of `example`; or null
  bool heads = false;    // the plan takes what does not fold into rows
  std::vector<std::function<void(Args&)>> finish;
  std::function<absl::Status(const Args&)> check_first;  // or null
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_TABLE_H_
