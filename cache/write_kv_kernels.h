#ifndef QUERN_CACHE_WRITE_KV_KERNELS_H_
#define QUERN_CACHE_WRITE_KV_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit: rows
// of keys or values to codes of the cache's type. Where codes go is in
// pack_kv_kernels.h.

#include <cstddef>
#include <cstdint>

#include "quern/cache/group_kv_kernels.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/core/dtype.h"

namespace quern {

// One head of one token's key, rotated: see WriteKvRotation.
struct RotatedRow {
  const void* row;   // of the input's type
  const float* cos;  // [rot_dim / 2]
  const float* sin;  // [rot_dim / 2]
  size_t rot_dim;
  size_t begin, count;  // the elements wanted; begin is even
};

struct WriteKvKernels {
  const char* target;

  // to[r][i] = Code(from[r][i] * inverse[r]), r < rows, i < count. `inverse` is
  // not used (no product) for types of 2 and 4 bytes. Rows of `to` are
  // to_stride bytes apart. On the way ahead[r], as long as from[r], is fetched
  // into L2.
  void (*encode)(const void* const* from, const void* const* ahead, size_t rows,
                 size_t count, const float* inverse, uint8_t* to,
                 size_t to_stride);
  // Like `encode`, from rows of f32.
  void (*encode_f32)(const void* const* from, const void* const* ahead,
                     size_t rows, size_t count, const float* inverse,
                     uint8_t* to, size_t to_stride);

  // to[r] = max over i < count of |from[r][i]|; NaN if one is NaN.
  void (*max_abs)(const void* const* from, size_t rows, size_t count,
                  float* to);
  void (*max_abs_f32)(const void* const* from, size_t rows, size_t count,
                      float* to);

  // scales[r] = max(most[r] / divisor, least), or 1 where most[r] is 0, and
  // inverse[r] = 1 / scales[r]; NaN and 0 where most[r] is not finite. Scales
  // are streamed where `stream` and all vectors are whole and aligned: end with
  // PackKvKernels::flush.
  void (*find_scales)(const float* most, size_t rows, float divisor,
                      float least, bool stream, float* scales, float* inverse);

  // to[i] = element begin + i of the rotated row.
  void (*rotate_halves)(const RotatedRow& args, float* to);
  void (*rotate_pairs)(const RotatedRow& args, float* to);
};

// What writes rows of one plan.
struct KvWriteKernels {
  WriteKvKernels rows;
  PackKvKernels pack;
  GroupKvKernels group;
  // KvScaling::kPerBlock: what writes the bf16 part of a key.
  WriteKvKernels bf16_rows;
  PackKvKernels bf16_pack;
};

// The kernels of the best instruction set this CPU supports. `input` is kF32,
// kBF16 or kF16; `cache` what KvLayout takes.
WriteKvKernels GetWriteKvKernels(DType input, DType cache);

}  // namespace quern

#endif  // QUERN_CACHE_WRITE_KV_KERNELS_H_
