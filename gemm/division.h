#ifndef QUERN_GEMM_DIVISION_H_
#define QUERN_GEMM_DIVISION_H_

// How one product of packed weights is divided into tasks: by panels, or by
// tiles of rows where there are few panels or many rows; then, if there still
// is not a task for each worker, by chunks of k. Who computes what depends on
// the number of workers; what is computed does not (gemm/tile_loop.h).

#include <algorithm>
#include <cstdint>

#include "quern/core/math_util.h"

namespace quern {

struct Division {
  // Panels of one task, at most: several, so that sums of a tile of rows stay
  // in L1 and each row of c is written two cache lines at a time or more.
  static constexpr int64_t kUnitPanels = 8;
  // Tasks per worker that level out a slow one, if there is work for so many:
  // a task should take 15 microseconds.
  static constexpr int64_t kTasksPerWorker = 4;
  static constexpr int64_t kTaskCycles = 1 << 16;
  // Tiles of rows per worker from which on rows are divided between workers.
  static constexpr int64_t kTilesPerWorker = 8;
  // More rows than this never divide k: they have tiles to divide.
  static constexpr int64_t kMaxSplitRows = 16;

  static Division Of(int64_t rows, int64_t row_tiles, int64_t panels,
                     int64_t lines, int64_t chunks, int64_t workers) {
    Division d;
    d.panels = panels;
    // A line takes a cycle for each row, or eight to come from memory.
    const int64_t tasks =
        std::clamp(panels * lines * std::max<int64_t>(rows, 8) / kTaskCycles,
                   workers, kTasksPerWorker * workers);
    d.units = DivCeil(panels, kUnitPanels);
    d.row_groups = 1;
    // Few columns, or many rows: each worker multiplies the rows that it has
    // packed. Weights are then read by all, but rows by one, which matters
    // where workers share no cache (4096 x 4096, 256 rows of bf16, two workers:
    // 19.5 ms from 20.1 there, 19.2 from 19.4 with one L3. Zen 4, 2026).
    if (panels < 2 * tasks) {
      d.row_groups = std::min(row_tiles, DivCeil(tasks, d.units));
    } else if (row_tiles >= kTilesPerWorker * workers) {
      d.row_groups = workers;
    }
    if (d.units < 2 * tasks) {  // few: as many for each worker
      const int64_t units = RoundUp(std::max(d.units, tasks / d.row_groups),
                                    workers / std::min(workers, d.row_groups));
      d.units = std::min(units, panels);
    }
    d.k_pieces = 1;
    if (d.units * d.row_groups < workers && rows <= kMaxSplitRows) {
      d.k_pieces =
          std::min(chunks, DivCeil(2 * workers, d.units * d.row_groups));
    }
    return d;
  }

  int64_t tasks() const { return units * row_groups * k_pieces; }
  // The first panel of a unit: an even one where there are enough, for a tile
  // of many rows takes two panels.
  int64_t panel(int64_t unit) const {
    if (panels < 2 * units) return panels * unit / units;
    return std::min(panels, DivCeil(panels, 2) * unit / units * 2);
  }

  int64_t panels;
  int64_t units;  // the panels in so many parts, of even sizes
  int64_t row_groups;
  int64_t k_pieces;
};

// Below this a fork-join costs more than it wins: a worker moves a line in
// about a nanosecond and multiplies it by four rows in another.
inline bool WorthAFork(int64_t lines, int64_t rows) {
  constexpr int64_t kWorth = 3072;  // nanoseconds
  return lines >= kWorth || lines * (1 + rows / 4) >= kWorth;
}

}  // namespace quern

#endif  // QUERN_GEMM_DIVISION_H_
