#ifndef QUERN_QUANT_QUANTIZE_ROWS_H_
#define QUERN_QUANT_QUANTIZE_ROWS_H_

// Private to this folder: what the quantisers to int8 and to e4m3 share. Both
// read a matrix [m, k] of floats and write codes of one byte.

#include <algorithm>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/stores.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace quant_internal {

// Tasks per worker at most, to level out slow ones.
inline constexpr int64_t kTasksPerWorker = 8;

// How many rows ahead of its turn a row is fetched into L2: 16 KiB, time enough
// for DRAM to answer, and little beside 1 MiB. docs/performance_notes.md#quant
// has what fetching into L1, or in both passes, costs.
inline int64_t RowsAhead(int64_t row_bytes) {
  return DivCeil(int64_t{16} << 10, std::max<int64_t>(row_bytes, 1));
}

// Whether codes go past the caches. kAuto: once the matrix and its codes do not
// fit together, because the matrix would drive the codes out. Rows shorter than
// 1024 codes are then not streamed: their partial cache lines at both ends
// would cost more than is won.
inline bool StreamsCodes(Stores stores, DType dtype, int64_t m, int64_t k,
                         int64_t last_level_bytes) {
  const int64_t row_bytes = k * static_cast<int64_t>(SizeOf(dtype));
  return stores == Stores::kStream || (stores == Stores::kAuto && k >= 1024 &&
                                       m * (row_bytes + k) > last_level_bytes);
}

// The bits of a code of `dtype`, f32, bf16 or f16, as f32.
inline uint32_t F32BitsOf(DType dtype, uint32_t code) {
  switch (dtype) {
    case DType::kBF16:
      return DecodeBits<BFloat16>(code);
    case DType::kF16:
      return DecodeBits<Float16>(code);
    default:
      return code;
  }
}

}  // namespace quant_internal
}  // namespace quern

#endif  // QUERN_QUANT_QUANTIZE_ROWS_H_
