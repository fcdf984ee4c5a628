#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

KvLayout MakeLayout(DType dtype, int64_t heads, int64_t head_dim,
                    int64_t v_head_dim, int64_t page_size,
                    KvScaling scaling = KvScaling::kNone) {
  KvLayoutSpec spec;
  spec.dtype = dtype;
  spec.kv_heads = heads;
  spec.head_dim = head_dim;
  spec.v_head_dim = v_head_dim;
  spec.page_size = page_size;
  spec.form = KvForm::kPlain;
  spec.scaling = scaling;
  return KvLayout::Create(spec).value();
}

TEST(WriteKvPlanTest, RefusesASpecThatMakesNoSense) {
  EXPECT_THAT(WriteKvPlan::Create({}).status().message(),
              HasSubstr("write_kv: kv layout is empty"));
  const KvLayout layout = MakeLayout(DType::kF32, 1, 4, 4, 16);
  WriteKvSpec spec;
  spec.kv = layout;
  spec.input = DType::kI8;
  const absl::Status status = WriteKvPlan::Create(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(),
              HasSubstr("input is i8; need f32 or bf16 or f16"));
  spec.input = DType::kF16;
  spec.rotation = KvRotation::kPairs;
  for (const int64_t rot_dim : {0, -2, 5, 6}) {
    spec.rot_dim = rot_dim;
    EXPECT_THAT(WriteKvPlan::Create(spec).status().message(),
                HasSubstr("write_kv: rot_dim="));
  }
  spec.rot_dim = 3;
  EXPECT_THAT(WriteKvPlan::Create(spec).status().message(),
              HasSubstr("rot_dim=3; need an even number"));
}

// A plan, and arguments that it accepts.
class WriteKvArgsTest : public testing::Test {
 protected:
  static constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;

  WriteKvArgsTest() {
    good.k = TensorView<const float, 3>(data.data(), {3, 2, 4}, {8, 4, 1});
    good.v = TensorView<const float, 3>(data.data(), {3, 2, 6}, {12, 6, 1});
    good.slots = slots;
    good.cache = KvCacheView(layout, 2, cache.data());
    EXPECT_TRUE(plan.CheckArgs(good).ok()) << plan.CheckArgs(good);
  }

