#ifndef QUERN_CACHE_PACK_KV_KERNELS_H_
#define QUERN_CACHE_PACK_KV_KERNELS_H_

// Private seam between write_kv's plan and the SIMD translation unit: codes of
// 16 tokens into the paired form of kv_layout.h. Bytes change place, no more.

#include <cstddef>
#include <cstdint>

namespace quern {

struct PackKvKernels {
  const char* target;

  // Stores are streaming ones where asked for and `to` is aligned to vectors:
  // end with flush.

  // K: to[c][t] = cell c of rows[t], t < 16, a cell being a pair of elements
  // (one, of f32). Rows have row_bytes, and zeros complete the last cell.
  void (*pack_k)(const uint8_t* const* rows, size_t row_bytes, uint8_t* to);
  void (*pack_k_stream)(const uint8_t* const* rows, size_t row_bytes,
                        uint8_t* to);

  // V: to[i][0 and 1] = element i of `even` and of `odd`. Null where elements
  // do not go in pairs.
  void (*pack_v)(const uint8_t* even, const uint8_t* odd, size_t row_bytes,
                 uint8_t* to);
  void (*pack_v_stream)(const uint8_t* even, const uint8_t* odd,
                        size_t row_bytes, uint8_t* to);

  // Makes what was streamed visible to others.
  void (*flush)();
};

// The kernels of the best instruction set this CPU supports, for elements of 1,
// 2 or 4 bytes.
PackKvKernels GetPackKvKernels(size_t element_bytes);

}  // namespace quern

#endif  // QUERN_CACHE_PACK_KV_KERNELS_H_
