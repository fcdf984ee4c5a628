#ifndef QUERN_C_TENSOR_H_
#define QUERN_C_TENSOR_H_

// Private to c/. From quern_tensor to the views and descriptions of the library
// and back.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/c/quern.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"

namespace quern {
namespace c_abi {

// Refusals begin with "op: name". InvalidArgument: ndim outside 1 to 5, no
// shape, a negative extent. Unimplemented: a dtype that the library does not
// have.
absl::StatusOr<TensorMeta> MetaOf(absl::string_view op, absl::string_view name,
                                  const quern_tensor& tensor);

// Sets `view`. Refuses also: a device other than the CPU, flags that do not
// exist, a negative stride, a byte_offset into nothing or beyond the address
// space. The operator's CheckArgs refuses the rest. Allocates nothing if it
// succeeds.
absl::Status SetView(absl::string_view op, absl::string_view name,
                     const quern_tensor& tensor, uint64_t flags,
                     AnyTensorView& view);

quern_dtype ToC(DType dtype);

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_TENSOR_H_
