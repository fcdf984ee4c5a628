#ifndef QUERN_OPS_REGISTRY_OP_DECLARATION_H_
#define QUERN_OPS_REGISTRY_OP_DECLARATION_H_

// An operator as one declaration: a table from the names of its schema to the
// members of its plan's own Spec and Args.
//
//   OpDeclaration<RmsNormPlan, RmsNormSpec, RmsNormArgs> op("rms_norm");
//   op.In("x", &Args::x, {kLeading, &Spec::hidden}, &Spec::x_dtype)
//       .In("weight", &Args::weight, {&Spec::hidden}, &Spec::weight_dtype)
//       .Attr("eps", 1e-6, &Spec::eps)
//       .DTypeAttr("out_dtype", Like("x"), &Spec::out_dtype)
//       .Out("out", &Args::out, Like("x"), &Spec::out_dtype)
//       .InPlace("x", "out")
//       .Calls(&CheckNorm, &ExecuteNorm)
//       .Example({{"x", {4, 64}}, {"weight", {64}}})
//       .Reference(&NativeNorm);
//   QUERN_RETURN_IF_ERROR(op.AddTo(registry));
//
// From it follow the schema, whose parameters have the order of the calls; the
// shapes of what is returned; the checks of ranks, extents and dtypes; the
// plan; the order of the tensors; which of them may share memory; what counts
// the rows of a step (OpRules); and the schema's words in refusals.
//
// A dimension of a tensor is
//
//   kLeading         any dimensions, which the plan sees folded into rows
//   kRows            one dimension, the rows of a step; all that have it agree
//   &Spec::hidden    the first tensor that names a member sets it; each later
//                    one must have that extent
//   Times(2, &S::d)  the same, of a multiple of 2
//   Plus(1, &S::n)   the same, of one more
//   &PageBytes       what that function of the Spec says
//   3, kAny          exactly 3; any extent
//
// and a shape is a list of them, or Like("x"): that of another tensor. The same
// holds for dtypes: a member, a constant, or Like("x"). The first tensor that
// has kLeading or kRows counts the rows of a step.
//
// This header brings all that declarations are written with: tensors, dtypes,
// the checks of arguments, Status, workspaces, executors, and rows as scalars.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// IWYU pragma: begin_exports
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_bound_plan.h"
#include "quern/ops/registry/op_call.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/ops/registry/op_shape.h"
#include "quern/ops/registry/op_table.h"
// IWYU pragma: end_exports

namespace quern {

template <class Plan, class Spec, class Args>
class OpDeclaration {
 public:
  using Shape = OpShape<Spec>;
  using Type = OpDType<Spec>;
  using View = AnyTensorView Args::*;
  using Table = OpTable<Plan, Spec, Args>;
  using Native = typename Table::Native;  // loops in place of a plan

  OpDeclaration(OpDeclaration&&) noexcept = default;
  OpDeclaration& operator=(OpDeclaration&&) noexcept = default;
  explicit OpDeclaration(const char* name) {
    table_->schema.name = name;
    if constexpr (HasCreate<Plan, Spec>::value) {
      table_->create = [](const Spec& spec, const OpCall&) {
        return Plan::Create(spec);
      };
    }
    if constexpr (TakesArgs<Plan, Args>::value) {
      table_->check = [](const Plan& plan, const Args& args) {
        return plan.CheckArgs(args);
      };
      table_->execute = [](const Plan& plan, const Args& args,
                           Workspace workspace, Executor& executor) {
        if constexpr (HasWorkspace<Plan>::value) {
          plan.Execute(args, workspace, executor);
        } else {
          plan.Execute(args, executor);
        }
      };
    }
  }

  // A tensor that is read.
  OpDeclaration& In(const char* name, View to, Shape shape = {},
                    Type dtype = {}) {
    return Tensor(name, false, false, {to, nullptr}, std::move(shape), dtype);
  }
  // One that is read and may be left out.
  OpDeclaration& Maybe(const char* name, View to, Shape shape = {},
                       Type dtype = {}) {
    return Tensor(name, true, false, {to, nullptr}, std::move(shape), dtype);
  }
  // One that is written, and may be read before; `also`: a second member for
  // it, or null.
  OpDeclaration& InOut(const char* name, View to, View also, Shape shape = {},
                       Type dtype = {}) {
    return Tensor(name, false, true, {to, also}, std::move(shape), dtype);
  }
  OpDeclaration& MaybeInOut(const char* name, View to, Shape shape = {},
                            Type dtype = {}) {
    return Tensor(name, true, true, {to, nullptr}, std::move(shape), dtype);
  }
  // One that is returned. The schema calls it out, or out0, out1 and so on if
  // there are several; `word` is what the plan's refusals call it.
  OpDeclaration& Out(const char* word, View to, Shape shape, Type dtype) {
    ++table_->schema.returns;
    words_.push_back(word);
    table_->Add(word, {to, nullptr}, shape, dtype, /*counts_rows=*/false,
                /*returned=*/true);
    return *this;
  }
  // The plan's refusals say `word` of what the schema calls `name`.
  OpDeclaration& Word(const char* word, const char* name) {
    table_->rules.words.emplace_back(word, name);
    return *this;
  }
  // Two tensors, of which one is written, may share memory as the plan says.
  OpDeclaration& InPlace(const char* a, const char* b) {
    table_->rules.in_place.emplace_back(a, b);
    return *this;
  }

