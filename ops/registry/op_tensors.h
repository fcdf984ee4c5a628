#ifndef QUERN_OPS_REGISTRY_OP_TENSORS_H_
#define QUERN_OPS_REGISTRY_OP_TENSORS_H_

// The tensors that one operator is executed with: their order, and the names,
// dtypes and marks that the schema gives them, whatever the implementation.

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
  // Lists the tensors of the schema in its order, then the returned ones:
  // "out", or "out0", "out1" and so on if there are several.
  OpTensors(const OpSchema& schema, absl::Span<const OpArg> args,
            absl::Span<const TensorMeta> returns);

  size_t size() const { return tensors_.size(); }

  // Puts the tensors in order, with a default-constructed view for each one
  // that is omitted. Allocates nothing if `ordered` has size() elements
  // already. InvalidArgument for a name that the operator does not have or that
  // is given twice, and for what Check refuses.
  absl::Status Arrange(absl::Span<const NamedTensor> named,
                       std::vector<AnyTensorView>& ordered) const;

  // InvalidArgument names a tensor that is missing, or given although the
  // operator was made without it; that has another dtype than the operator was
  // made with; or that is written but read-only.
  absl::Status Check(absl::Span<const AnyTensorView> ordered) const;

 private:
  struct Tensor {
    std::string name;
    DType dtype;
    bool given;    // whether the operator was made with it
    bool written;  // whether Execute writes it
  };

  std::string op_;
  std::vector<Tensor> tensors_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_TENSORS_H_
