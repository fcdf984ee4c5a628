#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/onednn/engine.h"
#include "quern/gemm/onednn/matmul_cache.h"
#include "quern/gemm/onednn/packed_matmul.h"
#include "quern/gemm/onednn/partition.h"
#include "quern/gemm/onednn/status.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

constexpr auto kAlign = static_cast<int64_t>(AlignedBuffer::kAlignment);
// Rows of less than this are copied by the caller's thread alone.
constexpr int64_t kParallelCopyBytes = 1 << 16;

int64_t SizeInBytes(DType dtype) { return static_cast<int64_t>(SizeOf(dtype)); }

// Data: uint8_t, or const uint8_t for rows that are only read.
template <typename Data>
AnyTensorView Rows(DType dtype, Data* data, int64_t rows, int64_t cols,
                   int64_t stride) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {stride, 1});
}

const uint8_t* RowOf(const AnyTensorView& view, int64_t row) {
  return static_cast<const uint8_t*>(view.data()) +
         row * view.RowStride() * SizeInBytes(view.dtype());
}

[[noreturn]] void Fail(const absl::Status& status) {
  CheckFailed(std::string(status.message()).c_str(), __FILE__, __LINE__);
}

template <typename T>
dnnl::memory Vector(const T* data, int64_t size) {
  return OneDnnMemory({{size}, ToOneDnn(DTypeOf<T>), dnnl::memory::dims{1}},
                      data);
}

}  // namespace

// One call of Execute.
struct PackedMatmul::Run {
  const MatmulCall& call;
  int64_t m;
  int64_t block_rows;  // of each row block but the tail
  int64_t tail_rows;
  // [is it the tail of the rows][last column task][last piece of k]
  MatmulCache::Kernel kernels[2][2][2];
  uint8_t* worker_memory;
  int64_t worker_bytes;
  int64_t kernel_bytes;  // oneDNN's, then the tile, then a piece's sums
  int64_t tile_bytes;
  int64_t a_bytes;  // staged rows of all workers, in front of worker_memory
  bool dense;       // all rows of a and c go through scratch

  // Rows that `rows` rows from the beginning of a block take in scratch, where
  // the tail is padded.
  int64_t Padded(int64_t rows) const {
    const int64_t tail = rows % block_rows;
    return rows - tail + (tail == 0 ? 0 : RowBucket(tail));
  }
  int64_t bytes(int64_t workers) const {
    return a_bytes + workers * worker_bytes;
  }
  // Whether the tile goes through scratch. oneDNN 3.7.2 writes a c of one
  // column as if its stride were 1 (2026).
  bool Stages(const PackedMatmul& matmul, int64_t rows, int64_t width) const {
    return dense || call.finish != nullptr || matmul.narrows_c() ||
           matmul.adds_i32() || width == 1 || rows != RowBucket(rows);
  }
};

// Rows [first, first + rows) as inner_a, dense, and zeros up to `bucket` rows.
void PackedMatmul::StageRows(const AnyTensorView& a, int64_t first,
                             int64_t rows, int64_t bucket, uint8_t* to,
                             Executor& executor) const {
  const int64_t k = config_.k;
  const int64_t row_bytes = k * SizeInBytes(config_.inner_a);
  const auto stage = [&](int64_t row, int) {
    uint8_t* const out = to + row * row_bytes;
    if (row >= rows) {
      std::memset(out, 0, static_cast<size_t>(row_bytes));
      return;
    }
    const uint8_t* const in = RowOf(a, first + row);
    if (!widens_a()) {
      std::memcpy(out, in, static_cast<size_t>(row_bytes));
    } else if (config_.inner_a == DType::kU8) {
      for (int64_t i = 0; i < k; ++i) {
        out[i] = static_cast<uint8_t>(in[i] ^ 0x80);
      }
    } else if (config_.a == DType::kI8) {
      const auto* from = reinterpret_cast<const int8_t*>(in);
      auto* const wide = reinterpret_cast<float*>(out);
      for (int64_t i = 0; i < k; ++i) wide[i] = static_cast<float>(from[i]);
    } else {
      InlineExecutor inline_executor;
      widen_->Execute(Rows(config_.a, in, 1, k, k),
                      Rows(config_.inner_a, out, 1, k, k), inline_executor);
    }
  };
  if (bucket * row_bytes <= kParallelCopyBytes) {
    InlineExecutor().ParallelFor(bucket, stage);
  } else {
    executor.ParallelFor(bucket, stage);
  }
}

