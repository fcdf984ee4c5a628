#include "cache/write_kv.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "cache/kv_cache_view.h"
#include "cache/kv_layout.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/hwy_executor.h"
#include "core/tensor_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/compare.h"
#include "testing/data.h"
#include "testing/guard_buffer.h"
#include "testing/isa_test.h"
#include "testing/no_alloc.h"
#include "testing/reference_convert.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

KvLayout MakeLayout(DType dtype, int64_t heads, int64_t head_dim,
                    int64_t v_head_dim, int64_t page_size,
                    KvForm form = KvForm::kPlain) {
  KvLayoutSpec spec;
  spec.dtype = dtype;
  spec.kv_heads = heads;
  spec.head_dim = head_dim;
  spec.v_head_dim = v_head_dim;
  spec.page_size = page_size;
  spec.form = form;
  return KvLayout::Create(spec).value();
}

// Where element d of a key (or value) of a slot lies, by the layout's formula.
template <typename T>
T& Element(GuardBuffer<T>& cache, const KvLayout& layout, bool value,
           int64_t slot, int64_t head, int64_t d) {
  const int64_t page = slot / layout.page_size();
  const int64_t offset = slot % layout.page_size();
  const int64_t block = page * layout.page_bytes() +
                        head * layout.head_bytes() +
                        (value ? layout.k_block_bytes() : int64_t{0});
  return cache[block / static_cast<int64_t>(sizeof(T)) +
               (value ? layout.VOffset(offset, d) : layout.KOffset(offset, d))];
}

