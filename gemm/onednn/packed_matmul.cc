#include "quern/gemm/onednn/packed_matmul.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/gemm/onednn/engine.h"
#include "quern/gemm/onednn/matmul_cache.h"
#include "quern/gemm/onednn/partition.h"
#include "quern/gemm/onednn/status.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

constexpr char kOp[] = "linear";
// Two for each row bucket, and some for other strides.
constexpr size_t kMaxKernels = 128;
constexpr auto kAlign = static_cast<int64_t>(AlignedBuffer::kAlignment);
int64_t SizeInBytes(DType dtype) { return static_cast<int64_t>(SizeOf(dtype)); }

absl::StatusOr<ConvertPlan> Converter(DType from, DType to) {
  ConvertSpec spec;
  spec.from = from;
  spec.to = to;
  spec.stores = Stores::kCached;
  return ConvertPlan::Create(spec);
}

// Sums of integers are exact in any order.
bool AddsIntegers(const MatmulConfig& config) {
  return config.max_k != 0 || config.inner_b == DType::kI8;
}

// Whether a kernel's sums over k do not depend on the number of rows. brgemm's
// do not, which float_layer_test.cc tests; those of oneDNN's older f32 GEMM do
// (3.7.2, 2026); nobody has looked at AMX.
bool RowsKeepBits(absl::string_view kernel) {
  return absl::StartsWith(kernel, "brg") && !absl::StrContains(kernel, "amx");
}

// Whether a kernel of floats multiplies what lies behind the k elements of a
// row by zeros, so that a NaN there, or in the next row, spreads. oneDNN's AMX
// kernels do so where k ends within a tile (3.7.2; its issue 5717). Those of
// integers may, because zero times any of them is zero.
bool ReadsBehindRows(absl::string_view kernel, int64_t k) {
  constexpr int64_t kTileK = 32;  // elements of bf16 or f16
  return absl::StrContains(kernel, "amx") && k % kTileK != 0;
}

}  // namespace

PackedMatmul::PackedMatmul(const MatmulConfig& config)
    : config_(config), cache_(kMaxKernels) {
  cols_ = ColsPerTask(config.n);
  num_tasks_ = DivCeil(config.n, cols_);
  max_k_ = config.max_k == 0 ? config.k : std::min(config.k, config.max_k);
  num_pieces_ = DivCeil(config.k, max_k_);
}

int64_t PackedMatmul::ColsOf(int64_t task) const {
  return std::min(cols_, config_.n - task * cols_);
}

int64_t PackedMatmul::BlockRows(int64_t m, int64_t workers) const {
  return rows_keep_bits_ ? RowsPerTask(m, num_tasks_, workers)
                         : RowsPerTaskOfAnyWorkers(m, num_tasks_);
}

int64_t PackedMatmul::KOf(int64_t piece) const {
  return std::min(max_k_, config_.k - piece * max_k_);
}

// Throws dnnl::error. `weights` may be of format any.
dnnl::matmul::primitive_desc PackedMatmul::Describe(const MatmulKey& key,
                                                    const Desc& weights) const {
  const ForOneThread one_thread;
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attr.set_deterministic(true);
  if (config_.scaled) {
    attr.set_scales_mask(DNNL_ARG_SRC, 0);
    attr.set_scales_mask(DNNL_ARG_WEIGHTS, 1 << 1);
  }
  if (config_.zero_point) attr.set_zero_points_mask(DNNL_ARG_SRC, 0);
  const Desc a({key.rows, key.k}, ToOneDnn(config_.inner_a),
               dnnl::memory::dims{key.lda, 1});
  const Desc c({key.rows, key.cols}, ToOneDnn(config_.inner_c),
               dnnl::memory::dims{key.ldc, 1});
  if (!config_.bias) return {OneDnnEngine(), a, weights, c, attr};
  const Desc bias({1, key.cols}, dnnl::memory::data_type::f32,
                  dnnl::memory::format_tag::ab);
  return {OneDnnEngine(), a, weights, bias, c, attr};
}

MatmulCache::Kernel PackedMatmul::Find(const MatmulKey& key,
                                       const Desc& weights) const {
  return cache_.Find(key, [&]() -> MatmulCache::Kernel {
    const auto pd = Describe(key, weights);
    const ForOneThread one_thread;
    return std::make_shared<const MatmulKernel>(
        MatmulKernel{dnnl::matmul(pd), pd.src_desc(), pd.weights_desc(),
                     pd.dst_desc(), pd.scratchpad_desc()});
  });
}