  void ExpectRefused(const WriteKvArgs& args, const char* words) {
    const absl::Status status = plan.CheckArgs(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(status.message(), HasSubstr(words));
  }

  const KvLayout layout = MakeLayout(DType::kBF16, 2, 4, 6, 16);
  const WriteKvPlan plan = WriteKvPlan::Create({layout, DType::kF32}).value();
  std::vector<float> data = std::vector<float>(3 * 2 * 6);
  std::vector<uint8_t> cache =
      std::vector<uint8_t>(static_cast<size_t>(2 * layout.page_bytes()));
  std::vector<int64_t> slots = {31, -1, 0};
  WriteKvArgs good;
};

TEST_F(WriteKvArgsTest, RefusesRowsThatDoNotFit) {
  const std::vector<BFloat16> bf16(3 * 2 * 6);
  WriteKvArgs args = good;
  args.k = TensorView<const float, 3>(data.data(), {2, 2, 4}, {8, 4, 1});
  ExpectRefused(args, "k.extent(0)=2; need 3");
  args = good;
  args.v = TensorView<const float, 3>(data.data(), {3, 2, 4}, {8, 4, 1});
  ExpectRefused(args, "v.extent(2)=4; need 6");
  args.v = TensorView<const float, 3>(data.data(), {3, 1, 6}, {6, 6, 1});
  ExpectRefused(args, "v.extent(1)=1; need 2");
  args.v = TensorView<const BFloat16, 3>(bf16.data(), {3, 2, 6}, {12, 6, 1});
  ExpectRefused(args, "v is bf16; need f32");
  args.v = DenseMatrix<const float>(data.data(), 3, 12);
  ExpectRefused(args, "v.rank=2; need 3");
  args = good;
  args.k = AnyTensorView(DType::kF32, static_cast<const void*>(data.data()), 3,
                         {3, 2, 4}, {8, 1, 2});
  ExpectRefused(args, "k has stride 2 in dimension 2; need 1");
  args = good;
  args.k = TensorView<const float, 3>(nullptr, {3, 2, 4}, {8, 4, 1});
  ExpectRefused(args, "k is null");
  args.k = TensorView<const float, 3>(data.data(), {3, 2, 4}, {-8, 4, 1});
  ExpectRefused(args, "k has stride -8 in dimension 0");
  args = good;
  args.v = TensorView<const float, 3>(nullptr, {3, 2, 6}, {12, 6, 1});
  ExpectRefused(args, "v is null");
  args.v = TensorView<const float, 3>(data.data(), {3, 2, 6}, {kHuge, 6, 1});
  ExpectRefused(args, "need fewer than 2^63 bytes");
  const auto* in_cache = reinterpret_cast<const float*>(cache.data());
  args.v = TensorView<const float, 3>(in_cache, {3, 2, 6}, {12, 6, 1});
  ExpectRefused(args, "keys of the cache overlaps v");
}

TEST_F(WriteKvArgsTest, RefusesAnotherCacheAndBlocksThatOverlap) {
  WriteKvArgs args = good;
  args.cache = KvCacheView(layout, 2, nullptr);
  ExpectRefused(args, "the keys of the cache are null; need memory for 2");
  args.cache = KvCacheView(layout, -1, cache.data());
  ExpectRefused(args, "num_pages of the cache=-1");
  const auto blocks = [&](int64_t page_stride, int64_t head_stride) {
    return KvCacheView::Blocks{cache.data(), page_stride, head_stride};
  };
  const auto apart = blocks(2 * 16 * 6 * 2, 16 * 6 * 2);
  std::vector<uint8_t> values(2 * 2 * 16 * 6 * 2);
  auto values_apart = apart;
  values_apart.data = values.data();
  args.cache = KvCacheView(layout, 2, apart, values_apart);
  EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
  args.cache = KvCacheView(layout, 2, apart, apart);
  ExpectRefused(args, "the values of the cache overlap the keys of the cache");
  const auto by_head = blocks(16 * 6 * 2, 2 * 16 * 6 * 2);
  auto values_by_head = by_head;
  values_by_head.data = values.data();
  args.cache = KvCacheView(layout, 2, by_head, values_by_head);
  EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
  args.cache = KvCacheView(layout, 2, apart, blocks(0, 192));
  ExpectRefused(args,
                "the values of the cache are 0 and 192 bytes apart; "
                "need blocks of 192 that do not overlap");
  args.cache = KvCacheView(layout, 2, blocks(-256, 128), apart);
  ExpectRefused(args, "the keys of the cache are -256 and 128 bytes apart");
  args.cache = KvCacheView(layout, 3, blocks(kHuge, 128), apart);
  ExpectRefused(args, "fewer than 2^63 bytes from first to last");
  args = good;
  args.cache =
      KvCacheView(MakeLayout(DType::kBF16, 2, 4, 6, 8), 4, cache.data());
  ExpectRefused(args, "another layout");
}

TEST_F(WriteKvArgsTest, RefusesSlotsBeyondTheCacheOrGivenTwice) {
  WriteKvArgs args = good;
  for (const int64_t slot :
       {int64_t{32}, std::numeric_limits<int64_t>::max()}) {
    args = good;
    std::vector<int64_t> bad = {31, -1, slot};
    args.slots = bad;
    ExpectRefused(args, "slots[2]=");
    ExpectRefused(args, "need slot < 32");
  }
  args = good;
  const std::vector<int64_t> twice = {5, -1, 5};
  args.slots = twice;
  ExpectRefused(args, "slot 5 is given twice");
  const std::vector<int64_t> skipped = {-1, -1, 5};
  args.slots = skipped;
  EXPECT_TRUE(plan.CheckArgs(args).ok());
}

// A single token has no next one and a head of one element no second: those
// strides are not used, not even in a sum that would overflow.
TEST(WriteKvPlanTest, IgnoresStridesThatLeadNowhere) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t dim : {1, 4}) {
    const KvLayout layout = MakeLayout(DType::kF32, 1, dim, dim, 16);
    const auto plan = WriteKvPlan::Create({layout, DType::kF32}).value();
    const std::vector<float> data = {1, 2, 3, 4};
    const std::vector<int64_t> slots = {5};
    InlineExecutor executor;
    std::vector<uint8_t> want;
    for (const int64_t stride : {int64_t{4}, int64_t{0}, kMost, -kMost}) {
      std::vector<uint8_t> cache(static_cast<size_t>(2 * layout.page_bytes()));
      WriteKvArgs args;
      args.k = args.v =
          AnyTensorView(DType::kF32, static_cast<const void*>(data.data()), 3,
                        {1, 1, dim}, {stride, stride, dim == 1 ? stride : 1});
      args.slots = slots;
      args.cache = KvCacheView(layout, 2, cache.data());
      ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
      plan.Execute(args, executor);
      if (want.empty()) want = cache;
      EXPECT_EQ(cache, want) << "stride " << stride;
    }
  }
}

