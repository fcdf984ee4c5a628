#ifndef QUERN_PACKING_VNNI_PACK_KERNELS_H_
#define QUERN_PACKING_VNNI_PACK_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.
// Kernels move bytes: strides, offsets and extents named _bytes are bytes.

#include <cstddef>
#include <cstdint>

namespace quern {

// The two sides of one task. Byte is const on the side that is read.
//
// Plain: rows are n for kNK and k for kKN.
template <typename Byte>
struct VnniPlainBlock {
  Byte* data;           // the first element
  ptrdiff_t row_bytes;  // from one row to the next
  size_t rows;          // that exist
  size_t cols_bytes;    // of each row, that exist
};

// Packed: the first line; panels follow each other at panel_bytes.
template <typename Byte>
struct VnniPackedBlock {
  Byte* data;
  size_t panel_bytes;
};

struct VnniPackKernels {
  using Pack = void (*)(const VnniPlainBlock<const uint8_t>& plain,
                        const VnniPackedBlock<uint8_t>& packed);
  using Unpack = void (*)(const VnniPlainBlock<uint8_t>& plain,
                          const VnniPackedBlock<const uint8_t>& packed);
  struct Direction {
    Pack pack;    // cached stores
    Pack stream;  // non-temporal stores, fenced at the end of the task
    Unpack unpack;
  };

  const char* target;
  Direction nk;    // plain.rows <= 16; any element type
  Direction kn32;  // elements of 4 bytes
  Direction kn16;  // of 2 bytes
  Direction kn8;   // of 1 byte
};

// The kernels of the best instruction set that this CPU supports.
VnniPackKernels GetVnniPackKernels();

}  // namespace quern

#endif  // QUERN_PACKING_VNNI_PACK_KERNELS_H_
