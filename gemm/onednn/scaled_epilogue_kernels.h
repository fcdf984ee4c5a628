#ifndef QUERN_GEMM_ONEDNN_SCALED_EPILOGUE_KERNELS_H_
#define QUERN_GEMM_ONEDNN_SCALED_EPILOGUE_KERNELS_H_

// Private seam between scaled_linear.cc and its SIMD translation unit.

#include <cstddef>
#include <cstdint>

namespace quern {

struct ScaledEpilogueRow {
  const int32_t* sums;      // [n], of a * w, plus `offsets`, modulo 2^32
  const int32_t* offsets;   // [n]; null: none
  const int32_t* col_sums;  // [n], of w; null: no zero point
  const float* w_scales;    // [n]
  const float* bias;        // [n]; null: none
  int32_t zero_point;
  float a_scale;
};

struct ScaledEpilogueKernels {
  const char* target;
  // out[i] = f32(sums[i] - offsets[i] - zero_point * col_sums[i])
  //          * (a_scale * w_scales[i]) + bias[i]
  // `out` may be where `sums` is.
  void (*row)(const ScaledEpilogueRow& row, size_t n, float* out);
};

// The kernels of the best instruction set this CPU supports.
ScaledEpilogueKernels GetScaledEpilogueKernels();

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_SCALED_EPILOGUE_KERNELS_H_
