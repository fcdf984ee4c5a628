// A layer whose results are exact in both forms and all dtypes. Latents are
// rows of a Hadamard matrix: 1 and -1, so that their norm is 1, and orthogonal
// to one another. Where queries are 0, a token that sees 2^n keys gets the mean
// of their values. Else a query picks some keys, whose logits are equal and so
// far above the others that these have the weight 0: a query is a sum of the
// rows of W_uk that are the latents of its keys, or it is rotated so that it
// points to the key two tokens before. Numbers are integers, but for the
// rotation, whose roundings are far smaller than the distance of logits.

#include <algorithm>
#include <cmath>
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
#include "quern/gemm/testing/known_weights.h"
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

constexpr int64_t kTokens = 8, kHeads = 3, kLatent = 16, kNope = 8, kRope = 2;
constexpr int64_t kValue = 5, kHidden = 9;

enum class Queries { kZero, kPick };

// Keys whose mean a head of a token is, oldest first: all, or those that it
// picks.
std::vector<int64_t> KeysOf(Queries queries, int64_t token, int64_t head) {
  if (queries == Queries::kPick) {
    constexpr int64_t kPicked[kTokens] = {0, 1, 0, 2, 1, 5, 3, 7};
    const int64_t one = kPicked[token];
    const int64_t other = (one + token / 2 + 1) % (token + 1);
    if (head == 0) return {one};
    if (head == 1) return {std::max<int64_t>(token - 2, 0)};
    if (one == other) return {one};
    return {std::min(one, other), std::max(one, other)};
  }
  std::vector<int64_t> keys;
  for (int64_t key = 0; key <= token; ++key) keys.push_back(key);
  return keys;
}

// Whether a mean of so many is exact.
bool IsPowerOfTwo(size_t keys) { return (keys & (keys - 1)) == 0; }

double Hadamard(int64_t row, int64_t column) {
  int64_t both = row & column;
  double sign = 1;
  for (; both != 0; both &= both - 1) sign = -sign;
  return sign;
}
// The latent of a token, element by element.
double Latent(int64_t token, int64_t element) {
  return Hadamard(token + 1, element);
}
// Which row of a head's W_uk is the latent of a key.
int64_t RowOf(int64_t head, int64_t key) { return (3 * key + head) % kNope; }

MlaSpec Spec(DType dtype, MlaForm form, bool blocks) {
  MlaSpec spec;
  spec.hidden = kHidden;
  spec.heads = kHeads;
  spec.kv_lora = kLatent;
  spec.nope = kNope;
  spec.rope = kRope;
  spec.v_head_dim = kValue;
  spec.eps = 0;
  spec.scale = 1;
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

// Token t is the unit vector t, so that columns of q and kv_a are queries and
// rows of the cache.
Doubles QueryMatrix(Queries queries) {
  constexpr int64_t kRow = kNope + kRope;
  Doubles q(kHeads * kRow * kHidden);
  if (queries == Queries::kZero) return q;
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto at = [&](int64_t head, int64_t row) -> double& {
      return q[static_cast<size_t>((head * kRow + row) * kHidden + t)];
    };
    for (const int64_t head : {0, 2}) {
      for (const int64_t key : KeysOf(queries, t, head)) {
        at(head, RowOf(head, key)) = 64;  // logits of 64 * kLatent and 0
      }
    }
    // Logits of 64 * 32 cos(key - t + 2).
    at(1, kNope) = 64 * std::cos(-2.0);
    at(1, kNope + 1) = 64 * std::sin(-2.0);
  }
  return q;
}
Doubles CacheMatrix() {
  Doubles kv_a((kLatent + kRope) * kHidden);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t j = 0; j < kLatent; ++j) {
      kv_a[static_cast<size_t>(j * kHidden + t)] = Latent(t, j);
    }
    kv_a[static_cast<size_t>(kLatent * kHidden + t)] = 32;
  }
  return kv_a;
}
// W_uk of rows that are latents; W_uv of small integers.
Doubles KeyValueMatrix(Rng& rng) {
  constexpr int64_t kRow = kNope + kValue;
  Doubles kv_b = ToDoubles(SmallIntegers(rng, kHeads * kRow * kLatent, -1, 1));
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t key = 0; key < kTokens; ++key) {
      for (int64_t j = 0; j < kLatent; ++j) {
        kv_b[static_cast<size_t>((h * kRow + RowOf(h, key)) * kLatent + j)] =
            Latent(key, j);
      }
    }
  }
  return kv_b;
}
// One head's value to a column of out, each by itself.
int64_t ColumnOf(int64_t n) { return (n * 7 + 3) % (kHeads * kValue); }
Doubles OutMatrix() {
  Doubles out(kHidden * kHeads * kValue);
  for (int64_t n = 0; n < kHidden; ++n) {
    out[static_cast<size_t>(n * kHeads * kValue + ColumnOf(n))] = 2;
  }
  return out;
}

