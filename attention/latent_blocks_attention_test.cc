// Attention over latents of f8e4m3 with a scale for each block has the bits of
// attention over bf16 latents of the same values, which has tests of its own.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/latent_blocks_testutil.h"
#include "quern/cache/page_table.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

// A token's key: codes, exponents and bf16, as the cache has them.
struct Key {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> exponents;
  std::vector<BFloat16> rest;
};

struct Sizes {
  int64_t heads = 3;
  int64_t latent = 132;
  int64_t rest = 7;
  int64_t page_size = 48;
  int64_t window = kNoWindow;
};

struct Batch {
  std::vector<int64_t> q_lens, kv_lens;
  std::vector<std::vector<Key>> keys;  // of each sequence
};

// Random codes of all magnitudes, exponents next to one another.
Key RandomKey(Rng& rng, const Sizes& sizes) {
  Key key;
  for (int64_t d = 0; d < sizes.latent; ++d) {
    const auto code = static_cast<uint8_t>(rng.Integer(0, 255));
    key.codes.push_back((code & 0x7F) == 0x7F ? uint8_t{0} : code);
  }
  for (int64_t d = 0; d < sizes.latent; d += KvLayout::kScaleBlock) {
    // Elements up to 1.75.
    key.exponents.push_back(static_cast<uint8_t>(rng.Integer(113, 119)));
  }
  key.rest = UniformReals<BFloat16>(rng, sizes.rest, -1, 1);
  return key;
}

Batch RandomBatch(Rng& rng, const Sizes& sizes,
                  const std::vector<int64_t>& q_lens,
                  const std::vector<int64_t>& kv_lens) {
  Batch batch = {q_lens, kv_lens, {}};
  for (const int64_t kv_len : kv_lens) {
    batch.keys.emplace_back();
    for (int64_t t = 0; t < kv_len; ++t) {
      batch.keys.back().push_back(RandomKey(rng, sizes));
    }
  }
  return batch;
}

// One batch over a cache of f8e4m3, or of bf16 with the same values. Slots of
// no token and pages of no sequence are filled with `poison`.
template <typename Q>
class BatchRun {
 public:
  BatchRun(const Sizes& sizes, const Batch& batch, const std::vector<Q>& q,
           bool blocks, Executor& executor, uint8_t poison = 0xFF) {
    KvLayoutSpec layout;
    layout.dtype = blocks ? DType::kF8E4M3 : DType::kBF16;
    layout.scaling = blocks ? KvScaling::kPerBlock : KvScaling::kNone;
    layout.kv_heads = 1;
    layout.head_dim = sizes.latent + sizes.rest;
    layout.v_head_dim = sizes.latent;
    layout.page_size = sizes.page_size;
    layout.form = KvForm::kLatent;
    AttentionSpec spec;
    spec.kv = KvLayout::Create(layout).value();
    spec.q_heads = sizes.heads;
    spec.q_dtype = DTypeOf<Q>;
    spec.window_left = sizes.window;
    plan_ = std::make_unique<PagedAttentionPlan>(
        PagedAttentionPlan::Create(spec).value());
    Fill(batch, poison);
    int64_t tokens = 0;
    for (const int64_t q_len : batch.q_lens) tokens += q_len;
    const int64_t rows = tokens * sizes.heads, dim = spec.kv.head_dim();
    const StridedMatrix<Q> queries(q, rows, dim, dim + 1);
    StridedMatrix<float> out(rows, sizes.latent, sizes.latent + 3);
    StridedMatrix<float> lse(tokens, sizes.heads, sizes.heads);
    args_.q = TensorView<const Q, 3>(queries.view().data(),
                                     {tokens, sizes.heads, dim},
                                     {sizes.heads * (dim + 1), dim + 1, 1});
    args_.out = TensorView<float, 3>(
        out.view().data(), {tokens, sizes.heads, sizes.latent},
        {sizes.heads * (sizes.latent + 3), sizes.latent + 3, 1});
    args_.lse = lse.view();
    args_.schedule = AttentionSchedule::Build(
                         spec, {batch.q_lens, batch.kv_lens, {}, {}, {}},
                         AttentionTiles(), executor.num_workers(), storage_)
                         .value();
    const int64_t bytes =
        plan_->WorkspaceBytes(args_.schedule, executor.num_workers()).value();
    GuardBuffer<uint8_t> memory(bytes);
    const Workspace workspace(memory.data(), static_cast<size_t>(bytes));
    EXPECT_EQ(plan_->CheckArgs(args_), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan_->Execute(args_, workspace, executor));
    out_ = out.ToDense();
    lse_ = lse.ToDense();
  }

