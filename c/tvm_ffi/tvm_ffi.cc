#include "quern/c/tvm_ffi/tvm_ffi.h"

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "quern/c/tvm_ffi/call.h"
#include "quern/c/tvm_ffi/state.h"

// The runtime's function, null where no runtime was loaded.
extern "C" __attribute__((weak)) void TVMFFIErrorSetRaisedFromCStr(
    const char* kind, const char* message);

namespace quern {
namespace tvm_ffi {
namespace {

static_assert(sizeof(quern_tvm_value) == 16 &&
              offsetof(quern_tvm_value, value) == 8 &&
              sizeof(quern_tvm_bytes) == 16);

enum OpIndex : size_t {
#define QUERN_TVM_OP(name) k_##name,
#include "quern/c/tvm_ffi/ops.inc"
#undef QUERN_TVM_OP
};

int Raise(const char* kind, const char* message) {
  if (TVMFFIErrorSetRaisedFromCStr != nullptr) {
    TVMFFIErrorSetRaisedFromCStr(kind, message);
  }
  return -1;
}

// Calls fn(value), whose value is None at first, and turns what it throws into
// the runtime's error.
template <typename Fn>
int Guarded(quern_tvm_value* result, const Fn& fn) {
  try {
    quern_tvm_value value = {};
    fn(value);
    if (result != nullptr) *result = value;
    return 0;
  } catch (const Refusal& refusal) {
    return Raise(refusal.kind(), refusal.what());
  } catch (const std::bad_alloc&) {
    return Raise("MemoryError", "quern: no memory left");
  } catch (const std::exception& other) {
    return Raise("RuntimeError", other.what());
  }
}

int64_t WorkersOf(const quern_tvm_value* args, int32_t count) {
  if (count != 1 || args == nullptr || args[0].type != QUERN_TVM_INT) {
    throw Refusal("TypeError",
                  "quern_set_workers: need one int, the number of workers");
  }
  const int64_t workers = args[0].value.integer;
  if (workers < 1 || workers > 127) {
    throw Refusal("ValueError",
                  "quern_set_workers: workers=" + std::to_string(workers) +
                      "; need 1 to 127");
  }
  return workers;
}

}  // namespace
}  // namespace tvm_ffi
}  // namespace quern

#define QUERN_TVM_API extern "C" __attribute__((visibility("default")))

#define QUERN_TVM_OP(name)                                                     \
  QUERN_TVM_API int __tvm_ffi_##name(void*, const quern_tvm_value* args,       \
                                     int32_t count, quern_tvm_value* result) { \
    return quern::tvm_ffi::Guarded(result, [&](quern_tvm_value&) {             \
      quern::tvm_ffi::CallOp(quern::tvm_ffi::k_##name, args, count);           \
    });                                                                        \
  }
#include "quern/c/tvm_ffi/ops.inc"
#undef QUERN_TVM_OP

QUERN_TVM_API int __tvm_ffi_quern_library(void*, const quern_tvm_value*,
                                          int32_t count,
                                          quern_tvm_value* result) {
  return quern::tvm_ffi::Guarded(result, [&](quern_tvm_value& value) {
    if (count != 0) {
      throw quern::tvm_ffi::Refusal("TypeError",
                                    "quern_library: takes no arguments");
    }
    value.type = QUERN_TVM_OPAQUE;
    value.value.pointer = quern::tvm_ffi::TheShared().library;
  });
}

QUERN_TVM_API int __tvm_ffi_quern_set_workers(void*,
                                              const quern_tvm_value* args,
                                              int32_t count,
                                              quern_tvm_value* result) {
  return quern::tvm_ffi::Guarded(result, [&](quern_tvm_value&) {
    quern::tvm_ffi::TheShared().SetWorkers(
        static_cast<int32_t>(quern::tvm_ffi::WorkersOf(args, count)));
  });
}
