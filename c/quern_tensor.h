#ifndef QUERN_C_QUERN_TENSOR_H_
#define QUERN_C_QUERN_TENSOR_H_

/* A tensor in the caller's memory. quern_tensor has the layout of DLPack's
 * DLTensor (dlpack.h, any version up to 1.1), so a DLTensor* may be cast to a
 * quern_tensor*. Element [i, j] lies at
 *
 *   data + byte_offset + element size * (i * strides[0] + j * strides[1])
 *
 * The layout is the C ABI's of a 64-bit CPU and never changes: 48 bytes, with
 * data at 0, device at 8, ndim at 16, dtype at 20, shape at 24, strides at 32
 * and byte_offset at 40.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct quern_device {
  int32_t device_type; /* QUERN_CPU */
  int32_t device_id;   /* not looked at */
} quern_device;
enum { QUERN_CPU = 1 };

typedef struct quern_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes; /* 1 */
} quern_dtype;
/* DLPack's type codes, of which Quern takes i8, i32, i64, u8, f16, f32, bf16,
 * and f8e4m3fn and f8e5m2. A bool of 8 bits counts as u8. */
enum {
  QUERN_CODE_INT = 0,
  QUERN_CODE_UINT = 1,
  QUERN_CODE_FLOAT = 2,
  QUERN_CODE_BFLOAT = 4,
  QUERN_CODE_BOOL = 6,
  QUERN_CODE_FLOAT8_E4M3FN = 10,
  QUERN_CODE_FLOAT8_E5M2 = 12,
  QUERN_CODE_FLOAT8_E8M0FNU = 14, /* refused */
  QUERN_CODE_FLOAT4_E2M1FN = 17   /* refused */
};

typedef struct quern_tensor {
  void* data;
  quern_device device;
  int32_t ndim; /* 1 to 5 */
  quern_dtype dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: dense. The last is 1 */
  uint64_t byte_offset;
} quern_tensor;

static inline quern_dtype quern_dtype_of(int code, int bits) {
  quern_dtype dtype;
  dtype.code = (uint8_t)code;
  dtype.bits = (uint8_t)bits;
  dtype.lanes = 1;
  return dtype;
}

/* A dense tensor on the CPU; `shape` is borrowed. */
static inline quern_tensor quern_dense(void* data, quern_dtype dtype,
                                       int32_t ndim, int64_t* shape) {
  quern_tensor tensor;
  tensor.data = data;
  tensor.device.device_type = QUERN_CPU;
  tensor.device.device_id = 0;
  tensor.ndim = ndim;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.strides = NULL;
  tensor.byte_offset = 0;
  return tensor;
}

#ifdef __cplusplus
}
#endif

#endif /* QUERN_C_QUERN_TENSOR_H_ */
