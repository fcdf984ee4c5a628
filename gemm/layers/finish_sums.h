#ifndef QUERN_GEMM_LAYERS_FINISH_SUMS_H_
#define QUERN_GEMM_LAYERS_FINISH_SUMS_H_

// Private: how a block of sums becomes rows of c, in the cache.

#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/packed_product.h"

namespace quern {

// Where finished rows go: c, or f32 that the epilogue reads.
struct FinishTo {
  int64_t rows, cols;
  void* c;
  ptrdiff_t c_row_bytes;
  bool before_epilogue;
};

// Turns a block of sums into rows of c: finish(part, row, col, to) writes the
// layer's results from that row and column of the block on, then come
// activation and residual. `first` is the row of c that the block's rows are
// counted from.
template <typename Sum, typename FinishRows>
void FinishBlock(LinearActivation activation, const EpilogueKernels& epilogue,
                 const SumsBlock<Sum>& block, int64_t first,
                 const LinearArgs& args, const FinishRows& finish) {
  const EpilogueRows to = RowsOfC(block.rows, block.cols, first + block.row,
                                  block.col, args.c, args.residual);
  if (activation == LinearActivation::kNone && to.residual == nullptr) {
    finish(0, 0, 0,
           FinishTo{block.rows, block.cols, to.c,
                    static_cast<ptrdiff_t>(to.c_row_bytes), false});
    return;
  }
  ApplyEpilogue(
      epilogue, PartsOf(activation), to,
      [&](int64_t part, int64_t row, int64_t col, int64_t cols, float* v) {
        finish(part, row, col, FinishTo{1, cols, v, 0, true});
      });
}

// Turns f32 sums into rows of c.
class FinishFloats {
 public:
  FinishFloats(const LinearSpec& spec, const LinearWeights& weights)
      : activation_(spec.activation),
        bias_(weights.bias()),
        part_n_(weights.spec().n / PartsOf(spec.activation)),
        finish_(GetFinish(spec.c)),
        finish_f32_(GetFinish(DType::kF32)),
        epilogue_(GetEpilogueKernels(spec.activation, spec.c)) {}

  void operator()(const SumsBlock<float>& block, int64_t first,
                  const LinearArgs& args) const;

 private:
  LinearActivation activation_;
  const float* bias_;
  int64_t part_n_;
  Finish finish_;
  Finish finish_f32_;  // before the epilogue, if there is one
  EpilogueKernels epilogue_;
};

}  // namespace quern

#endif  // QUERN_GEMM_LAYERS_FINISH_SUMS_H_
