#include "quern/ops/registry/reference/conv.h"

#include <cstdint>

#include "quern/core/tensor_view.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

// Row [i, j, k, l] of a tensor of five dimensions.
ScalarRow RowAt(const AnyTensorView& v, int64_t i, int64_t j, int64_t k,
                int64_t l) {
  return ScalarRow(v,
                   ((i * v.extent(1) + j) * v.extent(2) + k) * v.extent(3) + l);
}

// The sum of output [b, o, z, y, x], without its bias.
double Sum(const ConvSpec& s, const AnyTensorView& in,
           const AnyTensorView& weight, int64_t b, int64_t o,
           const ConvExtents& at) {
  const int64_t channels = s.in_channels / s.groups;
  const int64_t first = o / (s.out_channels / s.groups) * channels;
  double sum = 0;
  for (int64_t i = 0; i < channels; ++i) {
    for (int64_t dz = 0; dz < s.kernel.depth; ++dz) {
      for (int64_t dy = 0; dy < s.kernel.height; ++dy) {
        const ScalarRow w = RowAt(weight, o, i, dz, dy);
        const int64_t z =
            at.depth * s.stride.depth + dz * s.dilation.depth - s.padding.depth;
        const int64_t y = at.height * s.stride.height + dy * s.dilation.height -
                          s.padding.height;
        const bool inside =
            z >= 0 && z < in.extent(2) && y >= 0 && y < in.extent(3);
        const ScalarRow row =
            RowAt(in, b, first + i, inside ? z : 0, inside ? y : 0);
        for (int64_t dx = 0; dx < s.kernel.width; ++dx) {
          const int64_t x = at.width * s.stride.width + dx * s.dilation.width -
                            s.padding.width;
          const bool zero = !inside || x < 0 || x >= in.extent(4);
          sum += double{w[dx]} * (zero ? 0.0 : double{row[x]});
        }
      }
    }
  }
  return sum;
}

}  // namespace

void NativeConv(const ConvSpec& spec, const AnyTensorView& x,
                const AnyTensorView& weight, const AnyTensorView& bias,
                const AnyTensorView& out) {
  for (int64_t b = 0; b < out.extent(0); ++b) {
    for (int64_t o = 0; o < out.extent(1); ++o) {
      const double added =
          bias.rank() == 0 ? 0.0 : double{ScalarRow(bias, 0)[o]};
      for (int64_t i = 0; i < out.extent(2) * out.extent(3); ++i) {
        const int64_t z = i / out.extent(3), y = i % out.extent(3);
        const ScalarRow row = RowAt(out, b, o, z, y);
        for (int64_t j = 0; j < out.extent(4); ++j) {
          row.Set(j, static_cast<float>(added +
                                        Sum(spec, x, weight, b, o, {z, y, j})));
        }
      }
    }
  }
}

}  // namespace quern
