#include "quern/core/avx_vnni.h"

#include <atomic>

#if QUERN_AVX_VNNI
#include <cpuid.h>
#endif

namespace quern {
namespace {

std::atomic<bool> allowed_for_test{true};

bool CpuHasAvxVnni() {
#if QUERN_AVX_VNNI
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kFeatures = 7;
  // Subleaf 0 tells the last subleaf; subleaf 1 has the feature.
  if (__get_cpuid_count(kFeatures, 0, &eax, &ebx, &ecx, &edx) == 0)
    return false;
  if (eax < 1) return false;
  __cpuid_count(kFeatures, 1, eax, ebx, ecx, edx);
  return (eax >> 4 & 1) != 0;
#else
  return false;
#endif
}

}  // namespace

bool HasAvxVnni() {
  // Asked once, because cpuid may leave a virtual machine.
  static const bool kCpuHasIt = CpuHasAvxVnni();
  return kCpuHasIt && allowed_for_test.load(std::memory_order_relaxed);
}

void AllowAvxVnniForTest(bool allowed) {
  allowed_for_test.store(allowed, std::memory_order_relaxed);
}

}  // namespace quern
