#ifndef QUERN_OPS_REGISTRY_SGLANG_PACKING_PACK_KERNELS_H_
#define QUERN_OPS_REGISTRY_SGLANG_PACKING_PACK_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>
#include <cstdint>

namespace quern {

struct SglangPackKernels {
  // Packs one block: `cols` rows of `bytes` bytes, row_bytes apart, to
  // `packed`. cols is 16 or 32; bytes is a multiple of 16.
  using Block = void (*)(const uint8_t* w, ptrdiff_t row_bytes, size_t cols,
                         size_t bytes, uint8_t* packed);

  const char* target;
  Block dwords;      // packed[bytes / 4][cols][4]: int8, 16-bit types
  Block byte_pairs;  // packed[bytes / 2][cols][2]: f8e4m3
  Block nibbles;     // packed[bytes][32], cols == 32: u8
};

// The kernels of the best instruction set that this CPU supports.
SglangPackKernels GetSglangPackKernels();

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PACKING_PACK_KERNELS_H_
