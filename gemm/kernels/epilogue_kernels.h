#ifndef QUERN_GEMM_KERNELS_EPILOGUE_KERNELS_H_
#define QUERN_GEMM_KERNELS_EPILOGUE_KERNELS_H_

// Private seam between the plans (plain C++) and epilogue_simd.cc, and what the
// plans do between a block of sums and c where there is an epilogue.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"

namespace quern {

struct EpilogueKernels {
  // v[i] = act(v[i]), i < n rounded up to 16; null for none.
  void (*activate)(float* v, size_t n);
  // v[i] = up(v[i]), likewise.
  void (*up)(float* v, size_t n);
  // c[i] = round_c(v[i] * up[i] + residual[i]), i < n. up or residual may be
  // null for none; residual may be c.
  void (*store)(const float* v, const float* up, const void* residual, void* c,
                size_t n);
};

// Kernels of the best instruction set that this CPU supports. c: f32, bf16 or
// f16.
EpilogueKernels GetEpilogueKernels(LinearActivation activation, DType c);

// Bytes from row to row of a matrix.
inline int64_t RowBytes(const AnyTensorView& x) {
  return x.RowStride() * static_cast<int64_t>(SizeOf(x.dtype()));
}

// Matrices of weights: gate and up, or all.
inline int64_t PartsOf(LinearActivation activation) {
  return IsGated(activation) ? 2 : 1;
}

// A block of c and of what is added to it.
struct EpilogueRows {
  int64_t rows, cols;
  int64_t element_size;
  uint8_t* c;
  int64_t c_row_bytes;
  const uint8_t* residual;  // or null
  int64_t residual_row_bytes;
};

inline EpilogueRows RowsOfC(int64_t rows, int64_t cols, int64_t row,
                            int64_t col, const AnyTensorView& c,
                            const AnyTensorView& residual) {
  EpilogueRows r = {rows, cols, static_cast<int64_t>(SizeOf(c.dtype()))};
  r.c_row_bytes = RowBytes(c);
  r.c = static_cast<uint8_t*>(c.mutable_data()) + row * r.c_row_bytes +
        col * r.element_size;
  if (residual.rank() != 0) {
    r.residual_row_bytes = RowBytes(residual);
    r.residual = static_cast<const uint8_t*>(residual.data()) +
                 row * r.residual_row_bytes + col * r.element_size;
  }
  return r;
}

// `finish(part, row, col, cols, v)` writes that many of the layer's f32 results
// from [row, col] of the block on to v.
template <typename FinishF32>
void ApplyEpilogue(const EpilogueKernels& kernels, int64_t parts,
                   const EpilogueRows& block, const FinishF32& finish) {
  // Columns of a row that are finished at a time: few enough to stay in L1.
  constexpr int64_t kCols = 128;
  alignas(64) float v[kCols] = {};
  alignas(64) float up[kCols] = {};
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t col = 0; col < block.cols; col += kCols) {
      const int64_t cols = std::min(kCols, block.cols - col);
      finish(0, row, col, cols, v);
      if (parts == 2) finish(1, row, col, cols, up);
      const auto n = static_cast<size_t>(cols);
      if (kernels.activate != nullptr) kernels.activate(v, n);
      if (kernels.up != nullptr) kernels.up(up, n);
      const int64_t offset = col * block.element_size;
      kernels.store(
          v, parts == 2 ? up : nullptr,
          block.residual == nullptr
              ? nullptr
              : block.residual + row * block.residual_row_bytes + offset,
          block.c + row * block.c_row_bytes + offset, n);
    }
  }
}

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_EPILOGUE_KERNELS_H_