// Layers of a decode step ask, in debug builds of Execute too.
TEST(WriteKvPlanTest, ChecksWithoutAllocating) {
  for (const KvScaling scaling :
       {KvScaling::kNone, KvScaling::kPerHead, KvScaling::kPerTokenHead}) {
    const DType dtype = scaling == KvScaling::kNone ? DType::kBF16 : DType::kI8;
    const KvLayout layout = MakeLayout(dtype, 2, 4, 4, 16, scaling);
    const auto plan = WriteKvPlan::Create({layout, DType::kF32}).value();
    const std::vector<float> data(40 * 2 * 4);
    std::vector<float> scales(2, 1.0f);
    std::vector<uint8_t> cache(static_cast<size_t>(4 * layout.page_bytes()));
    std::vector<int64_t> slots;
    for (int64_t token = 0; token < 40; ++token) {
      slots.push_back(token % 7 == 0 ? -1 : 63 - token);
    }
    WriteKvArgs args;
    args.k = args.v =
        TensorView<const float, 3>(data.data(), {40, 2, 4}, {8, 4, 1});
    args.slots = slots;
    args.cache = KvCacheView(layout, 4, cache.data());
    if (scaling == KvScaling::kPerHead) {
      args.cache.set_scales({scales.data(), 0, 1}, {scales.data(), 0, 1});
    }
    absl::Status status;
    EXPECT_NO_ALLOCATION(status = plan.CheckArgs(args));
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(WriteKvPlanDeathTest, ChecksItsArgumentsInDebugBuilds) {
#ifndef NDEBUG
  const KvLayout layout = MakeLayout(DType::kF32, 1, 4, 4, 16);
  const auto plan = WriteKvPlan::Create({layout, DType::kF32}).value();
  const std::vector<float> data(8);
  std::vector<uint8_t> cache(static_cast<size_t>(2 * layout.page_bytes()));
  const std::vector<int64_t> twice = {5, 5};
  WriteKvArgs args;
  args.k = args.v =
      TensorView<const float, 3>(data.data(), {2, 1, 4}, {4, 4, 1});
  args.slots = twice;
  args.cache = KvCacheView(layout, 2, cache.data());
  InlineExecutor executor;
  EXPECT_DEATH(plan.Execute(args, executor),
               "write_kv: slot 5 is given twice; need distinct slots");
#else
  GTEST_SKIP() << "QUERN_DCHECK is off";
#endif
}

// The refusal of a plan with one token of 2 heads of 4 elements.
struct SmallCall {
  explicit SmallCall(KvScaling scaling,
                     KvRotation rotation = KvRotation::kNone) {
    spec.kv = MakeLayout(scaling == KvScaling::kNone ? DType::kF32 : DType::kI8,
                         2, 4, 4, 16, scaling);
    spec.rotation = rotation;
    spec.rot_dim = 4;
    cache.resize(static_cast<size_t>(2 * spec.kv.page_bytes()));
    args.k = args.v = TensorView<const float, 3>(data, {1, 2, 4}, {8, 4, 1});
    args.slots = slots;
    args.cache = KvCacheView(spec.kv, 2, cache.data());
  }
  std::string Refusal() const {
    const absl::Status status =
        WriteKvPlan::Create(spec).value().CheckArgs(args);
    if (status.ok()) return "accepted";
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }

  const float data[8] = {};
  const std::vector<int64_t> slots = {20};
  std::vector<uint8_t> cache;
  WriteKvSpec spec;
  WriteKvArgs args;
};

TEST(WriteKvPlanTest, RefusesScalesThatDivideNothing) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const KvScaling scaling : {KvScaling::kPerTensor, KvScaling::kPerHead}) {
    SmallCall call(scaling);
    EXPECT_THAT(call.Refusal(), HasSubstr("the scales of keys are null; need"));
    const bool per_head = scaling == KvScaling::kPerHead;
    float good[2] = {1, 0x1p-125f};
    call.args.cache.set_scales({good, 0, 1}, {});
    EXPECT_THAT(call.Refusal(), HasSubstr("the scales of values are null"));
    for (const float bad : {0.0f, -1.0f, kInfinity, std::nanf(""), 0x1p-126f}) {
      float scales[2] = {per_head ? 1.0f : bad, bad};
      call.args.cache.set_scales({good, 0, 1}, {scales, 0, 1});
      EXPECT_THAT(call.Refusal(),
                  HasSubstr(per_head ? "scale 1 of values=" : "scale 0 of"));
      EXPECT_THAT(call.Refusal(), HasSubstr("need a finite number >= 2^-125"));
    }
    call.args.cache.set_scales({good, 0, 1}, {good, 0, 1});
    EXPECT_EQ(call.Refusal(), "accepted");
    call.args.cache.set_scales({good, 0, -1}, {good, 0, 1});
    EXPECT_EQ(call.Refusal(), per_head ? "write_kv: the scales of keys are -1 "
                                         "apart; need 0 or more"
                                       : "accepted");
  }
}

