#ifndef QUERN_GEMM_ONEDNN_PACKED_MATMUL_H_
#define QUERN_GEMM_ONEDNN_PACKED_MATMUL_H_

// What the plans of this folder are made of: weights packed once, cut into
// column tasks, multiplied by row blocks through oneDNN's matmul.
//
//   p[m, n] = sum over k of a[m, k] * b[k, n]
//   p[m, n] = scale * weight_scales[n] * sum over k of
//             (a[m, k] - zero_point) * b[k, n]                  (if scaled)
//   c[m, n] = round_c(p[m, n] + bias[n])
//
// Rows are cut into blocks, fewer rows to a block where there are many workers;
// the last block is padded to a RowBucket through scratch. Private: the
// plans check arguments, this trusts them.

#include <cstddef>
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
#include "quern/gemm/onednn/cache_stats.h"
#include "quern/gemm/onednn/matmul_cache.h"
#include "quern/gemm/onednn/scratch.h"
#include "quern/quant/convert.h"

namespace quern {

struct MatmulConfig {
  const char* op = "";  // in messages
  int64_t n = 0;
  int64_t k = 0;
  // As the caller has them, and as oneDNN gets them: rows of `a` are widened
  // and c is narrowed in scratch. i8 becomes u8 by adding 128.
  DType a = DType::kF32;
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
// max_k is set). It may be overwritten.
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
  // Chooses layouts; Unimplemented if oneDNN has no kernel for the config.
  static absl::StatusOr<std::unique_ptr<PackedMatmul>> Create(
      const MatmulConfig& config);

  // `by_rows`: from[n, k], else from[k, n].
  absl::Status Pack(const AnyTensorView& from, bool by_rows,
                    Executor& executor);

  // Scratch that Execute takes at most, for up to max_m rows of any stride.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int64_t workers) const;

  void Execute(const MatmulCall& call, OneDnnScratch& scratch,
               Executor& executor) const noexcept;

  const MatmulConfig& config() const { return config_; }
  size_t packed_bytes() const { return weights_.bytes(); }
  size_t HugePageBytes() const { return weights_.HugePageBytes(); }
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
