#ifndef QUERN_GEMM_ONEDNN_SCRATCH_H_
#define QUERN_GEMM_ONEDNN_SCRATCH_H_

#include <cstddef>

#include "core/aligned_buffer.h"

namespace quern {

// Scratch of Execute. Grows when a call needs more than any before it; one per
// thread that calls Execute serves any number of plans of this folder.
class OneDnnScratch {
 public:
  OneDnnScratch() = default;
  size_t bytes() const { return buffer_.bytes(); }

 private:
  friend class PackedMatmul;
  AlignedBuffer buffer_;
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_SCRATCH_H_
