// The latent form of f8e4m3, with a scale for each block of 128: every byte
// that write_kv writes is the formula's.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/cache/convert_pages.h"
#include "quern/cache/copy_pages.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/latent_blocks_testutil.h"
#include "quern/cache/write_kv.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

KvLayoutSpec BlockSpec(int64_t latent, int64_t rest) {
  KvLayoutSpec spec;
  spec.dtype = DType::kF8E4M3;
  spec.kv_heads = 1;
  spec.head_dim = latent + rest;
  spec.v_head_dim = latent;
  spec.page_size = 32;
  spec.form = KvForm::kLatent;
  spec.scaling = KvScaling::kPerBlock;
  return spec;
}

// One call through the public interface into a cache full of poison. `rows` are
// the tokens' keys, all heads of a token in turn.
template <typename From>
class BlocksRun {
 public:
  BlocksRun(int64_t latent, int64_t rest, int64_t heads,
            const std::vector<From>& keys, const std::vector<int64_t>& slots,
            int64_t num_pages = 3)
      : latent_(latent),
        rest_(rest),
        heads_(heads),
        num_pages_(num_pages),
        keys_(keys),
        slots_(slots),
        layout_(LayoutOf()),
        rows_(keys, static_cast<int64_t>(slots.size()) * heads, latent + rest,
              latent + rest + 3),
        cache_(num_pages * layout_.page_bytes()),
        want_(num_pages * layout_.page_bytes()) {
    std::memset(cache_.data(), 0x5A, static_cast<size_t>(cache_.size()));
    std::memset(want_.data(), 0x5A, static_cast<size_t>(want_.size()));
    args_.k = Part(0, latent);
    args_.v = Part(latent, rest);
    args_.slots = slots_;
    args_.cache = KvCacheView(layout_, num_pages, cache_.data());
  }

  // Runs it and compares every byte. Returns the target of the plan.
  std::string Run(Executor& executor, Stores stores = Stores::kAuto) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<From>) << " latent " << latent_
                 << " rest " << rest_ << " heads " << heads_);
    WriteKvSpec spec;
    spec.kv = layout_;
    spec.input = DTypeOf<From>;
    spec.stores = stores;
    const WriteKvPlan plan = WriteKvPlan::Create(spec).value();
    const absl::Status status = plan.CheckArgs(args_);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_NO_ALLOCATION(plan.Execute(args_, executor));
    Fill(KvCacheView(layout_, num_pages_, want_.data()));
    int64_t failures = 0;
    for (int64_t i = 0; i < cache_.size() && failures < 5; ++i) {
      if (cache_[i] == want_[i]) continue;
      ADD_FAILURE() << "byte " << i << " of the cache is " << int{cache_[i]}
                    << "; want " << int{want_[i]};
      ++failures;
    }
    return plan.target();
  }

  const KvLayout& layout() const { return layout_; }
  GuardBuffer<uint8_t>& cache() { return cache_; }
  WriteKvArgs& args() { return args_; }

 private:
  KvLayout LayoutOf() const {
    KvLayoutSpec spec = BlockSpec(latent_, rest_);
    spec.kv_heads = heads_;
    return KvLayout::Create(spec).value();
  }
  AnyTensorView Part(int64_t begin, int64_t count) {
    const int64_t stride = latent_ + rest_ + 3;
    return TensorView<const From, 3>(
        rows_.view().data() + begin,
        {static_cast<int64_t>(slots_.size()), heads_, count},
        {heads_ * stride, stride, 1});
  }

  void Fill(const KvCacheView& want) {
    for (size_t t = 0; t < slots_.size(); ++t) {
      if (slots_[t] < 0) continue;
      for (int64_t h = 0; h < heads_; ++h) {
        FillKey(want, slots_[t], h, static_cast<int64_t>(t) * heads_ + h);
      }
    }
  }
  void FillKey(const KvCacheView& want, int64_t slot, int64_t head,
               int64_t row) {
    const int64_t token = slot % layout_.page_size();
    uint8_t* to = want.K(slot / layout_.page_size(), head);
    std::vector<double> key;
    for (int64_t d = 0; d < latent_ + rest_; ++d) {
      key.push_back(
          ToDouble(keys_[static_cast<size_t>(row * (latent_ + rest_) + d)]));
    }
    for (int64_t b = 0; b < layout_.scale_blocks(); ++b) {
      const auto begin = key.begin() + b * KvLayout::kScaleBlock;
      const auto end =
          key.begin() + std::min((b + 1) * KvLayout::kScaleBlock, latent_);
      const uint8_t exponent = LatentExponent({begin, end});
      to[layout_.ExponentOffset(token, b)] = exponent;
      for (auto x = begin; x != end; ++x) {
        to[layout_.KOffset(token, x - key.begin())] = LatentCode(*x, exponent);
      }
    }
    for (int64_t d = latent_; d < layout_.k_row(); ++d) {
      uint8_t* at = to + layout_.KOffset(token, d);
      BFloat16 element = BFloat16::FromBits(0);
      if (d < latent_ + rest_) {
        element = FromDouble<BFloat16>(key[static_cast<size_t>(d)]);
        BFloat16 written;
        std::memcpy(&written,
                    args_.cache.K(slot / layout_.page_size(), head) +
                        layout_.KOffset(token, d),
                    sizeof(written));
        if (std::isnan(ToDouble(element)) && std::isnan(ToDouble(written))) {
          element = written;
        }
      }
      std::memcpy(at, &element, sizeof(element));
    }
  }

  int64_t latent_, rest_, heads_, num_pages_;
  std::vector<From> keys_;
  std::vector<int64_t> slots_;
  KvLayout layout_;
  StridedMatrix<From> rows_;
  GuardBuffer<uint8_t> cache_, want_;
  WriteKvArgs args_;
};

