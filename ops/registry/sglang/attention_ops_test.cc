// SGLang's operators of attention by name, against attention in double, over
// buffers of poison.

#include <cstdint>
#include <utility>

#include "gtest/gtest.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/core/dtype.h"
#include "quern/ops/registry/sglang/attention_testutil.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

class SglangAttentionOpsTest : public SglangAttentionFixture {};
QUERN_INSTANTIATE_ISA_TEST(SglangAttentionOpsTest);

TEST_P(SglangAttentionOpsTest, AStepMatchesTheReference) {
  for (const bool new_keys : {false, true}) {
    for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{16, 16},
                                     std::pair<int64_t, int64_t>{33, 24}}) {
      SglangCase c;
      c.heads = SglangHeads(dim, v_dim);
      c.new_keys = new_keys;
      ExpectMatchesReference<float>(true, c, kSglangDecode);
      ExpectMatchesReference<BFloat16>(true, c, kSglangDecode);
      ExpectMatchesReference<float>(false, c, kSglangExtend);
      ExpectMatchesReference<Float16>(false, c, kSglangExtend);
    }
  }
}

// Heads and tokens may have any strides in every tensor.
TEST_P(SglangAttentionOpsTest, StridedViewsMatchTheReference) {
  for (const bool new_keys : {false, true}) {
    for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{16, 16},
                                     std::pair<int64_t, int64_t>{33, 24}}) {
      SglangCase c;
      c.heads = SglangHeads(dim, v_dim);
      c.new_keys = new_keys;
      c.pad = 5;
      ExpectMatchesReference<float>(true, c, kSglangDecode);
      ExpectMatchesReference<BFloat16>(false, c, kSglangExtend);
      ExpectMatchesReference<Float16>(true, c, kSglangDecode);
    }
  }
}

TEST_P(SglangAttentionOpsTest, EveryFeatureMatchesTheReference) {
  SglangCase c;
  c.heads = SglangHeads(16);
  c.heads.scale = 0.5f;
  c.heads.soft_cap = 3;
  c.heads.sinks = {-1, 0, 1, 2};
  for (const int64_t window : {0, 1, 10}) {
    c.window = window;
    ExpectMatchesReference<float>(true, c, kSglangDecode);
    ExpectMatchesReference<float>(false, c, kSglangExtend);
  }
}

TEST_P(SglangAttentionOpsTest, EncodersMatchTheReference) {
  SglangCase c;
  c.heads = SglangHeads(16);
  c.encoder = true;
  ExpectMatchesReference<float>(true, c, kSglangDecode);
  ExpectMatchesReference<float>(false, c, kSglangExtend);
  c.cross = true;
  // More queries than keys.
  ExpectMatchesReference<float>(true, c, kSglangDecode);
  ExpectMatchesReference<float>(false, c, {{5, 37}, {7, 3}});
}

TEST_P(SglangAttentionOpsTest, TreesMatchTheReference) {
  SglangCase c = {SglangHeads(16)};
  c.trees = true;
  for (const int64_t window : {0, 1, 4}) {
    c.window = window;
    c.new_keys = window == 4;
    ExpectMatchesReference<float>(false, c, {{9, 37}, {9, 9}, {9, 70}});
    ExpectMatchesReference<BFloat16>(false, c, {{64, 66}});
    ExpectMatchesReference<float>(false, c, {{1, 37}, {1, 1}});
  }
}

}  // namespace
}  // namespace quern
