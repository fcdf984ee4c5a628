/* Loads libquern_tvm_ffi.so as tvm-ffi's runtime does, in a process that has no
 * such runtime: a call is done, and a call that is refused returns -1. So does
 * a call at the end of the process, after the thread's state is gone. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "quern/c/quern_tensor.h"
#include "quern/c/tvm_ffi/tvm_ffi.h"

#define EXPECT(condition)                                        \
  do {                                                           \
    if (!(condition)) {                                          \
      printf("%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
      return 1;                                                  \
    }                                                            \
  } while (0)

static quern_tvm_value Tensor(quern_tensor* tensor) {
  quern_tvm_value value;
  memset(&value, 0, sizeof(value));
  value.type = QUERN_TVM_DLTENSOR;
  value.value.pointer = tensor;
  return value;
}

/* What AtTheEnd calls. */
static quern_tvm_function relu2;
static quern_tensor x_tensor, out_tensor;

static void AtTheEnd(void) {
  quern_tvm_value args[2];
  args[0] = Tensor(&out_tensor);
  args[1] = Tensor(&x_tensor);
  if (relu2(NULL, args, 2, NULL) != -1) _exit(2);
}

int main(int argc, char** argv) {
  static float x[4] = {3, -4, 3, -4}, out[4];
  static int64_t shape[2] = {1, 4};
  quern_tvm_value args[2], result;
  void* symbol;
  void* const library = argc < 2 ? NULL : dlopen(argv[1], RTLD_LAZY);
  if (library == NULL) printf("%s\n", dlerror());
  EXPECT(library != NULL);
  EXPECT(dlsym(RTLD_DEFAULT, "TVMFFIErrorSetRaisedFromCStr") == NULL);
  symbol = dlsym(library, "__tvm_ffi_relu2");
  EXPECT(symbol != NULL);
  memcpy(&relu2, &symbol, sizeof(symbol));
  x_tensor = quern_dense(x, quern_dtype_of(QUERN_CODE_FLOAT, 32), 2, shape);
  out_tensor = quern_dense(out, quern_dtype_of(QUERN_CODE_FLOAT, 32), 2, shape);
  args[0] = Tensor(&out_tensor);
  args[1] = Tensor(&x_tensor);
  EXPECT(atexit(&AtTheEnd) == 0);
  memset(&result, 0x55, sizeof(result));
  EXPECT(relu2(NULL, args, 2, &result) == 0);
  EXPECT(result.type == QUERN_TVM_NONE && result.value.integer == 0);
  EXPECT(out[0] == 9 && out[1] == 0 && out[2] == 9 && out[3] == 0);
  EXPECT(relu2(NULL, args, 1, &result) == -1);
  x_tensor.device.device_type = 2;
  EXPECT(relu2(NULL, args, 2, NULL) == -1);
  x_tensor.device.device_type = QUERN_CPU;
  EXPECT(relu2(NULL, args, 2, NULL) == 0);
  return dlclose(library);
}
