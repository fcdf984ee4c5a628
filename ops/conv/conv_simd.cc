#include "quern/core/float_type.h"
#include "quern/core/sets/avx3_zen4.h"
#include "quern/ops/conv/conv_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/conv/conv_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, kConvRowAlign>;
using VF = hn::Vec<DF>;

// kVectors vectors of outputs, of which n elements are wanted, from column x of
// the row on.
template <typename T, size_t kBlock, size_t kVectors>
HWY_INLINE void RunTile(const ConvRow& row, size_t x, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  VF sum[kBlock][kVectors];
  HWY_UNROLL(4)
  for (size_t o = 0; o < kBlock; ++o) {
    HWY_UNROLL(2)
    for (size_t v = 0; v < kVectors; ++v) {
      sum[o][v] = hn::Set(d, row.bias[o]);
    }
  }
  const float* HWY_RESTRICT weight = row.weights;
  for (size_t i = 0; i < row.channels; ++i) {
    for (size_t dz = 0; dz < row.depth; ++dz) {
      for (size_t dy = 0; dy < row.height; ++dy) {
        const float* HWY_RESTRICT in = row.in + i * row.channel_stride +
                                       dz * row.depth_stride +
                                       dy * row.height_stride + x;
        for (size_t dx = 0; dx < row.width_taps; ++dx) {
          VF tap[kVectors];
          HWY_UNROLL(2)
          for (size_t v = 0; v < kVectors; ++v) {
            tap[v] = hn::LoadU(d, in + row.offsets[dx] + v * lanes);
          }
          HWY_UNROLL(4)
          for (size_t o = 0; o < kBlock; ++o) {
            const auto w = hn::Set(d, weight[o]);
            HWY_UNROLL(2)
            for (size_t v = 0; v < kVectors; ++v) {
              sum[o][v] = hn::MulAdd(w, tap[v], sum[o][v]);
            }
          }
          weight += kBlock;
        }
      }
    }
  }
  HWY_UNROLL(4)
  for (size_t o = 0; o < kBlock; ++o) {
    T* const out = static_cast<T*>(row.out) + o * row.out_stride + x;
    HWY_UNROLL(2)
    for (size_t v = 0; v < kVectors; ++v) {
      const size_t left = n - v * lanes;
      if (left >= lanes) {
        StoreF32(sum[o][v], d, out + v * lanes);
      } else {
        StoreNF32(sum[o][v], d, out + v * lanes, left);
      }
    }
  }
}

template <typename T, size_t kBlock>
void RunRow(const ConvRow& row) {
  const size_t lanes = hn::Lanes(DF());
  for (size_t x = 0; x < row.width; x += 2 * lanes) {
    const size_t left = row.width - x;
    if (left > lanes) {
      RunTile<T, kBlock, 2>(row, x, HWY_MIN(left, 2 * lanes));
    } else {
      RunTile<T, kBlock, 1>(row, x, left);
    }
  }
}

ConvKernels GetKernels(DType out) {
  return WithFloatType(out, [](auto type) {
    using T = decltype(type);
    ConvKernels kernels = {};
    kernels.target = hwy::TargetName(HWY_TARGET);
    kernels.run[0] = &RunRow<T, 1>;
    kernels.run[1] = &RunRow<T, 2>;
    kernels.run[2] = &RunRow<T, 3>;
    kernels.run[3] = &RunRow<T, 4>;
    return kernels;
  });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
ConvKernels GetConvKernels(DType out) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(out);
}
}  // namespace quern
#endif  // HWY_ONCE
