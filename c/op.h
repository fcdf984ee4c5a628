#ifndef QUERN_C_OP_H_
#define QUERN_C_OP_H_

// Private to c/. What quern_op is.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "quern/c/object.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"

namespace quern {
namespace c_abi {

// No schema has more tensors. The views of an execution stay on the stack.
constexpr size_t kMaxTensors = 32;

class OperatorObject final : public Object {
 public:
  std::string Explain() const override {
    return absl::StrCat(name, " of ", made.provider, ": ",
                        made.op->Explain(made.tensors.made_rows()));
  }

  std::string name;
  // Objects that the operator was made with, and which outlive it. A call uses
  // those that change.
  std::vector<Borrowed> held;
  std::vector<Slot*> changing;
  // Whether Prepare fills those objects, and so needs them for itself.
  bool fills = false;
  // Whether its tasks read indices that other tasks wrote: the order of routes
  // by expert.
  bool orders = false;
  MadeOp made;
  std::vector<TensorMeta> returns;
  // Workers of the executor that prepared it; 0: never prepared.
  int prepared_workers = 0;
  // Whether that executor did not keep its promise.
  bool half_prepared = false;
};

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OP_H_
