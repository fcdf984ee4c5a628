#include "gemm/linear_impl.h"

#include <cstdint>

#include "absl/status/status.h"
#include "core/aligned_buffer.h"
#include "core/status_macros.h"

namespace quern {

absl::Status LinearScratch::Grow(int64_t bytes) {
  if (static_cast<int64_t>(buffer_.bytes()) >= bytes) return absl::OkStatus();
  buffer_ = AlignedBuffer();
  QUERN_ASSIGN_OR_RETURN(buffer_, AlignedBuffer::Create(bytes));
  return absl::OkStatus();
}

}  // namespace quern
