#ifndef QUERN_GEMM_ONEDNN_PACKED_MATMUL_H_
#define QUERN_GEMM_ONEDNN_PACKED_MATMUL_H_

// Private: weights that oneDNN has packed once, cut into column tasks and
// multiplied by row blocks through oneDNN's matmul.
//
//   p[m, n] = sum over k of a[m, k] * b[k, n]
//   p[m, n] = scale * weight_scales[n] * sum over k of
//             (a[m, k] - zero_point) * b[k, n]                  (if scaled)
//   c[m, n] = round_c(p[m, n] + bias[n])
//
// Rows are cut into blocks, fewer rows to a block where there are many workers;
// the last block is padded to a RowBucket through scratch. Arguments have been
// checked.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/onednn/matmul_cache.h"
#include "quern/quant/convert.h"

namespace quern {

struct MatmulConfig {
  int64_t n = 0;
  int64_t k = 0;
  // The types that the caller has, and those that oneDNN gets: rows of a are
  // widened and c is narrowed in scratch. i8 becomes u8 by adding 128.
  DType a = DType::kF32;
  DType b = DType::kF32;
  DType c = DType::kF32;
  DType inner_a = DType::kF32;
  DType inner_b = DType::kF32;
  DType inner_c = DType::kF32;
  // If not 0, sums over k are cut into pieces of this many, which are integers
  // below 2^24 in f32 and are added as i32: inner_c is f32, tiles are i32.
  int64_t max_k = 0;
  bool bias = false;
  bool scaled = false;
  bool zero_point = false;
  bool reference_kernel = false;  // take oneDNN's slow kernel rather than none
};

// A finished piece of the product in scratch, dense, of inner_c (of i32, if
// max_k is set). It may be overwritten, and kTilePadding bytes after it may be
// read.
inline constexpr int64_t kTilePadding = 64;
struct MatmulTile {
  int64_t row;
  int64_t col;
  int64_t rows;
  int64_t cols;
  void* data;
};

struct MatmulCall {
  AnyTensorView a;
  AnyTensorView c;
  const float* bias = nullptr;            // [n]
  const float* weight_scales = nullptr;   // [n]
  const float* a_scale = nullptr;         // [1]
  const int32_t* a_zero_point = nullptr;  // [1]
  // Takes the tiles instead of c.
  const absl::FunctionRef<void(const MatmulTile&)>* finish = nullptr;
};

class PackedMatmul {
 public:
  // Chooses layouts. Unimplemented if oneDNN has no kernel for the config, or
  // one in which a NaN behind a row of floats would spread.
  static absl::StatusOr<std::unique_ptr<PackedMatmul>> Create(
      const MatmulConfig& config);

  // Packs b[n, k], which has no gaps between its rows.
  absl::Status Pack(const uint8_t* b, Executor& executor);

  // Bytes that Execute takes at most, for up to max_m >= 0 rows of any stride.
  // Asks oneDNN for the kernels of all those row counts: milliseconds. Internal
  // if it fails.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int64_t workers) const;

  // Rows are padded into 45 sizes (gemm/onednn/partition.h), so that a new m is
  // seldom a new kernel; the first call with a new size or new strides takes
  // 0.2 ms to generate code, unless another product of this shape has. The last
  // 128 such kernels are kept. oneDNN's own bookkeeping allocates a few small
  // blocks per call. Everything else was proved at Create: what still fails
  // aborts.
  void Execute(const MatmulCall& call, Workspace workspace,
               Executor& executor) const noexcept;

  const MatmulConfig& config() const { return config_; }
  int64_t packed_bytes() const {
    return static_cast<int64_t>(weights_.bytes());
  }
  OneDnnCacheStats cache_stats() const { return cache_.stats(); }
  // "brg_matmul:avx512_core_bf16 a=bf16 b=bf16 c=f32"
  std::string Explain(int64_t m) const;

 private:
  struct Run;
  using Desc = dnnl::memory::desc;

  explicit PackedMatmul(const MatmulConfig& config);
  dnnl::matmul::primitive_desc Describe(const MatmulKey& key,
                                        const Desc& weights) const;
  MatmulCache::Kernel Find(const MatmulKey& key, const Desc& weights) const;
  // Rows of each row block of m rows but the last.
  int64_t BlockRows(int64_t m, int64_t workers) const;
  Run Prepare(const MatmulCall& call, int64_t workers, bool dense) const;
  void StageRows(const AnyTensorView& a, int64_t first, int64_t rows,
                 int64_t bucket, uint8_t* to, Executor& executor) const;
  void RunTask(const Run& run, int64_t first, const uint8_t* rows_of_a,
               int64_t task, int worker) const;

  int64_t TileBytes(int64_t rows, int64_t cols) const;
  int64_t ColsOf(int64_t task) const;
  int64_t KOf(int64_t piece) const;
  const Desc& PackedOf(int64_t task, int64_t piece) const {
    return packed_[task + 1 == num_tasks_][piece + 1 == num_pieces_];
  }
  bool widens_a() const { return config_.inner_a != config_.a; }
  bool adds_i32() const { return config_.max_k != 0; }
  bool narrows_c() const { return config_.inner_c != config_.c; }

  MatmulConfig config_;
  int64_t cols_ = 0;         // of each column task but the last
  int64_t num_tasks_ = 0;    // column tasks
  int64_t max_k_ = 0;        // of each piece of k but the last
  int64_t num_pieces_ = 1;   // of k
  int64_t piece_bytes_ = 0;  // of packed weights, from one piece to the next
  Desc packed_[2][2];        // [last task][last piece]
  // Whether oneDNN's sums of a row are the same with any rows beside it.
  bool rows_keep_bits_ = true;
  AlignedBuffer weights_;
  std::optional<ConvertPlan> widen_;
  std::optional<ConvertPlan> narrow_;
  mutable MatmulCache cache_;
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_PACKED_MATMUL_H_
