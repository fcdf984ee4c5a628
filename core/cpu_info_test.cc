#include "core/cpu_info.h"

#include <cstdint>
#include <string>

#include "gtest/gtest.h"
#include "hwy/highway.h"

namespace quern {
namespace {

TEST(CpuInfoTest, KnowsThisMachine) {
  const CpuInfo info = GetCpuInfo();
  ASSERT_FALSE(info.targets.empty());
  EXPECT_EQ(info.targets.size(), hwy::SupportedAndGeneratedTargets().size());
  EXPECT_EQ(info.targets.front(),
            hwy::TargetName(hwy::SupportedAndGeneratedTargets().front()));
  EXPECT_GE(info.cores_online, 1);
  EXPECT_GE(info.cores_available, 1);
  EXPECT_LE(info.cores_available, info.cores_online);
  EXPECT_GE(info.l1_data_bytes, 4 << 10);
  EXPECT_GE(info.l2_bytes, info.l1_data_bytes);
  EXPECT_GE(info.last_level_bytes(), info.l2_bytes);
  EXPECT_GE(info.last_level_bytes(), info.l3_bytes);
}

TEST(CpuInfoTest, ReadsTheQuotaOfACgroup) {
  using cpu_info_internal::CoresFromCpuMax;
  EXPECT_EQ(CoresFromCpuMax("max 100000\n"), 0);
  EXPECT_EQ(CoresFromCpuMax("200000 100000\n"), 2);
  EXPECT_EQ(CoresFromCpuMax("150000 100000"), 2);  // rounded up
  EXPECT_EQ(CoresFromCpuMax("100001 100000"), 2);
  EXPECT_EQ(CoresFromCpuMax("1000 100000"), 1);  // never none
  for (const char* nonsense :
       {"", "\n", "100000", "a b", "100000 0", "0 100000", "-1 100000", "1 2 3",
        "99999999999999999999 1"}) {
    EXPECT_EQ(CoresFromCpuMax(nonsense), 0) << nonsense;
  }
  // A limit beyond any machine must not wrap to a small or negative one.
  EXPECT_GE(CoresFromCpuMax("9223372036854775807 1"), 1 << 20);
  EXPECT_GE(CoresFromCpuMax("9223372036854775807 9223372036854775807"), 1);
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
