#ifndef QUERN_OPS_CONV_CONV_KERNELS_H_
#define QUERN_OPS_CONV_CONV_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

// Output channels that a call computes together. Four channels of two vectors
// are eight sums, which hide the latency of a multiply-add and fit the 16
// registers of AVX2 together with two inputs and a weight.
inline constexpr size_t kConvChannelBlock = 4;
// A multiple of every vector's length: what a call may read of a row.
inline constexpr size_t kConvRowAlign = 16;

// One row of the outputs of a block of channels. Strides are in elements.
//
// `in` is the first tap of the first output, in a padded image of f32, whose
// columns are sorted by their remainder of division by the stride: what tap dx
// reads for consecutive outputs is then consecutive, from offsets[dx] on. Reads
// RoundUp(width, kConvRowAlign) elements from each offset.
struct ConvRow {
  const float* in;
  size_t channel_stride, depth_stride, height_stride;
  size_t channels, depth, height, width_taps;  // of the kernel
  const size_t* offsets;                       // [width_taps]
  const float* weights;  // [channels, depth, height, width_taps, block]
  const float* bias;     // [block]
  void* out;
  size_t out_stride;  // from channel to channel
  size_t width;       // outputs of the row, >= 1
};

struct ConvKernels {
  const char* target;
  // run[n - 1] computes a block of n channels.
  void (*run[kConvChannelBlock])(const ConvRow& row);
};

// The kernels of the best instruction set this CPU supports, for outputs of
// f32, bf16 or f16.
ConvKernels GetConvKernels(DType out);

}  // namespace quern

#endif  // QUERN_OPS_CONV_CONV_KERNELS_H_