std::vector<int64_t> MixedSlots() {
  std::vector<int64_t> slots = {7, -1, 0, 29, 8};
  for (int64_t slot = 46; slot < 90; ++slot) slots.push_back(slot);
  return slots;
}

class LatentBlocksTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(LatentBlocksTest);

TEST_P(LatentBlocksTest, WritesEverySize) {
  TestRng rng;
  InlineExecutor executor;
  const std::vector<int64_t> slots = MixedSlots();
  for (const int64_t latent : {4, 36, 128, 132, 300, 512}) {
    for (const int64_t rest : {1, 2, 7, 64, 258}) {
      const int64_t count =
          static_cast<int64_t>(slots.size()) * 2 * (latent + rest);
      EXPECT_TRUE(
          RanOn(BlocksRun<float>(latent, rest, 2,
                                 UniformReals<float>(rng, count, -3, 3), slots)
                    .Run(executor)));
      BlocksRun<BFloat16>(latent, rest, 2,
                          UniformReals<BFloat16>(rng, count, -3, 3), slots)
          .Run(executor);
      BlocksRun<Float16>(latent, rest, 2,
                         UniformReals<Float16>(rng, count, -3, 3), slots)
          .Run(executor, Stores::kStream);
    }
  }
}

// Elements of a block from 2^-20 of its largest on, whatever that is: codes of
// every binade, ties among them.
TEST_P(LatentBlocksTest, WritesEveryMagnitude) {
  TestRng rng;
  InlineExecutor executor;
  constexpr int64_t kLatent = 128;
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < 96; ++slot) slots.push_back(slot);
  for (int exponent = -150; exponent < 128; exponent += 96) {
    std::vector<float> keys;
    for (int t = 0; t < 96; ++t) {
      const int top = std::min(exponent + t, 127);
      for (int64_t d = 0; d < kLatent + 2; ++d) {
        // 1.mmmm: a bit more than a code has.
        const auto m = static_cast<double>(rng.Integer(16, 31)) / 16;
        const auto down = static_cast<int>(rng.Integer(0, 20));
        keys.push_back(static_cast<float>(
            std::ldexp(rng.Integer(0, 1) == 0 ? m : -m, top - down)));
      }
    }
    EXPECT_TRUE(
        RanOn(BlocksRun<float>(kLatent, 2, 1, keys, slots).Run(executor)));
  }
}

// Every bf16 and f16 as an element of blocks whose largest is 448 times some
// power of two; larger ones are a block's largest themselves.
TEST_P(LatentBlocksTest, WritesEveryCode) {
  InlineExecutor executor;
  constexpr int64_t kLatent = 128;
  const int step = QuickTests() ? 61 : 1;
  for (const int exponent : {-9, 0, 7}) {
    std::vector<BFloat16> keys;
    std::vector<int64_t> slots;
    for (int code = 0; code < 0x10000; code += step) {
      if (keys.size() % (kLatent + 2) == 0) {
        slots.push_back(static_cast<int64_t>(slots.size()));
        keys.push_back(FromDouble<BFloat16>(std::ldexp(448.0, exponent)));
      }
      const BFloat16 x = BFloat16::FromBits(static_cast<uint16_t>(code));
      // NaN and infinity have a test of their own.
      keys.push_back(std::isfinite(ToDouble(x)) ? x : BFloat16::FromBits(0));
    }
    while (keys.size() % (kLatent + 2) != 0) {
      keys.push_back(BFloat16::FromBits(0));
    }
    const auto pages = static_cast<int64_t>(slots.size()) / 32 + 1;
    EXPECT_TRUE(RanOn(
        BlocksRun<BFloat16>(kLatent, 2, 1, keys, slots, pages).Run(executor)));
  }
}

