#include "quern/gemm/layers/packed_layer_of.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/packing/vnni_layout.h"

namespace quern {
namespace {

template <typename T>
void GatherAs(const uint8_t* row, const int32_t* order, int64_t count,
              uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * static_cast<int64_t>(sizeof(T)),
                row + order[i] * static_cast<int64_t>(sizeof(T)), sizeof(T));
  }
}

}  // namespace

void PackedArithmetic::Gather(const uint8_t* row, int64_t k, int64_t count,
                              uint8_t* to) const {
  const int32_t* order = weights_.order() + k;
  if (a_size_ == 4) {
    GatherAs<uint32_t>(row, order, count, to);
  } else {
    GatherAs<uint16_t>(row, order, count, to);
  }
}

std::string TilesOf(int64_t rows, const TileTable& table) {
  const int64_t tile_rows = RowTiles(rows, table, TileCount::kEven).max_size();
  const size_t panels = table.panels[static_cast<size_t>(tile_rows)];
  return absl::StrCat(tile_rows, " x ", panels * VnniLayout::kPanelCols);
}

}  // namespace quern