TEST(WriteKvPlanTest, RefusesScalesThatCannotBeWritten) {
  SmallCall call(KvScaling::kPerTokenHead);
  EXPECT_EQ(call.Refusal(), "accepted");
  std::vector<float> scales(2 * 2 * 16);
  const KvScales good = {scales.data(), 32, 16};
  call.args.cache.set_scales(good, {});
  EXPECT_THAT(call.Refusal(),
              HasSubstr("the scales of values of the cache are null"));
  call.args.cache.set_scales({scales.data(), 32, 8}, good);
  EXPECT_THAT(call.Refusal(), HasSubstr("the scales of keys of the cache are "
                                        "128 and 32 bytes apart; need blocks "
                                        "of 64 that do not overlap"));
  call.args.cache.set_scales(good, {scales.data(), -32, 16});
  EXPECT_THAT(call.Refusal(), HasSubstr("are -128 and 64 bytes apart"));
  call.args.cache.set_scales(good, {scales.data(), int64_t{1} << 62, 16});
  EXPECT_THAT(call.Refusal(), HasSubstr("the scales of values of the cache"));
  call.args.cache.set_scales(good, good);
  EXPECT_THAT(call.Refusal(), HasSubstr("the scales of values of the cache "
                                        "overlap the scales of keys"));
  call.args.cache.set_scales(
      good,
      {static_cast<float*>(static_cast<void*>(call.cache.data())), 32, 16});
  EXPECT_THAT(call.Refusal(), HasSubstr("the scales of values of the cache "
                                        "overlap the keys"));
  std::vector<float> others(scales.size());
  call.args.cache.set_scales(good, {others.data(), 32, 16});
  EXPECT_EQ(call.Refusal(), "accepted");
  call.args.k = TensorView<const float, 3>(scales.data(), {1, 2, 4}, {8, 4, 1});
  EXPECT_THAT(call.Refusal(),
              HasSubstr("scales of keys of the cache overlaps k"));
}

// Where the blocks of keys and values may lie in one buffer. Keys of 16 x 4 f32
// are 256 bytes, values of 16 x 8 are 512.
TEST(WriteKvPlanTest, AcceptsKeysAndValuesOfOneBufferWhereTheyAreApart) {
  const KvLayout layout = MakeLayout(DType::kF32, 2, 4, 8, 16);
  const auto plan = WriteKvPlan::Create({layout, DType::kF32}).value();
  const std::vector<float> data(16);
  const std::vector<int64_t> slots = {20};
  WriteKvArgs args;
  args.k = TensorView<const float, 3>(data.data(), {1, 2, 4}, {8, 4, 1});
  args.v = TensorView<const float, 3>(data.data(), {1, 2, 8}, {16, 8, 1});
  args.slots = slots;
  std::vector<float> memory(10000);
  auto* bytes = reinterpret_cast<uint8_t*>(memory.data());
  const struct {
    int64_t k_page, k_head, v, v_page, v_head;
    bool apart;
  } kCases[] = {
      {1536, 768, 256, 1536, 768, true},  // [page][head][K, V]
      {1536, 768, 252, 1536, 768, false},
      {1536, 768, 260, 1536, 768, false},
      {1540, 768, 260, 1540, 768, false},
      {1536, 256, 512, 1536, 512, true},  // [page][K, V][head]
      {1536, 256, 508, 1536, 512, false},
      {1536, 256, 516, 1536, 512, false},
      {256, 2304, 768, 512, 2304, true},  // [head][K, V][page]
      {256, 2304, 764, 512, 2304, false},
      {256, 2304, 772, 512, 2304, false},
      {768, 2304, 256, 768, 2304, true},  // [head][page][K, V]
      {768, 2304, 252, 768, 2304, false},
      {512, 256, 1536, 1024, 512, true},  // [K, V][page][head]
      {512, 256, 1532, 1024, 512, false},
      {1024, 512, 512, 2048, 1024, false},
      {1024, 256, 512, 2048, 1024, true},  // of other strides both
      {1024, 256, 508, 2048, 1024, false},
      {1536, 768, 256 + 1536, 1536, 768, true},  // a page later
      {1536, 768, 2 * 1536, 1536, 768, false},
      {1536, 768, 3 * 1536, 1536, 768, true},
      {512, 256, 0, int64_t{1} << 61, 512, false},
  };
  for (const auto& c : kCases) {
    args.cache = KvCacheView(layout, 3, {bytes, c.k_page, c.k_head},
                             {bytes + c.v, c.v_page, c.v_head});
    const absl::Status status = plan.CheckArgs(args);
    EXPECT_EQ(status.ok(), c.apart) << c.v << ": " << status;
    if (!c.apart) {
      EXPECT_THAT(status.message(),
                  HasSubstr("the values of the cache overlap the keys"));
    }
  }
}

