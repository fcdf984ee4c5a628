#ifndef QUERN_PACKING_CODE_PACK_KERNELS_H_
#define QUERN_PACKING_CODE_PACK_KERNELS_H_

// Private seam between packing/code_pack.cc (plain C++) and the SIMD
// translation unit.

#include <cstddef>
#include <cstdint>

namespace quern {

// The codes of one panel.
struct CodePackTask {
  const uint8_t* const* rows;  // the first code of each column
  size_t cols;                 // columns that exist, 1 to 16
  size_t k;                    // rows of b
  uint8_t fill;                // a code, for what lies beyond k and the columns
  uint8_t* to;                 // the first line, aligned to 64
};

struct CodePackKernels {
  using Pack = void (*)(const CodePackTask& task);

  const char* target;
  Pack bytes_of_8;  // to lines of 8 bits
  Pack bytes_of_4;  // to lines of 4 bits
};

// The kernels of the best instruction set that this CPU supports.
CodePackKernels GetCodePackKernels();

}  // namespace quern

#endif  // QUERN_PACKING_CODE_PACK_KERNELS_H_
