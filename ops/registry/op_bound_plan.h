#ifndef QUERN_OPS_REGISTRY_OP_BOUND_PLAN_H_
#define QUERN_OPS_REGISTRY_OP_BOUND_PLAN_H_

// An operator on the plan of a declaration (op_declaration.h), and the
// definition of all of its operators.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_table.h"

namespace quern {

// Whether the plan needs a workspace, and whether its CheckArgs takes an Args.
template <class Plan, class = void>
struct HasWorkspace : std::false_type {};
template <class Plan>
struct HasWorkspace<
    Plan, std::void_t<decltype(std::declval<const Plan&>().WorkspaceBytes(
              int64_t{}, int{}))>> : std::true_type {};
template <class Plan, class Args, class = void>
struct TakesArgs : std::false_type {};
template <class Plan, class Args>
struct TakesArgs<Plan, Args,
                 std::void_t<decltype(std::declval<const Plan&>().CheckArgs(
                     std::declval<const Args&>()))>> : std::true_type {};

// Whether the plan is made of its Spec alone; whether it packs weights, says
// what runs for so many rows, and keeps a Spec of the declaration's type.
template <class Plan, class Spec, class = void>
struct HasCreate : std::false_type {};
template <class Plan, class Spec>
struct HasCreate<
    Plan, Spec,
    std::void_t<decltype(Plan::Create(std::declval<const Spec&>()))>>
    : std::true_type {};
template <class Plan, class Args, class = void>
struct HasPrepare : std::false_type {};
template <class Plan, class Args>
struct HasPrepare<Plan, Args,
                  std::void_t<decltype(std::declval<Plan&>().Prepare(
                      std::declval<const Args&>(), std::declval<Executor&>()))>>
    : std::true_type {};
template <class Plan, class = void>
struct HasExplain : std::false_type {};
template <class Plan>
struct HasExplain<
    Plan, std::void_t<decltype(std::declval<const Plan&>().Explain(int64_t{}))>>
    : std::true_type {};
template <class Plan, class Spec, class = void>
struct KeepsSpec : std::false_type {};
template <class Plan, class Spec>
struct KeepsSpec<
    Plan, Spec,
    std::enable_if_t<std::is_convertible_v<
        decltype(std::declval<const Plan&>().spec()), const Spec&>>>
    : std::true_type {};

// An operator on a plan, or on loops over the plan's arguments.
template <class Plan, class Spec, class Args>
class BoundPlan final : public BoundOp {
 public:
  using Table = OpTable<Plan, Spec, Args>;
  // `reference`: what runs in place of the plan, or null.
  BoundPlan(std::shared_ptr<const Table> table, Plan plan,
            std::function<void(const Args&)> reference)
      : table_(std::move(table)),
        plan_(std::move(plan)),
        reference_(std::move(reference)) {}

  const char* target() const override {
    return reference_ != nullptr ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t rows) const override {
    if constexpr (HasExplain<Plan>::value) {
      if (reference_ == nullptr) return plan_.Explain(rows);
    }
    return BoundOp::Explain(rows);
  }
  absl::Status Prepare(absl::Span<const AnyTensorView> t,
                       Executor& executor) override {
    if constexpr (HasPrepare<Plan, Args>::value) {
      QUERN_RETURN_IF_ERROR(CheckCount(t));
      Args args;
      table_->Bind(t, args);
      return plan_.Prepare(args, executor);
    }
    return BoundOp::Prepare(t, executor);
  }
  absl::Status CheckArgs(absl::Span<const AnyTensorView> t) const override {
    QUERN_RETURN_IF_ERROR(CheckCount(t));
    Args args;
    table_->Bind(t, args);
    return Check(args);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if constexpr (HasWorkspace<Plan>::value) {
      if (reference_ == nullptr) {
        return plan_.WorkspaceBytes(max_rows, max_workers);
      }
    }
    return 0;
  }
  void Execute(absl::Span<const AnyTensorView> t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    Args args;
    table_->Bind(t, args);
    Run(args, workspace, executor);
  }
  absl::Status CheckAndExecute(absl::Span<const AnyTensorView> t,
                               Workspace workspace,
                               Executor& executor) const override {
    QUERN_RETURN_IF_ERROR(CheckCount(t));
    Args args;
    table_->Bind(t, args);
    QUERN_RETURN_IF_ERROR(Check(args));
    Run(args, workspace, executor);
    return absl::OkStatus();
  }

