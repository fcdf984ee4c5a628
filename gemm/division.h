#ifndef QUERN_GEMM_DIVISION_H_
#define QUERN_GEMM_DIVISION_H_

// How one product of packed weights is divided into tasks: by panels first,
// then by tiles of rows, then, if there still is not a task for each worker, by
// chunks of k. Who computes what depends on the number of workers; what is
// computed does not (gemm/tile_loop.h).

#include <algorithm>
#include <cstdint>

#include "core/math_util.h"

namespace quern {

struct Division {
  // Panels of one task: several, so that sums of a tile of rows stay in L1 and
  // each row of c is written two cache lines at a time or more.
  static constexpr int64_t kUnitPanels = 8;
  // Tasks per worker that level out a slow one.
  static constexpr int64_t kTasksPerWorker = 4;
  // More rows than this never divide k: they have tiles to divide.
  static constexpr int64_t kMaxSplitRows = 16;

  static Division Of(int64_t rows, int64_t row_tiles, int64_t panels,
                     int64_t chunks, int64_t workers) {
    Division d;
    d.unit = kUnitPanels;
    while (d.unit > 1 && DivCeil(panels, d.unit) < kTasksPerWorker * workers) {
      d.unit /= 2;
    }
    d.units = DivCeil(panels, d.unit);
    d.row_groups = 1;
    if (d.units < kTasksPerWorker * workers) {
      d.row_groups =
          std::min(row_tiles, DivCeil(kTasksPerWorker * workers, d.units));
    }
    d.k_pieces = 1;
    if (d.units * d.row_groups < workers && rows <= kMaxSplitRows) {
      d.k_pieces =
          std::min(chunks, DivCeil(2 * workers, d.units * d.row_groups));
    }
    return d;
  }

  int64_t tasks() const { return units * row_groups * k_pieces; }

  int64_t unit;  // panels of a task
  int64_t units;
  int64_t row_groups;
  int64_t k_pieces;
};

// Below this a fork-join costs more than it wins: a worker moves a line in
// about a nanosecond and multiplies it by four rows in another.
inline bool WorthAFork(int64_t lines, int64_t rows) {
  constexpr int64_t kWorth = 2048;  // nanoseconds
  return lines >= kWorth || lines * (1 + rows / 4) >= kWorth;
}

}  // namespace quern

#endif  // QUERN_GEMM_DIVISION_H_
