#ifndef QUERN_OPS_CONV_CONV_PARTS_H_
#define QUERN_OPS_CONV_CONV_PARTS_H_

// Private: what Create and Execute of the plan share.

#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/conv/conv_kernels.h"
#include "quern/ops/dense_view.h"

namespace quern {
namespace conv_internal {

inline constexpr int64_t kBlock = static_cast<int64_t>(kConvChannelBlock);
// Patches of one product: enough rows to fill a machine, few enough that they
// and their outputs stay in caches.
inline constexpr int64_t kPatchRows = 1024;

// *weights = weights of one output. False if that overflows.
inline bool WeightsOfOutput(const ConvSpec& s, int64_t* weights) {
  return CheckedMul(s.in_channels / s.groups, s.kernel.depth, weights) &&
         CheckedMul(*weights, s.kernel.height, weights) &&
         CheckedMul(*weights, s.kernel.width, weights);
}

// Largest distance of rows, in elements, that every implementation of a product
// takes: oneDNN holds strides as 32-bit numbers of bytes.
inline constexpr int64_t kMaxRowStride = (int64_t{1} << 29) - 1;

// Whether a product may take the rows of a view where they are. Others are
// copied.
inline bool IsMatrix(const AnyTensorView& v) {
  return IsDense(v, 1) && (v.extent(0) <= 1 || v.stride(0) <= kMaxRowStride);
}

// Rows [first, first + count) of a view as a matrix of `columns`, where
// dimensions 1 to rank - 1 are dense.
inline AnyTensorView DenseRows(const AnyTensorView& v, int64_t first,
                               int64_t count, int64_t columns) {
  const int64_t stride = v.RowStride();
  const int64_t at = first * stride * static_cast<int64_t>(SizeOf(v.dtype()));
  if (v.writable()) {
    return AnyTensorView(
        v.dtype(),
        static_cast<void*>(static_cast<char*>(v.mutable_data()) + at), 2,
        {count, columns}, {stride, 1});
  }
  return AnyTensorView(
      v.dtype(),
      static_cast<const void*>(static_cast<const char*>(v.data()) + at), 2,
      {count, columns}, {stride, 1});
}

inline ConvExtents ExtentsOf(const AnyTensorView& v) {
  return {v.extent(2), v.extent(3), v.extent(4)};
}

// Scratch of some patches; the product takes its own behind it.
struct PatchScratch {
  char* patches;
  char* outputs;
};
template <typename Allocator>
PatchScratch LayOutPatches(Allocator& a, int64_t patch_bytes,
                           int64_t output_bytes) {
  return {a.template Allocate<char>("patches", patch_bytes),
          a.template Allocate<char>("outputs", output_bytes)};
}

struct DirectScratch {
  size_t* offsets;
  float* image;
};
template <typename Allocator>
DirectScratch LayOutDirect(Allocator& a, int64_t taps, int64_t elements) {
  return {a.template Allocate<size_t>("offsets", taps),
          a.template Allocate<float>("padded image", elements)};
}

}  // namespace conv_internal
}  // namespace quern

#endif  // QUERN_OPS_CONV_CONV_PARTS_H_
