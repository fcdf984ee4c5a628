#include "gemm/linear_impl.h"

#include <cstdint>

#include "absl/status/status.h"
#include "core/aligned_buffer.h"
#include "core/status_macros.h"

namespace quern {

absl::Status LinearScratch::Grow(int64_t bytes) {
  if (static_cast<int64_t>(buffer_.bytes()) >= bytes) return absl::OkStatus();
  // Both live for a moment: where there is no room, what was reserved stays.
  QUERN_ASSIGN_OR_RETURN(buffer_, AlignedBuffer::Create(bytes));
  return absl::OkStatus();
}

}  // namespace quern
