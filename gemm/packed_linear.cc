#include "gemm/packed_linear.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/aligned_buffer.h"
#include "core/check.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/division.h"
#include "gemm/linear_kernels.h"
#include "gemm/tile.h"
#include "gemm/tile_loop.h"
#include "packing/vnni_layout.h"
#include "packing/vnni_pack.h"

namespace quern {
namespace {

constexpr char kOp[] = "packed_linear";
constexpr int64_t kPanelCols = VnniLayout::kPanelCols;

// Rows that are packed and multiplied at once: their packed form stays in L2
// for a chunk of k, and the weights are read again for every so many rows.
constexpr int64_t kBlockRows = 256;

LinearKernels KernelsOf(const PackedLinearSpec& spec) {
  switch (spec.b) {
    case DType::kBF16:
      return GetLinearKernelsBF16(spec.a, spec.c);
    case DType::kF16:
      return GetLinearKernelsF16(spec.a, spec.c);
    default:
      return GetLinearKernelsF32(spec.a, spec.c);
  }
}

constexpr int64_t kChunk = static_cast<int64_t>(kChunkLines);

int64_t Chunks(const VnniLayout& layout) {
  return DivCeil(layout.lines(), kChunk);
}
int64_t Pitch(const LinearKernels& kernels) {
  return static_cast<int64_t>(PackedRowPitch(kernels.elements_per_line));
}

// From row to row. The stride of a single row means nothing.
int64_t RowBytes(const AnyTensorView& x) {
  return x.extent(0) <= 1
             ? 0
             : x.stride(0) * static_cast<int64_t>(SizeOf(x.dtype()));
}

struct Scratch {
  uint32_t* a;
  float* sums;
};

// Of one block of rows. Room for the sums of every worker, or for those of
// every chunk where k is divided.
template <typename Allocator>
Scratch LayOut(Allocator& allocator, const VnniLayout& layout,
               const LinearKernels& kernels, int64_t rows, int64_t workers) {
  const RowTiles tiles(rows, kernels.table);
  const int64_t a =
      tiles.count * tiles.max_size() * Chunks(layout) * Pitch(kernels);
  int64_t cols = workers * Division::kUnitPanels * kPanelCols;
  if (rows <= Division::kMaxSplitRows && layout.panels() < workers) {
    cols = std::max(cols, Chunks(layout) * layout.panels() * kPanelCols);
  }
  return {allocator.template Allocate<uint32_t>("packed rows", a),
          allocator.template Allocate<float>("sums", rows * cols)};
}

}  // namespace

absl::StatusOr<PackedLinearPlan> PackedLinearPlan::Create(
    const PackedLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& bias, Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "n", spec.n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "k", spec.k, 1, kMaxExtent));
  const DType types[] = {DType::kF32, DType::kBF16, DType::kF16};
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "a", spec.a, types));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "b", spec.b, types));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "c", spec.c, types));
  const bool nk = spec.order == WeightOrder::kNK;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weights", weights, spec.b,
                 {nk ? spec.n : spec.k, nk ? spec.k : spec.n}));
  if (bias.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "bias", bias, DType::kF32, {spec.n}));
  }

  QUERN_ASSIGN_OR_RETURN(const VnniLayout layout,
                         VnniLayout::Create(spec.b, spec.k, spec.n));
  PackedLinearPlan plan(spec, layout, KernelsOf(spec));
  QUERN_ASSIGN_OR_RETURN(plan.packed_, AlignedBuffer::Create(layout.bytes()));
  VnniPackSpec pack_spec;
  pack_spec.layout = layout;
  pack_spec.order = spec.order;
  QUERN_ASSIGN_OR_RETURN(const VnniPackPlan pack,
                         VnniPackPlan::Create(pack_spec));
  pack.Pack(weights, plan.packed_.data(), executor);
  if (bias.rank() != 0) {
    QUERN_ASSIGN_OR_RETURN(plan.bias_, AlignedBuffer::Create(spec.n * 4));
    std::memcpy(plan.bias_.data(), bias.data(), plan.bias_.bytes());
  }
  return plan;
}

std::string PackedLinearPlan::Explain(int64_t m) const {
  const RowTiles tiles(std::max<int64_t>(1, std::min(m, kBlockRows)),
                       kernels_.table);
  const int64_t rows = tiles.max_size();
  return absl::StrCat(
      "packed ", kernels_.target, " ", kernels_.arithmetic, ", tiles of ", rows,
      " x ", kernels_.table.panels[static_cast<size_t>(rows)] * kPanelCols);
}

int64_t PackedLinearPlan::WorkspaceBytes(int64_t max_m, int max_workers) const {
  // Every smaller m, too, has room: only a single row, and many rows where k
  // is not divided, take less than fewer rows could.
  WorkspaceLayout most;
  const int64_t rows = std::min(std::max<int64_t>(max_m, 1), kBlockRows);
  LayOut(most, layout_, kernels_, rows, max_workers);
  if (rows <= Division::kMaxSplitRows) return most.bytes();
  WorkspaceLayout split;
  LayOut(split, layout_, kernels_, Division::kMaxSplitRows, max_workers);
  return std::max(most.bytes(), split.bytes());
}

absl::Status PackedLinearPlan::CheckArgs(const AnyTensorView& a,
                                         const AnyTensorView& c) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a", a, spec_.a, {kAnyExtent, spec_.k}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "c", c, spec_.c, {a.extent(0), spec_.n}));
  return CheckApart(kOp, "a", a, "c", c);
}

