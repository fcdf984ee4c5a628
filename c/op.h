#ifndef QUERN_C_OP_H_
#define QUERN_C_OP_H_

// Private to c/. What quern_op is.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/c/object.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"

namespace quern {
namespace c_abi {

// No schema has more tensors. The views of an execution stay on the stack.
constexpr size_t kMaxTensors = 32;

// From which tensor an operator's number of rows comes, as the headers of
// ops/registry say: the first dimension of the first tensor that is given; of x
// for selective_state_update, whose first tensor is the pool of states; all
// dimensions of x but the last for the layers over ranks.
struct RowsOf {
  size_t tensor = 0;
  bool leading = false;

  int64_t Count(absl::Span<const AnyTensorView> views) const {
    if (tensor >= views.size()) return 0;
    const AnyTensorView& view = views[tensor];
    if (!leading) return view.rank() == 0 ? 0 : view.extent(0);
    int64_t rows = 1;
    for (int d = 0; d + 1 < view.rank(); ++d) rows *= view.extent(d);
    return rows;
  }
};

class OperatorObject final : public Object {
 public:
  std::string Explain() const override {
    return absl::StrCat(name, " of ", made.provider, ": ",
                        made.op->Explain(made_rows));
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
  std::vector<std::string> tensors;  // their names, in order
  std::vector<TensorMeta> returns;
  RowsOf rows_of;
  int64_t made_rows = 0;
  // Workers of the executor that prepared it; 0: never prepared.
  int prepared_workers = 0;
  // Whether that executor did not keep its promise.
  bool half_prepared = false;
};

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OP_H_
