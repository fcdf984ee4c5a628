#ifndef QUERN_C_TVM_FFI_CALL_H_
#define QUERN_C_TVM_FFI_CALL_H_

// Private to libquern_tvm_ffi.so: one call of one operator.

#include <cstddef>
#include <cstdint>

#include "quern/c/tvm_ffi/tvm_ffi.h"

namespace quern {
namespace tvm_ffi {

// Calls operator number `index` of ops.inc. Throws a Refusal, or
// std::bad_alloc.
void CallOp(size_t index, const quern_tvm_value* args, int32_t count);

}  // namespace tvm_ffi
}  // namespace quern

#endif  // QUERN_C_TVM_FFI_CALL_H_
