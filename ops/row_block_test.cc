#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/ops/row_block_kernels.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

class RowBlockTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(RowBlockTest);

// Some instruction sets round a vector with an instruction that flushes
// denormals. A denormal among ordinary numbers, at any place, must keep its
// value.
TEST_P(RowBlockTest, RoundsDenormalsAndSpecialsToNearestEven) {
  TestRng rng;
  const RowBlockKernels kernels = GetRowBlockKernels(DType::kF32, DType::kBF16);
  ASSERT_TRUE(RanOn(isa()));  // block kernels have no target()
  const float specials[] = {0x1p-149f,
                            -0x1.8p-130f,
                            0x1p-133f,
                            0x1.fffp-127f,
                            -0.0f,
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::quiet_NaN(),
                            FromBits<float>(0x7f800001u),
                            std::numeric_limits<float>::max(),
                            1.0f + 0x1p-8f,
                            1.0f + 0x1.8p-7f};
  for (const float special : specials) {
    for (const int64_t n : {1, 15, 32, 77, 256}) {
      for (int64_t at = 0; at < n; at += 5) {
        alignas(64) float v[kRowBlock] = {};
        const auto reals = UniformReals(rng, n);
        for (int64_t i = 0; i < n; ++i) v[i] = reals[static_cast<size_t>(i)];
        v[at] = special;
        std::vector<BFloat16> out(static_cast<size_t>(n));
        kernels.store(v, static_cast<size_t>(n), false, out.data());
        for (int64_t i = 0; i < n; ++i) {
          const uint32_t got = BitsOf(out[static_cast<size_t>(i)]);
          if (std::isnan(v[i])) {
            // A NaN keeps its payload and becomes quiet.
            EXPECT_EQ(got, BitsOf(v[i]) >> 16 | 0x40) << special;
          } else {
            EXPECT_EQ(got, BitsOf(FromDouble<BFloat16>(double{v[i]})))
                << special << " at " << at << ", element " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace quern