LinearWeights Pack(DType dtype, int64_t n, int64_t k, const Doubles& values) {
  InlineExecutor executor;
  return FloatWeights(dtype, n, k, values).Pack(executor);
}

class MlaExactTest : public IsaTest {
 protected:
  void ExpectMeans(DType dtype, MlaForm form, Queries queries,
                   bool blocks = false) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(dtype) << " form " << static_cast<int>(form)
                 << " blocks " << blocks);
    TestRng rng;
    InlineExecutor executor;
    const MlaSpec spec = Spec(dtype, form, blocks);
    Doubles x(kTokens * kHidden);
    for (int64_t t = 0; t < kTokens; ++t) {
      x[static_cast<size_t>(t * kHidden + t)] = 1;
    }
    const Doubles kv_b = KeyValueMatrix(rng);
    MlaWeights weights;
    weights.q =
        Pack(dtype, kHeads * (kNope + kRope), kHidden, QueryMatrix(queries));
    weights.kv_a = Pack(dtype, kLatent + kRope, kHidden, CacheMatrix());
    weights.out = Pack(dtype, kHidden, kHeads * kValue, OutMatrix());
    const AnyMatrix b(dtype, kv_b, kHeads * (kNope + kValue), kLatent, kLatent);
    ASSERT_EQ(PackKvB(spec, b.const_view(), executor, weights),
              absl::OkStatus());
    const auto plan = MlaPlan::Create(spec, weights, executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    const Doubles got = Run(*plan, x);

    for (int64_t t = 0; t < kTokens; ++t) {
      if (!IsPowerOfTwo(KeysOf(queries, t, 0).size())) continue;
      Doubles want;
      for (int64_t n = 0; n < kHidden; ++n) {
        const int64_t head = ColumnOf(n) / kValue;
        const int64_t row =
            head * (kNope + kValue) + kNope + ColumnOf(n) % kValue;
        const std::vector<int64_t> keys = KeysOf(queries, t, head);
        double sum = 0;
        for (const int64_t key : keys) {
          for (int64_t j = 0; j < kLatent; ++j) {
            sum +=
                kv_b[static_cast<size_t>(row * kLatent + j)] * Latent(key, j);
          }
        }
        want.push_back(2 * sum / static_cast<double>(keys.size()));
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
    ExpectMeans(dtype, MlaForm::kAbsorbed, Queries::kZero);
    ExpectMeans(dtype, MlaForm::kDirect, Queries::kZero);
    // f8e4m3 holds 1 and -1 exactly, whatever the scale.
    ExpectMeans(dtype, MlaForm::kAbsorbed, Queries::kZero, /*blocks=*/true);
    ExpectMeans(dtype, MlaForm::kDirect, Queries::kZero, /*blocks=*/true);
  }
}

TEST_P(MlaExactTest, QueriesPickKeysByLatentsAndByPositions) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    ExpectMeans(dtype, MlaForm::kAbsorbed, Queries::kPick);
    ExpectMeans(dtype, MlaForm::kDirect, Queries::kPick);
  }
}

}  // namespace
}  // namespace quern
