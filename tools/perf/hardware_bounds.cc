#include "quern/tools/perf/hardware_bounds.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/machine/cpu_core.h"
#include "quern/tools/perf/op.h"

namespace quern {

absl::string_view CoreName(const CpuId& cpu) {
  switch (CoreOf(cpu)) {
    case CpuCore::kZen3:
      return "Zen 3";
    case CpuCore::kZen4:
      return "Zen 4";
    case CpuCore::kIntelServer:
      return "Intel Xeon with two 512-bit units";
    case CpuCore::kUnknown:
      break;
  }
  return "";
}

int HardwareBound(const CpuId& cpu, absl::string_view target, PeakKind kind) {
  const CpuCore core = CoreOf(cpu);
  const bool avx2 = target == "AVX2" || target == kAvxVnniTarget ||
                    target == kAvxVnniInt8Target;
  const bool sse = target == "SSE4" || target == "SSSE3" || target == "SSE2";
  const bool widened =
      kind == PeakKind::kBF16 && target != "AVX3_ZEN4" && target != "AVX3_SPR";
  const bool f32 = kind == PeakKind::kF32 || widened;
  if (core == CpuCore::kZen3 || core == CpuCore::kZen4) {
    // Two multiplies of 256 bits a cycle, with an addition in each, or beside
    // each on other units. Four products of bytes take two multiplies; with
    // SSE2, two products of 16 bits take one. 512 bits are two of 256.
    if (f32) return sse ? 16 : 32;
    const bool maddubs =
        target == "AVX2" || target == "AVX3" || (sse && target != "SSE2");
    if (kind == PeakKind::kI6 && maddubs) {
      return sse ? 57
                 : 114;  // nine multiplies make the products of 8 * 32 bytes
    }
    if (kind == PeakKind::kI8 || kind == PeakKind::kI6) {
      if (sse) return 32;
      if (avx2 || target == "AVX3") return 64;
      return 128;  // an instruction that multiplies and adds
    }
    return 64;
  }
  if (core == CpuCore::kIntelServer && f32 && !sse) return avx2 ? 32 : 64;
  return 0;
}

std::string HardwareNote(const CpuId& cpu, absl::string_view target,
                         PeakKind kind) {
  const int bound = HardwareBound(cpu, target, kind);
  if (bound == 0) return "hardware bound unknown";
  return absl::StrCat(CoreName(cpu), ": at most ", bound, " a cycle");
}

}  // namespace quern
