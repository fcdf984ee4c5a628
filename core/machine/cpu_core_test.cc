#include "quern/core/machine/cpu_core.h"

#include <cstddef>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace quern {
namespace {

TEST(CpuCoreTest, NamesCoresByFamilyAndModel) {
  EXPECT_EQ(CoreOf({"AuthenticAMD", 25, 0x01}), CpuCore::kZen3);
  EXPECT_EQ(CoreOf({"AuthenticAMD", 25, 0x21}), CpuCore::kZen3);
  EXPECT_EQ(CoreOf({"AuthenticAMD", 25, 0x11}), CpuCore::kZen4);
  EXPECT_EQ(CoreOf({"AuthenticAMD", 25, 0x61}), CpuCore::kZen4);
  EXPECT_EQ(CoreOf({"AuthenticAMD", 26, 0x02}), CpuCore::kUnknown);
  EXPECT_EQ(CoreOf({"GenuineIntel", 6, 0x8f}), CpuCore::kIntelServer);
  EXPECT_EQ(CoreOf({"GenuineIntel", 25, 0x01}), CpuCore::kUnknown);
  EXPECT_EQ(CoreOf({}), CpuCore::kUnknown);
}

#if defined(__x86_64__) && defined(__linux__)
// The value behind the first "key : value" of /proc/cpuinfo.
std::string CpuInfoField(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string name =
        line.substr(0, line.find_last_not_of(" \t:", colon) + 1);
    if (name == key) return line.substr(colon + 2);
  }
  return "";
}

TEST(CpuCoreTest, AgreesWithLinux) {
  const CpuId cpu = ThisCpuId();
  EXPECT_EQ(cpu.vendor, CpuInfoField("vendor_id"));
  EXPECT_EQ(std::to_string(cpu.family), CpuInfoField("cpu family"));
  EXPECT_EQ(std::to_string(cpu.model), CpuInfoField("model"));
  EXPECT_EQ(ThisCpuCore(), CoreOf(cpu));
}
#endif

}  // namespace
}  // namespace quern
