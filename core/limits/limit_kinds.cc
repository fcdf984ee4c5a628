#include "quern/core/limits/limit_kinds.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "quern/core/dtype.h"

namespace quern {

DramKind DramKindOf(double read, double written, double updated) {
  constexpr int kMostLines = 8;
  constexpr double kNear = 1.0 / 32;
  const double all = read + written + updated;
  if (!(all > 0)) return DramKind::kRead;
  DramKind best;
  double least_error = 2;
  for (int lines = 1; lines <= kMostLines && least_error > kNear; ++lines) {
    const auto share = [&](double bytes) {
      return static_cast<int>(std::lround(bytes / all * lines));
    };
    const DramKind kind = {share(read), share(written), share(updated)};
    if (kind.touched() == 0 || kind.touched() > kMostLines) continue;
    const auto error = [&](double bytes, int count) {
      return std::abs(bytes / all -
                      static_cast<double>(count) / kind.touched());
    };
    const double worst =
        std::max({error(read, kind.reads), error(written, kind.writes),
                  error(updated, kind.updates)});
    if (worst < least_error) {
      best = kind;
      least_error = worst;
    }
  }
  return best;
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

const char* PeakKindName(PeakKind kind) {
  switch (kind) {
    case PeakKind::kF32:
      return "f32";
    case PeakKind::kBF16:
      return "bf16";
    case PeakKind::kI8:
      return "i8";
    case PeakKind::kI6:
      break;
  }
  return "i6";
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
