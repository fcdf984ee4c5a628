#ifndef QUERN_OPS_LOAD_ROW_H_
#define QUERN_OPS_LOAD_ROW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/ops/row_block_kernels.h"

namespace quern {

// v[i] = x[i] for 0 <= i < n, where x has elements of `element` bytes. v is
// aligned to 64 bytes and has room for a whole last vector, which is filled
// with zeros.
inline void LoadRow(const RowBlockKernels& blocks, const char* x, int64_t n,
                    size_t element, float* v) {
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(kRowBlock)) {
    const auto count = std::min(kRowBlock, static_cast<size_t>(n - i));
    blocks.load(x + static_cast<size_t>(i) * element, count, v + i);
  }
}

}  // namespace quern

#endif  // QUERN_OPS_LOAD_ROW_H_