// What is at the edge of a scale, alone in a block of zeros.
TEST_P(LatentBlocksTest, ChoosesTheSmallestScale) {
  InlineExecutor executor;
  std::vector<float> edges = {0.0f, -0.0f, std::numeric_limits<float>::max(),
                              std::numeric_limits<float>::denorm_min(),
                              std::numeric_limits<float>::min()};
  for (const int exponent : {-126, -118, -117, -20, -9, 0, 8, 110, 118, 119}) {
    const float edge = std::ldexp(448.0f, exponent);
    edges.push_back(-edge);
    edges.push_back(std::nextafter(edge, 0.0f));
    if (exponent < 119) edges.push_back(std::nextafter(edge, 1e38f));
  }
  std::vector<float> keys;
  std::vector<int64_t> slots;
  for (size_t i = 0; i < edges.size(); ++i) {
    slots.push_back(static_cast<int64_t>(i));
    std::vector<float> key(132 + 1);
    key[i % 128] = key[128 + i % 4] = edges[i];
    keys.insert(keys.end(), key.begin(), key.end());
  }
  BlocksRun<float> run(132, 1, 1, keys, slots);
  EXPECT_TRUE(RanOn(run.Run(executor)));
  // Zeros, in words of their own.
  const uint8_t* zeros = run.args().cache.K(0, 0);
  EXPECT_EQ(zeros[run.layout().ExponentOffset(0, 0)], 10);
  EXPECT_EQ(zeros[run.layout().KOffset(0, 5)], 0);
}

TEST_P(LatentBlocksTest, NanAndInfinityMakeTheirBlockNan) {
  InlineExecutor executor;
  const float kInfinity = std::numeric_limits<float>::infinity();
  const float specials[] = {std::numeric_limits<float>::quiet_NaN(), kInfinity,
                            -kInfinity};
  constexpr int64_t kLatent = 260, kRest = 3;
  std::vector<float> keys;
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < 21; ++t) {
    slots.push_back(t);
    std::vector<float> key(kLatent + kRest, 0.5f);
    // Blocks 0, 1 and 2, and the rest, which is bf16.
    const int64_t at[] = {0, 127, 128, 255, 256, 259, 261};
    key[static_cast<size_t>(at[t % 7])] = specials[t / 7];
    keys.insert(keys.end(), key.begin(), key.end());
  }
  BlocksRun<float> run(kLatent, kRest, 1, keys, slots);
  EXPECT_TRUE(RanOn(run.Run(executor)));
  const std::vector<double> row = LatentRow(run.args().cache, 0, 0, 2);
  EXPECT_EQ(row[127], 0.5);
  EXPECT_TRUE(std::isnan(row[128]) && std::isnan(row[255]));
  EXPECT_EQ(row[256], 0.5);
}

TEST_P(LatentBlocksTest, WorkersWriteTheSameBytes) {
  TestRng rng;
  const auto workers = Workers(3);
  ASSERT_NE(workers, nullptr);
  const std::vector<int64_t> slots = MixedSlots();
  const auto count = static_cast<int64_t>(slots.size()) * 576;
  EXPECT_TRUE(
      RanOn(BlocksRun<float>(512, 64, 1, UniformReals<float>(rng, count, -3, 3),
                             slots)
                .Run(*workers)));
}

TEST_P(LatentBlocksTest, PagesAreCopiedWhole) {
  TestRng rng;
  InlineExecutor executor;
  const std::vector<int64_t> slots = MixedSlots();
  const auto count = static_cast<int64_t>(slots.size()) * 139;
  BlocksRun<float> run(132, 7, 1, UniformReals<float>(rng, count, -3, 3),
                       slots);
  EXPECT_TRUE(RanOn(run.Run(executor)));
  const KvLayout& layout = run.layout();
  const auto bytes = static_cast<size_t>(layout.k_elements());
  GuardBuffer<uint8_t> other(3 * layout.page_bytes());
  const KvCacheView to(layout, 3, other.data());
  CopyPages(run.args().cache, to, {{2, 0}}, executor);
  EXPECT_EQ(std::memcmp(to.K(0, 0), run.args().cache.K(2, 0), bytes), 0);
  ASSERT_EQ(ConvertPages(run.args().cache, to), absl::OkStatus());
  for (int64_t page = 0; page < 3; ++page) {
    EXPECT_EQ(std::memcmp(to.K(page, 0), run.args().cache.K(page, 0), bytes),
              0);
  }
}

TEST(LatentBlocksRefusalTest, CachesAreAlignedToBf16) {
  BlocksRun<float> run(128, 2, 1, std::vector<float>(130), {0});
  WriteKvSpec spec;
  spec.kv = run.layout();
  const WriteKvPlan plan = WriteKvPlan::Create(spec).value();
  KvCacheView::Blocks blocks = run.args().cache.k();
  EXPECT_EQ(plan.CheckArgs(run.args()), absl::OkStatus());
  blocks.data += 1;
  run.args().cache = KvCacheView(run.layout(), 2, blocks, {});
  ExpectRefusal(plan.CheckArgs(run.args()),
                "the keys of the cache are not aligned to their elements of 2");
  blocks.data -= 1;
  blocks.page_stride_bytes = run.layout().k_elements() - 2;
  run.args().cache = KvCacheView(run.layout(), 2, blocks, {});
  ExpectRefusal(plan.CheckArgs(run.args()), "that do not overlap");
  WriteKvSpec turned = spec;
  turned.rotation = KvRotation::kHalves;
  turned.rot_dim = 2;
  ExpectRefusal(WriteKvPlan::Create(turned).status(),
                absl::StatusCode::kUnimplemented, "the layout is latent");
}

}  // namespace
}  // namespace quern
