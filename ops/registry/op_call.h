#ifndef QUERN_OPS_REGISTRY_OP_CALL_H_
#define QUERN_OPS_REGISTRY_OP_CALL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/status_macros.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_schema.h"

namespace quern {

// The arguments that an operator is made with, by the names of its schema.
// Whoever asks names a parameter that the schema has, by its type.
class OpCall {
 public:
  // All are borrowed. `args` is in the order of the schema; `provider` is who
  // makes the operator, and empty while shapes are inferred.
  OpCall(const OpSchema& schema, absl::Span<const OpArg> args,
         absl::string_view provider = "")
      : schema_(schema), args_(args), provider_(provider) {}

  absl::string_view op() const { return schema_.name; }
  absl::string_view provider() const { return provider_; }
  // Null if the tensor was left out.
  const TensorMeta* Tensor(absl::string_view name) const {
    return std::get_if<TensorMeta>(&At(name));
  }
  bool has(absl::string_view name) const {
    return !std::holds_alternative<std::monostate>(At(name));
  }
  int64_t Int(absl::string_view name) const {
    return std::get<int64_t>(At(name));
  }
  double Float(absl::string_view name) const {
    return std::get<double>(At(name));
  }
  bool Bool(absl::string_view name) const { return std::get<bool>(At(name)); }
  const std::string& Text(absl::string_view name) const {
    return std::get<std::string>(At(name));
  }
  // Another way to give M: a bool, a float, a text or an integer.
  template <class M>
  M Value(absl::string_view name) const {
    if constexpr (std::is_same_v<M, bool>) {
      return Bool(name);
    } else if constexpr (std::is_same_v<M, std::string>) {
      return Text(name);
    } else if constexpr (std::is_floating_point_v<M>) {
      return static_cast<M>(Float(name));
    } else {
      return Int(name);
    }
  }
  // The value of a text that is one of some words. InvalidArgument names them.
  template <class M>
  absl::StatusOr<M> OneOf(
      absl::string_view name,
      const std::vector<std::pair<const char*, M>>& choices) const {
    std::string words;
    for (size_t i = 0; i < choices.size(); ++i) {
      if (Text(name) == choices[i].first) return choices[i].second;
      const bool last = i + 1 == choices.size();
      absl::StrAppend(&words,
                      i == 0 ? ""
                      : last ? " or "
                             : ", ",
                      "\"", choices[i].first, "\"");
    }
    return InvalidArgument(op(), name, "=\"", Text(name), "\"; need ", words);
  }
  // Null if the object was left out.
  template <class T>
  T* Object(absl::string_view name) const {
    const auto* ref = std::get_if<OpObjectRef>(&At(name));
    // OpArg took a pointer to this type, so no const is cast away.
    return ref == nullptr ? nullptr
                          : static_cast<T*>(const_cast<void*>(ref->object));
  }

 private:
  const OpArg& At(absl::string_view name) const {
    size_t i = 0;
    while (i < args_.size() && schema_.params[i].name != name) ++i;
    QUERN_CHECK(i < args_.size());
    return args_[i];
  }

  const OpSchema& schema_;
  absl::Span<const OpArg> args_;
  absl::string_view provider_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_CALL_H_
