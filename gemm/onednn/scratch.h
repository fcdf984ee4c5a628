#ifndef QUERN_GEMM_ONEDNN_SCRATCH_H_
#define QUERN_GEMM_ONEDNN_SCRATCH_H_

#include <cstddef>
#include <cstdint>

#include "quern/core/aligned_buffer.h"
#include "quern/core/workspace.h"

namespace quern {

// Scratch of Execute: memory of its own, which grows when a call needs more
// than any before it, or memory that is lent. One per thread that calls Execute
// serves any number of plans of this folder.
class OneDnnScratch {
 public:
  OneDnnScratch() = default;
  // Borrows what is left of `workspace`, at least the plan's WorkspaceBytes,
  // and never grows.
  explicit OneDnnScratch(Workspace workspace)
      : lent_(true),
        lent_bytes_(workspace.bytes_left() / AlignedBuffer::kAlignment *
                    AlignedBuffer::kAlignment),
        lent_data_(workspace.Allocate<uint8_t>(
            "oneDNN", static_cast<int64_t>(lent_bytes_))) {}

  // Size of the memory of its own, in bytes; 0 where memory is lent.
  size_t bytes() const { return buffer_.bytes(); }

 private:
  friend class PackedMatmul;
  size_t room() const { return lent_ ? lent_bytes_ : buffer_.bytes(); }
  uint8_t* data() { return lent_ ? lent_data_ : buffer_.data(); }

  AlignedBuffer buffer_;
  bool lent_ = false;
  size_t lent_bytes_ = 0;
  uint8_t* lent_data_ = nullptr;
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_SCRATCH_H_