  const PagedAttentionPlan& plan() const { return *plan_; }
  const std::vector<float>& out() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }

 private:
  void Fill(const Batch& batch, uint8_t poison) {
    const KvLayout& layout = plan_->spec().kv;
    int32_t pages = 1;  // page 0 belongs to no sequence
    for (const int64_t kv_len : batch.kv_lens) {
      std::vector<int32_t> ids(
          static_cast<size_t>(DivCeil(kv_len, layout.page_size())));
      for (size_t i = ids.size(); i-- > 0;) ids[i] = pages++;
      table_.Append(ids);
    }
    cache_ =
        std::make_unique<GuardBuffer<uint8_t>>(pages * layout.page_bytes());
    std::memset(cache_->data(), poison, static_cast<size_t>(cache_->size()));
    args_.kv = KvCacheView(layout, pages, cache_->data());
    args_.pages = table_.Build(layout.page_size(), pages).value();
    for (size_t s = 0; s < batch.keys.size(); ++s) {
      for (size_t t = 0; t < batch.keys[s].size(); ++t) {
        const int64_t slot =
            args_.pages.Slot(static_cast<int64_t>(s), static_cast<int64_t>(t));
        Put(args_.kv.K(slot / layout.page_size(), 0), slot % layout.page_size(),
            batch.keys[s][t]);
      }
    }
  }
  void Put(uint8_t* page, int64_t token, const Key& key) const {
    const KvLayout& layout = plan_->spec().kv;
    const bool blocks = layout.scaling() == KvScaling::kPerBlock;
    for (int64_t d = 0; d < layout.k_row(); ++d) {
      const auto i = static_cast<size_t>(d);
      BFloat16 element = BFloat16::FromBits(0);
      if (d < layout.v_head_dim()) {
        const uint8_t exponent =
            key.exponents[static_cast<size_t>(d / KvLayout::kScaleBlock)];
        if (blocks) {
          page[layout.KOffset(token, d)] = key.codes[i];
          page[layout.ExponentOffset(token, d / KvLayout::kScaleBlock)] =
              exponent;
          continue;
        }
        const double value = LatentValue(key.codes[i], exponent);
        element = FromDouble<BFloat16>(value);
        EXPECT_TRUE(ToDouble(element) == value || std::isnan(value));
      } else if (d < layout.head_dim()) {
        element = key.rest[i - key.codes.size()];
      }
      std::memcpy(page + layout.KOffset(token, d) *
                             (blocks ? 1 : int64_t{sizeof(element)}),
                  &element, sizeof(element));
    }
  }

  std::unique_ptr<PagedAttentionPlan> plan_;
  PageTableStorage table_;
  std::unique_ptr<GuardBuffer<uint8_t>> cache_;
  AttentionScheduleStorage storage_;
  PagedAttentionArgs args_;
  std::vector<float> out_, lse_;
};

class LatentBlocksAttentionTest : public IsaTest {
 protected:
  template <typename Q>
  void ExpectBitsOfBf16(const Sizes& sizes, const std::vector<int64_t>& q_lens,
                        const std::vector<int64_t>& kv_lens, Rng& rng) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<Q>) << " latent " << sizes.latent
                 << " rest " << sizes.rest << " heads " << sizes.heads);
    const Batch batch = RandomBatch(rng, sizes, q_lens, kv_lens);
    int64_t tokens = 0;
    for (const int64_t q_len : q_lens) tokens += q_len;
    const std::vector<Q> q = UniformReals<Q>(
        rng, tokens * sizes.heads * (sizes.latent + sizes.rest), -1, 1);
    InlineExecutor executor;
    const BatchRun<Q> want(sizes, batch, q, /*blocks=*/false, executor);
    for (const uint8_t poison : {0xFF, 0xA5}) {
      const BatchRun<Q> got(sizes, batch, q, /*blocks=*/true, executor, poison);
      EXPECT_RAN_ON(got.plan());
      EXPECT_STREQ(got.plan().arithmetic(), want.plan().arithmetic());
      EXPECT_TRUE(AllBitsEqual(got.out(), want.out()));
      EXPECT_TRUE(AllBitsEqual(got.lse(), want.lse()));
    }
    const auto workers = Workers(3);
    ASSERT_NE(workers, nullptr);
    const BatchRun<Q> shared(sizes, batch, q, /*blocks=*/true, *workers);
    EXPECT_TRUE(AllBitsEqual(shared.out(), want.out()));
    EXPECT_TRUE(AllBitsEqual(shared.lse(), want.lse()));
  }

  // The output for a key of its own, `copies` times, and queries of zeros.
  // Weights are equal, so that it is the latent.
  template <typename Q>
  void ExpectLatents(const std::vector<Key>& keys, int64_t copies) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<Q>) << " copies " << copies);
    Sizes sizes;
    sizes.heads = 1;
    sizes.latent = static_cast<int64_t>(keys[0].codes.size());
    sizes.rest = static_cast<int64_t>(keys[0].rest.size());
    sizes.page_size = 16;
    Batch batch;
    std::vector<float> want;
    for (const Key& key : keys) {
      batch.q_lens.push_back(1);
      batch.kv_lens.push_back(copies);
      batch.keys.emplace_back(static_cast<size_t>(copies), key);
      for (size_t d = 0; d < key.codes.size(); ++d) {
        want.push_back(static_cast<float>(LatentValue(
            key.codes[d],
            key.exponents[d / static_cast<size_t>(KvLayout::kScaleBlock)])));
      }
    }
    const std::vector<Q> q(keys.size() *
                           static_cast<size_t>(sizes.latent + sizes.rest));
    InlineExecutor executor;
    const BatchRun<Q> got(sizes, batch, q, /*blocks=*/true, executor);
    EXPECT_RAN_ON(got.plan());
    EXPECT_TRUE(AllEqual(got.out(), want));
  }
};
QUERN_INSTANTIATE_ISA_TEST(LatentBlocksAttentionTest);