absl::StatusOr<std::unique_ptr<PackedMatmul>> PackedMatmul::Create(
    const MatmulConfig& config) {
  auto matmul = std::unique_ptr<PackedMatmul>(new PackedMatmul(config));
  PackedMatmul& self = *matmul;
  std::string reference, reads_behind;
  QUERN_RETURN_IF_ERROR(CatchOneDnn(kOp, [&] {
    for (const int64_t task : {int64_t{0}, self.num_tasks_ - 1}) {
      for (const int64_t piece : {int64_t{0}, self.num_pieces_ - 1}) {
        const int64_t width = self.ColsOf(task), k = self.KOf(piece);
        Desc weights({k, width}, ToOneDnn(config.inner_b),
                     dnnl::memory::format_tag::any);
        // The largest block chooses the layout; smaller ones must take it.
        for (const int64_t rows : {kMaxMatmulRows, int64_t{16}, RowBucket(1)}) {
          const auto pd =
              self.Describe({rows, width, k, config.k, config.n}, weights);
          weights = pd.weights_desc();
          const std::string name = pd.impl_info_str();
          if (absl::StartsWith(name, "ref")) reference = name;
          if (AddsIntegers(config)) continue;
          if (!RowsKeepBits(name)) self.rows_keep_bits_ = false;
          if (ReadsBehindRows(name, k)) reads_behind = name;
        }
        self.packed_[task + 1 == self.num_tasks_]
                    [piece + 1 == self.num_pieces_] = weights;
      }
    }
  }));
  if (!reference.empty() && !config.reference_kernel) {
    return Unimplemented(kOp, "only oneDNN's reference kernel ", reference);
  }
  if (!reads_behind.empty()) {
    return Unimplemented(kOp, "oneDNN's kernel ", reads_behind,
                         " reads behind rows of k=", config.k);
  }
  if (self.widens_a() && config.a != DType::kI8) {
    QUERN_ASSIGN_OR_RETURN(self.widen_, Converter(config.a, config.inner_a));
  }
  if (self.narrows_c() && config.inner_c == DType::kF32) {
    QUERN_ASSIGN_OR_RETURN(self.narrow_, Converter(config.inner_c, config.c));
  }
  return matmul;
}

absl::Status PackedMatmul::Pack(const uint8_t* b, Executor& executor) {
  piece_bytes_ = 0;
  for (const auto& descs : packed_) {
    for (const Desc& desc : descs) {
      if (!desc) continue;
      piece_bytes_ = std::max(
          piece_bytes_, RoundUp(static_cast<int64_t>(desc.get_size()), kAlign));
    }
  }
  const int64_t num_jobs = num_tasks_ * num_pieces_;
  int64_t bytes = 0;
  if (!CheckedMul(piece_bytes_, num_jobs, &bytes)) {
    return InvalidArgument(kOp, "n=", config_.n, ", k=", config_.k,
                           "; the packed weights have more than 2^63 bytes");
  }
  QUERN_ASSIGN_OR_RETURN(weights_, AlignedBuffer::Create(bytes));

  std::mutex status_mutex;
  absl::Status status;
  executor.ParallelFor(num_jobs, [&](int64_t job, int) {
    const int64_t task = job / num_pieces_, piece = job % num_pieces_;
    const absl::Status job_status = CatchOneDnn(kOp, [&] {
      const ForOneThread one_thread;
      const Desc plain_desc({KOf(piece), ColsOf(task)}, ToOneDnn(config_.b),
                            dnnl::memory::dims{1, config_.k});
      const int64_t first = task * cols_ * config_.k + piece * max_k_;
      dnnl::memory plain =
          OneDnnMemory(plain_desc, b + first * SizeInBytes(config_.b));
      dnnl::memory packed = OneDnnMemory(PackedOf(task, piece),
                                         weights_.data() + job * piece_bytes_);
      dnnl::stream stream(OneDnnEngine());
      dnnl::reorder(plain, packed).execute(stream, plain, packed);
    });
    if (job_status.ok()) return;
    const std::lock_guard<std::mutex> lock(status_mutex);
    status.Update(job_status);
  });
  return status;
}

std::string PackedMatmul::Explain(int64_t m) const {
  const MatmulKey key{RowBucket(std::clamp<int64_t>(m, 1, kMaxMatmulRows)),
                      ColsOf(0), KOf(0), config_.k, config_.n};
  std::string text;
  const absl::Status status = CatchOneDnn(
      kOp, [&] { text = Describe(key, PackedOf(0, 0)).impl_info_str(); });
  if (!status.ok()) return std::string(status.message());
  return absl::StrCat(text, " a=", DTypeName(config_.inner_a),
                      " b=", DTypeName(config_.inner_b),
                      " c=", DTypeName(config_.inner_c));
}

}  // namespace quern
