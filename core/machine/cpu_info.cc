#include "quern/core/machine/cpu_info.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "quern/core/isa.h"

namespace quern {
namespace {

constexpr char kCpuFolder[] = "/sys/devices/system/cpu";

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string Trimmed(const std::string& path) {
  return std::string(absl::StripAsciiWhitespace(ReadFile(path)));
}

int CpusFromQuota(int64_t quota_us, int64_t period_us) {
  if (quota_us <= 0 || period_us <= 0) return 0;
  // A quota beyond any machine is capped: it must not wrap to a small one. One
  // of 1.5 CPUs is one: of two threads the second would be stopped for half of
  // each period, and the first would wait for it.
  constexpr int64_t kMany = 1 << 20;
  return static_cast<int>(std::clamp<int64_t>(quota_us / period_us, 1, kMany));
}

// The smaller of two limits, where 0 is no limit.
int Tighter(int a, int b) {
  if (a == 0) return b;
  if (b == 0) return a;
  return std::min(a, b);
}

// The quota of this process's group and every parent; 0: no limit.
int CgroupCpus() {
  int cpus = 0;
  for (const absl::string_view line :
       absl::StrSplit(ReadFile("/proc/self/cgroup"), '\n')) {
    // "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1).
    const std::vector<absl::string_view> fields =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const bool v2 = fields[1].empty();
    const std::vector<absl::string_view> controllers =
        absl::StrSplit(fields[1], ',');
    const bool v1 = std::find(controllers.begin(), controllers.end(), "cpu") !=
                    controllers.end();
    if (!v1 && !v2) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    // Inside a container the path may not exist below the root: the root then
    // is this group, and the walk ends there in either case.
    std::string path(fields[2] == "/" ? absl::string_view() : fields[2]);
    for (;;) {
      const std::string group = absl::StrCat(root, path);
      if (v2) {
        cpus = Tighter(cpus, cpu_info_internal::CpusFromCpuMax(
                                 ReadFile(absl::StrCat(group, "/cpu.max"))));
      } else {
        int64_t quota = 0, period = 0;
        if (absl::SimpleAtoi(Trimmed(absl::StrCat(group, "/cpu.cfs_quota_us")),
                             &quota) &&
            absl::SimpleAtoi(Trimmed(absl::StrCat(group, "/cpu.cfs_period_us")),
                             &period)) {
          cpus = Tighter(cpus, CpusFromQuota(quota, period));
        }
      }
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
  return cpus;
}

// The logical CPUs of the affinity mask; those online where there is no mask.
std::vector<int> AffinityCpus() {
  std::vector<int> cpus;
#ifdef __linux__
  // Machines may have more CPUs than cpu_set_t has bits: grow until it fits.
  for (size_t count = 1; count <= 1024; count *= 2) {
    std::vector<cpu_set_t> sets(count);
    const size_t bytes = count * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, sets.data()) != 0) continue;
    const int max_cpus = static_cast<int>(count) * CPU_SETSIZE;
    for (int cpu = 0; cpu < max_cpus; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, sets.data())) cpus.push_back(cpu);
    }
    break;
  }
#endif
  if (cpus.empty()) {
    cpus.resize(static_cast<size_t>(
        std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)))));
    std::iota(cpus.begin(), cpus.end(), 0);
  }
  return cpus;
}

void ReadCaches(CpuInfo& info) {
  for (int index = 0;; ++index) {
    const std::string folder =
        absl::StrCat(kCpuFolder, "/cpu0/cache/index", index, "/");
    const std::string level = Trimmed(folder + "level");
    if (level.empty()) return;
    const int64_t bytes =
        cpu_info_internal::CacheBytes(Trimmed(folder + "size"));
    if (bytes == 0 || Trimmed(folder + "type") == "Instruction") continue;
    if (level == "1") info.l1_data_bytes = bytes;
    if (level == "2") info.l2_bytes = bytes;
    if (level == "3") info.l3_bytes = bytes;
  }
}

}  // namespace

namespace cpu_info_internal {

int CpusFromCpuMax(const std::string& text) {
  const std::vector<absl::string_view> fields =
      absl::StrSplit(text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  int64_t quota = 0, period = 0;
  if (fields.size() != 2 || !absl::SimpleAtoi(fields[0], &quota) ||
      !absl::SimpleAtoi(fields[1], &period)) {
    return 0;  // "max 100000", or no such file
  }
  return CpusFromQuota(quota, period);
}

int CountCores(const std::vector<int>& cpus, const std::string& root) {
  std::set<std::string> cores;
  for (const int cpu : cpus) {
    std::string siblings = Trimmed(
        absl::StrCat(root, "/cpu", cpu, "/topology/thread_siblings_list"));
    // Every sibling has the same list, so that it names the core.
    cores.insert(siblings.empty() ? absl::StrCat(cpu) : std::move(siblings));
  }
  return static_cast<int>(cores.size());
}

int64_t CacheBytes(const std::string& text) {
  absl::string_view digits = text;
  int64_t unit = 1;
  if (absl::ConsumeSuffix(&digits, "K")) {
    unit = 1 << 10;
  } else if (absl::ConsumeSuffix(&digits, "M")) {
    unit = 1 << 20;
  }
  int64_t value = 0;
  if (!absl::SimpleAtoi(digits, &value) || value < 0 || value > 1 << 30) {
    return 0;
  }
  return value * unit;
}

}  // namespace cpu_info_internal

CpuInfo GetCpuInfo() {
  CpuInfo info;
  for (const absl::string_view line :
       absl::StrSplit(ReadFile("/proc/cpuinfo"), '\n')) {
    if (absl::StartsWith(line, "model name")) {
      const std::vector<absl::string_view> fields =
          absl::StrSplit(line, absl::MaxSplits(':', 1));
      if (fields.size() == 2) {
        info.model = std::string(absl::StripAsciiWhitespace(fields[1]));
      }
      break;
    }
  }
  for (const Isa& isa : SupportedIsas()) info.targets.push_back(isa.name());
  ReadCaches(info);
  info.cpus_online =
      std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  info.cpus_available = AvailableCpus();
  info.cores_available = AvailableCores();
  return info;
}

int64_t LastLevelBytes() {
  CpuInfo caches;
  ReadCaches(caches);
  return caches.last_level_bytes();
}

int AvailableCpus() {
  return Tighter(static_cast<int>(AffinityCpus().size()), CgroupCpus());
}

int AvailableCores() {
  return Tighter(cpu_info_internal::CountCores(AffinityCpus(), kCpuFolder),
                 CgroupCpus());
}

}  // namespace quern
