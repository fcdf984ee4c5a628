#ifndef QUERN_C_TVM_FFI_TVM_FFI_TESTUTIL_H_
#define QUERN_C_TVM_FFI_TVM_FFI_TESTUTIL_H_

// Test utility: values of tvm-ffi, and calls of the functions of
// libquern_tvm_ffi.so with a stub in the place of the runtime.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "quern/c/quern.h"
#include "quern/c/tvm_ffi/tvm_ffi.h"

namespace quern {

inline quern_tvm_value None() { return {}; }
inline quern_tvm_value Int(int64_t i) {
  quern_tvm_value value = {};
  value.type = QUERN_TVM_INT;
  value.value.integer = i;
  return value;
}
inline quern_tvm_value Bool(bool yes) {
  quern_tvm_value value = Int(yes ? 1 : 0);
  value.type = QUERN_TVM_BOOL;
  return value;
}
inline quern_tvm_value Float(double x) {
  quern_tvm_value value = {};
  value.type = QUERN_TVM_FLOAT;
  value.value.real = x;
  return value;
}
inline quern_tvm_value Pointer(int32_t type, const void* pointer) {
  quern_tvm_value value = {};
  value.type = type;
  value.value.pointer = const_cast<void*>(pointer);
  return value;
}

// Objects of the runtime: what stands behind their headers.
struct TensorObject {
  char header[QUERN_TVM_HEADER];
  quern_tensor tensor;
};
struct TextObject {
  char header[QUERN_TVM_HEADER];
  quern_tvm_bytes bytes;
};
static_assert(offsetof(TensorObject, tensor) == QUERN_TVM_HEADER &&
              offsetof(TextObject, bytes) == QUERN_TVM_HEADER);

// What the stub was given last by a call of this thread.
struct Raised {
  std::string kind, message;
};
Raised& LastRaised();

// The function of an operator. Null, and a failure of the test, if there is
// none.
quern_tvm_function FindFunction(const std::string& op);

// Calls the function and returns the sentence of its refusal, or "". An error
// code without a sentence, or a sentence without a code, fails the test.
std::string CallByName(const std::string& op,
                       const std::vector<quern_tvm_value>& args,
                       quern_tvm_value* result = nullptr);

// The library in which objects for these functions are made.
quern_library* LibraryOfFunctions();

}  // namespace quern

#endif  // QUERN_C_TVM_FFI_TVM_FFI_TESTUTIL_H_
