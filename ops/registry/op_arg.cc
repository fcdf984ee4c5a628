#include "quern/ops/registry/op_arg.h"

#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

absl::StatusOr<OpArg> ConvertTensor(const OpSchema& schema,
                                    const OpParam& param,
                                    const TensorMeta& meta) {
  for (const int64_t extent : meta.extents) {
    if (extent >= 0) continue;
    return InvalidArgument(schema.name, param.name, " has an extent of ",
                           extent, "; need 0 or more");
  }
  return OpArg(meta);
}

absl::StatusOr<OpArg> ConvertObject(const OpSchema& schema,
                                    const OpParam& param, const OpArg& arg,
                                    const OpObjectRef& ref) {
  if (ref.type != param.object) {
    return InvalidArgument(schema.name, param.name, " is ", ref.type, "; need ",
                           param.object);
  }
  if (ref.object != nullptr) return arg;
  if (param.optional) return OpArg();
  return InvalidArgument(schema.name, param.name, " is null; need ",
                         param.object);
}

absl::StatusOr<OpArg> Convert(const OpSchema& schema, const OpParam& param,
                              const OpArg& arg) {
  const auto is = [&](OpType type) { return param.type == type; };
  const auto* meta = std::get_if<TensorMeta>(&arg);
  if (meta != nullptr && is(OpType::kTensor)) {
    return ConvertTensor(schema, param, *meta);
  }
  const auto* object = std::get_if<OpObjectRef>(&arg);
  if (object != nullptr && is(OpType::kObject)) {
    return ConvertObject(schema, param, arg, *object);
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
  if (std::holds_alternative<std::monostate>(arg) && param.optional) return arg;
  return InvalidArgument(schema.name, param.name, " is of another type; need ",
                         param.TypeName());
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
      std::visit([&](const auto& value) { arranged[i] = OpArg(value); },
                 *param.default_value);
    } else if (!param.optional) {
      return InvalidArgument(schema.name, param.name, " is missing; need ",
                             param.TypeName());
    }
  }
  return arranged;
}

std::string PrintMeta(const TensorMeta& meta) {
  return absl::StrCat(DTypeName(meta.dtype), "[",
                      absl::StrJoin(meta.extents, ", "), "]");
}

absl::Status CheckExtents(absl::string_view op, absl::string_view field,
                          const TensorMeta& meta,
                          const std::vector<int64_t>& want,
                          absl::string_view why) {
  if (meta.extents == want) return absl::OkStatus();
  return InvalidArgument(op, field, " is ", PrintMeta(meta), "; need [",
                         absl::StrJoin(want, ", "), "]", why);
}

absl::Status CheckMeta(absl::string_view op, absl::string_view field,
                       const TensorMeta& meta, const TensorMeta& want,
                       absl::string_view why) {
  if (meta == want) return absl::OkStatus();
  return InvalidArgument(op, field, " is ", PrintMeta(meta), "; need ",
                         PrintMeta(want), why);
}

absl::Status OfOp(absl::string_view op, const absl::Status& status) {
  if (status.ok()) return status;
  absl::string_view text = status.message();
  // How many characters a name at the beginning has.
  size_t end = 0;
  while (end < text.size() &&
         (absl::ascii_islower(static_cast<unsigned char>(text[end])) ||
          absl::ascii_isdigit(static_cast<unsigned char>(text[end])) ||
          text[end] == '_')) {
    ++end;
  }
  if (end > 0 && text.substr(end, 2) == ": ") {
    if (text.substr(0, end) == op) return status;
    text.remove_prefix(end + 2);
  }
  return absl::Status(status.code(), absl::StrCat(op, ": ", text));
}

}  // namespace quern
