#include "quern/core/avx_vnni.h"

#include "gtest/gtest.h"
#include "hwy/base.h"

namespace quern {
namespace {

// GCC's own reading of cpuid.
#if QUERN_AVX_VNNI && HWY_COMPILER_GCC_ACTUAL >= 1200
TEST(AvxVnniTest, IsFoundWhereTheCompilersLibraryFindsIt) {
  EXPECT_EQ(HasAvxVnni(), __builtin_cpu_supports("avxvnni") != 0);
}
#endif

TEST(AvxVnniTest, IsNotUsedWhileATestForbidsIt) {
  const bool has = HasAvxVnni();
  AllowAvxVnniForTest(false);
  EXPECT_FALSE(HasAvxVnni());
  AllowAvxVnniForTest(true);
  EXPECT_EQ(HasAvxVnni(), has);
}

#if QUERN_AVX_VNNI && HWY_COMPILER_GCC_ACTUAL >= 1300
TEST(AvxVnniInt8Test, IsFoundWhereTheCompilersLibraryFindsIt) {
  EXPECT_EQ(HasAvxVnniInt8(), __builtin_cpu_supports("avxvnniint8") != 0);
}
#endif

TEST(AvxVnniInt8Test, IsUsedWhereItIsEmulatedAndAllowed) {
  const bool has = HasAvxVnniInt8();
  EXPECT_FALSE(AvxVnniInt8IsEmulated());
  SetAvxVnniInt8IsEmulated(true);
  EXPECT_TRUE(HasAvxVnniInt8());
  AllowAvxVnniForTest(false);
  EXPECT_FALSE(HasAvxVnniInt8());
  AllowAvxVnniForTest(true);
  AllowAvxVnniInt8ForTest(false);
  EXPECT_FALSE(HasAvxVnniInt8());
  AllowAvxVnniInt8ForTest(true);
  SetAvxVnniInt8IsEmulated(false);
  EXPECT_EQ(HasAvxVnniInt8(), has);
}

}  // namespace
}  // namespace quern
