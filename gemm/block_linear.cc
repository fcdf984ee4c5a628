#include "gemm/block_linear.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/aligned_buffer.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/block_linear_kernels.h"
#include "gemm/epilogue_kernels.h"
#include "gemm/linear_kernels.h"
#include "gemm/packed_product.h"
#include "gemm/tile.h"
#include "gemm/tile_loop.h"
#include "packing/code_layout.h"
#include "packing/vnni_layout.h"

namespace quern {
namespace {

constexpr int64_t kChunk = static_cast<int64_t>(kChunkLines);
constexpr int64_t kChunkK = 2 * kChunk;
constexpr int64_t kLineBytes = VnniLayout::kLineBytes;
constexpr int64_t kDecodedPanelBytes = kChunk * kLineBytes;
constexpr int64_t kDecodedBytes =
    static_cast<int64_t>(kTilePanels) * kDecodedPanelBytes;
// The sums of one tile: vectors of 16 that fit in registers, or fewer.
constexpr int64_t kTileSums = 32 * VnniLayout::kPanelCols;

template <typename T>
void Gather(const uint8_t* row, const int32_t* order, int64_t k, uint8_t* to) {
  for (int64_t i = 0; i < k; ++i) {
    std::memcpy(to + i * static_cast<int64_t>(sizeof(T)),
                row + order[i] * static_cast<int64_t>(sizeof(T)), sizeof(T));
  }
}

}  // namespace

BlockLinear::BlockLinear(const BlockLinearSpec& spec, const VnniLayout& pairs,
                         const CodeLayout& codes)
    : spec_(spec),
      pairs_(pairs),
      codes_layout_(codes),
      blocks_(DivCeil(spec.k, spec.block_k)),
      linear_(GetLinearKernelsBF16(spec.a, spec.c)),
      kernels_(GetBlockKernels(spec.codes, spec.a)) {
  for (int64_t k = 0; k < spec_.k; k = PieceEnd(k)) ++pieces_;
}

absl::Status BlockLinear::CheckSpec(const BlockLinearSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(spec.op, "n", spec.n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(spec.op, "k", spec.k, 1, kMaxExtent));
  const DType types[] = {DType::kF32, DType::kBF16, DType::kF16};
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(spec.op, "a", spec.a, types));
  return CheckDTypeIn(spec.op, "c", spec.c, types);
}

absl::StatusOr<BlockLinear> BlockLinear::Create(const BlockLinearSpec& spec,
                                                const AnyTensorView& bias) {
  if (bias.rank() != 0) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(spec.op, "bias", bias, DType::kF32, {spec.n}));
  }
  QUERN_ASSIGN_OR_RETURN(const VnniLayout pairs,
                         VnniLayout::Create(DType::kBF16, spec.k, spec.n));
  QUERN_ASSIGN_OR_RETURN(
      const CodeLayout codes,
      CodeLayout::Create(BitsOf(spec.codes), spec.k, spec.n));
  BlockLinear linear(spec, pairs, codes);
  QUERN_ASSIGN_OR_RETURN(linear.codes_, AlignedBuffer::Create(codes.bytes()));
  // Fewer than 2^63: a block has 16 k or more, which 64 bytes of codes hold.
  const int64_t bytes = codes.panels() * linear.blocks_ * kLineBytes;
  QUERN_ASSIGN_OR_RETURN(linear.scales_, AlignedBuffer::Create(bytes));
  if (spec.zeros) {
    QUERN_ASSIGN_OR_RETURN(linear.zeros_, AlignedBuffer::Create(bytes));
  }
  if (spec.permuted) {
    QUERN_ASSIGN_OR_RETURN(linear.permutation_,
                           AlignedBuffer::Create(spec.k * 4));
  }
  if (bias.rank() != 0) {
    QUERN_ASSIGN_OR_RETURN(linear.bias_, AlignedBuffer::Create(spec.n * 4));
    std::memcpy(linear.bias_.data(), bias.data(), linear.bias_.bytes());
  }
  return linear;
}

