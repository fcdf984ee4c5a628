#include "quern/ops/registry/op_registry.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kWhat[] = "op registry";

absl::Status NoSuchOp(absl::string_view op) {
  return absl::NotFoundError(absl::StrCat(kWhat, ": no operator \"", op, "\""));
}

// The schema's parameters without names and defaults are the signature's.
absl::Status CheckSignature(const OpSchema& schema,
                            const std::vector<OpParam>& signature,
                            absl::string_view of) {
  OpSchema want = schema, have = schema;
  have.params = signature;
  for (OpParam& param : want.params) {
    param.name.clear();
    param.default_value.reset();
  }
  if (want == have) return absl::OkStatus();
  return InvalidArgument(kWhat, of, " of ", schema.name, " is a function of ",
                         have.Print(), "; need ", want.Print());
}

absl::StatusOr<OpArg> Convert(const OpSchema& schema, const OpParam& param,
                              const OpArg& arg) {
  const auto is = [&](OpType type) { return param.type == type; };
  if (const auto* meta = std::get_if<TensorMeta>(&arg);
      meta != nullptr && is(OpType::kTensor)) {
    for (const int64_t extent : meta->extents) {
      if (extent >= 0) continue;
      return InvalidArgument(schema.name, param.name, " has an extent of ",
                             extent, "; need 0 or more");
    }
    return arg;
  }
  if (const auto* i = std::get_if<int64_t>(&arg)) {
    if (is(OpType::kInt)) return arg;
    if (is(OpType::kFloat)) return OpArg(static_cast<double>(*i));
  }
  if (std::holds_alternative<double>(arg) && is(OpType::kFloat)) return arg;
  if (std::holds_alternative<bool>(arg) && is(OpType::kBool)) return arg;
  if (std::holds_alternative<std::string>(arg) && is(OpType::kString)) {
    return arg;
  }
  if (std::holds_alternative<Communicator*>(arg) && is(OpType::kCommunicator)) {
    return arg;
  }
  if (std::holds_alternative<std::monostate>(arg) && param.optional) return arg;
  return InvalidArgument(schema.name, param.name, " is of another type; need ",
                         OpTypeName(param.type));
}

}  // namespace

absl::StatusOr<std::vector<OpArg>> ArrangeArgs(const OpSchema& schema,
                                               const NamedArgs& args) {
  std::vector<OpArg> arranged(schema.params.size());
  std::vector<bool> given(schema.params.size(), false);
  for (const auto& [name, arg] : args) {
    size_t i = 0;
    while (i < schema.params.size() && schema.params[i].name != name) ++i;
    if (i == schema.params.size()) {
      return InvalidArgument(schema.name, "has no ", name, "; need those of ",
                             schema.Print());
    }
    if (given[i]) return InvalidArgument(schema.name, name, " is given twice");
    given[i] = true;
    QUERN_ASSIGN_OR_RETURN(arranged[i], Convert(schema, schema.params[i], arg));
  }
  for (size_t i = 0; i < arranged.size(); ++i) {
    const OpParam& param = schema.params[i];
    if (given[i]) continue;
    if (param.default_value.has_value()) {
      std::visit([&](const auto& value) { arranged[i] = value; },
                 *param.default_value);
    } else if (!param.optional) {
      return InvalidArgument(schema.name, param.name, " is missing; need a ",
                             OpTypeName(param.type));
    }
  }
  return arranged;
}

absl::Status OfOp(absl::string_view op, const absl::Status& status) {
  const std::string name = absl::StrCat(op, ": ");
  if (status.ok() || absl::StartsWith(status.message(), name)) return status;
  return absl::Status(status.code(), absl::StrCat(name, status.message()));
}

absl::Status OpRegistry::DefineTyped(absl::string_view text,
                                     std::vector<OpParam> signature,
                                     OpShapes shapes, OpExample example,
                                     OpKind kind) {
  QUERN_ASSIGN_OR_RETURN(OpSchema schema, OpSchema::Parse(text));
  QUERN_RETURN_IF_ERROR(
      CheckSignature(schema, signature, "the shape function"));
  const std::string name = schema.name;
  OpDefinition op;
  op.schema = std::move(schema);
  op.shapes = std::move(shapes);
  op.example = example;
  op.kind = kind;
  if (ops_.emplace(name, std::move(op)).second) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(kWhat, ": ", name, " is defined twice"));
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
  if (!shapes.ok()) return OfOp(op, shapes.status());
  return shapes;
}

}  // namespace quern