// One instance per instruction set that this CPU has.
class WriteKvTest : public IsaTest {
 protected:
  template <typename From, typename To>
  void ExpectWritten(KvForm form, int64_t heads, int64_t head_dim,
                     int64_t v_head_dim, const std::vector<int64_t>& slots,
                     const std::vector<From>& choices, Rng& rng) {
    constexpr int64_t kPages = 6;
    const int64_t page_size = form == KvForm::kPlain ? 5 : 16;
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<From>) << " to " << KvFormName(form)
                 << " " << DTypeName(DTypeOf<To>) << " heads " << heads
                 << " head_dim " << head_dim << " and " << v_head_dim);
    const KvLayout layout =
        MakeLayout(DTypeOf<To>, heads, head_dim, v_head_dim, page_size, form);
    const auto tokens = static_cast<int64_t>(slots.size());
    const auto k = ChosenFrom(rng, tokens * heads * head_dim, choices);
    const auto v = ChosenFrom(rng, tokens * heads * v_head_dim, choices);
    // Gaps between rows; a guard page behind the last element.
    const StridedMatrix<From> k_rows(k, tokens * heads, head_dim, head_dim + 3);
    const StridedMatrix<From> v_rows(v, tokens * heads, v_head_dim,
                                     v_head_dim + 1);
    const int64_t elements =
        kPages * layout.page_bytes() / static_cast<int64_t>(sizeof(To));
    GuardBuffer<To> cache(elements), want(elements);
    WriteKvArgs args;
    args.k = TensorView<const From, 3>(
        k_rows.view().data(), {tokens, heads, head_dim},
        {heads * (head_dim + 3), head_dim + 3, 1});
    args.v = TensorView<const From, 3>(
        v_rows.view().data(), {tokens, heads, v_head_dim},
        {heads * (v_head_dim + 1), v_head_dim + 1, 1});
    args.slots = slots;
    args.cache = KvCacheView(layout, kPages, cache.data());
    const auto plan = WriteKvPlan::Create({layout, DTypeOf<From>}).value();
    EXPECT_RAN_ON(plan);
    const absl::Status status = plan.CheckArgs(args);
    ASSERT_TRUE(status.ok()) << status;
    InlineExecutor executor;
    EXPECT_NO_ALLOCATION(plan.Execute(args, executor));

    size_t next_k = 0, next_v = 0;
    for (const int64_t slot : slots) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < head_dim; ++d, ++next_k) {
          if (slot < 0) continue;
          Element(want, layout, false, slot, h, d) =
              FromDouble<To>(ToDouble(k[next_k]));
        }
        // The zero that completes the last pair.
        for (int64_t d = head_dim; d < layout.k_row() && slot >= 0; ++d) {
          Element(want, layout, false, slot, h, d) = FromDouble<To>(0);
        }
        for (int64_t d = 0; d < v_head_dim; ++d, ++next_v) {
          if (slot < 0) continue;
          Element(want, layout, true, slot, h, d) =
              FromDouble<To>(ToDouble(v[next_v]));
        }
      }
    }
    // What was not written is poison in both.
    EXPECT_TRUE(AllEqual(cache.ToVector(), want.ToVector()));
  }

  template <typename From, typename To>
  void ExpectAllShapesWritten(const std::vector<From>& choices, Rng& rng) {
    for (const KvForm form : {KvForm::kPlain, KvForm::kPaired}) {
      for (const int64_t dim : {1, 3, 4, 7, 8, 15, 16, 17, 33, 64, 65, 130}) {
        ExpectWritten<From, To>(form, 2, dim, dim + 1, {7, -1, 0, 29, 8},
                                choices, rng);
      }
      ExpectWritten<From, To>(form, 1, 16, 16, {}, choices, rng);
      ExpectWritten<From, To>(form, 3, 5, 2, {-1, -9}, choices, rng);
      std::vector<int64_t> slots;
      for (int64_t slot = 0; slot < 30; ++slot) slots.push_back(slot);
      rng.Shuffle(slots);
      ExpectWritten<From, To>(form, 3, 9, 24, slots, choices, rng);
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(WriteKvTest);

// What rounding can get wrong: ties on both sides, carries, the largest values
// and beyond, denormals, infinities, NaN, negative zero.
std::vector<float> HardFloats() {
  std::vector<float> v = Extremes<float>();
  for (const float x : Specials<float>()) v.push_back(x);
  for (const float x :
       {1.00390625f, 1.01171875f, 1.0039063f, 1.0039062f, 255.5f, 65504.0f,
        65519.99f, 65520.0f, 1e5f, 6.1e-5f, 5.96e-8f, 2.98e-8f, 2.99e-8f,
        3.4e38f, 3.395e38f, 1e-39f, 1.00048828125f, 1.00146484375f, 0.1f}) {
    v.push_back(x);
    v.push_back(-x);
  }
  return v;
}

TEST_P(WriteKvTest, RoundsToNearestEvenFromF32) {
  TestRng rng;
  ExpectAllShapesWritten<float, float>(HardFloats(), rng);
  ExpectAllShapesWritten<float, BFloat16>(HardFloats(), rng);
  ExpectAllShapesWritten<float, Float16>(HardFloats(), rng);
}

TEST_P(WriteKvTest, ConvertsFromBf16) {
  TestRng rng;
  std::vector<BFloat16> choices = Extremes<BFloat16>();
  for (const BFloat16 x : Specials<BFloat16>()) choices.push_back(x);
  for (const BFloat16 x : UniformReals<BFloat16>(rng, 50, -3, 3)) {
    choices.push_back(x);
  }
  ExpectAllShapesWritten<BFloat16, float>(choices, rng);
  ExpectAllShapesWritten<BFloat16, BFloat16>(choices, rng);
  ExpectAllShapesWritten<BFloat16, Float16>(choices, rng);
}

TEST_P(WriteKvTest, DoesNotDependOnTheNumberOfWorkers) {
  TestRng rng;
  constexpr int64_t kTokens = 200, kHeads = 2, kDim = 24;
  const KvLayout layout = MakeLayout(DType::kBF16, kHeads, kDim, kDim, 16);
  const auto rows = UniformReals(rng, kTokens * kHeads * kDim);
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < kTokens; ++slot) slots.push_back(slot);
  rng.Shuffle(slots);
  WriteKvArgs args;
  args.k = args.v = DenseTensor<const float>(
      rows.data(), std::array<int64_t, 3>{kTokens, kHeads, kDim});
  args.slots = slots;
  const auto plan = WriteKvPlan::Create({layout, DType::kF32}).value();
  EXPECT_RAN_ON(plan);
  std::vector<std::vector<uint8_t>> caches;
  for (const int workers : {1, 2, 5}) {
    const auto executor = HwyExecutor::Create(workers).value();
    std::vector<uint8_t> cache(static_cast<size_t>(13 * layout.page_bytes()));
    args.cache = KvCacheView(layout, 13, cache.data());
    plan.Execute(args, *executor);
    caches.push_back(cache);
  }
  EXPECT_EQ(caches[0], caches[1]);
  EXPECT_EQ(caches[0], caches[2]);
}

TEST(WriteKvPlanTest, RefusesASpecThatMakesNoSense) {
  EXPECT_THAT(WriteKvPlan::Create({}).status().message(),
              HasSubstr("write_kv: kv layout is empty"));
  const KvLayout layout = MakeLayout(DType::kF32, 1, 4, 4, 16);
  const absl::Status status =
      WriteKvPlan::Create({layout, DType::kF16}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("input is f16; need f32 or bf16"));
}

TEST(WriteKvPlanTest, RefusesArgumentsThatDoNotFit) {
  const KvLayout layout = MakeLayout(DType::kBF16, 2, 4, 6, 16);
  const auto plan = WriteKvPlan::Create({layout, DType::kF32}).value();
  std::vector<float> data(3 * 2 * 6);
  std::vector<BFloat16> bf16(3 * 2 * 6);
  std::vector<uint8_t> cache(static_cast<size_t>(2 * layout.page_bytes()));
  std::vector<int64_t> slots = {31, -1, 0};
  WriteKvArgs good;
  good.k = TensorView<const float, 3>(data.data(), {3, 2, 4}, {8, 4, 1});
  good.v = TensorView<const float, 3>(data.data(), {3, 2, 6}, {12, 6, 1});
  good.slots = slots;
  good.cache = KvCacheView(layout, 2, cache.data());
  ASSERT_TRUE(plan.CheckArgs(good).ok()) << plan.CheckArgs(good);
  const auto expect_refused = [&](const WriteKvArgs& args, const char* words) {
    const absl::Status status = plan.CheckArgs(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(status.message(), HasSubstr(words));
  };
  WriteKvArgs args = good;
  args.k = TensorView<const float, 3>(data.data(), {2, 2, 4}, {8, 4, 1});
  expect_refused(args, "k.extent(0)=2; need 3");
  args = good;
  args.v = TensorView<const float, 3>(data.data(), {3, 2, 4}, {8, 4, 1});
  expect_refused(args, "v.extent(2)=4; need 6");
  args.v = TensorView<const float, 3>(data.data(), {3, 1, 6}, {6, 6, 1});
  expect_refused(args, "v.extent(1)=1; need 2");
  args.v = TensorView<const BFloat16, 3>(bf16.data(), {3, 2, 6}, {12, 6, 1});
  expect_refused(args, "v is bf16; need f32");
  args.v = DenseMatrix<const float>(data.data(), 3, 12);
  expect_refused(args, "v.rank=2; need 3");
  args = good;
  args.k = AnyTensorView(DType::kF32, static_cast<const void*>(data.data()), 3,
                         {3, 2, 4}, {8, 1, 2});
  expect_refused(args, "k.stride(2)=2; need 1");
  args = good;
  args.k = TensorView<const float, 3>(nullptr, {3, 2, 4}, {8, 4, 1});
  expect_refused(args, "k is null");
  args.k = TensorView<const float, 3>(data.data(), {3, 2, 4}, {-8, 4, 1});
  expect_refused(args, "k has stride -8 in dimension 0");
  args = good;
  args.v = TensorView<const float, 3>(nullptr, {3, 2, 6}, {12, 6, 1});
  expect_refused(args, "v is null");
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  args.v = TensorView<const float, 3>(data.data(), {3, 2, 6}, {kHuge, 6, 1});
  expect_refused(args, "need fewer than 2^63 bytes");
  const auto* in_cache = reinterpret_cast<const float*>(cache.data());
  args.v = TensorView<const float, 3>(in_cache, {3, 2, 6}, {12, 6, 1});
  expect_refused(args, "keys of the cache overlaps v");
  args = good;
  args.cache = KvCacheView(layout, 2, nullptr);
  expect_refused(args, "the keys of the cache are null; need memory for 2");
  args.cache = KvCacheView(layout, -1, cache.data());
  expect_refused(args, "num_pages of the cache=-1");
  const auto blocks = [&](int64_t page_stride, int64_t head_stride) {
    return KvCacheView::Blocks{cache.data(), page_stride, head_stride};
  };
  const auto apart = blocks(2 * 16 * 6 * 2, 16 * 6 * 2);
  args.cache = KvCacheView(layout, 2, apart, apart);
  EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
  const auto by_head = blocks(16 * 6 * 2, 2 * 16 * 6 * 2);
  args.cache = KvCacheView(layout, 2, by_head, by_head);
  EXPECT_TRUE(plan.CheckArgs(args).ok()) << plan.CheckArgs(args);
  args.cache = KvCacheView(layout, 2, apart, blocks(0, 192));
  expect_refused(args,
                 "the values of the cache are 0 and 192 bytes apart; "
                 "need blocks of 192 that do not overlap");
  args.cache = KvCacheView(layout, 2, blocks(-256, 128), apart);
  expect_refused(args, "the keys of the cache are -256 and 128 bytes apart");
  args.cache = KvCacheView(layout, 3, blocks(kHuge, 128), apart);
  expect_refused(args, "fewer than 2^63 bytes from first to last");
  args = good;
  args.cache =
      KvCacheView(MakeLayout(DType::kBF16, 2, 4, 6, 8), 4, cache.data());
  expect_refused(args, "another layout");
  for (const int64_t slot :
       {int64_t{32}, std::numeric_limits<int64_t>::max()}) {
    args = good;
    std::vector<int64_t> bad = {31, -1, slot};
    args.slots = bad;
    expect_refused(args, "slots[2]=");
    expect_refused(args, "need slot < 32");
  }
  args = good;
  const std::vector<int64_t> twice = {5, -1, 5};
  args.slots = twice;
  expect_refused(args, "slot 5 is given twice");
  const std::vector<int64_t> skipped = {-1, -1, 5};
  args.slots = skipped;
  EXPECT_TRUE(plan.CheckArgs(args).ok());
}

}  // namespace
}  // namespace quern
