#ifndef QUERN_CORE_MACHINE_CPU_CORE_H_
#define QUERN_CORE_MACHINE_CPU_CORE_H_

// Which core this is, for the few choices that no instruction set tells: how
// far ahead to fetch, say. Results never depend on it.

#include <string>

namespace quern {

// A processor by its numbers, as /proc/cpuinfo prints them.
struct CpuId {
  std::string vendor;  // "AuthenticAMD"
  int family = 0;
  int model = 0;
};

enum class CpuCore {
  kUnknown,
  kZen3,
  kZen4,
  kIntelServer,  // Xeons with two units of 512 bits
};

CpuCore CoreOf(const CpuId& cpu);

// The CPU of the calling thread, by the cpuid instruction; no vendor where
// there is no such instruction.
CpuId ThisCpuId();
// CoreOf(ThisCpuId()), asked once.
CpuCore ThisCpuCore();

}  // namespace quern

#endif  // QUERN_CORE_MACHINE_CPU_CORE_H_
