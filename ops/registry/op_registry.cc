#include "quern/ops/registry/op_registry.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kWhat[] = "op registry";

absl::Status NoSuchOp(absl::string_view op) {
  return absl::NotFoundError(absl::StrCat(kWhat, ": no operator \"", op, "\""));
}

// InvalidArgument unless the schema's parameters, without names and defaults,
// equal the signature's. For a pointer to an object, the signature does not say
// whether the object is optional.
absl::Status CheckSignature(const OpSchema& schema,
                            const std::vector<OpParam>& signature,
                            absl::string_view of) {
  OpSchema want = schema, have = schema;
  have.params = signature;
  for (size_t i = 0; i < std::min(want.params.size(), signature.size()); ++i) {
    if (have.params[i].type == OpType::kObject) {
      have.params[i].optional = want.params[i].optional;
    }
  }
  for (OpParam& param : want.params) {
    param.name.clear();
    param.default_value.reset();
  }
  if (want == have) return absl::OkStatus();
  return InvalidArgument(kWhat, of, " of ", schema.name, " is a function of ",
                         have.Print(), "; need ", want.Print());
}

// InvalidArgument for a tensor that the schema does not have, and for a pair in
// place of which neither is written.
absl::Status CheckRules(const OpSchema& schema, const OpRules& rules) {
  const std::vector<std::string> names = OpTensors::NamesOf(schema);
  const auto check = [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      return absl::OkStatus();
    }
    return InvalidArgument(kWhat, schema.name, " has no tensor ", name,
                           "; need one of ", absl::StrJoin(names, ", "));
  };
  const auto is_written = [&](const std::string& name) {
    for (const OpParam& param : schema.params) {
      if (param.name == name) return param.mutated;
    }
    return true;  // a returned tensor
  };
  for (const auto& [a, b] : rules.in_place) {
    QUERN_RETURN_IF_ERROR(check(a));
    QUERN_RETURN_IF_ERROR(check(b));
    if (is_written(a) || is_written(b)) continue;
    return InvalidArgument(kWhat, a, " and ", b, " of ", schema.name,
                           " are in place, and neither is written");
  }
  return rules.rows_of.empty() ? absl::OkStatus() : check(rules.rows_of);
}

}  // namespace

absl::Status OpRegistry::DefineTyped(absl::string_view text,
                                     std::vector<OpParam> signature,
                                     OpShapes shapes, OpExample example,
                                     OpKind kind) {
  QUERN_ASSIGN_OR_RETURN(OpSchema schema, OpSchema::Parse(text));
  QUERN_RETURN_IF_ERROR(
      CheckSignature(schema, signature, "the shape function"));
  OpDefinition op;
  op.schema = std::move(schema);
  op.shapes = std::move(shapes);
  op.example = std::move(example);
  op.kind = kind;
  return Define(std::move(op));
}

absl::Status OpRegistry::Define(OpDefinition definition) {
  QUERN_RETURN_IF_ERROR(CheckRules(definition.schema, definition.rules));
  const std::string name = definition.schema.name;
  const std::string text = definition.schema.Print();
  QUERN_ASSIGN_OR_RETURN(const OpSchema parsed, OpSchema::Parse(text));
  if (parsed.Print() != text) {
    return InvalidArgument(kWhat, text, " reads as ", parsed.Print());
  }
  std::set<std::string> providers;
  for (const OpImplementation& made : definition.implementations) {
    if (providers.insert(made.provider).second) continue;
    return InvalidArgument(kWhat, name, " has the provider ", made.provider,
                           " twice");
  }
  if (ops_.emplace(name, std::move(definition)).second) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(
      absl::StrCat(kWhat, ": ", name, " is defined twice"));
}

absl::Status OpRegistry::Declare(absl::string_view op, OpRules rules) {
  const auto found = ops_.find(op);
  if (found == ops_.end()) return NoSuchOp(op);
  QUERN_RETURN_IF_ERROR(CheckRules(found->second.schema, rules));
  found->second.rules = std::move(rules);
  return absl::OkStatus();
}
absl::Status OpRegistry::AddTyped(absl::string_view op,
                                  absl::string_view provider,
                                  std::vector<OpParam> signature,
                                  OpFactory factory) {
  const auto found = ops_.find(op);
  if (found == ops_.end()) return NoSuchOp(op);
  OpDefinition& definition = found->second;
  QUERN_RETURN_IF_ERROR(CheckSignature(
      definition.schema, signature, absl::StrCat("the ", provider, " maker")));
  auto& list = definition.implementations;
  for (const OpImplementation& other : list) {
    if (other.provider == provider) {
      return absl::AlreadyExistsError(
          absl::StrCat(kWhat, ": ", op, " has a ", provider, " already"));
    }
  }
  const bool before_last = !list.empty() && list.back().provider == kReference;
  list.insert(before_last ? list.end() - 1 : list.end(),
              {std::string(provider), std::move(factory)});
  return absl::OkStatus();
}

absl::Status OpRegistry::OverrideTyped(absl::string_view op,
                                       absl::string_view provider,
                                       std::vector<OpParam> signature,
                                       OpFactory factory) {
  const auto found = ops_.find(op);
  if (found == ops_.end()) return NoSuchOp(op);
  OpDefinition& definition = found->second;
  QUERN_RETURN_IF_ERROR(CheckSignature(
      definition.schema, signature, absl::StrCat("the ", provider, " maker")));
  if (definition.override_with.has_value()) {
    return absl::AlreadyExistsError(
        absl::StrCat(kWhat, ": ", op, " is overridden by ",
                     definition.override_with->provider, " already"));
  }
  definition.override_with =
      OpImplementation{std::string(provider), std::move(factory)};
  return absl::OkStatus();
}

const OpDefinition* OpRegistry::Find(absl::string_view op) const {
  const auto found = ops_.find(op);
  return found == ops_.end() ? nullptr : &found->second;
}

std::vector<std::string> OpRegistry::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, op] : ops_) names.push_back(name);
  return names;
}

absl::StatusOr<std::vector<TensorMeta>> OpRegistry::InferShapes(
    absl::string_view op, const NamedArgs& args) const {
  const OpDefinition* const definition = Find(op);
  if (definition == nullptr) return NoSuchOp(op);
  QUERN_ASSIGN_OR_RETURN(const std::vector<OpArg> arranged,
                         ArrangeArgs(definition->schema, args));
  auto shapes = definition->shapes(arranged);
  if (!shapes.ok()) {
    return InWordsOf(op, definition->rules, shapes.status());
  }
  return shapes;
}

}  // namespace quern
