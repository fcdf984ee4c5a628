#ifndef QUERN_OPS_CONV_PADDED_IMAGE_H_
#define QUERN_OPS_CONV_PADDED_IMAGE_H_

// Private: an input as the direct kernel reads it, f32 with its zeros around
// it. The columns of a row are sorted by their remainder of division by the
// stride. A slot holds one remainder that a tap needs:
//
//   row[slot, i] = in[i * stride + Remainder(slot) - padding], or 0 outside
//
// and tap dx of output x reads slot dx % slots, at Offset(dx) + x.

#include <cstdint>

#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/row_block_kernels.h"

namespace quern {

class PaddedImage {
 public:
  // The caller has proved that `out` are the extents of the outputs.
  PaddedImage(const ConvExtents& kernel, const ConvExtents& stride,
              const ConvExtents& padding, const ConvExtents& dilation,
              const ConvExtents& out);

  int64_t slots() const { return slots_; }
  // Rows of a channel that the kernel reaches, and elements of each.
  int64_t depth() const { return depth_; }
  int64_t height() const { return height_; }
  // False, and *row unspecified, for 2^63 elements or more.
  bool RowElements(int64_t* row) const;

  // Offset of tap dx of the first output of a row.
  int64_t Offset(int64_t dx) const;

  // Fills the image at `to` with in[b]. `blocks` load
  // in's dtype.
  void Fill(const AnyTensorView& in, int64_t b, const RowBlockKernels& blocks,
            float* to, Executor& executor) const;

 private:
  int64_t Remainder(int64_t slot) const;
  // `from`: `width` elements of the input, or null for a row of zeros.
  void FillRow(const RowBlockKernels& blocks, const char* from, int64_t width,
               int64_t element, float* row) const;

  ConvExtents stride_, padding_, dilation_;
  int64_t slots_, slot_width_, depth_, height_;
};

}  // namespace quern

#endif  // QUERN_OPS_CONV_PADDED_IMAGE_H_
