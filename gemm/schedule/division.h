#ifndef QUERN_GEMM_SCHEDULE_DIVISION_H_
#define QUERN_GEMM_SCHEDULE_DIVISION_H_

// How one product of packed weights is divided into tasks: by panels, or by
// tiles of rows where there are few panels or many rows; then, if there still
// is not a task for each worker, by chunks of k. Who computes what depends on
// the number of workers; what is computed does not (gemm/schedule/tile_loop.h).

#include <algorithm>
#include <cstdint>

#include "quern/core/math_util.h"

namespace quern {

struct Division {
  // Panels of one unit, at most: several, so that sums of a tile of rows stay
  // in L1 and each row of c is written two cache lines at a time or more.
  static constexpr int64_t kUnitPanels = 8;
  // Rows times panels of one unit of few rows, at most: 4 KiB of sums, which
  // stay in L1.
  static constexpr int64_t kUnitSums = 64;
  // Panels of one unit of `rows` rows, at most; an even number. Few rows have
  // more than kUnitPanels, because a core's prefetchers lose the stream of the
  // weights between units: the first two panels of a unit then take half a
  // microsecond longer together (one row of Q4_K, Zen 4, 2026).
  static constexpr int64_t MostPanels(int64_t rows) {
    return std::max(kUnitPanels, kUnitSums / rows / 2 * 2);
  }
  // The largest product of r rows and MostPanels(r), for all r up to `rows`.
  static constexpr int64_t MostSums(int64_t rows) {
    return std::max(rows * kUnitPanels, kUnitSums);
  }
  // Tasks per worker that level out a slow one, if there is work for so many:
  // a task should take 15 microseconds. That is a time, which stands against
  // the overhead of a task; no cache of CpuInfo says it.
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
    d.row_groups = 1;
    d.k_pieces = 1;
    if (MostPanels(rows) > kUnitPanels && tasks == kTasksPerWorker * workers) {
      d.share_units = 2 + std::max(kTasksPerWorker - 2,
                                   DivCeil(panels, workers * MostPanels(rows)));
      d.units = workers * d.share_units;
      if (panels >= 2 * d.Before(d.units)) return d;
      d.share_units = 0;
    }
    d.units = DivCeil(panels, kUnitPanels);
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
    if (d.units * d.row_groups < workers && rows <= kMaxSplitRows) {
      d.k_pieces =
          std::min(chunks, DivCeil(2 * workers, d.units * d.row_groups));
    }
    return d;
  }

  // Each a unit, of a group of tiles of rows and a piece of k. Where there are
  // shares, a worker takes several of them in one task of its executor.
  int64_t tasks() const { return units * row_groups * k_pieces; }
  // Zero where units have even sizes.
  int64_t shares() const { return share_units == 0 ? 0 : units / share_units; }
  // The first panel of a unit: an even one where there are enough, for a tile
  // of many rows takes two panels.
  int64_t panel(int64_t unit) const {
    const int64_t all = Before(units);
    if (panels < 2 * all) return panels * Before(unit) / all;
    return std::min(panels, DivCeil(panels, 2) * Before(unit) / all * 2);
  }

  int64_t panels;
  // Number of parts that the panels are divided into: of even sizes, or in
  // shares.
  int64_t units;
  // Number of units in a share, where each worker has a share of the panels;
  // zero where units have even sizes. A worker takes the units of its share in
  // order, one at a time, and then those of workers that are late. The last
  // ones are smaller, in the proportions 4 ... 4 2 1 1. Share w is units [w *
  // share_units, (w + 1) * share_units).
  int64_t share_units = 0;
  int64_t row_groups;
  int64_t k_pieces;

 private:
  // The sizes of the units before this one, in units of the smallest.
  int64_t Before(int64_t unit) const {
    if (share_units == 0) return unit;
    const int64_t share = unit / share_units;
    const int64_t after_large = unit % share_units - (share_units - 3);
    return 4 * (share_units - 2) * share + 4 * (share_units - 3) +
           (after_large <= 0 ? 4 * after_large : 1 + after_large);
  }
};

// Below this a fork-join costs more than it wins: a worker moves a line in
// about a nanosecond and multiplies it by four rows in another.
inline bool WorthAFork(int64_t lines, int64_t rows) {
  constexpr int64_t kWorth = 3072;  // nanoseconds
  return lines >= kWorth || lines * (1 + rows / 4) >= kWorth;
}

}  // namespace quern

#endif  // QUERN_GEMM_SCHEDULE_DIVISION_H_
