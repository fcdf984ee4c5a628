#ifndef QUERN_C_TVM_FFI_TVM_FFI_H_
#define QUERN_C_TVM_FFI_TVM_FFI_H_

/* Operators for programs that load functions by the calling convention of
 * tvm-ffi 0.1 (PyTorch, JAX, NumPy, CuPy, Rust): libquern_tvm_ffi.so, which
 * needs libquern.so beside it and no file of tvm-ffi.
 *
 *   ops = tvm_ffi.load_module("libquern_tvm_ffi.so")
 *   ops.rms_norm(out, x, weight, 1e-5)
 *
 * Every operator that quern_ops lists is a function __tvm_ffi_<name>. Its
 * arguments are the tensors that the operator returns, then the parameters of
 * its schema in their order. None stands for an optional argument that is left
 * out, or for a default; at the end such arguments need not be given. Results
 * are written to the tensors, and the function returns None. Two more functions
 * are no operators:
 *
 *   quern_library()         the quern_library* of these functions, as an opaque
 *                           pointer. Objects that operators take are made in it
 *                           by the functions of quern.h, and are given as
 *                           opaque pointers. It must not be destroyed.
 *   quern_set_workers(n)    the threads of all later calls. 1: the calling
 *                           thread, as at the beginning; 2 to 127: a pool. A
 *                           call that is running meanwhile may be refused.
 *
 * Refused are a wrong number of arguments, null pointers, values of another
 * type, and what quern.h refuses. A call that is refused hands
 * TVMFFIErrorSetRaisedFromCStr a kind (TypeError, ValueError,
 * NotImplementedError, RuntimeError, MemoryError) and a sentence, and returns
 * -1. That function is a weak reference, because Python's package loads the
 * runtime for all libraries before it loads any module. Without a runtime the
 * caller gets the -1 and no sentence.
 *
 * Plans. The convention has calls alone, so each thread keeps the last 32
 * operators that it made, by the arguments, dtypes and shapes that they were
 * made with. The next call with the same ones executes at once. An operator
 * that must be prepared (it packs its weights, or reads lengths), or that takes
 * an object, is made and prepared by every call, because the weights or the
 * object may have changed. Operators that pack weights are therefore slow here:
 * take those that have their weights in an object.
 *
 * Memory. Each thread has one workspace, which grows to the largest that a call
 * has needed. The workspace and the operators go with the thread. The library
 * stays for the life of the process. Strings are copied; tensors are borrowed
 * for the call. Device and dtype are checked. As in quern.h, memory must be as
 * large as its tensor says, which cannot be checked.
 *
 * Any number of threads may call at once. README.md says what a call costs.
 *
 * These declarations repeat the layout of tvm-ffi's values, and nothing else of
 * it. tvm-ffi's version begins with 0, so the layout may change. Sizes are
 * asserted, but a caller cannot be asked for its layout.
 */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  QUERN_TVM_NONE = 0,
  QUERN_TVM_INT = 1,
  QUERN_TVM_BOOL = 2,
  QUERN_TVM_FLOAT = 3,
  QUERN_TVM_OPAQUE = 4,      /* a pointer */
  QUERN_TVM_DLTENSOR = 7,    /* a DLTensor* */
  QUERN_TVM_RAW_TEXT = 8,    /* ends with 0 */
  QUERN_TVM_SMALL_TEXT = 11, /* up to 7 bytes in the value */
  QUERN_TVM_TEXT = 65,       /* an object: header, quern_tvm_bytes */
  QUERN_TVM_TENSOR = 70      /* an object: header, DLTensor */
};

/* Size of the header of every object, in bytes. */
#define QUERN_TVM_HEADER 24

typedef struct quern_tvm_value {
  int32_t type; /* QUERN_TVM_.. */
  uint32_t small_size;
  union {
    int64_t integer; /* and a bool */
    double real;
    void* pointer;
    const char* text;
    char small[8];
  } value;
} quern_tvm_value;

typedef struct quern_tvm_bytes {
  const char* data;
  uint64_t size;
} quern_tvm_bytes;

typedef int (*quern_tvm_function)(void* handle, const quern_tvm_value* args,
                                  int32_t num_args, quern_tvm_value* result);

#ifdef __cplusplus
}
#endif

#endif /* QUERN_C_TVM_FFI_TVM_FFI_H_ */
