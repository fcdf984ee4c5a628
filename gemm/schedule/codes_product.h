#ifndef QUERN_GEMM_SCHEDULE_CODES_PRODUCT_H_
#define QUERN_GEMM_SCHEDULE_CODES_PRODUCT_H_

// Private: the product of packed rows with weights that are codes with scales,
// and possibly zero points, for each column and group of k,
//
//   sums[m, n] = sum over groups g of
//       scale[g, n] * (sum over k in g of a[m, k] * code[k, n]
//                      - zero[g, n] * sum over k in g of a[m, k])
//
// Codes become bf16, exactly, in registers or, of many rows, once for all of
// them in scratch; sums are f32, by the tiles of gemm/kernels/linear_kernels.h.
// A group is cut where 512 k end (kChunkLines); the pieces are added in order.

#include <algorithm>
#include <cstdint>

#include "quern/gemm/kernels/codes_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/vnni_layout.h"

namespace quern {

// How k is cut into pieces, each within one group and one chunk.
struct CodePieces {
  static constexpr int64_t kChunkK = 2 * static_cast<int64_t>(kChunkLines);

  // Where the piece that begins at `from` ends.
  int64_t End(int64_t from) const {
    const int64_t group_end = (from / group_size + 1) * group_size;
    const int64_t chunk_end = (from / kChunkK + 1) * kChunkK;
    return std::min({group_end, chunk_end, k});
  }
  int64_t Count() const {
    int64_t count = 0;
    for (int64_t at = 0; at < k; at = End(at)) ++count;
    return count;
  }

  int64_t k;
  int64_t group_size;
};

// One part of the weights and what multiplies it.
struct CodesPart {
  const CodeLayout& layout;
  const CodePieces& pieces;
  int64_t groups;
  int64_t piece_count;
  const CodesKernels& codes_kernels;
  const LinearKernels& linear;
  bool fused;  // tiles decode in registers
  const uint8_t* codes;
  const float* scales;
  const float* zeros;  // or null

  const TileTable& table() const {
    return fused ? codes_kernels.fused : linear.table;
  }
};

// Bytes of decoded weights that each worker needs where they are not fused.
inline constexpr int64_t kDecodedPanelBytes =
    static_cast<int64_t>(kChunkLines) * VnniLayout::kLineBytes;
inline constexpr int64_t kDecodedBytes =
    static_cast<int64_t>(kTilePanels) * kDecodedPanelBytes;

// Overwrites `sums` of the rows and panels of `range`, all k. `a` are the rows
// packed by `product`; `row_sums`, [rows, pieces], are read where there are
// zero points; `decoded` has kDecodedBytes, unless the tiles are fused.
void MultiplyCodes(const CodesPart& part, const PackedProduct<float>& product,
                   const uint32_t* a, const float* row_sums, uint8_t* decoded,
                   const TileRange& range, float* sums, int64_t stride);

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_CODES_PRODUCT_H_
