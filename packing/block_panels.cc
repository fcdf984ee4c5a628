#include "quern/packing/block_panels.h"

#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {

absl::StatusOr<BlockPanels> BlockPanels::Create(const BlockCodes& codes,
                                                int64_t k, int64_t n) {
  constexpr char kOp[] = "block_panels";
  const int64_t unit = codes.has_head() ? kRecordK : kBlockK;
  if (n < 1) return InvalidArgument(kOp, "n=", n, "; need 1 or more");
  if (k < 1 || k % unit != 0) {
    return InvalidArgument(kOp, "k=", k, "; need a positive multiple of ",
                           unit);
  }
  const bool halves = codes.scales == BlockScales::kBytes ||
                      codes.scales == BlockScales::kNibbles;
  if (codes.sub_block != kBlockK && !(halves && codes.sub_block == 16)) {
    return InvalidArgument(kOp, "sub_block=", codes.sub_block, "; need ",
                           kBlockK, halves ? " or 16" : "");
  }
  const BlockPanels layout(codes, k, n);
  int64_t bytes = 0;
  if (!CheckedMul(layout.records(), layout.record_bytes(), &bytes) ||
      !CheckedMul(layout.panels(), bytes, &bytes)) {
    return InvalidArgument(kOp, "k=", k, ", n=", n,
                           "; the packed weights have more than 2^63 bytes");
  }
  return layout;
}

}  // namespace quern
