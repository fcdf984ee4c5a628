#include "quern/tools/perf/hardware_bounds.h"

#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "quern/core/avx_vnni.h"
#include "quern/tools/perf/op.h"

namespace quern {
namespace {

enum class Core { kUnknown, kZen3, kZen4, kIntelServer };

bool Between(int value, int low, int high) {
  return low <= value && value <= high;
}

Core CoreOf(const CpuId& cpu) {
  const int model = cpu.model;
  if (cpu.vendor == "AuthenticAMD" && cpu.family == 0x19) {
    if (Between(model, 0x10, 0x1f) || Between(model, 0x60, 0x7f) ||
        Between(model, 0xa0, 0xaf)) {
      return Core::kZen4;
    }
    if (Between(model, 0x00, 0x0f) || Between(model, 0x20, 0x5f)) {
      return Core::kZen3;
    }
  }
  if (cpu.vendor == "GenuineIntel" && cpu.family == 6 &&
      (model == 0x55 || model == 0x6a || model == 0x8f || model == 0xcf)) {
    return Core::kIntelServer;
  }
  return Core::kUnknown;
}

}  // namespace

CpuId ParseCpuId(absl::string_view cpuinfo) {
  CpuId cpu;
  for (const absl::string_view line : absl::StrSplit(cpuinfo, '\n')) {
    if (line.empty()) break;  // the next processor
    const std::pair<absl::string_view, absl::string_view> field =
        absl::StrSplit(line, absl::MaxSplits(':', 1));
    const absl::string_view key = absl::StripAsciiWhitespace(field.first);
    const absl::string_view value = absl::StripAsciiWhitespace(field.second);
    int number = 0;
    if (key == "vendor_id") cpu.vendor = std::string(value);
    if (!absl::SimpleAtoi(value, &number)) continue;
    if (key == "cpu family") cpu.family = number;
    if (key == "model") cpu.model = number;
  }
  return cpu;
}

CpuId ThisCpuId() {
  std::ifstream file("/proc/cpuinfo");
  std::ostringstream text;
  text << file.rdbuf();
  return ParseCpuId(text.str());
}

absl::string_view CoreName(const CpuId& cpu) {
  switch (CoreOf(cpu)) {
    case Core::kZen3:
      return "Zen 3";
    case Core::kZen4:
      return "Zen 4";
    case Core::kIntelServer:
      return "Intel Xeon with two 512-bit units";
    case Core::kUnknown:
      break;
  }
  return "";
}

int HardwareBound(const CpuId& cpu, absl::string_view target, PeakKind kind) {
  const Core core = CoreOf(cpu);
  const bool avx2 = target == "AVX2" || target == kAvxVnniTarget;
  const bool sse = target == "SSE4" || target == "SSSE3" || target == "SSE2";
  const bool widened =
      kind == PeakKind::kBF16 && target != "AVX3_ZEN4" && target != "AVX3_SPR";
  const bool f32 = kind == PeakKind::kF32 || widened;
  if (core == Core::kZen3 || core == Core::kZen4) {
    // Two multiplies of 256 bits a cycle, with an addition in each, or beside
    // each on other units. Four products of bytes take two multiplies; with
    // SSE2, two products of 16 bits take one. 512 bits are two of 256.
    if (f32) return sse ? 16 : 32;
    if (kind == PeakKind::kI8) {
      if (sse) return 32;
      if (avx2 || target == "AVX3") return 64;
      return 128;  // an instruction that multiplies and adds
    }
    return 64;
  }
  if (core == Core::kIntelServer && f32 && !sse) return avx2 ? 32 : 64;
  return 0;
}

std::string HardwareNote(const CpuId& cpu, absl::string_view target,
                         PeakKind kind) {
  const int bound = HardwareBound(cpu, target, kind);
  if (bound == 0) return "hardware bound unknown";
  return absl::StrCat(CoreName(cpu), ": at most ", bound, " a cycle");
}

}  // namespace quern