  // The tensor whose first dimension counts the rows of a step, where that is
  // not the first tensor with kLeading or kRows.
  OpDeclaration& Rows(const char* tensor) {
    table_->rules.rows_of = tensor;
    table_->rules.rows = OpRows::kFirst;
    return *this;
  }

  // A value that may be left out: a bool, an int, a float or text.
  OpDeclaration& Attr(const char* name, OpScalar value) {
    OpParam& param = Param(name, OpTypeOf(value));
    param.default_value = std::move(value);
    return *this;
  }
  // One that the plan's Spec has, too; Owner is the Spec or a base of it.
  template <class M, class Owner>
  OpDeclaration& Attr(const char* name, OpScalar value, M Owner::*to) {
    Attr(name, OpScalarOf<M>(std::move(value)));
    return Copy(name, OpField<Spec, M>(to));
  }
  template <class M>
  OpDeclaration& Attr(const char* name, OpScalar value, M& (*to)(Spec&)) {
    Attr(name, OpScalarOf<M>(std::move(value)));
    return Copy(name, OpField<Spec, M>(to));
  }
  // One that must be given: bool, int64_t, double or std::string.
  template <class T>
  OpDeclaration& Need(const char* name) {
    Param(name, OpTypeOf(OpScalar(T())));
    return *this;
  }
  template <class M, class Owner>
  OpDeclaration& Need(const char* name, M Owner::*to) {
    using T = std::conditional_t<std::is_same_v<M, float>, double, M>;
    Need<T>(name);
    return Copy(name, OpField<Spec, M>(to));
  }
  // A text that is one of some words, each with its value.
  template <class M>
  OpDeclaration& Choice(const char* name, const char* value,
                        std::vector<std::pair<const char*, M>> choices,
                        M Spec::*to) {
    Attr(name, std::string(value));
    return Then([name, choices = std::move(choices), to](
                    Spec& spec, const OpCall& call) -> absl::Status {
      QUERN_ASSIGN_OR_RETURN(spec.*to, call.OneOf(name, choices));
      return absl::OkStatus();
    });
  }
  // The name of a dtype; left out, that of the tensor.
  OpDeclaration& DTypeAttr(const char* name, Like like,
                           OpField<Spec, DType> to) {
    Attr(name, std::string());
    return Then(
        [name, like, to](Spec& spec, const OpCall& call) -> absl::Status {
          QUERN_ASSIGN_OR_RETURN(to.In(spec),
                                 DTypeOr(call.op(), name, call.Text(name),
                                         call.Tensor(like.tensor)->dtype));
          return absl::OkStatus();
        });
  }
  // A borrowed object, which Then or Creates looks at.
  template <class T>
  OpDeclaration& Object(const char* name, bool optional = false) {
    OpParam& param = Param(name, OpType::kObject);
    param.object = OpObject<T>::kName;
    param.optional = optional;
    return *this;
  }
  // A member whose value the call tells before the tensors that are named
  // later, which must then agree with it.
  template <class M, class Owner>
  OpDeclaration& Known(M Owner::*to, M (*value)(const OpCall&)) {
    table_->steps.push_back(
        [to, value](OpSpec<Spec>& filled, const OpCall& call) {
          filled.Fill(OpField<Spec, M>(to), value(call));
          return absl::OkStatus();
        });
    return *this;
  }
  // A member that every call has.
  template <class M, class Owner>
  OpDeclaration& Given(M Owner::*to, M value) {
    return Then([to, value](Spec& spec, const OpCall&) {
      spec.*to = value;
      return absl::OkStatus();
    });
  }
  // What else there is to fill or to check, in its turn among the steps.
  OpDeclaration& Then(std::function<absl::Status(Spec&, const OpCall&)> step) {
    table_->steps.push_back(
        [step = std::move(step)](OpSpec<Spec>& filled, const OpCall& call) {
          return step(filled.spec(), call);
        });
    return *this;
  }
  // The plan also takes [tokens, heads, n] with strides that do not fold into
  // rows; then no tensor is folded.
  OpDeclaration& OrHeads() {
    table_->heads = true;
    return *this;
  }

