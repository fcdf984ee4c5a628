#include "quern/core/machine/cpu_core.h"

#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#define QUERN_HAS_CPUID 1
#else
#define QUERN_HAS_CPUID 0
#endif

namespace quern {
namespace {

bool Between(int value, int low, int high) {
  return low <= value && value <= high;
}

}  // namespace

CpuCore CoreOf(const CpuId& cpu) {
  const int model = cpu.model;
  if (cpu.vendor == "AuthenticAMD" && cpu.family == 0x19) {
    if (Between(model, 0x10, 0x1f) || Between(model, 0x60, 0x7f) ||
        Between(model, 0xa0, 0xaf)) {
      return CpuCore::kZen4;
    }
    if (Between(model, 0x00, 0x0f) || Between(model, 0x20, 0x5f)) {
      return CpuCore::kZen3;
    }
  }
  if (cpu.vendor == "GenuineIntel" && cpu.family == 6 &&
      (model == 0x55 || model == 0x6a || model == 0x8f || model == 0xcf)) {
    return CpuCore::kIntelServer;
  }
  return CpuCore::kUnknown;
}

CpuId ThisCpuId() {
  CpuId cpu;
#if QUERN_HAS_CPUID
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return cpu;
  char vendor[12];
  std::memcpy(vendor, &ebx, 4);
  std::memcpy(vendor + 4, &edx, 4);
  std::memcpy(vendor + 8, &ecx, 4);
  cpu.vendor.assign(vendor, sizeof(vendor));
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return cpu;
  const unsigned family = eax >> 8 & 15, model = eax >> 4 & 15;
  const bool has_extended_model = family == 6 || family == 15;
  cpu.family =
      static_cast<int>(family == 15 ? family + (eax >> 20 & 255) : family);
  cpu.model = static_cast<int>(
      has_extended_model ? model + ((eax >> 16 & 15) << 4) : model);
#endif
  return cpu;
}

CpuCore ThisCpuCore() {
  static const CpuCore kCore = CoreOf(ThisCpuId());
  return kCore;
}

}  // namespace quern