PackedProduct<float> BlockLinear::ProductOf(int64_t rows) const {
  return {pairs_, Fused(rows) ? kernels_.fused : linear_.table,
          static_cast<int64_t>(linear_.elements_per_line), rows, 1};
}

std::string BlockLinear::Explain(int64_t m) const {
  const int64_t rows = std::max<int64_t>(1, std::min(m, kBlockRows));
  const bool fused = Fused(rows);
  const TileTable& table = fused ? kernels_.fused : linear_.table;
  const int64_t tile = RowTiles(rows, table).max_size();
  return absl::StrCat("packed ", kernels_.target, " ", linear_.arithmetic,
                      ", decoded in ", fused ? "registers" : "scratch",
                      ", tiles of ", tile, " x ",
                      table.panels[static_cast<size_t>(tile)] *
                          static_cast<size_t>(kPanelCols));
}

int64_t BlockLinear::PieceEnd(int64_t k) const {
  const int64_t block_end = (k / spec_.block_k + 1) * spec_.block_k;
  const int64_t chunk_end = (k / kChunkK + 1) * kChunkK;
  return std::min({block_end, chunk_end, spec_.k});
}

template <typename Allocator>
BlockLinear::Scratch BlockLinear::LayOut(Allocator& allocator, int64_t rows,
                                         int64_t workers) const {
  Scratch scratch = {};
  scratch.product = ProductOf(rows).LayOutWholeK(allocator, workers);
  if (!Fused(rows)) {
    scratch.decoded = allocator.template Allocate<uint8_t>(
        "decoded weights", workers * kDecodedBytes);
  }
  if (spec_.zeros) {
    scratch.row_sums =
        allocator.template Allocate<float>("sums of rows", rows * pieces_);
  }
  if (spec_.permuted) {
    scratch.gathered = allocator.template Allocate<uint8_t>(
        "permuted rows",
        workers * spec_.k * static_cast<int64_t>(SizeOf(spec_.a)));
  }
  return scratch;
}

int64_t BlockLinear::WorkspaceBytes(int64_t max_m, int max_workers) const {
  return MostWorkspaceBytes(max_m, max_workers,
                            [&](int64_t rows, int64_t workers) {
                              WorkspaceLayout layout;
                              LayOut(layout, rows, workers);
                              return layout.bytes();
                            });
}

absl::Status BlockLinear::CheckArgs(const AnyTensorView& a,
                                    const AnyTensorView& c) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(spec_.op, "a", a, spec_.a, {kAnyExtent, spec_.k}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(spec_.op, "c", c, spec_.c, {a.extent(0), spec_.n}));
  return CheckApart(spec_.op, "a", a, "c", c);
}

