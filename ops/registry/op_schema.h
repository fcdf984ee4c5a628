#ifndef QUERN_OPS_REGISTRY_OP_SCHEMA_H_
#define QUERN_OPS_REGISTRY_OP_SCHEMA_H_

// The signature of an operator: what it takes, writes and returns. Converts
// from and to text:
//
//   rms_norm(Tensor x, Tensor? weight, float eps=1e-06) -> Tensor
//   fused_add_rms_norm(Tensor(a0!) x, Tensor(a1!) residual, Tensor? weight,
//                      float eps=1e-06) -> ()
//
//   schema  = name "(" [param {"," param}] ")" "->" returns
//   param   = type name ["=" default]
//   type    = "Tensor" ["(a" index "!)"] ["?"] | ("int" | "float" | "bool" |
//             "str" | object) ["?"]
//   returns = "Tensor" | "(" ["Tensor" {"," "Tensor"}] ")"
//   name    = [a-z_][a-z0-9_]*
//   object  = [A-Z][A-Za-z0-9]*, as OpObject of op_arg.h names C++ types:
//             "LinearWeights weights", "Communicator? ranks"
//
// (aN!) marks a tensor that is written; N is the index of the parameter, from
// 0. "?" marks an optional argument; without a Communicator an operator runs on
// one rank. Spaces between words are free. Print gives one form, which Parse
// reads as the same schema.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern {

enum class OpType : uint8_t {
  kTensor,
  kInt,
  kFloat,
  kBool,
  kString,
  kObject,  // a borrowed C++ object
};

// "Tensor", "int", "float", "bool", "str", "object".
absl::string_view OpTypeName(OpType type);

using OpScalar = std::variant<int64_t, double, bool, std::string>;

struct OpParam {
  std::string name;
  OpType type = OpType::kTensor;
  bool optional = false;
  bool mutated = false;
  // Tensors and objects have no defaults.
  std::optional<OpScalar> default_value;
  std::string object = {};  // kObject: the name of the object's type

  absl::string_view TypeName() const {
    return type == OpType::kObject ? object : OpTypeName(type);
  }

  friend bool operator==(const OpParam& a, const OpParam& b) {
    return a.name == b.name && a.type == b.type && a.optional == b.optional &&
           a.mutated == b.mutated && a.default_value == b.default_value &&
           a.object == b.object;
  }
};

struct OpSchema {
  std::string name;
  std::vector<OpParam> params;
  int returns = 0;  // number of returned tensors

  // InvalidArgument quotes the text, the place, and what is expected there.
  static absl::StatusOr<OpSchema> Parse(absl::string_view text);
  std::string Print() const;

  friend bool operator==(const OpSchema& a, const OpSchema& b) {
    return a.name == b.name && a.params == b.params && a.returns == b.returns;
  }
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_SCHEMA_H_