void PackedLinearPlan::Execute(const AnyTensorView& a, const AnyTensorView& c,
                               Workspace workspace,
                               Executor& executor) const noexcept {
  QUERN_DCHECK(CheckArgs(a, c).ok());
  const int64_t m = a.extent(0);
  const int64_t blocks = DivCeil(m, kBlockRows);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t row = m * i / blocks;
    ExecuteBlock(a, c, row, m * (i + 1) / blocks - row, workspace, executor);
  }
}

void PackedLinearPlan::ExecuteBlock(const AnyTensorView& a,
                                    const AnyTensorView& c, int64_t row,
                                    int64_t rows, Workspace workspace,
                                    Executor& executor) const noexcept {
  const RowTiles tiles(rows, kernels_.table);
  const int64_t chunks = Chunks(layout_), pitch = Pitch(kernels_);
  const Scratch scratch =
      LayOut(workspace, layout_, kernels_, rows, executor.num_workers());
  InlineExecutor inline_executor;

  // a, in tiles.
  const int64_t a_row_bytes = RowBytes(a);
  const auto* a_data =
      static_cast<const uint8_t*>(a.data()) + row * a_row_bytes;
  const int64_t chunk_k = kChunk * layout_.v();
  Executor& packers =
      WorthAFork(rows * layout_.lines() / 16, 0) ? executor : inline_executor;
  packers.ParallelFor(tiles.count * chunks, [&](int64_t task, int) {
    const int64_t tile = task / chunks, chunk = task % chunks;
    PackRowsArgs args;
    args.a = a_data + tiles.begin(tile) * a_row_bytes +
             chunk * chunk_k * static_cast<int64_t>(SizeOf(spec_.a));
    args.row_bytes = static_cast<ptrdiff_t>(a_row_bytes);
    args.rows = static_cast<size_t>(tiles.size(tile));
    args.k = static_cast<size_t>(std::min(chunk_k, spec_.k - chunk * chunk_k));
    args.elements = static_cast<size_t>(
                        std::min(kChunk, layout_.lines() - chunk * kChunk)) *
                    kernels_.elements_per_line;
    args.to = scratch.a + task * tiles.max_size() * pitch;
    args.to_pitch = static_cast<size_t>(pitch);
    kernels_.pack_rows(args);
  });

  const TileLoop loop = {&kernels_.table, scratch.a,
                         pitch,           tiles,
                         packed_.data(),  layout_.panel_bytes(),
                         layout_.lines(), layout_.panels()};
  const Division division = Division::Of(rows, tiles.count, layout_.panels(),
                                         chunks, executor.num_workers());
  Executor& multipliers = WorthAFork(layout_.panels() * layout_.lines(), rows)
                              ? executor
                              : inline_executor;

  // c[row + first, ...) from sums.
  const int64_t c_row_bytes = RowBytes(c);
  const auto finish = [&](int64_t first, int64_t count, int64_t panel,
                          int64_t panel_end, const float* sums,
                          int64_t sums_stride) {
    FinishArgs args;
    const int64_t col = panel * kPanelCols;
    args.sums = sums;
    args.sums_stride = static_cast<size_t>(sums_stride);
    args.bias = bias_.empty() ? nullptr : bias_.data<float>() + col;
    args.rows = static_cast<size_t>(count);
    args.cols =
        static_cast<size_t>(std::min(panel_end * kPanelCols, spec_.n) - col);
    args.c = static_cast<uint8_t*>(c.mutable_data()) +
             (row + first) * c_row_bytes +
             col * static_cast<int64_t>(SizeOf(spec_.c));
    args.c_row_bytes = static_cast<ptrdiff_t>(c_row_bytes);
    kernels_.finish(args);
  };

  const auto range_of = [&](int64_t task) {
    TileRange range;
    const int64_t piece = task % division.k_pieces;
    const int64_t group = task / division.k_pieces % division.row_groups;
    const int64_t unit = task / division.k_pieces / division.row_groups;
    range.panel = unit * division.unit;
    range.panel_end = std::min(range.panel + division.unit, layout_.panels());
    range.tile = tiles.count * group / division.row_groups;
    range.tile_end = tiles.count * (group + 1) / division.row_groups;
    range.chunk = chunks * piece / division.k_pieces;
    range.chunk_end = chunks * (piece + 1) / division.k_pieces;
    return range;
  };
  if (division.k_pieces == 1) {
    const int64_t sums_stride = division.unit * kPanelCols;
    multipliers.ParallelFor(division.tasks(), [&](int64_t task, int worker) {
      const TileRange range = range_of(task);
      float* sums =
          scratch.sums + worker * rows * Division::kUnitPanels * kPanelCols;
      MultiplyPanels(loop, range, sums, sums_stride);
      const int64_t first = tiles.begin(range.tile);
      finish(first, tiles.begin(range.tile_end) - first, range.panel,
             range.panel_end, sums, sums_stride);
    });
    return;
  }
  // The sums of every chunk side by side, then added in order.
  const int64_t sums_stride = layout_.panels() * kPanelCols;
  const int64_t chunk_sums = rows * sums_stride;
  multipliers.ParallelFor(division.tasks(), [&](int64_t task, int) {
    TileRange range = range_of(task);
    const int64_t end = range.chunk_end;
    for (; range.chunk < end; ++range.chunk) {
      range.chunk_end = range.chunk + 1;
      MultiplyPanels(loop, range,
                     scratch.sums + range.chunk * chunk_sums +
                         tiles.begin(range.tile) * sums_stride +
                         range.panel * kPanelCols,
                     sums_stride);
    }
  });
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    const float* from = scratch.sums + chunk * chunk_sums;
    for (int64_t i = 0; i < chunk_sums; ++i) scratch.sums[i] += from[i];
  }
  finish(0, rows, 0, layout_.panels(), scratch.sums, sums_stride);
}

}  // namespace quern
