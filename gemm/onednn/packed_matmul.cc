#include "quern/gemm/onednn/packed_matmul.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

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
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/engine.h"
#include "quern/gemm/onednn/matmul_cache.h"
#include "quern/gemm/onednn/partition.h"
#include "quern/gemm/onednn/status.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

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

// Some of [k, n], `k_step` and `n_step` elements apart.
struct Block {
  int64_t k;
  int64_t n;
  int64_t k_step;
  int64_t n_step;
};

// Throws dnnl::error.
void Reorder(const void* from, const Block& block, DType dtype,
             dnnl::memory& packed) {
  const dnnl::memory::desc desc({block.k, block.n}, ToOneDnn(dtype),
                                dnnl::memory::dims{block.k_step, block.n_step});
  dnnl::memory plain = OneDnnMemory(desc, from);
  dnnl::stream stream(OneDnnEngine());
  dnnl::reorder(plain, packed).execute(stream, plain, packed);
}

// The block without gaps between its rows, or columns: oneDNN packs bytes from
// nothing else.
Block MakeDense(const uint8_t* from, const Block& block, DType dtype,
                std::vector<uint8_t>& dense) {
  const bool by_rows = block.n_step != 1;  // rows of k
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  const int64_t rows = by_rows ? block.n : block.k;
  const int64_t row_bytes = (by_rows ? block.k : block.n) * size;
  const int64_t step_bytes = (by_rows ? block.n_step : block.k_step) * size;
  dense.resize(static_cast<size_t>(rows * row_bytes));
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(dense.data() + row * row_bytes, from + row * step_bytes,
                static_cast<size_t>(row_bytes));
  }
  return by_rows ? Block{block.k, block.n, 1, block.k}
                 : Block{block.k, block.n, block.n, 1};
}

// Sums of integers are exact in any order.
bool AddsIntegers(const MatmulConfig& config) {
  return config.max_k != 0 || config.inner_b == DType::kI8;
}

// Whether a kernel's sums over k do not depend on the number of rows. brgemm's
// do not, to which linear_test.cc holds it; those of oneDNN's older f32 GEMM do
// (3.7.2, 2026); nobody has looked at AMX.
bool RowsKeepBits(absl::string_view kernel) {
  return absl::StartsWith(kernel, "brg") && !absl::StrContains(kernel, "amx");
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
  std::string reference;
  QUERN_RETURN_IF_ERROR(CatchOneDnn(config.op, [&] {
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
          if (!AddsIntegers(config) && !RowsKeepBits(name)) {
            self.rows_keep_bits_ = false;
          }
        }
        self.packed_[task + 1 == self.num_tasks_]
                    [piece + 1 == self.num_pieces_] = weights;
      }
    }
  }));
  if (!reference.empty() && !config.reference_kernel) {
    return Unimplemented(config.op, "only oneDNN's reference kernel ",
                         reference);
  }
  if (self.widens_a() && config.a != DType::kI8) {
    QUERN_ASSIGN_OR_RETURN(self.widen_, Converter(config.a, config.inner_a));
  }
  if (self.narrows_c() && config.inner_c == DType::kF32) {
    QUERN_ASSIGN_OR_RETURN(self.narrow_, Converter(config.inner_c, config.c));
  }
  return matmul;
}

absl::Status PackedMatmul::Pack(const AnyTensorView& from, bool by_rows,
                                Executor& executor) {
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
    return InvalidArgument(config_.op, "n=", config_.n, ", k=", config_.k,
                           "; the packed weights have more than 2^63 bytes");
  }
  QUERN_ASSIGN_OR_RETURN(weights_, AlignedBuffer::Create(bytes));

  // The stride of a single row may be any number, even one that oneDNN takes
  // for "to be told later".
  const int64_t stride = from.extent(0) > 1 ? from.stride(0) : from.extent(1);
  const int64_t n_step = by_rows ? stride : 1, k_step = by_rows ? 1 : stride;
  std::mutex status_mutex;
  absl::Status status;
  executor.ParallelFor(num_jobs, [&](int64_t job, int) {
    const int64_t task = job / num_pieces_, piece = job % num_pieces_;
    const absl::Status job_status = CatchOneDnn(config_.op, [&] {
      const ForOneThread one_thread;
      const int64_t first = (task * cols_ * n_step + piece * max_k_ * k_step) *
                            SizeInBytes(from.dtype());
      const auto* const source =
          static_cast<const uint8_t*>(from.data()) + first;
      dnnl::memory packed = OneDnnMemory(PackedOf(task, piece),
                                         weights_.data() + job * piece_bytes_);
      const Block block{KOf(piece), ColsOf(task), k_step, n_step};
      try {
        Reorder(source, block, from.dtype(), packed);
      } catch (const dnnl::error& error) {
        if (error.status != dnnl_unimplemented) throw;
        std::vector<uint8_t> dense;
        const Block as_dense = MakeDense(source, block, from.dtype(), dense);
        Reorder(dense.data(), as_dense, from.dtype(), packed);
      }
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
  const absl::Status status = CatchOneDnn(config_.op, [&] {
    text = Describe(key, PackedOf(0, 0)).impl_info_str();
  });
  if (!status.ok()) return std::string(status.message());
  return absl::StrCat(text, " a=", DTypeName(config_.inner_a),
                      " b=", DTypeName(config_.inner_b),
                      " c=", DTypeName(config_.inner_c));
}

}  // namespace quern
