#ifndef QUERN_GEMM_LAYERS_PACKED_LAYER_OF_H_
#define QUERN_GEMM_LAYERS_PACKED_LAYER_OF_H_

// Private: the packed layer, written once for all kinds of arithmetic. It takes
// rows in blocks, lays out memory, and runs gemm/schedule/packed_product.h. An
// Arithmetic says the rest. It is a PackedArithmetic with
//
//   Sum                   float or int32_t
//   target(), name()      "AVX3_ZEN4", "bf16 dot"
//   TableFor(rows)        the tiles of a block of so many rows
//   row_pitch()           as PackedProduct takes it
//   max_tile_rows()       rows of a tile, at most, where a block has several
//   PackRow(product, row, terms)
//                         writes a row to row.to, as `product` divides k into
//                         chunks, and the row's part of the terms
//   Finish(sums, first, args, terms)
//                         turns sums into rows of args.c, from row `first` on
//
// and, where kDecodes is true,
//
//   Fused(rows)           whether tiles of so many rows decode in registers
//   MultiplyPart(part, product, a, terms, worker, range, sums, stride)
//                         overwrites the sums of the range, all k, of one part
//                         of the weights by the packed rows at `a`

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/core/workspace.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/block_order.h"
#include "quern/gemm/schedule/grouped_rows.h"
#include "quern/gemm/schedule/packed_product.h"
#include "quern/gemm/schedule/prefetch_policy.h"
#include "quern/gemm/schedule/tile_loop.h"
#include "quern/packing/vnni_layout.h"

namespace quern {

// One row of a, and where it goes.
struct RowToPack {
  const uint8_t* a;  // its k elements
  int64_t row;       // of the block, whose terms are at hand
  int worker;
  uint32_t* to;
  // The arguments of the layer, and the row's number in them, which only rows
  // of int8 need; null for GroupedLinearPlan, which has none of these.
  const LinearArgs* args;
  int64_t row_of_a;
};

// What every Arithmetic has, or has unless it says otherwise.
class PackedArithmetic {
 public:
  // Whether weights are codes that MultiplyPart decodes. If not, tiles read
  // them as they are packed, and k may be divided between workers.
  static constexpr bool kDecodes = false;
  // Who packs a block of one row, where kDecodes is true.
  static constexpr auto kOneRow = OneRowIsPacked::kOnce;

  // Memory that rows and workers need besides the product.
  struct Terms {
    // The terms of a block that begins at that row.
    Terms From(int64_t /*row*/) const { return {}; }
  };
  template <typename Allocator>
  Terms LayOutTerms(Allocator& /*allocator*/, int64_t /*rows*/,
                    int64_t /*workers*/) const {
    return {};
  }

  // `layout` is that of one part of the weights, as the product divides it.
  PackedArithmetic(const LinearWeights& weights, DType a,
                   const VnniLayout& layout, int64_t parts)
      : weights_(weights),
        a_size_(static_cast<int64_t>(SizeOf(a))),
        layout_(layout),
        parts_(parts) {}

  const LinearWeights& weights() const { return weights_; }
  const VnniLayout& layout() const { return layout_; }
  int64_t parts() const { return parts_; }
  // Cache lines of a panel.
  int64_t panel_lines() const { return layout_.lines(); }

 protected:
  int64_t a_size() const { return a_size_; }

  // The kernels, with tiles of few rows that read these weights in one stream
  // where this CPU reads them fastest so.
  template <class Kernels>
  static Kernels InOneStream(Kernels kernels, const LinearWeights& weights) {
    ReadInOneStream(ThisCpuCore(), static_cast<int64_t>(weights.bytes().size()),
                    kernels.table);
    return kernels;
  }

  // Calls fn(k, count, to) for every chunk of a row that is packed to `to`.
  template <typename Sum, typename Fn>
  void ForEachChunk(const PackedProduct<Sum>& product, uint32_t* to,
                    const Fn& fn) const {
    // Each takes a division.
    const int64_t chunk_k = product.chunk_k(), a_chunk = product.a_chunk();
    const int64_t all_k = layout_.k();
    for (int64_t k = 0; k < all_k; k += chunk_k) {
      fn(k, std::min(chunk_k, all_k - k), to);
      to += a_chunk;
    }
  }
  // Copies elements order()[i], k <= i < k + count, of a row of a.
  void Gather(const uint8_t* row, int64_t k, int64_t count, uint8_t* to) const;

 private:
  LinearWeights weights_;
  int64_t a_size_;  // bytes of an element of a
  VnniLayout layout_;
  int64_t parts_;
};

// "8 x 32", the tiles of a block of so many rows.
std::string TilesOf(int64_t rows, const TileTable& table);

template <class Arithmetic>
class PackedLayerOf final : public PackedLayer {
  using Sum = typename Arithmetic::Sum;
  using Terms = typename Arithmetic::Terms;
  using Product = PackedProduct<Sum>;

 public:
  explicit PackedLayerOf(Arithmetic arithmetic)
      : arithmetic_(std::move(arithmetic)) {}

