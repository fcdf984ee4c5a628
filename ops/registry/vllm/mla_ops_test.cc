// mla_decode_kvcache against attention in double, with NaN in every slot that
// must not be read, and concat_and_cache_mla_cpu element by element.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/vllm/attention_ops.h"
#include "quern/ops/registry/vllm/named_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

size_t At(int64_t i) { return static_cast<size_t>(i); }

class VllmMlaTest : public VllmOpFixture {
 protected:
  VllmMlaTest() {
    EXPECT_EQ(RegisterVllmAttentionOps(registry_), absl::OkStatus());
  }

  template <typename T>
  void ExpectNearDouble(int64_t heads, int64_t dim, int64_t values,
                        int64_t block, const std::vector<int32_t>& lens) {
    const auto sequences = static_cast<int64_t>(lens.size());
    const int64_t columns =
        (*std::max_element(lens.begin(), lens.end()) + block - 1) / block + 1;
    const int64_t blocks = sequences * columns + 2;
    auto q = UniformReals<T>(rng_, sequences * heads * dim);
    std::vector<T> cache(At(blocks * block * dim), FromDouble<T>(std::nan("")));
    // Blocks from the last to the first; those that are not read are none.
    std::vector<int32_t> tables(At(sequences * columns), -7), copy = lens;
    int32_t next = static_cast<int32_t>(blocks) - 1;
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t i = 0; i < lens[At(s)]; ++i) {
        int32_t& entry = tables[At(s * columns + i / block)];
        if (entry < 0) entry = next--;
        const auto row = UniformReals<T>(rng_, dim);
        std::copy(row.begin(), row.end(),
                  cache.begin() + (entry * block + i % block) * dim);
      }
    }
    const double scale = 1 / std::sqrt(static_cast<double>(dim));
    for (const char* provider : {"simd", "reference"}) {
      SCOPED_TRACE(testing::Message()
                   << DTypeName(DTypeOf<T>) << " heads " << heads << " dim "
                   << dim << " block " << block << " " << provider);
      std::vector<float> out(At(sequences * heads * values), NAN);
      ASSERT_EQ(Try(provider, "mla_decode_kvcache",
                    {{"out", Over(out, {sequences, heads, values})},
                     {"query", Over(q, {sequences, heads, dim})},
                     {"kv_cache", Over(cache, {blocks, block, dim})},
                     {"block_tables", Over(tables, {sequences, columns})},
                     {"seq_lens", Over(copy, {sequences})}},
                    {{"scale", scale}}),
                absl::OkStatus());
      for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t h = 0; h < heads; ++h) {
          const auto key = [&](int64_t i, int64_t d) {
            const int64_t b = tables[At(s * columns + i / block)];
            return ToDouble(cache[At((b * block + i % block) * dim + d)]);
          };
          std::vector<double> logits, want(At(values));
          double most = -INFINITY, sum = 0;
          for (int64_t i = 0; i < lens[At(s)]; ++i) {
            double dot = 0;
            for (int64_t d = 0; d < dim; ++d) {
              dot += ToDouble(q[At((s * heads + h) * dim + d)]) * key(i, d);
            }
            logits.push_back(scale * dot);
            most = std::max(most, logits.back());
          }
          for (double& logit : logits) sum += logit = std::exp(logit - most);
          for (int64_t i = 0; i < lens[At(s)]; ++i) {
            for (int64_t v = 0; v < values; ++v) {
              want[At(v)] += logits[At(i)] / sum * key(i, v);
            }
          }
          // Probabilities may be rounded to T; products of f32 have room.
          const double error = 2 * UnitRoundoff<T>() + 0x1p-16;
          for (int64_t v = 0; v < values; ++v) {
            ASSERT_NEAR(double{out[At((s * heads + h) * values + v)]},
                        want[At(v)], error)
                << "sequence " << s << " head " << h << " column " << v;
          }
        }
      }
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(VllmMlaTest);

TEST_P(VllmMlaTest, IsNearAttentionInDouble) {
  ExpectNearDouble<float>(3, 12, 8, 16, {1, 17, 0, 33});
  ExpectNearDouble<BFloat16>(16, 576, 512, 16, {5, 40});
  ExpectNearDouble<Float16>(5, 40, 32, 16, {16, 31, 2});
  ExpectNearDouble<float>(2, 24, 24, 5, {11, 4});
}

