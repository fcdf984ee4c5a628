#include "quern/ops/registry/op_tensors.h"

#include <variant>

#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"

namespace quern {

OpTensors::OpTensors(const OpSchema& schema, absl::Span<const OpArg> args,
                     absl::Span<const TensorMeta> returns)
    : op_(schema.name) {
  for (size_t i = 0; i < schema.params.size() && i < args.size(); ++i) {
    const OpParam& param = schema.params[i];
    if (param.type != OpType::kTensor) continue;
    const auto* meta = std::get_if<TensorMeta>(&args[i]);
    tensors_.push_back({param.name, meta == nullptr ? DType::kF32 : meta->dtype,
                        meta != nullptr, param.mutated});
  }
  for (size_t i = 0; i < returns.size(); ++i) {
    tensors_.push_back({returns.size() == 1 ? "out" : absl::StrCat("out", i),
                        returns[i].dtype, true, true});
  }
}

absl::Status OpTensors::Arrange(absl::Span<const NamedTensor> named,
                                std::vector<AnyTensorView>& ordered) const {
  ordered.assign(size(), AnyTensorView());
  for (const auto& [name, view] : named) {
    size_t i = 0;
    while (i < size() && tensors_[i].name != name) ++i;
    if (i == size()) {
      std::string names;
      for (const Tensor& tensor : tensors_) {
        absl::StrAppend(&names, names.empty() ? "" : ", ", tensor.name);
      }
      return InvalidArgument(op_, "has no tensor ", name, "; need ", names);
    }
    if (ordered[i].rank() != 0) {
      return InvalidArgument(op_, name, " is given twice");
    }
    ordered[i] = view;
  }
  return Check(ordered);
}

absl::Status OpTensors::Check(absl::Span<const AnyTensorView> ordered) const {
  if (ordered.size() != size()) {
    return InvalidArgument(op_, "tensors=", ordered.size(), "; need ", size(),
                           ", as the schema has");
  }
  for (size_t i = 0; i < size(); ++i) {
    const Tensor& tensor = tensors_[i];
    const AnyTensorView& view = ordered[i];
    if ((view.rank() != 0) != tensor.given) {
      return InvalidArgument(op_, tensor.name,
                             tensor.given ? " is missing" : " is given",
                             "; need what the operator was made with");
    }
    if (!tensor.given) continue;
    if (view.dtype() != tensor.dtype) {
      return InvalidArgument(op_, tensor.name, " is ", DTypeName(view.dtype()),
                             "; need ", DTypeName(tensor.dtype),
                             ", as the operator was made");
    }
    if (tensor.written && !view.writable() && !IsEmpty(view)) {
      return InvalidArgument(op_, tensor.name,
                             " is read-only; need a view that may be written");
    }
  }
  return absl::OkStatus();
}

}  // namespace quern