  // How the plan is made, where that is not Plan::Create(spec).
  OpDeclaration& Creates(typename Table::Create create) {
    table_->create = std::move(create);
    return *this;
  }
  // Who makes the operator, in the order in which they are asked; left out:
  // "simd". The reference is the last.
  OpDeclaration& Provider(absl::string_view name,
                          typename Table::Create create) {
    table_->providers.emplace_back(name, std::move(create));
    return *this;
  }
  // Several providers, for which Creates asks the call who makes it.
  OpDeclaration& Providers(const std::vector<std::string>& names) {
    for (const std::string& name : names) Provider(name, nullptr);
    return *this;
  }
  // `none` in a policy does not disable the operator.
  OpDeclaration& Layer() {
    table_->kind = OpKind::kLayer;
    return *this;
  }
  // What the plan's CheckArgs and Execute take, where that is not the Args as a
  // whole: members of it, and functions of it, in their order.
  template <auto... kParts>
  OpDeclaration& Takes() {
    return Calls(
        [](const Plan& plan, const Args& args) {
          return plan.CheckArgs(std::invoke(kParts, args)...);
        },
        [](const Plan& plan, const Args& args, Workspace workspace,
           Executor& executor) {
          if constexpr (HasWorkspace<Plan>::value) {
            plan.Execute(std::invoke(kParts, args)..., workspace, executor);
          } else {
            plan.Execute(std::invoke(kParts, args)..., executor);
          }
        });
  }
  // Members of the plan that stand in for CheckArgs(args) and Execute(args,
  // executor).
  template <auto kCheck, auto kExecute>
  OpDeclaration& Calls() {
    return Calls(
        [](const Plan& plan, const Args& args) { return (plan.*kCheck)(args); },
        [](const Plan& plan, const Args& args, Workspace, Executor& executor) {
          (plan.*kExecute)(args, executor);
        });
  }
  // Functions that stand in for both.
  OpDeclaration& Calls(absl::Status (*check)(const Plan&, const Args&),
                       void (*execute)(const Plan&, const Args&, Workspace,
                                       Executor&)) {
    table_->check = check;
    table_->execute = execute;
    return *this;
  }
  // Completes the arguments when all tensors are bound, checked or not.
  OpDeclaration& Finish(std::function<void(Args&)> finish) {
    table_->finish.push_back(std::move(finish));
    return *this;
  }
  // What must hold before the plan's CheckArgs may look at the arguments.
  OpDeclaration& CheckFirst(std::function<absl::Status(const Args&)> check) {
    table_->check_first = std::move(check);
    return *this;
  }
  // Plain loops with the arithmetic of a framework's operators.
  OpDeclaration& Reference(void (*reference)(const Spec&, const Args&)) {
    return ReferenceOf([reference](const Spec& spec) {
      return Native([spec, reference](const Args& a) { reference(spec, a); });
    });
  }
  // The same, where it needs more than the plan's Spec; `make` is given that.
  OpDeclaration& ReferenceOf(
      std::function<absl::StatusOr<Native>(const Spec&)> make) {
    return ReferenceFrom(
        [make = std::move(make)](const Spec& spec, const Plan& plan) {
          if constexpr (KeepsSpec<Plan, Spec>::value) {
            return make(plan.spec());
          } else {
            return make(spec);
          }
        });
  }
  // The same, of the Spec as the call has filled it, and the plan.
  OpDeclaration& ReferenceFrom(typename Table::Reference make) {
    table_->reference = std::move(make);
    return *this;
  }
  OpDeclaration& Example(std::vector<OpExampleArg> example) {
    table_->example = std::move(example);
    return *this;
  }
  OpDeclaration& ExampleOf(OpExample example) {
    table_->example_of = std::move(example);
    return *this;
  }

  // Adds the operator, its providers, and its reference if it has one.
  absl::Status AddTo(OpRegistry& registry) {
    QUERN_RETURN_IF_ERROR(table_->CheckSources());
    for (size_t i = 0; i < words_.size(); ++i) {
      const std::string name =
          words_.size() == 1 ? "out" : absl::StrCat("out", i);
      if (words_[i] != name) Word(words_[i].c_str(), name.c_str());
    }
    return registry.Define(OpDefinitionOf(table_));
  }

 private:
  OpParam& Param(const char* name, OpType type) {
    OpParam& param = table_->schema.params.emplace_back();
    param.name = name;
    param.type = type;
    return param;
  }

  template <class M>
  OpDeclaration& Copy(const char* name, OpField<Spec, M> to) {
    return Then([name, to](Spec& spec, const OpCall& call) {
      to.In(spec) = call.Value<M>(name);
      return absl::OkStatus();
    });
  }

  OpDeclaration& Tensor(const char* name, bool optional, bool written,
                        std::pair<View, View> to, Shape shape, Type dtype) {
    OpParam& param = Param(name, OpType::kTensor);
    param.optional = optional;
    param.mutated = written;
    table_->Add(name, to, shape, dtype, /*counts_rows=*/!optional);
    table_->steps.push_back([name, shape = std::move(shape), dtype](
                                OpSpec<Spec>& filled, const OpCall& call) {
      const TensorMeta* const meta = call.Tensor(name);
      return meta == nullptr ? absl::OkStatus()
                             : filled.Read(call, name, *meta, shape, dtype);
    });
    return *this;
  }

  std::shared_ptr<Table> table_ = std::make_shared<Table>();
  std::vector<std::string> words_;  // of what is returned
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_DECLARATION_H_