class VllmLatentTest : public VllmLoopFixture {
 protected:
  VllmLatentTest() {
    EXPECT_EQ(RegisterVllmAttentionOps(registry_), absl::OkStatus());
  }
};

TEST_F(VllmLatentTest, WritesLatentsToTheirSlots) {
  constexpr int64_t kTokens = 5, kLatent = 6, kRope = 3, kBlock = 4;
  constexpr int64_t kDim = kLatent + kRope, kBlocks = 3;
  auto latent = UniformReals<BFloat16>(rng_, kTokens * kLatent);
  auto rope = UniformReals<BFloat16>(rng_, kTokens * kRope);
  std::vector<BFloat16> cache(kBlocks * kBlock * kDim, FromDouble<BFloat16>(9));
  std::vector<int64_t> slots = {11, -1, 0, 6, 7};
  ASSERT_EQ(Try("reference", "concat_and_cache_mla_cpu",
                {{"kv_c_normed", Over(latent, {kTokens, kLatent})},
                 {"k_pe", Over(rope, {kTokens, kRope})},
                 {"kv_cache", Over(cache, {kBlocks, kBlock, kDim})},
                 {"slot_mapping", Over(slots, {kTokens})}}),
            absl::OkStatus());
  for (int64_t slot = 0; slot < kBlocks * kBlock; ++slot) {
    const auto token =
        std::find(slots.begin(), slots.end(), slot) - slots.begin();
    for (int64_t d = 0; d < kDim; ++d) {
      double want = 9;
      if (token < kTokens) {
        want = d < kLatent ? ToDouble(latent[At(token * kLatent + d)])
                           : ToDouble(rope[At(token * kRope + d - kLatent)]);
      }
      EXPECT_EQ(ToDouble(cache[At(slot * kDim + d)]), want)
          << slot << ", " << d;
    }
  }
  slots[2] = 12;
  ExpectRefusal(Try("reference", "concat_and_cache_mla_cpu",
                    {{"kv_c_normed", Over(latent, {kTokens, kLatent})},
                     {"k_pe", Over(rope, {kTokens, kRope})},
                     {"kv_cache", Over(cache, {kBlocks, kBlock, kDim})},
                     {"slot_mapping", Over(slots, {kTokens})}}),
                "slot_mapping[2]=12; need a slot of 12");
}

TEST_P(VllmMlaTest, Refuses) {
  std::vector<float> out(2 * 8), q(2 * 12), cache(3 * 4 * 12);
  std::vector<int32_t> tables = {0, 1, 2, 0}, lens = {5, 8};
  const auto decode = [&](int64_t values, int64_t dim) {
    return Try("simd", "mla_decode_kvcache",
               {{"out", Over(out, {2, 1, values})},
                {"query", Over(q, {2, 1, dim})},
                {"kv_cache", Over(cache, {3, 4, 12})},
                {"block_tables", Over(tables, {2, 2})},
                {"seq_lens", Over(lens, {2})}},
               {{"scale", 0.5}});
  };
  EXPECT_EQ(decode(8, 12), absl::OkStatus());
  ExpectRefusal(decode(8, 11), "kv_cache is f32[3, 4, 12]");
  lens[1] = 9;
  ExpectRefusal(decode(8, 12), "seq_lens[1]=9; need 0 to 8");
  lens[1] = -1;
  ExpectRefusal(decode(8, 12), "seq_lens[1]=-1");
  lens[1] = 8;
  tables[3] = 3;
  ExpectRefusal(decode(8, 12), "block_tables[1][1]=3; need a block of 3");
  tables[3] = -1;
  ExpectRefusal(decode(8, 12), "block_tables[1][1]=-1");
  const OpDispatcher ops(registry_, OpPolicy());
  ExpectRefusal(ops.Make("concat_and_cache_mla_cpu",
                         {{"kv_c_normed", TensorMeta{DType::kF32, {2, 8}}},
                          {"k_pe", TensorMeta{DType::kF32, {2, 3}}},
                          {"kv_cache", TensorMeta{DType::kF32, {2, 4, 12}}},
                          {"slot_mapping", TensorMeta{DType::kI64, {2}}}})
                    .status(),
                "kv_cache has 12 columns; need 8 + 3");
}

}  // namespace
}  // namespace quern
