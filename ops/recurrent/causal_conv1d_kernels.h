#ifndef QUERN_OPS_RECURRENT_CAUSAL_CONV1D_KERNELS_H_
#define QUERN_OPS_RECURRENT_CAUSAL_CONV1D_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"

namespace quern {

enum class ConvActivation : uint8_t { kNone, kSilu };

inline constexpr size_t kMaxConvWidth = 4;
// Channels that one call takes at most. Weights and history of a block, 16 KiB,
// stay in L1.
inline constexpr size_t kConvChannels = 512;

// Weights of a block of channels: weight[j][c], bias[c]. Vectors read beyond
// the last channel, within the arrays.
struct ConvWeights {
  alignas(64) float weight[kMaxConvWidth][kConvChannels];
  alignas(64) float bias[kConvChannels];
};

// Consecutive tokens of a sequence, on a block of channels. Strides are in
// elements.
struct ConvTokens {
  const void* x;
  size_t x_stride;
  void* out;
  size_t out_stride;
  // width - 1 rows of history: what is read, and what is written. `from` is
  // the same place, or later rows of it, or the row before, or apart.
  const void* from;
  size_t from_stride;
  void* state;
  size_t state_stride;
  size_t tokens;    // >= 1
  size_t channels;  // 1 <= channels <= kConvChannels
  bool fresh;       // the history is zeros, and `from` is not read
  // First rows of what is wanted next, in the same strides; or null.
  const void* next_state;
  const void* next_x;
  const void* next_out;
};

struct CausalConv1dKernels {
  const char* target;
  // weight[j][c] = w[c * width + j]
  void (*transpose)(const float* w, size_t channels, ConvWeights& weights);
  void (*run)(const ConvWeights& weights, const ConvTokens& tokens);
  // rows[i * row_stride + c] = dense[c * stride + i] for i < width - 1, and
  // back
  void (*load_dense)(const void* dense, size_t stride, size_t channels,
                     void* rows, size_t row_stride);
  void (*store_dense)(const void* rows, size_t row_stride, size_t channels,
                      void* dense, size_t stride);
};

// The kernels of the best instruction set this CPU supports. dtype: f32, bf16
// or f16; 2 <= width <= kMaxConvWidth.
CausalConv1dKernels GetCausalConv1dKernels(DType dtype, int64_t width,
                                           ConvActivation activation);

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_CAUSAL_CONV1D_KERNELS_H_