// Multiplies one row block by one column task. `first` is the block's first row
// in a and c.
void PackedMatmul::RunTask(const Run& run, int64_t first,
                           const uint8_t* rows_of_a, int64_t task,
                           int worker) const {
  const bool tail = first + run.block_rows > run.m;
  const bool last = task + 1 == num_tasks_;
  const int64_t rows = tail ? run.tail_rows : run.block_rows;
  const int64_t width = ColsOf(task), col = task * cols_;
  const MatmulCall& call = run.call;
  uint8_t* const own = run.worker_memory + worker * run.worker_bytes;
  uint8_t* const staged = own + run.kernel_bytes;
  uint8_t* const sums = staged + run.tile_bytes;
  const bool stages = run.Stages(*this, rows, width);
  const int64_t c_size = SizeInBytes(call.c.dtype());
  uint8_t* const c_out = static_cast<uint8_t*>(call.c.mutable_data()) +
                         (first * call.c.RowStride() + col) * c_size;
  const absl::Status status = CatchOneDnn("linear", [&] {
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      const MatmulKernel& kernel =
          *run.kernels[tail][last][piece + 1 == num_pieces_];
      const uint8_t* const a_piece =
          rows_of_a + piece * max_k_ * SizeInBytes(config_.inner_a);
      std::unordered_map<int, dnnl::memory> args;
      args.emplace(DNNL_ARG_SRC, OneDnnMemory(kernel.a, a_piece));
      args.emplace(DNNL_ARG_WEIGHTS,
                   OneDnnMemory(kernel.b,
                                weights_.data() + (task * num_pieces_ + piece) *
                                                      piece_bytes_));
      args.emplace(DNNL_ARG_DST,
                   OneDnnMemory(kernel.c, stages ? staged : c_out));
      if (config_.bias) {
        const Desc bias({1, width}, dnnl::memory::data_type::f32,
                        dnnl::memory::format_tag::ab);
        args.emplace(DNNL_ARG_BIAS, OneDnnMemory(bias, call.bias + col));
      }
      if (config_.scaled) {
        args.emplace(DNNL_ARG_ATTR_SCALES | DNNL_ARG_SRC,
                     Vector(call.a_scale, 1));
        args.emplace(DNNL_ARG_ATTR_SCALES | DNNL_ARG_WEIGHTS,
                     Vector(call.weight_scales + col, width));
      }
      if (config_.zero_point) {
        args.emplace(DNNL_ARG_ATTR_ZERO_POINTS | DNNL_ARG_SRC,
                     Vector(call.a_zero_point, 1));
      }
      if (kernel.scratch.get_size() > 0) {
        args.emplace(DNNL_ARG_SCRATCHPAD, OneDnnMemory(kernel.scratch, own));
      }
      kernel.primitive.execute(dnnl::stream(OneDnnEngine()), args);
      if (adds_i32()) {
        const auto* const part = reinterpret_cast<const float*>(staged);
        auto* const sum = reinterpret_cast<int32_t*>(sums);
        for (int64_t i = 0; i < rows * width; ++i) {
          sum[i] = (piece == 0 ? 0 : sum[i]) + static_cast<int32_t>(part[i]);
        }
      }
    }
  });
  if (!status.ok()) Fail(status);
  if (!stages) return;
  if (call.finish != nullptr) {
    (*call.finish)({first, col, rows, width, adds_i32() ? sums : staged});
    return;
  }
  const int64_t c_stride = call.c.RowStride();
  if (narrows_c()) {
    InlineExecutor inline_executor;
    narrow_->Execute(Rows(config_.inner_c, staged, rows, width, width),
                     Rows(config_.c, c_out, rows, width, c_stride),
                     inline_executor);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(c_out + r * c_stride * c_size, staged + r * width * c_size,
                static_cast<size_t>(width * c_size));
  }
}

int64_t PackedMatmul::TileBytes(int64_t rows, int64_t cols) const {
  return RoundUp(rows * cols * SizeInBytes(config_.inner_c) + kTilePadding,
                 kAlign);
}

// Kernels, and how much scratch they take.
PackedMatmul::Run PackedMatmul::Prepare(const MatmulCall& call, int64_t workers,
                                        bool dense) const {
  const int64_t m = call.a.extent(0), k = config_.k;
  const int64_t block_rows = BlockRows(m, workers);
  const int64_t tail_rows = m % block_rows;
  const int64_t tail_bucket = tail_rows == 0 ? 0 : RowBucket(tail_rows);
  Run run{call, m, block_rows, tail_rows, {}, nullptr, 0, 0, 0, 0, dense};
  const bool stages_a = dense || widens_a();
  const absl::Status status = CatchOneDnn("linear", [&] {
    for (const bool tail : {false, true}) {
      const int64_t rows = tail ? tail_rows : block_rows;
      if (rows == 0 || rows > m) continue;
      const int64_t bucket = RowBucket(rows);
      for (const bool last : {false, true}) {
        const int64_t task = last ? num_tasks_ - 1 : 0;
        if (!last && num_tasks_ == 1) continue;
        const int64_t width = ColsOf(task);
        MatmulKey key{bucket, width, k, k, width};
        if (!stages_a && rows == bucket) key.lda = call.a.stride(0);
        if (run.Stages(*this, rows, width)) {
          run.tile_bytes = std::max(run.tile_bytes, TileBytes(bucket, width));
        } else {
          key.ldc = call.c.stride(0);
        }
        for (const bool last_piece : {false, true}) {
          if (!last_piece && num_pieces_ == 1) continue;
          const int64_t piece = last_piece ? num_pieces_ - 1 : 0;
          key.k = KOf(piece);
          auto& kernel = run.kernels[tail][last][last_piece];
          kernel = Find(key, PackedOf(task, piece));
          run.kernel_bytes =
              std::max(run.kernel_bytes,
                       static_cast<int64_t>(kernel->scratch.get_size()));
        }
      }
    }
  });
  if (!status.ok()) Fail(status);
  const int64_t staged_rows = stages_a ? run.Padded(std::min(m, kMaxMatmulRows))
                              : tail_bucket != tail_rows ? tail_bucket
                                                         : 0;
  run.a_bytes = RoundUp(staged_rows * k * SizeInBytes(config_.inner_a), kAlign);
  run.kernel_bytes = RoundUp(run.kernel_bytes, kAlign);
  run.worker_bytes = run.kernel_bytes + run.tile_bytes * (adds_i32() ? 2 : 1);
  return run;
}

