#include "quern/ops/registry/op_dispatcher.h"

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kWhat[] = "op dispatcher";

absl::StatusOr<MadeOp> MakeWith(const OpImplementation& implementation,
                                absl::Span<const OpArg> args) {
  QUERN_ASSIGN_OR_RETURN(std::unique_ptr<BoundOp> op,
                         implementation.factory(args));
  if (op == nullptr) {
    return absl::InternalError(absl::StrCat(
        kWhat, ": the maker of ", implementation.provider, " made nothing"));
  }
  return MadeOp{std::move(op), implementation.provider, {}};
}

absl::StatusOr<MadeOp> MakeEnabled(const OpDefinition& op,
                                   absl::Span<const OpArg> args) {
  if (op.override_with.has_value()) return MakeWith(*op.override_with, args);
  absl::Status last = Unimplemented(op.schema.name, "has no implementation");
  for (const OpImplementation& implementation : op.implementations) {
    absl::StatusOr<MadeOp> made = MakeWith(implementation, args);
    if (made.ok() || !absl::IsUnimplemented(made.status())) return made;
    last = made.status();
  }
  return last;
}

absl::StatusOr<MadeOp> MakeNamed(absl::string_view provider,
                                 const OpDefinition& op,
                                 absl::Span<const OpArg> args) {
  const auto& own = op.override_with;
  if (own.has_value() && own->provider == provider) return MakeWith(*own, args);
  std::vector<absl::string_view> names;
  if (own.has_value()) names.push_back(own->provider);
  for (const OpImplementation& implementation : op.implementations) {
    if (implementation.provider == provider) {
      return MakeWith(implementation, args);
    }
    names.push_back(implementation.provider);
  }
  return absl::NotFoundError(
      absl::StrCat(kWhat, ": ", op.schema.name, " has no provider \"", provider,
                   "\"; need one of ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<MadeOp> MakeDisabled(const OpDefinition& op,
                                    absl::Span<const OpArg> args) {
  if (op.implementations.empty() ||
      op.implementations.back().provider != OpRegistry::kReference) {
    return Unimplemented(op.schema.name, "is disabled and has no reference");
  }
  return MakeWith(op.implementations.back(), args);
}

}  // namespace

absl::Status MadeOp::CheckArgs(absl::Span<const AnyTensorView> ordered) const {
  QUERN_RETURN_IF_ERROR(tensors.Check(ordered));
  return tensors.InWords(op->CheckArgs(ordered));
}

absl::Status MadeOp::CheckAndExecute(absl::Span<const AnyTensorView> ordered,
                                     Workspace workspace,
                                     Executor& executor) const {
  QUERN_RETURN_IF_ERROR(tensors.Check(ordered));
  return tensors.InWords(op->CheckAndExecute(ordered, workspace, executor));
}

absl::Status MadeOp::Prepare(absl::Span<const AnyTensorView> ordered,
                             Executor& executor) const {
  QUERN_RETURN_IF_ERROR(tensors.Check(ordered));
  return tensors.InWords(op->Prepare(ordered, executor));
}

absl::StatusOr<int64_t> MadeOp::WorkspaceBytes(
    absl::Span<const AnyTensorView> ordered, int max_workers) const {
  auto bytes = op->WorkspaceBytes(tensors.Rows(ordered), max_workers);
  if (!bytes.ok()) return tensors.InWords(bytes.status());
  return bytes;
}

absl::Status MadeOp::Bind(absl::Span<const NamedTensor> named,
                          std::vector<AnyTensorView>& ordered) const {
  QUERN_RETURN_IF_ERROR(tensors.Arrange(named, ordered));
  return tensors.InWords(op->CheckArgs(ordered));
}

OpDispatcher::OpDispatcher(const OpRegistry& registry, OpPolicy policy)
    : registry_(registry), policy_(std::move(policy)) {
  for (std::string& name : registry.Names()) {
    counters_.emplace(std::move(name), std::make_unique<Counters>());
  }
}

bool OpDispatcher::enabled(absl::string_view op) const {
  const OpDefinition* const definition = registry_.Find(op);
  if (definition != nullptr && definition->kind == OpKind::kLayer) {
    return !policy_.disables(op);
  }
  return policy_.enabled(op);
}

absl::StatusOr<MadeOp> OpDispatcher::MakeBy(absl::string_view op,
                                            const NamedArgs& args,
                                            Maker make) const {
  const OpDefinition* const definition = registry_.Find(op);
  const auto counters = counters_.find(op);
  if (definition == nullptr || counters == counters_.end()) {
    return absl::NotFoundError(
        absl::StrCat(kWhat, ": no operator \"", op, "\""));
  }
  QUERN_ASSIGN_OR_RETURN(const std::vector<OpArg> arranged,
                         ArrangeArgs(definition->schema, args));
  const auto returns = definition->shapes(arranged);
  if (!returns.ok()) {
    return InWordsOf(op, definition->rules, returns.status());
  }
  bool on = true;
  absl::StatusOr<MadeOp> made = make(*definition, arranged, on);
  if (!made.ok()) return InWordsOf(op, definition->rules, made.status());
  made->tensors =
      OpTensors(definition->schema, definition->rules, arranged, *returns);
  (on ? counters->second->enabled : counters->second->disabled)
      .fetch_add(1, std::memory_order_relaxed);
  return made;
}

absl::StatusOr<MadeOp> OpDispatcher::Make(absl::string_view op,
                                          const NamedArgs& args,
                                          OpEnable enable) const {
  return MakeBy(op, args,
                [&](const OpDefinition& definition,
                    absl::Span<const OpArg> arranged, bool& on) {
                  on = enable == OpEnable::kAlways || enabled(op);
                  return on ? MakeEnabled(definition, arranged)
                            : MakeDisabled(definition, arranged);
                });
}

absl::StatusOr<MadeOp> OpDispatcher::MakeFrom(absl::string_view provider,
                                              absl::string_view op,
                                              const NamedArgs& args) const {
  return MakeBy(op, args,
                [&](const OpDefinition& definition,
                    absl::Span<const OpArg> arranged, bool& on) {
                  on = provider != OpRegistry::kReference;
                  return MakeNamed(provider, definition, arranged);
                });
}

OpCounts OpDispatcher::Counts(absl::string_view op) const {
  const auto found = counters_.find(op);
  if (found == counters_.end()) return {};
  return {found->second->enabled.load(std::memory_order_relaxed),
          found->second->disabled.load(std::memory_order_relaxed)};
}

std::vector<std::string> OpDispatcher::Warnings() const {
  const auto constructions = [this](absl::string_view op) {
    const OpCounts counts = Counts(op);
    return counts.enabled + counts.disabled;
  };
  int64_t all = 0;
  for (const auto& [name, counters] : counters_) all += constructions(name);
  std::vector<std::string> warnings;
  if (all == 0) return warnings;
  for (const std::string& token : policy_.signed_tokens()) {
    const absl::string_view op = absl::string_view(token).substr(1);
    if (constructions(op) > 0) continue;
    warnings.push_back(absl::StrCat("op policy: \"", token, "\": ",
                                    registry_.Find(op) == nullptr
                                        ? "no operator has this name"
                                        : "the operator is not used"));
  }
  return warnings;
}

}  // namespace quern
