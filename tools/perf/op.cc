#include "tools/perf/op.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/dtype.h"

namespace quern {

DramKind DramKindOf(double read, double written, double updated) {
  constexpr int kMostLines = 8;
  constexpr double kNear = 1.0 / 16;
  const double all = read + written + updated;
  if (!(all > 0)) return DramKind::kRead;
  DramKind kind;
  for (int lines = 1; lines <= kMostLines; ++lines) {
    const auto share = [&](double bytes) {
      return static_cast<int>(std::lround(bytes / all * lines));
    };
    kind = {share(read), share(written), share(updated)};
    if (kind.touched() == 0) continue;
    const auto near = [&](double bytes, int count) {
      return std::abs(bytes / all -
                      static_cast<double>(count) / kind.touched()) <= kNear;
    };
    if (near(read, kind.reads) && near(written, kind.writes) &&
        near(updated, kind.updates)) {
      break;
    }
  }
  return kind;
}

std::string DramKindName(DramKind kind) {
  if (kind == DramKind::kRead) return "read";
  if (kind == DramKind::kWrite) return "write";
  if (kind == DramKind::kCopy) return "copy";
  if (kind == DramKind::kUpdate) return "update";
  std::vector<std::string> parts;
  if (kind.reads > 0) parts.push_back(absl::StrCat(kind.reads, "r"));
  if (kind.writes > 0) parts.push_back(absl::StrCat(kind.writes, "w"));
  if (kind.updates > 0) parts.push_back(absl::StrCat(kind.updates, "u"));
  return absl::StrJoin(parts, "+");
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