void BlockLinear::Multiply(const PackedProduct<float>& product,
                           const Scratch& scratch, const TileRange& range,
                           float* sums, int64_t stride, int worker) const {
  const RowTiles& tiles = product.tiles();
  const bool fused = Fused(tiles.rows);
  const TileTable& table = fused ? kernels_.fused : linear_.table;
  const auto best =
      static_cast<int64_t>(table.panels[static_cast<size_t>(tiles.max_size())]);
  const int64_t a_tile = product.chunks() * product.a_chunk();
  const int64_t panel_bytes = codes_layout_.panel_bytes();
  const int64_t line_k = codes_layout_.line_k();
  uint8_t* decoded = fused ? nullptr : scratch.decoded + worker * kDecodedBytes;
  // For one tile of rows what it wants next, which stays in L1.
  const bool whole_chunks = range.tile_end - range.tile > 1;

  alignas(64) float tile_sums[kTileSums];
  TileArgs t = {};
  t.sums = tile_sums;
  t.panel_bytes = static_cast<size_t>(fused ? panel_bytes : kDecodedPanelBytes);
  ScaleArgs scale = {};
  scale.sums = tile_sums;
  scale.panel_stride = static_cast<size_t>(blocks_ * kPanelCols);
  scale.row_sums_stride = static_cast<size_t>(pieces_);
  scale.to_stride = static_cast<size_t>(stride);

  // The piece that follows k in these panels, or begins the next ones.
  const auto ahead = [&](int64_t panel, int64_t panels,
                         int64_t k) -> TilePrefetch {
    if (k == spec_.k) {
      panel += panels;
      k = 0;
      if (panel + panels > codes_layout_.panels()) return {};
    }
    return {codes_.data() + panel * panel_bytes + k / line_k * kLineBytes,
            static_cast<size_t>(panel_bytes),
            static_cast<size_t>(DivCeil(PieceEnd(k) - k, line_k))};
  };

  // All tiles of rows for [chunk_k, chunk_end) of panels [panel, panel +
  // 2^log), the pieces of blocks there from `piece` on. Returns the piece that
  // follows.
  const auto multiply_block = [&](int64_t chunk, int64_t panel, size_t log,
                                  const int64_t first_piece) {
    const int64_t chunk_k = chunk * kChunkK;
    const int64_t chunk_end = std::min(chunk_k + kChunkK, spec_.k);
    const int64_t panels = int64_t{1} << log;
    const uint8_t* codes = codes_.data() + panel * panel_bytes;
    const auto decode = [&](int64_t k, int64_t end) {
      for (int64_t p = 0; p < panels; ++p) {
        kernels_.decode(
            codes + p * panel_bytes + k / line_k * kLineBytes,
            static_cast<size_t>(DivCeil(end - k, line_k)),
            decoded + p * kDecodedPanelBytes + (k - chunk_k) / 2 * kLineBytes);
      }
    };
    if (!fused && whole_chunks) decode(chunk_k, chunk_end);
    scale.panels = static_cast<size_t>(panels);
    t.sums_stride = static_cast<size_t>(panels * kPanelCols);
    int64_t piece = first_piece;
    for (int64_t tile = range.tile; tile < range.tile_end; ++tile) {
      const int64_t row = tiles.begin(tile);
      scale.rows = static_cast<size_t>(tiles.size(tile));
      scale.to = sums + (row - tiles.begin(range.tile)) * stride +
                 (panel - range.panel) * kPanelCols;
      const uint32_t* a =
          scratch.product.a + tile * a_tile + chunk * product.a_chunk();
      piece = first_piece;
      for (int64_t k = chunk_k; k < chunk_end; ++piece) {
        const int64_t end = PieceEnd(k);
        const int64_t pairs = (k - chunk_k) / 2;
        t.a = a + pairs * static_cast<int64_t>(linear_.elements_per_line);
        if (fused) {
          t.b = codes + k / line_k * kLineBytes;
          t.steps = static_cast<size_t>(DivCeil(end - k, line_k));
          t.prefetch[0] = {};
          if (tile == range.tile) {
            t.prefetch[0] = ahead(panel, panels, end);
            t.prefetch[0].steps = std::min(t.prefetch[0].steps, t.steps);
          }
        } else {
          if (!whole_chunks) decode(k, end);
          t.b = decoded + pairs * kLineBytes;
          t.steps = static_cast<size_t>(DivCeil(end - k, int64_t{2}));
        }
        table.tiles[scale.rows][log](t);
        const int64_t at = IndexOf(k / spec_.block_k, panel * kPanelCols);
        scale.scales = scales_.data<float>() + at;
        if (spec_.zeros) {
          scale.zeros = zeros_.data<float>() + at;
          scale.row_sums = scratch.row_sums + row * pieces_ + piece;
        }
        scale.add = k > 0;
        kernels_.scale(scale);
        k = end;
      }
    }
    return piece;
  };

  // With one tile of rows, a group of panels from its first line to its last.
  // With more, all panels for one chunk after the other: the rows of that chunk
  // stay in L2.
  const int64_t width = whole_chunks ? range.panel_end - range.panel : best;
  for (int64_t begin = range.panel; begin < range.panel_end; begin += width) {
    const int64_t panel_end = std::min(begin + width, range.panel_end);
    int64_t first_piece = 0;
    for (int64_t chunk = 0; chunk < product.chunks(); ++chunk) {
      int64_t next_piece = first_piece;
      for (int64_t panel = begin; panel < panel_end;) {
        size_t log = 0;
        while ((int64_t{2} << log) <= std::min(best, panel_end - panel)) ++log;
        next_piece = multiply_block(chunk, panel, log, first_piece);
        panel += int64_t{1} << log;
      }
      first_piece = next_piece;
    }
  }
}