TEST(WriteKvPlanTest, RefusesACacheThatIsNotAligned) {
  SmallCall call(KvScaling::kNone);
  const KvCacheView good = call.args.cache;
  const auto moved = [](KvCacheView::Blocks blocks, int64_t bytes) {
    blocks.data += bytes;
    return blocks;
  };
  call.args.cache = KvCacheView(call.spec.kv, 1, moved(good.k(), 2), good.v());
  EXPECT_THAT(call.Refusal(),
              HasSubstr("the keys of the cache are not aligned to their "
                        "elements of 4 bytes"));
  call.args.cache = KvCacheView(call.spec.kv, 1, good.k(), moved(good.v(), 1));
  EXPECT_THAT(call.Refusal(), HasSubstr("the values of the cache are not"));
  KvCacheView::Blocks stepped = good.k();
  stepped.page_stride_bytes += 2;
  call.args.cache = KvCacheView(call.spec.kv, 2, stepped, good.v());
  EXPECT_THAT(call.Refusal(), HasSubstr("the keys of the cache are not"));
  stepped = good.v();
  stepped.head_stride_bytes += 1;
  call.args.cache = KvCacheView(call.spec.kv, 1, good.k(), stepped);
  EXPECT_THAT(call.Refusal(), HasSubstr("the values of the cache are not"));
  // Bytes are aligned anywhere, their scales are not.
  std::vector<float> memory(2 * 2 * 16 + 1);
  auto* stray =
      reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(memory.data()) + 1);
  float one = 1;
  for (const KvScaling scaling :
       {KvScaling::kPerTensor, KvScaling::kPerHead, KvScaling::kPerTokenHead}) {
    SmallCall scaled(scaling);
    const KvCacheView& view = scaled.args.cache;
    KvScales k = {&one, 0, 0}, v = {stray, 0, 0};
    if (scaling == KvScaling::kPerTokenHead) {
      k = view.k_scales();
      v = {stray, 32, 16};
    }
    scaled.args.cache.set_scales(k, v);
    EXPECT_THAT(scaled.Refusal(), HasSubstr("the scales of values"));
    EXPECT_THAT(scaled.Refusal(),
                HasSubstr("not aligned to their elements of 4 bytes"));
  }
}

TEST(WriteKvPlanTest, RefusesPositionsBeyondTheTables) {
  SmallCall call(KvScaling::kNone, KvRotation::kHalves);
  EXPECT_THAT(call.Refusal(), HasSubstr("cos is [0, 0]; need [0, 2]"));
  const float table[6] = {};
  call.args.cos = DenseMatrix<const float>(table, 3, 2);
  call.args.sin = DenseMatrix<const float>(table, 2, 2);
  EXPECT_THAT(call.Refusal(), HasSubstr("sin is [2, 2]; need [3, 2]"));
  call.args.sin = call.args.cos;
  EXPECT_THAT(call.Refusal(), HasSubstr("positions.size()=0; need 1"));
  std::vector<int64_t> positions = {2};
  call.args.positions = positions;
  EXPECT_EQ(call.Refusal(), "accepted");
  for (const int64_t position : {int64_t{3}, int64_t{-1}}) {
    positions[0] = position;
    EXPECT_THAT(call.Refusal(), HasSubstr("positions[0]="));
    EXPECT_THAT(call.Refusal(), HasSubstr("need 0 <= position < 3"));
  }
  const std::vector<int64_t> skipped = {-1};
  call.args.slots = skipped;
  EXPECT_EQ(call.Refusal(), "accepted");
}

}  // namespace
}  // namespace quern
