/* A norm and a linear layer by name, on a pool of two threads. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "quern/c/quern.h"

enum { kRows = 4, kHidden = 64, kOut = 48 };

/* Ends the program if a call on `object` was refused. */
static void Check(quern_status status, const void* object) {
  char message[512];
  if (status == QUERN_OK) return;
  quern_message(object, message, sizeof(message));
  fprintf(stderr, "status %d: %s\n", (int)status, message);
  exit(1);
}

int main(void) {
  static float x[kRows * kHidden], normed[kRows * kHidden];
  static float b[kOut * kHidden], y[kRows * kOut];
  int64_t rows[] = {kRows, kHidden}, matrix[] = {kOut, kHidden};
  int64_t out[] = {kRows, kOut};
  const quern_dtype f32 = quern_dtype_of(QUERN_CODE_FLOAT, 32);
  const quern_tensor x_tensor = quern_dense(x, f32, 2, rows);
  const quern_tensor normed_tensor = quern_dense(normed, f32, 2, rows);
  const quern_tensor b_tensor = quern_dense(b, f32, 2, matrix);
  const quern_tensor y_tensor = quern_dense(y, f32, 2, out);
  char text[256];
  int i, k;
  for (i = 0; i < kRows * kHidden; ++i) x[i] = (float)(i % 7 - 3);
  for (i = 0; i < kOut * kHidden; ++i) b[i] = (float)(i % 5 - 2) / 8;

  quern_library* library;
  quern_executor* executor;
  if (quern_library_create(NULL, &library, text, sizeof(text)) != QUERN_OK) {
    fprintf(stderr, "%s\n", text);
    return 1;
  }
  Check(quern_executor_create_pool(library, 2, &executor), library);

  quern_op* norm;
  const quern_argument norm_of[] = {quern_tensor_argument("x", &x_tensor),
                                    quern_float_argument("eps", 1e-5)};
  Check(quern_op_create(library, "rms_norm", NULL, norm_of, 2, &norm), library);
  const quern_operand norm_step[] = {{"x", &x_tensor, QUERN_READ_ONLY},
                                     {"out", &normed_tensor, 0}};
  Check(quern_op_execute(norm, norm_step, 2, NULL, 0, executor), norm);

  quern_linear_weights* weights;
  quern_linear_weights_options options = {0};
  quern_linear_source source = {0};
  options.size = sizeof(options);
  options.n = kOut;
  options.k = kHidden;
  source.codes = &b_tensor;
  Check(quern_linear_weights_pack(library, &options, &source, 1, sizeof(source),
                                  executor, &weights),
        library);

  quern_op* linear;
  int64_t bytes;
  const quern_argument linear_of[] = {
      quern_tensor_argument("x", &normed_tensor),
      quern_object_argument("weights", weights)};
  Check(quern_op_create(library, "linear", NULL, linear_of, 2, &linear),
        library);
  Check(quern_op_workspace_bytes(linear, kRows, executor, &bytes), linear);
  char* const memory = malloc((size_t)bytes + QUERN_ALIGNMENT);
  char* const workspace =
      memory + (QUERN_ALIGNMENT - (uintptr_t)memory % QUERN_ALIGNMENT);
  const quern_operand linear_step[] = {{"x", &normed_tensor, QUERN_READ_ONLY},
                                       {"out", &y_tensor, 0}};
  Check(quern_op_execute(linear, linear_step, 2, workspace, (size_t)bytes,
                         executor),
        linear);
  quern_explain(linear, text, sizeof(text));
  printf("%s\ny[0][0] = %g\n", text, (double)y[0]);

  double squares = 0, sum = 0;
  for (k = 0; k < kHidden; ++k) squares += (double)x[k] * x[k];
  for (k = 0; k < kHidden; ++k) {
    sum += x[k] / sqrt(squares / kHidden + 1e-5) * b[k];
  }
  free(memory);
  Check(quern_destroy(library), library); /* and all that was made in it */
  return fabs(y[0] - sum) < 1e-3 ? 0 : 1;
}