TEST_P(LatentBlocksAttentionTest, HasTheBitsOfBf16) {
  TestRng rng;
  Sizes sizes;
  const int64_t dims[][2] = {{4, 1}, {20, 4}, {64, 7}, {128, 1}, {260, 7}};
  for (const auto& [latent, rest] : dims) {
    sizes.latent = latent;
    sizes.rest = rest;
    ExpectBitsOfBf16<BFloat16>(sizes, {1, 2, 5}, {1, 47, 265}, rng);
  }
  sizes.latent = 132;
  ExpectBitsOfBf16<float>(sizes, {1, 2, 5}, {16, 47, 265}, rng);
  ExpectBitsOfBf16<Float16>(sizes, {1, 3}, {32, 90}, rng);
  // With few rows and with more than attention reads as bytes elsewhere.
  for (const int64_t heads : {1, 2, 16}) {
    sizes.heads = heads;
    ExpectBitsOfBf16<BFloat16>(sizes, {1, 1}, {256, 33}, rng);
  }
  sizes.window = 21;
  ExpectBitsOfBf16<BFloat16>(sizes, {4, 1}, {300, 90}, rng);
}

TEST_P(LatentBlocksAttentionTest, HasThemForTheDimsOfDeepSeek) {
  TestRng rng;
  Sizes sizes;
  sizes.heads = 16;
  sizes.latent = 512;
  sizes.rest = 64;
  sizes.page_size = 64;
  ExpectBitsOfBf16<BFloat16>(sizes, {1, 3}, {270, 33}, rng);
}

// Every code under every exponent that write_kv writes, but NaN.
TEST_P(LatentBlocksAttentionTest, WidensEveryCodeExactly) {
  std::vector<Key> keys;
  for (int exponent = KvLayout::kMinExponent;
       exponent <= KvLayout::kMaxExponent; ++exponent) {
    Key key;
    for (int code = 0; code < 256; ++code) {
      key.codes.push_back(
          static_cast<uint8_t>((code & 0x7F) == 0x7F ? 0 : code));
    }
    key.exponents.assign(2, static_cast<uint8_t>(exponent));
    key.rest.assign(2, BFloat16::FromBits(0));
    keys.push_back(key);
  }
  ExpectLatents<float>(keys, 1);
  ExpectLatents<BFloat16>(keys, 1);
  // A whole group, which takes another way. Sums of 16 stay finite.
  std::vector<Key> some;
  for (size_t i = 0; i + 4 < keys.size(); i += 29) some.push_back(keys[i]);
  ExpectLatents<float>(some, 16);
  ExpectLatents<BFloat16>(some, 16);
}

// A token that is NaN, by a code or by an exponent, is so for those who see it.
TEST_P(LatentBlocksAttentionTest, NanReachesThoseWhoSeeIt) {
  TestRng rng;
  const Sizes sizes;
  constexpr int64_t kQueries = 6, kKeys = 40;
  const Batch clean = RandomBatch(rng, sizes, {kQueries}, {kKeys});
  const int64_t dim = sizes.latent + sizes.rest;
  const std::vector<BFloat16> q =
      UniformReals<BFloat16>(rng, kQueries * sizes.heads * dim, -1, 1);
  InlineExecutor executor;
  const BatchRun<BFloat16> want(sizes, clean, q, /*blocks=*/true, executor);
  for (const int which : {0, 1, 2}) {
    Batch batch = clean;
    Key& key = batch.keys[0][37];  // seen by queries 3, 4 and 5
    if (which == 0) key.codes[131] = 0x7F;
    if (which == 1) key.codes[5] = 0xFF;
    if (which == 2) key.exponents[1] = 255;
    const BatchRun<BFloat16> got(sizes, batch, q, /*blocks=*/true, executor);
    EXPECT_RAN_ON(got.plan());
    const auto row = static_cast<size_t>(sizes.heads * sizes.latent);
    for (size_t i = 0; i < got.out().size(); ++i) {
      if (i / row < 3) {
        ASSERT_EQ(got.out()[i], want.out()[i]) << which << " at " << i;
      } else {
        ASSERT_TRUE(std::isnan(got.out()[i])) << which << " at " << i;
      }
    }
  }
}

}  // namespace
}  // namespace quern
