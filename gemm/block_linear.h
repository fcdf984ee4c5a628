#ifndef QUERN_GEMM_BLOCK_LINEAR_H_
#define QUERN_GEMM_BLOCK_LINEAR_H_

// What gemm/fp8_block_linear.h and gemm/int4_linear.h share: a linear layer on
// weights that are codes with scales, and possibly zero points, for each column
// and block of k.
//
//   c[m, n] = round_c(bias[n] + sum over blocks g of
//       scale[g, n] * (sum over k in g of a[m, k] * code[k, n]
//                      - zero[g, n] * sum over k in g of a[m, k]))
//
// Codes become bf16, exactly, in registers or, of many rows, once for all of
// them in scratch; sums are f32, by the kernels of gemm/packed_linear.h. A
// block ends where 512 k end (kChunkLines), too; the blocks are added in order.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/block_linear_kernels.h"
#include "gemm/linear_kernels.h"
#include "gemm/packed_product.h"
#include "gemm/tile_loop.h"
#include "packing/code_layout.h"
#include "packing/vnni_layout.h"

namespace quern {

struct BlockLinearSpec {
  const char* op = "";
  int64_t n = 0;
  int64_t k = 0;
  BlockCodes codes = BlockCodes::kE4M3;
  int64_t block_k = 0;  // a multiple of 16, or k or more
  bool zeros = false;
  bool permuted = false;  // row k of the codes meets a[m, permutation[k]]
  DType a = DType::kBF16;
  DType c = DType::kBF16;
};

class BlockLinear {
 public:
  static constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;

  // n, k, a and c; block_k has been proved.
  static absl::Status CheckSpec(const BlockLinearSpec& spec);
  // Of the spec, without codes: the caller writes codes, scales, zeros and
  // permutation.
  static absl::StatusOr<BlockLinear> Create(const BlockLinearSpec& spec,
                                            const AnyTensorView& bias);

  const char* target() const { return kernels_.target; }
  const CodeLayout& layout() const { return codes_layout_; }
  int64_t blocks() const { return blocks_; }
  uint8_t* codes() { return codes_.data(); }
  // Writes the scales, or the zero points, of all columns: at(g, n) is that of
  // column n in block g. Panels are divided between the workers, whose memory
  // it becomes: nobody has written to it before.
  template <typename At>
  void SetScales(const At& at, Executor& executor) {
    SetPerBlock(at, scales_.data<float>(), executor);
  }
  template <typename At>
  void SetZeros(const At& at, Executor& executor) {
    SetPerBlock(at, zeros_.data<float>(), executor);
  }
  int32_t* permutation() { return permutation_.data<int32_t>(); }

  std::string Explain(int64_t m) const;
  size_t packed_bytes() const {
    return codes_.bytes() + scales_.bytes() + zeros_.bytes();
  }
  int64_t WorkspaceBytes(int64_t max_m, int max_workers) const;
  absl::Status CheckArgs(const AnyTensorView& a, const AnyTensorView& c) const;
  void Execute(const AnyTensorView& a, const AnyTensorView& c,
               Workspace workspace, Executor& executor) const noexcept;

 private:
  struct Scratch {
    PackedScratch<float> product;
    uint8_t* decoded;   // of each worker
    float* row_sums;    // [rows, pieces]
    uint8_t* gathered;  // rows of a, of each worker
  };

  BlockLinear(const BlockLinearSpec& spec, const VnniLayout& pairs,
              const CodeLayout& codes);

  template <typename At>
  void SetPerBlock(const At& at, float* to, Executor& executor) {
    executor.ParallelFor(
        codes_layout_.panels(), [&](int64_t panel, int /*worker*/) {
          const int64_t n = panel * kPanelCols;
          const int64_t cols = std::min(kPanelCols, spec_.n - n);
          for (int64_t g = 0; g < blocks_; ++g) {
            float* block = to + IndexOf(g, n);
            for (int64_t c = 0; c < kPanelCols; ++c) {
              block[c] = c < cols ? at(g, n + c) : 0.0f;
            }
          }
        });
  }

  // Where the scale and the zero point of column n in block g are.
  int64_t IndexOf(int64_t g, int64_t n) const {
    return (n / kPanelCols * blocks_ + g) * kPanelCols + n % kPanelCols;
  }
  // Whether tiles decode in registers: of more than two tiles' rows it is
  // faster to decode once, and to have larger tiles (4096 x 4096, 256 rows of
  // bf16 by int4: 24 ms from scratch, 39 ms in tiles of 14 rows. Zen 4, 2026).
  bool Fused(int64_t rows) const {
    return linear_.elements_per_line == 1 &&
           rows <= 2 * static_cast<int64_t>(kernels_.fused.max_rows);
  }
  PackedProduct<float> ProductOf(int64_t rows) const;
  template <typename Allocator>
  Scratch LayOut(Allocator& allocator, int64_t rows, int64_t workers) const;
  // Where the piece of a block that begins at k ends.
  int64_t PieceEnd(int64_t k) const;
  void Multiply(const PackedProduct<float>& product, const Scratch& scratch,
                const TileRange& range, float* sums, int64_t stride,
                int worker) const;

  static constexpr int64_t kPanelCols = VnniLayout::kPanelCols;

  BlockLinearSpec spec_;
  VnniLayout pairs_;  // what the codes become
  CodeLayout codes_layout_;
  int64_t blocks_ = 0;
  int64_t pieces_ = 0;
  LinearKernels linear_;
  BlockKernels kernels_;
  AlignedBuffer codes_, scales_, zeros_, permutation_, bias_;
};

}  // namespace quern

#endif  // QUERN_GEMM_BLOCK_LINEAR_H_
