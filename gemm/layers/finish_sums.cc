#include "quern/gemm/layers/finish_sums.h"

#include <cstddef>
#include <cstdint>

#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/schedule/packed_product.h"

namespace quern {

void FinishFloats::operator()(const SumsBlock<float>& block, int64_t first,
                              const LinearArgs& args) const {
  FinishBlock(activation_, epilogue_, block, first, args,
              [&](int64_t part, int64_t row, int64_t col, const FinishTo& to) {
                FinishArgs finish = {};
                finish.sums = block.sums + part * block.part_stride +
                              row * block.stride + col;
                finish.sums_stride = static_cast<size_t>(block.stride);
                if (bias_ != nullptr)
                  finish.bias = bias_ + part * part_n_ + block.col + col;
                finish.rows = static_cast<size_t>(to.rows);
                finish.cols = static_cast<size_t>(to.cols);
                finish.c = to.c;
                finish.c_row_bytes = to.c_row_bytes;
                (to.before_epilogue ? finish_f32_ : finish_)(finish);
              });
}

}  // namespace quern
