#ifndef QUERN_CORE_MACHINE_CPU_INFO_H_
#define QUERN_CORE_MACHINE_CPU_INFO_H_

// What this machine can do: asked once at start-up or at plan time, never in a
// kernel. Linux; on other systems the fields keep their defaults.

#include <cstdint>
#include <string>
#include <vector>

namespace quern {

struct CpuInfo {
  std::string model;  // e.g. "AMD EPYC"
  // Instruction sets of kernels, the best first: Highway's targets, e.g.
  // "AVX3_ZEN4", and kAvxVnniTarget (core/avx_vnni.h).
  std::vector<std::string> targets;
  int64_t l1_data_bytes = 32 << 10;  // per core
  int64_t l2_bytes = 1 << 20;        // per core
  int64_t l3_bytes = 0;              // shared; 0: none or unknown
  int cpus_online = 1;               // logical CPUs of the machine
  int cpus_available = 1;            // what AvailableCpus() says
  int cores_available = 1;           // what AvailableCores() says

  // The larger of L2 and L3: what a cold working set must exceed.
  int64_t last_level_bytes() const {
    return l3_bytes > l2_bytes ? l3_bytes : l2_bytes;
  }
};

// Reads /proc, /sys and cpuid, a file for each logical CPU: a millisecond, and
// several on machines of hundreds of CPUs. Not cached. Under a cap of
// instruction sets (core/max_isa.h) no other thread may make plans meanwhile.
CpuInfo GetCpuInfo();

// GetCpuInfo().last_level_bytes(), by the few files that describe the caches:
// for plans that only ask what does not fit there.
int64_t LastLevelBytes();

// Logical CPUs that this process may really use: the smaller of the affinity
// mask and the cgroup's CPU quota (v1 or v2, this group and its parents),
// rounded down; >= 1. More threads than this only take turns.
int AvailableCpus();

// Cores among them: logical CPUs of one core (siblings, "hyper-threads") share
// its arithmetic units and caches and count once. The quota limits cores as it
// limits CPUs. 1 <= AvailableCores() <= AvailableCpus().
int AvailableCores();

namespace cpu_info_internal {

// The quota of "cpu.max" (v2), e.g. "150000 100000" -> 1; 0: no limit.
int CpusFromCpuMax(const std::string& text);
// How many cores the logical CPUs `cpus` belong to, by the sibling lists under
// `root`, on a real machine "/sys/devices/system/cpu". A CPU without such a
// list is a core.
int CountCores(const std::vector<int>& cpus, const std::string& root);
// Bytes of a sysfs cache size, e.g. "32768K" -> 33554432; 0: not a size.
int64_t CacheBytes(const std::string& text);

}  // namespace cpu_info_internal
}  // namespace quern

#endif  // QUERN_CORE_MACHINE_CPU_INFO_H_
