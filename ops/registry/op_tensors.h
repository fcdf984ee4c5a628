#ifndef QUERN_OPS_REGISTRY_OP_TENSORS_H_
#define QUERN_OPS_REGISTRY_OP_TENSORS_H_

// The tensors that one operator is executed with: their order, and what their
// names, dtypes and marks in the schema say, whichever implementation runs.

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_schema.h"

namespace quern {

using NamedTensor = std::pair<absl::string_view, AnyTensorView>;

class OpTensors {
 public:
  OpTensors() = default;
  // The tensors of the schema in its order, then those that it returns: "out",
  // or "out0", "out1" and so on where there are several.
  OpTensors(const OpSchema& schema, absl::Span<const OpArg> args,
            absl::Span<const TensorMeta> returns);

  size_t size() const { return tensors_.size(); }

  // Puts the tensors in order, with a default-constructed view for each that is
  // left out. Allocates nothing where `ordered` has size() elements already.
  // InvalidArgument: a name that the operator does not have, or that is given
  // twice; and what Check refuses.
  absl::Status Arrange(absl::Span<const NamedTensor> named,
                       std::vector<AnyTensorView>& ordered) const;

  // InvalidArgument names the tensor: one that is missing, or that is given
  // where the operator was made without it; one of another dtype than the
  // operator was made with; a read-only view of a tensor that is written.
  absl::Status Check(absl::Span<const AnyTensorView> ordered) const;

 private:
  struct Tensor {
    std::string name;
    DType dtype;
    bool given;    // when the operator was made
    bool written;  // by Execute
  };

  std::string op_;
  std::vector<Tensor> tensors_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_TENSORS_H_