void BlockLinear::Execute(const AnyTensorView& a, const AnyTensorView& c,
                          Workspace workspace,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(a, c));
  const auto a_size = static_cast<int64_t>(SizeOf(spec_.a));
  const auto c_size = static_cast<int64_t>(SizeOf(spec_.c));
  const int64_t a_row_bytes = RowBytes(a);
  const int64_t c_row_bytes = RowBytes(c);
  ForEachRowBlock(a.extent(0), [&](int64_t first, int64_t rows) {
    const PackedProduct<float> product = ProductOf(rows);
    Workspace block = workspace;
    const Scratch scratch = LayOut(block, rows, executor.num_workers());
    const auto pack = [&](int64_t row, uint32_t* to, int worker) {
      const uint8_t* from =
          static_cast<const uint8_t*>(a.data()) + (first + row) * a_row_bytes;
      if (spec_.permuted) {
        uint8_t* gathered = scratch.gathered + worker * spec_.k * a_size;
        const auto* order = permutation_.data<int32_t>();
        if (a_size == 4) {
          Gather<uint32_t>(from, order, spec_.k, gathered);
        } else {
          Gather<uint16_t>(from, order, spec_.k, gathered);
        }
        from = gathered;
      }
      for (int64_t k = 0; k < spec_.k; k += kChunkK) {
        const int64_t count = std::min(kChunkK, spec_.k - k);
        // A line of codes is longer than a pair.
        if (count < kChunkK && linear_.elements_per_line == 1) {
          std::fill(to + count / 2, to + RoundUp(count, int64_t{8}) / 2, 0u);
        }
        linear_.pack_row(from + k * a_size, static_cast<size_t>(count), to);
        to += product.a_chunk();
      }
      if (!spec_.zeros) return;
      float* row_sums = scratch.row_sums + row * pieces_;
      for (int64_t k = 0; k < spec_.k;) {
        const int64_t end = PieceEnd(k);
        *row_sums++ =
            kernels_.sum(from + k * a_size, static_cast<size_t>(end - k));
        k = end;
      }
    };
    const auto multiply = [&](const TileRange& range, float* sums,
                              int64_t stride, int64_t /*part_stride*/,
                              int worker) {
      Multiply(product, scratch, range, sums, stride, worker);
    };
    const auto finish = [&](const SumsBlock<float>& sums) {
      FinishArgs args = {};
      args.sums = sums.sums;
      args.sums_stride = static_cast<size_t>(sums.stride);
      args.bias = bias_.empty() ? nullptr : bias_.data<float>() + sums.col;
      args.rows = static_cast<size_t>(sums.rows);
      args.cols = static_cast<size_t>(sums.cols);
      args.c = static_cast<uint8_t*>(c.mutable_data()) +
               (first + sums.row) * c_row_bytes + sums.col * c_size;
      args.c_row_bytes = static_cast<ptrdiff_t>(c_row_bytes);
      linear_.finish(args);
    };
    product.RunWith(scratch.product, executor, pack, multiply, finish);
  });
}

}  // namespace quern
