#include "tools/perf/op.h"

#include "absl/strings/string_view.h"
#include "core/dtype.h"

namespace quern {

absl::string_view DramKindName(DramKind kind) {
  switch (kind) {
    case DramKind::kRead:
      return "read";
    case DramKind::kWrite:
      return "write";
    case DramKind::kCopy:
      return "copy";
  }
  return "";
}

PeakKind PeakKindOf(DType dtype) {
  switch (dtype) {
    case DType::kI8:
    case DType::kU8:
      return PeakKind::kI8;
    case DType::kBF16:
      return PeakKind::kBF16;
    default:
      return PeakKind::kF32;  // the rest is widened before it is multiplied
  }
}

}  // namespace quern