  const char* target() const override { return arithmetic_.target(); }
  std::string Explain(int64_t m) const override {
    const int64_t rows = std::clamp<int64_t>(m, 1, kBlockRows);
    const char* decoded = "";
    if constexpr (Arithmetic::kDecodes) {
      decoded = arithmetic_.Fused(rows) ? ", decoded in registers"
                                        : ", decoded in scratch";
    }
    return absl::StrCat("packed ", target(), " ", arithmetic_.name(), decoded,
                        ", tiles of ",
                        TilesOf(rows, arithmetic_.TableFor(rows)));
  }
  int64_t packed_bytes() const override {
    return static_cast<int64_t>(arithmetic_.weights().bytes().size());
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m,
                                         int max_workers) const override {
    return MostWorkspaceBytes(
        max_m, max_workers, [&](int64_t rows, int64_t workers) {
          WorkspaceLayout layout;
          LayOut(ProductOf(rows, TileCount::kEven), layout, workers);
          return layout.bytes();
        });
  }
  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept override {
    const auto* a = static_cast<const uint8_t*>(args.a.data());
    const int64_t a_row_bytes = RowBytes(args.a);
    ForEachRowBlock(args.a.extent(0), [&](int64_t first, int64_t rows) {
      const Product product = ProductOf(rows, TileCount::kEven);
      Workspace memory = workspace;
      const auto scratch = LayOut(product, memory, executor.num_workers());
      const auto pack = [&](int64_t row, uint32_t* to, int worker) {
        arithmetic_.PackRow(product,
                            {a + (first + row) * a_row_bytes, row, worker, to,
                             &args, first + row},
                            scratch.terms);
      };
      const auto finish = [&](const SumsBlock<Sum>& block) {
        arithmetic_.Finish(block, first, args, scratch.terms);
      };
      if constexpr (Arithmetic::kDecodes) {
        const auto multiply = [&](const uint32_t* packed,
                                  const TileRange& range, const SumsAt<Sum>& to,
                                  int worker) {
          Multiply(product, packed, scratch.terms, worker, range, to);
        };
        product.RunWith(scratch.product, executor, pack, multiply, finish);
      } else {
        product.Run(arithmetic_.weights().panels(), scratch.product, executor,
                    pack, finish);
      }
    });
  }

  int64_t panels() const override { return arithmetic_.layout().panels(); }
  int64_t lines() const override {
    return arithmetic_.parts() * arithmetic_.panel_lines();
  }
  void CountGroups(WorkspaceLayout& layout, int64_t rows,
                   int64_t workers) const override {
    LayOutGroups(layout, rows, workers);
  }
  void PackRow(const GroupedRows& all, const RowsBlock& block, int64_t row,
               const uint8_t* from, int worker) const override {
    const Product product = ProductOf(block.rows, TileCount::kFewest);
    const auto scratch = ScratchOf(all);
    uint32_t* to = product.PackedRow(scratch.product.RowsOf(block), row);
    arithmetic_.PackRow(product, {from, row, worker, to, nullptr, 0},
                        scratch.terms.From(block.first));
  }
  void MultiplyBlock(const GroupedRows& all, const RowsBlock& block,
                     int64_t panel, int64_t panel_end, const LinearArgs& args,
                     int worker) const override {
    const Product product = ProductOf(block.rows, TileCount::kFewest);
    const auto scratch = ScratchOf(all);
    const Terms terms = scratch.terms.From(block.first);
    product.MultiplyAllRows(
        panel, panel_end, scratch.product.SumsOf(worker),
        [&](const TileRange& range, const SumsAt<Sum>& to) {
          Multiply(product, scratch.product.RowsOf(block), terms, worker, range,
                   to);
        },
        [&](const SumsBlock<Sum>& sums) {
          arithmetic_.Finish(sums, block.first, args, terms);
        });
  }

 private:
  template <class ProductScratch>
  struct Scratch {
    ProductScratch product;
    Terms terms;
  };

  Product ProductOf(int64_t rows, TileCount tile_count) const {
    return {arithmetic_.layout(),    arithmetic_.TableFor(rows),
            arithmetic_.row_pitch(), rows,
            arithmetic_.parts(),     tile_count};
  }

  // Overwrites the sums of the range, which are `to`.
  void Multiply(const Product& product, const uint32_t* a, const Terms& terms,
                int worker, const TileRange& range,
                const SumsAt<Sum>& to) const {
    if constexpr (Arithmetic::kDecodes) {
      for (int64_t part = 0; part < arithmetic_.parts(); ++part) {
        arithmetic_.MultiplyPart(part, product, a, terms, worker, range,
                                 to.sums + part * to.part_stride, to.stride);
      }
    } else {
      product.MultiplyRange(arithmetic_.weights().panels(), a, range, to);
    }
  }

  template <typename Allocator>
  Scratch<PackedScratch<Sum>> LayOut(const Product& product,
                                     Allocator& allocator,
                                     int64_t workers) const {
    const PackedScratch<Sum> scratch =
        Arithmetic::kDecodes
            ? product.LayOutWholeK(allocator, workers, Arithmetic::kOneRow)
            : product.LayOut(allocator, workers);
    const int64_t rows = product.tiles().rows;
    return {scratch, arithmetic_.LayOutTerms(allocator, rows, workers)};
  }
  template <typename Allocator>
  Scratch<GroupedScratch<Sum>> LayOutGroups(Allocator& allocator, int64_t rows,
                                            int64_t workers) const {
    const auto scratch = GroupedScratch<Sum>::LayOut(
        allocator, ProductOf(std::min(rows, kBlockRows), TileCount::kFewest),
        rows, workers, static_cast<int64_t>(arithmetic_.max_tile_rows()));
    return {scratch, arithmetic_.LayOutTerms(allocator, rows, workers)};
  }
  Scratch<GroupedScratch<Sum>> ScratchOf(const GroupedRows& all) const {
    Workspace memory = all.workspace;
    return LayOutGroups(memory, all.rows, all.workers);
  }

  Arithmetic arithmetic_;
};

}  // namespace quern

#endif  // QUERN_GEMM_LAYERS_PACKED_LAYER_OF_H_
