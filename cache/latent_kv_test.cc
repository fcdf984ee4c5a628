// The latent form: one block of keys, of which the values are a part.

#include <cstdint>
#include <cstring>
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
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

using ::testing::HasSubstr;

KvLayoutSpec LatentSpec(DType dtype) {
  KvLayoutSpec spec;
  spec.dtype = dtype;
  spec.kv_heads = 1;
  spec.head_dim = 576;
  spec.v_head_dim = 512;
  spec.page_size = 64;
  spec.form = KvForm::kLatent;
  return spec;
}

TEST(LatentKvLayoutTest, HasNoBlockOfValues) {
  const KvLayout layout = KvLayout::Create(LatentSpec(DType::kBF16)).value();
  EXPECT_EQ(layout.page_bytes(), 64 * 576 * 2);
  EXPECT_EQ(layout.v_block_bytes(), 0);
  EXPECT_EQ(layout.v_elements(), 0);
  EXPECT_TRUE(layout.in_groups());
  EXPECT_EQ(KvFormName(layout.form()), "latent");
  for (int64_t t = 0; t < 64; ++t) {
    for (int64_t d = 0; d < 512; ++d) {
      ASSERT_EQ(layout.VOffset(t, d), layout.KOffset(t, d));
    }
  }
  std::vector<uint8_t> memory(static_cast<size_t>(2 * layout.page_bytes()));
  const KvCacheView cache(layout, 2, memory.data());
  EXPECT_EQ(cache.V(1, 0), cache.K(1, 0));
  EXPECT_EQ(cache.K(1, 0), memory.data() + layout.page_bytes());
  const KvCacheView view(layout, 2, cache.k(), {});
  EXPECT_EQ(view.V(1, 0), cache.K(1, 0));
}

TEST(LatentKvLayoutTest, RefusesWhatHasNoPartForValues) {
  using Change = void (*)(KvLayoutSpec&);
  const struct {
    Change change;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {[](KvLayoutSpec& s) { s.page_size = 24; },
       absl::StatusCode::kInvalidArgument,
       "page_size=24; need a multiple of 16 for the latent form"},
      {[](KvLayoutSpec& s) { s.v_head_dim = 510; },
       absl::StatusCode::kInvalidArgument,
       "v_head_dim=510; need a multiple of 4 below head_dim=576"},
      {[](KvLayoutSpec& s) { s.v_head_dim = 0; },
       absl::StatusCode::kInvalidArgument, "v_head_dim=576; need a multiple"},
      {[](KvLayoutSpec& s) { s.dtype = DType::kF8E4M3; },
       absl::StatusCode::kUnimplemented,
       "dtype is f8e4m3 and scaling none; need f32, bf16"},
  };
  for (const auto& c : kCases) {
    KvLayoutSpec spec = LatentSpec(DType::kBF16);
    c.change(spec);
    const absl::Status status = KvLayout::Create(spec).status();
    EXPECT_EQ(status.code(), c.code) << c.words;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.words));
  }
}

TEST(LatentWriteKvPlanTest, RefusesToRotate) {
  WriteKvSpec spec;
  spec.kv = KvLayout::Create(LatentSpec(DType::kBF16)).value();
  spec.rotation = KvRotation::kHalves;
  spec.rot_dim = 64;
  const absl::Status status = WriteKvPlan::Create(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layout is latent"));
}

class LatentWriteKvTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(LatentWriteKvTest);

// What the paired form has for the whole key, which has tests of its own.
// Returns the target that wrote it.
template <typename From, typename To>
std::string ExpectBothPartsOfTheKey(int64_t latent, int64_t rest,
                                    const std::vector<int64_t>& slots,
                                    Rng& rng) {
  SCOPED_TRACE(testing::Message()
               << latent << " and " << rest << " of "
               << DTypeName(DTypeOf<From>) << " to " << DTypeName(DTypeOf<To>));
  const int64_t dim = latent + rest;
  constexpr int64_t kHeads = 2, kPages = 3, kPageSize = 32;
  const auto tokens = static_cast<int64_t>(slots.size());
  const std::vector<From> keys =
      UniformReals<From>(rng, tokens * kHeads * dim, -3, 3);
  KvLayoutSpec spec = LatentSpec(DTypeOf<To>);
  spec.kv_heads = kHeads;
  spec.head_dim = dim;
  spec.v_head_dim = latent;
  spec.page_size = kPageSize;
  const KvLayout layout = KvLayout::Create(spec).value();
  spec.form = KvForm::kPaired;
  const KvLayout paired = KvLayout::Create(spec).value();

  GuardBuffer<uint8_t> got(kPages * layout.page_bytes());
  std::vector<uint8_t> want(static_cast<size_t>(kPages * paired.page_bytes()));
  std::memset(got.data(), 0x5A, static_cast<size_t>(got.size()));
  std::memset(want.data(), 0x5A, want.size());
  const auto part = [&](int64_t begin, int64_t count) {
    return TensorView<const From, 3>(
        keys.data() + begin, {tokens, kHeads, count}, {kHeads * dim, dim, 1});
  };
  const auto write = [&](const KvLayout& to, const AnyTensorView& k,
                         const AnyTensorView& v, uint8_t* memory) {
    WriteKvSpec plan_spec;
    plan_spec.kv = to;
    plan_spec.input = DTypeOf<From>;
    const WriteKvPlan plan = WriteKvPlan::Create(plan_spec).value();
    WriteKvArgs args;
    args.k = k;
    args.v = v;
    args.slots = slots;
    args.cache = KvCacheView(to, kPages, memory);
    const absl::Status status = plan.CheckArgs(args);
    EXPECT_TRUE(status.ok()) << status;
    InlineExecutor executor;
    if (status.ok()) plan.Execute(args, executor);
    return std::string(plan.target());
  };
  const std::string target =
      write(layout, part(0, latent), part(latent, rest), got.data());
  write(paired, part(0, dim), part(0, latent), want.data());
  const KvCacheView got_view(layout, kPages, got.data());
  const KvCacheView want_view(paired, kPages, want.data());
  const size_t bytes = static_cast<size_t>(layout.k_elements()) * sizeof(To);
  for (int64_t page = 0; page < kPages; ++page) {
    for (int64_t head = 0; head < kHeads; ++head) {
      EXPECT_EQ(
          std::memcmp(got_view.K(page, head), want_view.K(page, head), bytes),
          0)
          << "page " << page << " head " << head;
    }
  }
  return target;
}

TEST_P(LatentWriteKvTest, WritesBothPartsOfTheKey) {
  TestRng rng;
  std::vector<int64_t> slots = {7, -1, 0, 29, 8};
  for (int64_t slot = 46; slot < 90; ++slot) slots.push_back(slot);
  for (const int64_t latent : {4, 8, 36, 512}) {
    for (const int64_t rest : {1, 2, 7, 64}) {
      EXPECT_TRUE(RanOn(ExpectBothPartsOfTheKey<BFloat16, BFloat16>(
          latent, rest, slots, rng)));
      EXPECT_TRUE(RanOn(
          ExpectBothPartsOfTheKey<float, BFloat16>(latent, rest, slots, rng)));
      EXPECT_TRUE(RanOn(
          ExpectBothPartsOfTheKey<float, float>(latent, rest, slots, rng)));
      EXPECT_TRUE(RanOn(ExpectBothPartsOfTheKey<BFloat16, Float16>(
          latent, rest, slots, rng)));
    }
  }
}

}  // namespace
}  // namespace quern
