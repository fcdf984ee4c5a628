#include "quern/ops/conv/padded_image.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/threads/parallel_rows.h"
#include "quern/ops/conv/conv_kernels.h"

namespace quern {
namespace {

// Positions from the first tap of the first output to the last of the last.
int64_t Reach(int64_t out, int64_t stride, int64_t kernel, int64_t dilation) {
  return (out - 1) * stride + (kernel - 1) * dilation + 1;
}

}  // namespace

PaddedImage::PaddedImage(const ConvExtents& kernel, const ConvExtents& stride,
                         const ConvExtents& padding,
                         const ConvExtents& dilation, const ConvExtents& out)
    : stride_(stride),
      padding_(padding),
      dilation_(dilation),
      // The remainders of consecutive taps repeat after this many.
      slots_(std::min(kernel.width,
                      stride.width / std::gcd(stride.width, dilation.width))),
      slot_width_(RoundUp(out.width, static_cast<int64_t>(kConvRowAlign)) +
                  (kernel.width - 1) * dilation.width / stride.width),
      depth_(Reach(out.depth, stride.depth, kernel.depth, dilation.depth)),
      height_(
          Reach(out.height, stride.height, kernel.height, dilation.height)) {}

bool PaddedImage::RowElements(int64_t* row) const {
  return CheckedMul(slots_, slot_width_, row);
}

int64_t PaddedImage::Remainder(int64_t slot) const {
  return slot * dilation_.width % stride_.width;
}

int64_t PaddedImage::Offset(int64_t dx) const {
  return dx % slots_ * slot_width_ + dx * dilation_.width / stride_.width;
}

void PaddedImage::FillRow(const RowBlockKernels& blocks, const char* from,
                          int64_t width, int64_t element, float* row) const {
  std::fill(row, row + slots_ * slot_width_, 0.0f);
  if (from == nullptr) return;
  alignas(64) float block[kRowBlock];
  for (int64_t first = 0; first < width;
       first += static_cast<int64_t>(kRowBlock)) {
    const int64_t count =
        std::min(static_cast<int64_t>(kRowBlock), width - first);
    blocks.load(from + first * element, static_cast<size_t>(count), block);
    for (int64_t slot = 0; slot < slots_; ++slot) {
      // Column i of the slot is number i * stride - start of the block.
      const int64_t start = first + padding_.width - Remainder(slot);
      float* const to = row + slot * slot_width_;
      int64_t i = start <= 0 ? 0 : DivCeil(start, stride_.width);
      const int64_t end =
          start + count <= 0
              ? 0
              : std::min(slot_width_, DivCeil(start + count, stride_.width));
      if (stride_.width == 1 && i < end) {
        std::copy(block + (i - start), block + (end - start), to + i);
        continue;
      }
      for (; i < end; ++i) to[i] = block[i * stride_.width - start];
    }
  }
}

void PaddedImage::Fill(const AnyTensorView& in, int64_t b,
                       const RowBlockKernels& blocks, float* to,
                       Executor& executor) const {
  const auto element = static_cast<int64_t>(SizeOf(in.dtype()));
  const int64_t row = slots_ * slot_width_;
  const auto step = [&](int d, int64_t i) {
    return i == 0 ? 0 : i * in.stride(d) * element;
  };
  ParallelRowRanges(
      executor, in.extent(1) * depth_ * height_, 2 * row, 4,
      [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const int64_t y = r % height_ - padding_.height;
          const int64_t z = r / height_ % depth_ - padding_.depth;
          const char* from = nullptr;
          if (y >= 0 && y < in.extent(3) && z >= 0 && z < in.extent(2)) {
            from = static_cast<const char*>(in.data()) + step(0, b) +
                   step(1, r / height_ / depth_) + step(2, z) + step(3, y);
          }
          FillRow(blocks, from, in.extent(4), element, to + r * row);
        }
      });
}

}  // namespace quern
