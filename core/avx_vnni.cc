#include "quern/core/avx_vnni.h"

#include <atomic>

#if QUERN_AVX_VNNI
#include <cpuid.h>
#endif

namespace quern {
namespace {

std::atomic<bool> allowed_for_test{true};
std::atomic<bool> int8_allowed_for_test{true};
std::atomic<bool> int8_emulated{false};

struct Features {
  bool avx_vnni = false;
  bool avx_vnni_int8 = false;
};

Features FeaturesOfCpu() {
  Features has;
#if QUERN_AVX_VNNI
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kFeatures = 7;
  // Subleaf 0 tells the last subleaf; subleaf 1 has the features.
  if (__get_cpuid_count(kFeatures, 0, &eax, &ebx, &ecx, &edx) == 0) return has;
  if (eax < 1) return has;
  __cpuid_count(kFeatures, 1, eax, ebx, ecx, edx);
  has.avx_vnni = (eax >> 4 & 1) != 0;
  has.avx_vnni_int8 = (edx >> 4 & 1) != 0;
#endif
  return has;
}

// Asked once, because cpuid may leave a virtual machine.
const Features& CpuHas() {
  static const Features kFeatures = FeaturesOfCpu();
  return kFeatures;
}

}  // namespace

bool HasAvxVnni() {
  return CpuHas().avx_vnni && allowed_for_test.load(std::memory_order_relaxed);
}

void AllowAvxVnniForTest(bool allowed) {
  allowed_for_test.store(allowed, std::memory_order_relaxed);
}

bool HasAvxVnniInt8() {
  return (CpuHas().avx_vnni_int8 || AvxVnniInt8IsEmulated()) &&
         allowed_for_test.load(std::memory_order_relaxed) &&
         int8_allowed_for_test.load(std::memory_order_relaxed);
}

void AllowAvxVnniInt8ForTest(bool allowed) {
  int8_allowed_for_test.store(allowed, std::memory_order_relaxed);
}

void SetAvxVnniInt8IsEmulated(bool emulated) {
  int8_emulated.store(emulated, std::memory_order_relaxed);
}

bool AvxVnniInt8IsEmulated() {
  return int8_emulated.load(std::memory_order_relaxed);
}

}  // namespace quern
