#include "quern/core/machine/cpu_info.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "quern/core/avx_vnni.h"

namespace quern {
namespace {

TEST(CpuInfoTest, KnowsThisMachine) {
  const CpuInfo info = GetCpuInfo();
  ASSERT_FALSE(info.targets.empty());
  std::vector<std::string> targets;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const std::string name = hwy::TargetName(target);
    if (name == "AVX2" && HasAvxVnniInt8()) {
      targets.push_back("AVX2_VNNI_INT8");
    }
    if (name == "AVX2" && HasAvxVnni()) targets.push_back("AVX2_VNNI");
    targets.push_back(name);
  }
  EXPECT_EQ(info.targets, targets);
  EXPECT_GE(info.cpus_online, 1);
  EXPECT_GE(info.cores_available, 1);
  EXPECT_LE(info.cores_available, info.cpus_available);
  EXPECT_LE(info.cpus_available, info.cpus_online);
  EXPECT_GE(info.l1_data_bytes, 4 << 10);
  EXPECT_GE(info.l2_bytes, info.l1_data_bytes);
  EXPECT_GE(info.last_level_bytes(), info.l2_bytes);
  EXPECT_GE(info.last_level_bytes(), info.l3_bytes);
  EXPECT_EQ(LastLevelBytes(), info.last_level_bytes());
}

TEST(CpuInfoTest, ReadsTheQuotaOfACgroup) {
  using cpu_info_internal::CpusFromCpuMax;
  EXPECT_EQ(CpusFromCpuMax("max 100000\n"), 0);
  EXPECT_EQ(CpusFromCpuMax("200000 100000\n"), 2);
  EXPECT_EQ(CpusFromCpuMax("150000 100000"), 1);  // rounded down
  EXPECT_EQ(CpusFromCpuMax("199999 100000"), 1);
  EXPECT_EQ(CpusFromCpuMax("1000 100000"), 1);  // never none
  for (const char* nonsense :
       {"", "\n", "100000", "a b", "100000 0", "0 100000", "-1 100000", "1 2 3",
        "99999999999999999999 1"}) {
    EXPECT_EQ(CpusFromCpuMax(nonsense), 0) << nonsense;
  }
  // A limit beyond any machine must not wrap to a small or negative one.
  EXPECT_GE(CpusFromCpuMax("9223372036854775807 1"), 1 << 20);
  EXPECT_GE(CpusFromCpuMax("9223372036854775807 9223372036854775807"), 1);
}

// Four logical CPUs on two cores, and one whose list is missing.
TEST(CpuInfoTest, CountsSiblingsOnce) {
  const std::filesystem::path root =
      std::filesystem::path(testing::TempDir()) / "cpu_info_test";
  const char* const siblings[] = {"0,2", "1,3", "0,2", "1,3"};
  for (int cpu = 0; cpu < 4; ++cpu) {
    const auto folder = root / ("cpu" + std::to_string(cpu)) / "topology";
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "thread_siblings_list") << siblings[cpu] << '\n';
  }
  using cpu_info_internal::CountCores;
  EXPECT_EQ(CountCores({0, 1, 2, 3}, root), 2);
  EXPECT_EQ(CountCores({0, 1}, root), 2);
  EXPECT_EQ(CountCores({1, 3}, root), 1);
  EXPECT_EQ(CountCores({2}, root), 1);
  EXPECT_EQ(CountCores({0, 2, 4}, root), 2);
  EXPECT_EQ(CountCores({5, 6, 7}, root), 3);
}

TEST(CpuInfoTest, ReadsCacheSizes) {
  using cpu_info_internal::CacheBytes;
  EXPECT_EQ(CacheBytes("48K"), 48 << 10);
  EXPECT_EQ(CacheBytes("32768K"), 32 << 20);
  EXPECT_EQ(CacheBytes("2M"), 2 << 20);
  EXPECT_EQ(CacheBytes("512"), 512);
  for (const char* nonsense :
       {"", "K", "-1K", "4G", "x", "1.5M", "99999999999999999999K"}) {
    EXPECT_EQ(CacheBytes(nonsense), 0) << nonsense;
  }
}

}  // namespace
}  // namespace quern