absl::StatusOr<int64_t> PackedMatmul::WorkspaceBytes(int64_t max_m,
                                                     int64_t workers) const {
  if (max_m == 0) return 0;
  const int64_t most = RowBucket(std::min(max_m, kMaxMatmulRows));
  int64_t kernel_bytes = 0, width = 0;
  QUERN_RETURN_IF_ERROR(CatchOneDnn("linear", [&] {
    for (int64_t rows = 1; rows <= most; ++rows) {
      if (rows != RowBucket(rows)) continue;
      for (const int64_t task : {int64_t{0}, num_tasks_ - 1}) {
        for (const int64_t piece : {int64_t{0}, num_pieces_ - 1}) {
          width = std::max(width, ColsOf(task));
          const MatmulKey key{rows, ColsOf(task), KOf(piece), config_.k,
                              ColsOf(task)};
          kernel_bytes =
              std::max(kernel_bytes,
                       static_cast<int64_t>(Describe(key, PackedOf(task, piece))
                                                .scratchpad_desc()
                                                .get_size()));
        }
      }
    }
  }));
  return RoundUp(most * config_.k * SizeInBytes(config_.inner_a), kAlign) +
         workers * (RoundUp(kernel_bytes, kAlign) +
                    TileBytes(most, width) * (adds_i32() ? 2 : 1));
}

void PackedMatmul::Execute(const MatmulCall& call, Workspace workspace,
                           Executor& executor) const noexcept {
  const AnyTensorView& a = call.a;
  const int64_t m = a.extent(0);
  if (m == 0) return;
  const int64_t workers = executor.num_workers();
  Run in_place = Prepare(call, workers, false);
  // Some strides ask oneDNN for more scratch than dense rows do, which is what
  // WorkspaceBytes counts.
  const bool dense =
      in_place.bytes(workers) > static_cast<int64_t>(workspace.bytes_left());
  Run run = dense ? Prepare(call, workers, true) : std::move(in_place);
  uint8_t* const staged_a =
      workspace.Allocate<uint8_t>("oneDNN", run.bytes(workers));
  run.worker_memory = staged_a + run.a_bytes;

  if (!run.dense && !widens_a()) {
    const int64_t tail_first = m - run.tail_rows;
    const int64_t tail_bucket =
        run.tail_rows == 0 ? 0 : RowBucket(run.tail_rows);
    const bool stages_tail = tail_bucket != run.tail_rows;
    if (stages_tail) {
      StageRows(a, tail_first, run.tail_rows, tail_bucket, staged_a, executor);
    }
    // Rows fastest: a worker keeps its weights in cache over the row blocks.
    const int64_t blocks = DivCeil(m, run.block_rows);
    executor.ParallelFor(blocks * num_tasks_, [&](int64_t index, int worker) {
      const int64_t first = index % blocks * run.block_rows;
      const bool staged = stages_tail && first == tail_first;
      RunTask(run, first, staged ? staged_a : RowOf(a, first), index / blocks,
              worker);
    });
    return;
  }
  const int64_t row_bytes = config_.k * SizeInBytes(config_.inner_a);
  for (int64_t begin = 0; begin < m; begin += kMaxMatmulRows) {
    const int64_t rows = std::min(kMaxMatmulRows, m - begin);
    StageRows(a, begin, rows, run.Padded(rows), staged_a, executor);
    const int64_t blocks = DivCeil(rows, run.block_rows);
    executor.ParallelFor(blocks * num_tasks_, [&](int64_t index, int worker) {
      const int64_t row = index % blocks * run.block_rows;
      RunTask(run, begin + row, staged_a + row * row_bytes, index / blocks,
              worker);
    });
  }
}

}  // namespace quern
