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

}  // namespace
}  // namespace quern
