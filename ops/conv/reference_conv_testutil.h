#ifndef QUERN_OPS_CONV_REFERENCE_CONV_TESTUTIL_H_
#define QUERN_OPS_CONV_REFERENCE_CONV_TESTUTIL_H_

// The oracle of convolutions: one output in double, by the formula of conv.h.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/ops/conv/conv_extents.h"

namespace quern {

struct ConvShape {
  int64_t in_channels = 1, out_channels = 1, groups = 1;
  ConvExtents in, kernel, stride, padding, dilation;
};

struct ConvOutput {
  double value;
  double magnitude;  // the sum of the magnitudes of what is added
};

// Output [o, z, y, x] of the input in[in_channels, depth, height, width].
// `bias` is empty or has a number for each output channel.
inline ConvOutput ReferenceConvolution(const ConvShape& s,
                                       const std::vector<double>& in,
                                       const std::vector<double>& weight,
                                       const std::vector<double>& bias,
                                       int64_t o, int64_t z, int64_t y,
                                       int64_t x) {
  const int64_t channels = s.in_channels / s.groups;
  const int64_t first = o / (s.out_channels / s.groups) * channels;
  ConvOutput sum = {0, 0};
  if (!bias.empty()) {
    const double b = bias[static_cast<size_t>(o)];
    sum = {b, std::abs(b)};
  }
  int64_t w = o * channels * s.kernel.depth * s.kernel.height * s.kernel.width;
  for (int64_t i = 0; i < channels; ++i) {
    for (int64_t dz = 0; dz < s.kernel.depth; ++dz) {
      for (int64_t dy = 0; dy < s.kernel.height; ++dy) {
        for (int64_t dx = 0; dx < s.kernel.width; ++dx, ++w) {
          const int64_t at_z =
              z * s.stride.depth + dz * s.dilation.depth - s.padding.depth;
          const int64_t at_y =
              y * s.stride.height + dy * s.dilation.height - s.padding.height;
          const int64_t at_x =
              x * s.stride.width + dx * s.dilation.width - s.padding.width;
          if (at_z < 0 || at_z >= s.in.depth) continue;
          if (at_y < 0 || at_y >= s.in.height) continue;
          if (at_x < 0 || at_x >= s.in.width) continue;
          const int64_t at =
              (((first + i) * s.in.depth + at_z) * s.in.height + at_y) *
                  s.in.width +
              at_x;
          const double product =
              weight[static_cast<size_t>(w)] * in[static_cast<size_t>(at)];
          sum.value += product;
          sum.magnitude += std::abs(product);
        }
      }
    }
  }
  return sum;
}

// Bound on the error of an output that is summed in f32, before it is rounded:
// a product and a sum for each tap and one for the bias, counted as 2^-23,
// twice the unit roundoff, which covers the terms of second order. Products of
// subnormal numbers may be lost.
inline double ConvolutionBound(const ConvShape& s, double magnitude) {
  const double taps =
      static_cast<double>(s.in_channels / s.groups * s.kernel.depth *
                          s.kernel.height * s.kernel.width);
  return (taps + 1) * 0x1p-23 * magnitude + taps * 0x1p-126;
}

}  // namespace quern

#endif  // QUERN_OPS_CONV_REFERENCE_CONV_TESTUTIL_H_