 private:
  absl::Status CheckCount(absl::Span<const AnyTensorView> t) const {
    if (t.size() == table_->places.size()) return absl::OkStatus();
    return CheckTensorCount(table_->schema.name, t, table_->places.size());
  }
  absl::Status Check(const Args& args) const {
    if (table_->check_first != nullptr) {
      QUERN_RETURN_IF_ERROR(table_->check_first(args));
    }
    return table_->check(plan_, args);
  }
  void Run(const Args& args, Workspace workspace,
           Executor& executor) const noexcept {
    if (reference_ != nullptr) return reference_(args);
    table_->execute(plan_, args, workspace, executor);
  }

  std::shared_ptr<const Table> table_;
  Plan plan_;
  std::function<void(const Args&)> reference_;
};

// Makes the operator of one provider, whose plan `create` makes.
template <class Plan, class Spec, class Args>
OpFactory OpFactoryOf(std::shared_ptr<const OpTable<Plan, Spec, Args>> table,
                      std::string provider,
                      typename OpTable<Plan, Spec, Args>::Create create) {
  return [table = std::move(table), provider = std::move(provider),
          create = std::move(create)](absl::Span<const OpArg> args)
             -> absl::StatusOr<std::unique_ptr<BoundOp>> {
    QUERN_ASSIGN_OR_RETURN(const Spec spec, table->Read(args, nullptr));
    QUERN_ASSIGN_OR_RETURN(Plan plan,
                           create(spec, OpCall(table->schema, args, provider)));
    std::function<void(const Args&)> reference;
    if (provider == OpRegistry::kReference && table->reference != nullptr) {
      QUERN_ASSIGN_OR_RETURN(reference, table->reference(spec, plan));
    }
    return std::unique_ptr<BoundOp>(new BoundPlan<Plan, Spec, Args>(
        table, std::move(plan), std::move(reference)));
  };
}

// The operator with its providers, and its reference if it has one.
template <class Plan, class Spec, class Args>
OpDefinition OpDefinitionOf(
    const std::shared_ptr<OpTable<Plan, Spec, Args>>& table) {
  OpTable<Plan, Spec, Args>& t = *table;
  OpDefinition op;
  op.schema = t.schema;
  op.rules = t.rules;
  op.kind = t.kind;
  op.shapes = [table](absl::Span<const OpArg> args)
      -> absl::StatusOr<std::vector<TensorMeta>> {
    std::vector<TensorMeta> returns;
    QUERN_RETURN_IF_ERROR(table->Read(args, &returns).status());
    return returns;
  };
  op.example = [table](DType dtype) {
    if (table->example_of != nullptr) return table->example_of(dtype);
    NamedArgs args;
    for (const OpExampleArg& arg : table->example) {
      args.emplace_back(arg.name,
                        arg.object != nullptr ? arg.object() : arg.value);
      if (arg.any_dtype) {
        std::get<TensorMeta>(args.back().second).dtype = dtype;
      }
    }
    return args;
  };
  if (t.providers.empty()) t.providers.emplace_back("simd", nullptr);
  if (t.reference != nullptr &&
      t.providers.back().first != OpRegistry::kReference) {
    t.providers.emplace_back(OpRegistry::kReference, nullptr);
  }
  for (const auto& [provider, create] : t.providers) {
    op.implementations.push_back(
        {provider, OpFactoryOf<Plan, Spec, Args>(table, provider,
                                                 create ? create : t.create)});
  }
  return op;
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_BOUND_PLAN_H_
