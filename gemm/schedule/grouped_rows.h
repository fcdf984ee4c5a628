#ifndef QUERN_GEMM_SCHEDULE_GROUPED_ROWS_H_
#define QUERN_GEMM_SCHEDULE_GROUPED_ROWS_H_

// Private: the memory of gemm/grouped_linear.h, whose rows are all packed
// before any is multiplied. Rows of one group are adjacent and are multiplied
// in blocks of at most kBlockRows; each block has tiles of its own.

#include <algorithm>
#include <cstdint>

#include "quern/core/math_util.h"
#include "quern/core/workspace.h"
#include "quern/gemm/schedule/packed_product.h"

namespace quern {

// The rows of one Execute.
struct GroupedRows {
  int64_t rows;         // of all groups
  int64_t workers;      // of the executor
  Workspace workspace;  // has what PackedLayer::CountGroups counts for these
};

// Rows that the same weights multiply: `rows` of them, at most kBlockRows.
struct RowsBlock {
  int64_t first;
  int64_t rows;
};

// The packed rows of all blocks, and the sums of every worker.
template <typename Sum>
struct GroupedScratch {
  // A block needs a row for each row of a, and where its tiles are not of one
  // size, one more for each tile but the last. So blocks of whatever sizes fit
  // where RowSlot says, if no tile has more than max_tile_rows: the block
  // [first, first + rows) needs at most rows + (rows - 1) / max_tile_rows.
  static constexpr int64_t RowSlot(int64_t row, int64_t max_tile_rows) {
    return row + row / max_tile_rows;
  }

  // `product` is one of min(rows, kBlockRows) rows.
  template <typename Allocator>
  static GroupedScratch LayOut(Allocator& allocator,
                               const PackedProduct<Sum>& product, int64_t rows,
                               int64_t workers, int64_t max_tile_rows) {
    GroupedScratch scratch = {};
    scratch.max_tile_rows = max_tile_rows;
    scratch.row_elements = product.row_elements();
    scratch.worker_sums = product.unit_sums(product.tiles().rows);
    int64_t elements = 0;
    if (!CheckedMul(RowSlot(rows, max_tile_rows), scratch.row_elements,
                    &elements)) {
      elements = -1;  // which the count of bytes takes for too many
    }
    scratch.a = allocator.template Allocate<uint32_t>("packed rows", elements);
    scratch.sums =
        allocator.template Allocate<Sum>("sums", workers * scratch.worker_sums);
    return scratch;
  }

  uint32_t* RowsOf(const RowsBlock& block) const {
    return a + RowSlot(block.first, max_tile_rows) * row_elements;
  }
  Sum* SumsOf(int worker) const { return sums + worker * worker_sums; }

  uint32_t* a;
  Sum* sums;
  int64_t row_elements;  // 32-bit elements of a packed row
  int64_t worker_sums;
  int64_t max_tile_rows;
};

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_GROUPED_ROWS_H_
