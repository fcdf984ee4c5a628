/* Divides a row by the root of its mean square, by the operator rms_norm. */

#include <math.h>
#include <stdio.h>

#include "quern/c/quern.h"

int main(void) {
  float x[4] = {1, 7, 5, 5}, y[4] = {0}; /* squares: mean 25 */
  int64_t shape[] = {1, 4};
  const quern_dtype f32 = quern_dtype_of(QUERN_CODE_FLOAT, 32);
  const quern_tensor in = quern_dense(x, f32, 2, shape);
  const quern_tensor out = quern_dense(y, f32, 2, shape);
  const quern_argument made_of[] = {quern_tensor_argument("x", &in),
                                    quern_float_argument("eps", 1e-6)};
  const quern_operand step[] = {{"x", &in, QUERN_READ_ONLY}, {"out", &out, 0}};
  quern_library* library;
  quern_op* norm = NULL;
  char message[512];
  if (quern_library_create(NULL, &library, message, sizeof(message)) !=
      QUERN_OK) {
    fprintf(stderr, "norm: %s\n", message);
    return 1;
  }
  if (quern_op_create(library, "rms_norm", NULL, made_of, 2, &norm) !=
      QUERN_OK) {
    quern_message(library, message, sizeof(message));
    fprintf(stderr, "norm: %s\n", message);
    return 1;
  }
  if (quern_op_execute(norm, step, 2, NULL, 0, NULL) != QUERN_OK) {
    quern_message(norm, message, sizeof(message));
    fprintf(stderr, "norm: %s\n", message);
    return 1;
  }
  printf("Quern %s: %g %g %g %g\n", quern_version(), (double)y[0], (double)y[1],
         (double)y[2], (double)y[3]);
  quern_destroy(library); /* and the operator */
  return fabs(y[1] - 1.4) < 1e-4 ? 0 : 1;
}
