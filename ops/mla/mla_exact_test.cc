// A layer whose numbers are small integers: latents are 1 and -1, so that their
// norm is 1, and queries are 0, so that a token that sees 2^n keys gets their
// mean. Every sum is exact then, in both forms and all dtypes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr int64_t kTokens = 8, kHeads = 3, kLatent = 16, kNope = 4, kRope = 2;
constexpr int64_t kValue = 5, kHidden = 9;

// Whether the mean of the first `keys` tokens is exact.
bool IsPowerOfTwo(int64_t keys) { return (keys & (keys - 1)) == 0; }

MlaSpec Spec(DType dtype, MlaForm form, bool blocks) {
  MlaSpec spec;
  spec.hidden = kHidden;
  spec.heads = kHeads;
  spec.kv_lora = kLatent;
  spec.nope = kNope;
  spec.rope = kRope;
  spec.v_head_dim = kValue;
  spec.eps = 0;
  spec.dtype = spec.norm_dtype = dtype;
  spec.form = form;
  KvLayoutSpec layout;
  layout.dtype = dtype;
  layout.kv_heads = 1;
  layout.head_dim = kLatent + kRope;
  layout.v_head_dim = kLatent;
  layout.page_size = 16;
  layout.form = KvForm::kLatent;
  if (blocks) {
    layout.dtype = DType::kF8E4M3;
    layout.scaling = KvScaling::kPerBlock;
  }
  spec.cache = KvLayout::Create(layout).value();
  return spec;
}

Doubles Signs(Rng& rng, int64_t count) {
  Doubles signs;
  for (int64_t i = 0; i < count; ++i) {
    signs.push_back(rng.Integer(0, 1) == 0 ? -1 : 1);
  }
  return signs;
}

LinearWeights Pack(DType dtype, int64_t n, int64_t k, const Doubles& values) {
  const AnyMatrix matrix(dtype, values, n, k, k);
  LinearWeightsSpec spec;
  spec.n = n;
  spec.k = k;
  spec.format = FormatOfFloats(dtype);
  LinearSource source;
  source.codes = matrix.const_view();
  InlineExecutor executor;
  return LinearWeights::Pack(spec, {source}, executor).value();
}

class MlaExactTest : public IsaTest {
 protected:
  void ExpectMeans(DType dtype, MlaForm form, bool blocks = false) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(dtype) << " form " << static_cast<int>(form)
                 << " blocks " << blocks);
    TestRng rng;
    InlineExecutor executor;
    const MlaSpec spec = Spec(dtype, form, blocks);
    // Token t is the unit vector t, and column t of kv_a its latent.
    Doubles x(kTokens * kHidden);
    for (int64_t t = 0; t < kTokens; ++t) {
      x[static_cast<size_t>(t * kHidden + t)] = 1;
    }
    const Doubles kv_a = Signs(rng, (kLatent + kRope) * kHidden);
    const Doubles kv_b = ToDoubles(
        SmallIntegers(rng, kHeads * (kNope + kValue) * kLatent, -1, 1));
    // One head's value to a column of out, each by itself.
    Doubles out(kHidden * kHeads * kValue);
    for (int64_t n = 0; n < kHidden; ++n) {
      const int64_t column = (n * 7 + 3) % (kHeads * kValue);
      out[static_cast<size_t>(n * kHeads * kValue + column)] = 2;
    }
    MlaWeights weights;
    weights.q = Pack(dtype, kHeads * (kNope + kRope), kHidden,
                     Doubles(kHeads * (kNope + kRope) * kHidden));
    weights.kv_a = Pack(dtype, kLatent + kRope, kHidden, kv_a);
    weights.out = Pack(dtype, kHidden, kHeads * kValue, out);
    const AnyMatrix b(dtype, kv_b, kHeads * (kNope + kValue), kLatent, kLatent);
    ASSERT_EQ(PackKvB(spec, b.const_view(), executor, weights),
              absl::OkStatus());
    const auto plan = MlaPlan::Create(spec, weights, executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    const Doubles got = Run(*plan, x);

    for (int64_t t = 0; t < kTokens; ++t) {
      if (!IsPowerOfTwo(t + 1)) continue;
      Doubles want;
      for (int64_t n = 0; n < kHidden; ++n) {
        const int64_t column = (n * 7 + 3) % (kHeads * kValue);
        const int64_t row =
            column / kValue * (kNope + kValue) + kNope + column % kValue;
        double sum = 0;
        for (int64_t key = 0; key <= t; ++key) {
          for (int64_t j = 0; j < kLatent; ++j) {
            sum += kv_b[static_cast<size_t>(row * kLatent + j)] *
                   kv_a[static_cast<size_t>(j * kHidden + key)];
          }
        }
        want.push_back(2 * sum / static_cast<double>(t + 1));
      }
      const Doubles mine(got.begin() + t * kHidden,
                         got.begin() + (t + 1) * kHidden);
      EXPECT_TRUE(AllEqual(mine, want)) << "token " << t;
    }
  }

 private:
  static Doubles Run(const MlaPlan& plan, const Doubles& x) {
    const MlaSpec& spec = plan.spec();
    const int64_t q_lens[] = {kTokens}, kv_lens[] = {kTokens};
    const std::vector<int64_t> positions = {0, 1, 2, 3, 4, 5, 6, 7};
    PageTableStorage table;
    table.Append({0});
    const PageTable pages = table.Build(16, 1).value();
    MlaScheduleStorage storage;
    RotaryEmbeddingSpec rope_spec;
    rope_spec.head_dim = rope_spec.rot_dim = kRope;
    rope_spec.max_positions = kTokens;
    rope_spec.dtype = spec.dtype;
    const RotaryEmbeddingPlan rope =
        RotaryEmbeddingPlan::Create(rope_spec).value();
    const AnyMatrix in(spec.dtype, x, kTokens, kHidden, kHidden);
    const AnyMatrix ones(spec.dtype, Doubles(kLatent, 1), 1, kLatent, kLatent);
    const AnyMatrix out(spec.dtype, kTokens, kHidden, kHidden);
    AlignedBuffer cache =
        AlignedBuffer::Create(spec.cache.page_bytes()).value();
    MlaArgs args;
    args.x = in.const_view();
    args.positions = DenseVector(positions.data(), kTokens);
    args.kv_norm = ones.vector();
    args.rope = &rope;
    args.cache = KvCacheView(spec.cache, 1, cache.data());
    args.schedule =
        MlaSchedule::Build(spec, {q_lens, kv_lens, pages}, 1, storage).value();
    args.out = out.view();
    AlignedBuffer memory =
        AlignedBuffer::Create(plan.WorkspaceBytes(args.schedule, 1).value())
            .value();
    InlineExecutor executor;
    EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
    plan.Execute(args, Workspace(memory), executor);
    return out.doubles();
  }
};
QUERN_INSTANTIATE_ISA_TEST(MlaExactTest);

TEST_P(MlaExactTest, UniformWeightsGiveTheMeanOfValues) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    ExpectMeans(dtype, MlaForm::kAbsorbed);
    ExpectMeans(dtype, MlaForm::kDirect);
    // f8e4m3 holds 1 and -1 exactly, whatever the scale.
    ExpectMeans(dtype, MlaForm::kAbsorbed, /*blocks=*/true);
    ExpectMeans(dtype, MlaForm::kDirect, /*blocks=*/true);
  }
}

}  // namespace
}  // namespace quern
