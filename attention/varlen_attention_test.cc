// Attention without a cache: the bits of paged attention, which has tests of
// its own, and the reference.

#include "quern/attention/varlen_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_bound.h"
#include "quern/attention/testing/paged_attention_testutil.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

VarlenAttentionSpec SpecOf(const Heads& heads, DType dtype, DType out_dtype) {
  VarlenAttentionSpec spec;
  spec.q_heads = heads.q_heads;
  spec.kv_heads = heads.kv_heads;
  spec.head_dim = heads.head_dim;
  spec.v_head_dim = heads.v_head_dim;
  spec.dtype = dtype;
  spec.out_dtype = out_dtype;
  spec.scale = heads.scale;
  spec.window_left = heads.window_left;
  spec.window_right = heads.window_right;
  spec.soft_cap = heads.soft_cap;
  return spec;
}

// Where q, k and v lie.
enum class Lay {
  kApart,     // with gaps between rows
  kOneMatrix  // as columns of one projection, where dims are equal
};

class VarlenAttentionTest : public IsaTest {
 protected:
  // Runs the batch, all of whose sequences have one mask.
  template <typename T, typename Out>
  Result<Out> Run(const Heads& heads, const std::vector<Sequence>& batch,
                  Lay lay = Lay::kApart, int workers = 1,
                  Executor* threads = nullptr) {
    const VarlenAttentionPlan plan =
        VarlenAttentionPlan::Create(SpecOf(heads, DTypeOf<T>, DTypeOf<Out>))
            .value();
    EXPECT_RAN_ON(plan);
    std::vector<int32_t> cu_q = {0}, cu_kv = {0};
    std::vector<T> q, k, v;
    for (const Sequence& s : batch) {
      cu_q.push_back(cu_q.back() + static_cast<int32_t>(s.length.q_len));
      cu_kv.push_back(cu_kv.back() + static_cast<int32_t>(s.length.kv_len));
      for (const double x : s.q) q.push_back(FromDouble<T>(x));
      for (const double x : s.k) k.push_back(FromDouble<T>(x));
      for (const double x : s.v) v.push_back(FromDouble<T>(x));
    }
    const bool causal = batch.empty() || batch[0].length.causal;
    VarlenAttentionStorage storage;
    VarlenAttentionArgs args;
    args.schedule = plan.BuildSchedule(cu_q, cu_kv,
                                       causal ? VarlenMask::kCausal
                                              : VarlenMask::kBidirectional,
                                       workers, storage)
                        .value();
    const int64_t tokens = cu_q.back(), keys = cu_kv.back();
    const int64_t dim = heads.head_dim, v_dim = ValueDim(heads);
    const int64_t q_heads = heads.q_heads, kv_heads = heads.kv_heads;
    // The rows of q, k and v, each with gaps, or side by side.
    const int64_t gap = lay == Lay::kApart ? 3 : 0;
    const int64_t row = (q_heads + 2 * kv_heads) * dim + 5;
    GuardBuffer<T> joint(lay == Lay::kApart ? 0 : tokens * row);
    std::vector<std::unique_ptr<StridedMatrix<T>>> apart;
    int64_t column = 0;
    const auto place = [&](const std::vector<T>& x, int64_t rows, int64_t n,
                           int64_t d) -> AnyTensorView {
      if (lay == Lay::kApart) {
        apart.push_back(
            std::make_unique<StridedMatrix<T>>(x, rows * n, d, d + gap));
        return TensorView<const T, 3>(apart.back()->view().data(), {rows, n, d},
                                      {n * (d + gap), d + gap, 1});
      }
      T* const first = joint.data() + column;
      for (int64_t i = 0; i < rows * n * d; ++i) {
        first[i / (n * d) * row + i % (n * d)] = x[static_cast<size_t>(i)];
      }
      column += n * d;
      return TensorView<const T, 3>(first, {rows, n, d}, {row, d, 1});
    };
    args.q = place(q, tokens, q_heads, dim);
    args.k = place(k, keys, kv_heads, dim);
    args.v = place(v, keys, kv_heads, v_dim);
    StridedMatrix<Out> out(tokens * q_heads, v_dim, v_dim + 5);
    StridedMatrix<float> lse(tokens, q_heads, q_heads + 1);
    args.out = TensorView<Out, 3>(out.view().data(), {tokens, q_heads, v_dim},
                                  {q_heads * (v_dim + 5), v_dim + 5, 1});
    args.lse = lse.view();
    args.alibi_slopes = heads.alibi_slopes;
    args.sinks = heads.sinks;
    InlineExecutor inline_executor;
    Executor& executor = threads == nullptr ? inline_executor : *threads;
    EXPECT_EQ(plan.CheckArgs(args), absl::OkStatus());
    GuardBuffer<uint8_t> memory(
        plan.WorkspaceBytes(args.schedule, executor.num_workers()).value());
    const Workspace workspace(memory.data(),
                              static_cast<size_t>(memory.size()));
    EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
    // Dirty scratch must not matter.
    plan.Execute(args, workspace, executor);
    return {out.ToDense(), lse.ToDense()};
  }

  template <typename T, typename Out>
  void ExpectBitsOfPaged(const Heads& heads,
                         const std::vector<Lengths>& lengths, Rng& rng) {
    SCOPED_TRACE(testing::Message()
                 << "q_heads " << heads.q_heads << " head_dim "
                 << heads.head_dim << " v_head_dim " << heads.v_head_dim << " "
                 << DTypeName(DTypeOf<T>) << " causal " << lengths[0].causal);
    std::vector<Sequence> batch;
    for (const Lengths& length : lengths) {
      batch.push_back(RandomSequence<T, T>(rng, heads, length));
    }
    const Attention<T, T, Out> paged(heads, Variant(), batch);
    const Result<Out> got = Run<T, Out>(heads, batch);
    EXPECT_TRUE(AllBitsEqual(got.out, paged.result().out));
    EXPECT_TRUE(AllBitsEqual(got.lse, paged.result().lse));
    const ReferenceAttentionResult want = Reference(heads, batch);
    const Bounds bounds(heads, LongestKv(batch), UnitRoundoff<Out>(),
                        paged.plan());
    EXPECT_TRUE(AllClose(got.out, want.out, bounds.out));
    EXPECT_TRUE(AllClose(got.lse, want.lse, bounds.lse));
  }
};
QUERN_INSTANTIATE_ISA_TEST(VarlenAttentionTest);

std::vector<Lengths> Whole(const std::vector<int64_t>& lengths, bool causal) {
  std::vector<Lengths> whole;
  for (const int64_t length : lengths)
    whole.push_back({length, length, causal});
  return whole;
}

TEST_P(VarlenAttentionTest, HasTheBitsOfPagedAttention) {
  TestRng rng;
  Heads heads;
  heads.kv_heads = 2;
  // Vision towers have 72 and 80.
  for (const int64_t dim : {1, 5, 16, 33, 72, 80, 128}) {
    heads.q_heads = dim == 33 ? 2 : 6;
    heads.head_dim = dim;
    heads.v_head_dim = dim == 16 ? 23 : 0;
    for (const bool causal : {true, false}) {
      ExpectBitsOfPaged<float, float>(
          heads, Whole({3, 1, 0, 17, 32, 60}, causal), rng);
      ExpectBitsOfPaged<BFloat16, BFloat16>(
          heads, Whole({20, 2, 2, 0, 45}, causal), rng);
    }
  }
  heads.head_dim = 24;
  heads.v_head_dim = 0;
  for (const bool causal : {true, false}) {
    ExpectBitsOfPaged<Float16, Float16>(heads, Whole({300, 16}, causal), rng);
    ExpectBitsOfPaged<BFloat16, float>(heads, Whole({270, 530}, causal), rng);
  }
  // Fewer queries than keys, or none; keys or none.
  ExpectBitsOfPaged<BFloat16, BFloat16>(
      heads, {{5, 70}, {0, 40}, {3, 0}, {0, 0}, {1, 300}}, rng);
}

TEST_P(VarlenAttentionTest, HasWindowsCapsSlopesAndSinks) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = 20;
  heads.scale = 0.7f;
  heads.soft_cap = 2;
  heads.window_left = 21;
  heads.window_right = 4;
  for (const bool causal : {true, false}) {
    ExpectBitsOfPaged<BFloat16, BFloat16>(heads, Whole({90, 13, 280}, causal),
                                          rng);
  }
  heads.alibi_slopes = {0.5f, 0.25f, 0.0f, -0.01f};
  heads.sinks = {0.0f, 2.0f, -3.0f, 1.0f};
  ExpectBitsOfPaged<float, float>(heads, Whole({50, 7}, true), rng);
}

// More queries than keys, none of which is a query's own.
TEST_P(VarlenAttentionTest, CrossAttention) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 4;
  heads.kv_heads = 2;
  heads.head_dim = 24;
  const std::vector<Lengths> lengths = {
      {30, 7, false}, {300, 20, false}, {5, 0, false}, {2, 600, false}};
  ExpectBitsOfPaged<BFloat16, BFloat16>(heads, lengths, rng);
  ExpectBitsOfPaged<float, float>(heads, lengths, rng);
  // Positions count from the last query, so the first ones are negative.
  heads.window_left = 9;
  heads.window_right = 14;
  heads.alibi_slopes = {0.5f, 0.25f, 0.0f, -0.01f};
  ExpectBitsOfPaged<float, float>(heads, lengths, rng);
}

// q, k and v lie as they come out of one projection, and run on any number of
// workers.
TEST_P(VarlenAttentionTest, BitsDependNeitherOnStridesNorOnWorkers) {
  TestRng rng;
  Heads heads;
  heads.q_heads = 6;
  heads.kv_heads = 2;
  heads.head_dim = 32;
  std::vector<Sequence> batch;
  for (const Lengths& length : Whole({600, 33, 0, 90, 1}, false)) {
    batch.push_back(RandomSequence<BFloat16, BFloat16>(rng, heads, length));
  }
  const auto want = Run<BFloat16, float>(heads, batch);
  const auto joint = Run<BFloat16, float>(heads, batch, Lay::kOneMatrix);
  EXPECT_TRUE(AllBitsEqual(joint.out, want.out));
  for (const int workers : {2, 5}) {
    const auto executor = Workers(workers);
    const auto got = Run<BFloat16, float>(heads, batch, Lay::kOneMatrix,
                                          workers, executor.get());
    EXPECT_TRUE(AllBitsEqual(got.out, want.out)) << workers;
    EXPECT_TRUE(AllBitsEqual(got.lse, want.lse)) << workers;
  }
}

TEST_P(VarlenAttentionTest, NanStaysInItsSequence) {
  TestRng rng;
  Heads heads;
  heads.head_dim = 16;
  std::vector<Sequence> batch;
  for (const Lengths& length : Whole({21, 7, 40}, false)) {
    batch.push_back(RandomSequence<float, float>(rng, heads, length));
  }
  const auto want = Run<float, float>(heads, batch);
  batch[1].v[3] = batch[1].k[20] = std::nan("");
  const auto got = Run<float, float>(heads, batch);
  for (size_t i = 0; i < got.out.size(); ++i) {
    const size_t token = i / 16;
    if (token >= 21 && token < 28) {
      EXPECT_TRUE(std::isnan(got.out[i])) << i;
    } else {
      EXPECT_EQ(got.out[i], want.out[i]) << i;
    }
  }
}

TEST_P(VarlenAttentionTest, NothingGivesNothing) {
  EXPECT_TRUE((Run<float, float>(Heads(), {}).out.empty()));
}

TEST(VarlenAttentionPlanTest, RefusesSpecs) {
  const auto expect = [](const char* words, auto change,
                         absl::StatusCode code =
                             absl::StatusCode::kInvalidArgument) {
    VarlenAttentionSpec spec;
    spec.q_heads = 4;
    spec.kv_heads = 2;
    spec.head_dim = 8;
    ASSERT_TRUE(VarlenAttentionPlan::Create(spec).ok());
    change(spec);
    ExpectRefusal(VarlenAttentionPlan::Create(spec).status(), code, words);
  };
  using Spec = VarlenAttentionSpec;
  constexpr auto kMissing = absl::StatusCode::kUnimplemented;
  expect("varlen_attention: q_heads=3; need a multiple of kv_heads=2",
         [](Spec& s) { s.q_heads = 3; });
  expect("q_heads=0", [](Spec& s) { s.q_heads = 0; });
  expect("varlen_attention: kv_heads=0", [](Spec& s) { s.kv_heads = 0; });
  expect("varlen_attention: head_dim=-1", [](Spec& s) { s.head_dim = -1; });
  expect("varlen_attention: v_head_dim=-1", [](Spec& s) { s.v_head_dim = -1; });
  expect("varlen_attention: window_left=-2",
         [](Spec& s) { s.window_left = -2; });
  expect("varlen_attention: soft_cap=-1", [](Spec& s) { s.soft_cap = -1; });
  expect(
      "varlen_attention: dtype is i8; need f32 or bf16 or f16",
      [](Spec& s) { s.dtype = DType::kI8; }, kMissing);
  expect(
      "varlen_attention: out_dtype is f8e5m2",
      [](Spec& s) { s.out_dtype = DType::kF8E5M2; }, kMissing);
}

TEST(VarlenAttentionPlanTest, RefusesOffsets) {
  VarlenAttentionSpec spec;
  spec.q_heads = spec.kv_heads = spec.head_dim = 1;
  const auto plan = VarlenAttentionPlan::Create(spec).value();
  VarlenAttentionStorage storage;
  const auto expect = [&](const std::vector<int32_t>& cu_q,
                          const std::vector<int32_t>& cu_kv,
                          const char* words) {
    ExpectRefusal(
        plan.BuildSchedule(cu_q, cu_kv, VarlenMask::kCausal, 1, storage)
            .status(),
        words);
  };
  expect({0, 3}, {0, 3, 4}, "varlen_attention: cu_kv.size()=3; need 2");
  expect({}, {}, "varlen_attention: cu_q does not begin with 0");
  expect({0, 1}, {1, 2}, "varlen_attention: cu_kv does not begin with 0");
  expect({0, 4, 3}, {0, 4, 8}, "varlen_attention: cu_q[2]=3; need at least 4");
  expect({0, 5}, {0, 4}, "q_len=5");
  const std::vector<int32_t> none = {0};
  EXPECT_TRUE(
      plan.BuildSchedule(none, none, VarlenMask::kCausal, 1, storage).ok());
}

TEST(VarlenAttentionPlanTest, RefusesArguments) {
  VarlenAttentionSpec spec;
  spec.q_heads = 2;
  spec.kv_heads = 1;
  spec.head_dim = 4;
  const auto plan = VarlenAttentionPlan::Create(spec).value();
  VarlenAttentionStorage storage;
  std::vector<float> memory(1000, 0.0f);
  const auto rows = [&](size_t at, int64_t tokens, int64_t heads,
                        int64_t dim = 4) {
    return TensorView<float, 3>(memory.data() + at, {tokens, heads, dim},
                                {heads * dim, dim, 1});
  };
  VarlenAttentionArgs good;
  good.q = rows(0, 5, 2);
  good.k = rows(100, 7, 1);
  good.v = rows(200, 7, 1);
  good.out = rows(300, 5, 2);
  good.lse = MatrixView<float>(memory.data() + 400, {5, 2}, {2, 1});
  const std::vector<int32_t> cu_q = {0, 3, 5}, cu_kv = {0, 5, 7};
  good.schedule =
      plan.BuildSchedule(cu_q, cu_kv, VarlenMask::kCausal, 1, storage).value();
  ASSERT_EQ(plan.CheckArgs(good), absl::OkStatus());
  const auto expect = [&](const char* words, auto change) {
    VarlenAttentionArgs args = good;
    change(args);
    ExpectRefusal(plan.CheckArgs(args), words);
  };
  using Args = VarlenAttentionArgs;
  const std::vector<float> one = {1};
  expect("varlen_attention: q", [&](Args& a) { a.q = rows(0, 4, 2); });
  expect("varlen_attention: k", [&](Args& a) { a.k = rows(100, 5, 1); });
  expect("varlen_attention: k", [&](Args& a) { a.k = rows(100, 7, 2); });
  expect("varlen_attention: v", [&](Args& a) { a.v = rows(200, 7, 1, 3); });
  expect("varlen_attention: out", [&](Args& a) { a.out = rows(300, 5, 1); });
  expect("varlen_attention: v", [&](Args& a) {
    a.v = TensorView<float, 3>(nullptr, {7, 1, 4}, {4, 4, 1});
  });
  expect("varlen_attention: k", [&](Args& a) {
    a.k = TensorView<float, 3>(memory.data() + 150, {7, 1, 4}, {-4, 4, 1});
  });
  expect("varlen_attention: k is bf16", [&](Args& a) {
    a.k = TensorView<BFloat16, 3>(reinterpret_cast<BFloat16*>(memory.data()),
                                  {7, 1, 4}, {4, 4, 1});
  });
  expect("out overlaps q", [&](Args& a) { a.out = rows(8, 5, 2); });
  expect("out overlaps k", [&](Args& a) { a.out = rows(90, 5, 2); });
  expect("out overlaps v", [&](Args& a) { a.out = rows(210, 5, 2); });
  expect("lse overlaps k", [&](Args& a) {
    a.lse = MatrixView<float>(memory.data() + 100, {5, 2}, {2, 1});
  });
  expect("alibi_slopes.size()=1; need 2",
         [&](Args& a) { a.alibi_slopes = one; });
  expect("sinks.size()=1; need 2", [&](Args& a) { a.sinks = one; });
  expect("schedule.", [&](Args& a) {
    VarlenAttentionSpec other = spec;
    other.q_heads = 3;
    static VarlenAttentionStorage others;
    a.schedule = VarlenAttentionPlan::Create(other)
                     .value()
                     .BuildSchedule(cu_q, cu_kv, VarlenMask::kCausal, 1, others)
                     .value();
  });
  EXPECT_FALSE(plan.WorkspaceBytes(good.schedule, 0).ok());
}

TEST(VarlenAttentionPlanTest, LimitsAreEnoughForEverySchedule) {
  TestRng rng;
  VarlenAttentionSpec spec;
  spec.q_heads = spec.kv_heads = 3;
  spec.head_dim = 20;
  const auto plan = VarlenAttentionPlan::Create(spec).value();
  VarlenAttentionStorage storage;
  for (int round = 0; round < 50; ++round) {
    std::vector<int32_t> cu = {0};
    AttentionLimits limits;
    limits.max_sequences = rng.Integer(1, 9);
    for (int64_t s = 0; s < limits.max_sequences; ++s) {
      const int64_t length = rng.Integer(0, s % 3 == 0 ? 600 : 40);
      limits.max_kv_len = std::max(limits.max_kv_len, length);
      limits.max_tokens += length;
      cu.push_back(static_cast<int32_t>(limits.max_tokens));
    }
    const int workers = static_cast<int>(rng.Integer(1, 70));
    limits.max_schedule_workers = static_cast<int>(rng.Integer(0, 140));
    const auto schedule = plan.BuildSchedule(
        cu, cu, VarlenMask::kCausal,
        std::max(workers, limits.max_schedule_workers), storage);
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    EXPECT_LE(plan.WorkspaceBytes(*schedule, workers).value(),
              plan.WorkspaceBytes(limits, workers).value());
  }
  AttentionLimits limits;
  limits.max_tokens = -1;
  ExpectRefusal(plan.WorkspaceBytes(limits, 1).status(), "max_tokens=-1");
}

// Each sequence of this operator has its own keys, so a schedule with shared
// ones, made elsewhere, is refused.
TEST(VarlenAttentionPlanTest, RefusesSharedKeys) {
  VarlenAttentionSpec spec;
  spec.dtype = spec.out_dtype = DType::kF32;
  spec.q_heads = spec.kv_heads = spec.head_dim = 1;
  const auto plan = VarlenAttentionPlan::Create(spec).value();
  KvLayoutSpec layout;
  layout.kv_heads = layout.head_dim = layout.page_size = 1;
  AttentionSpec paged;
  paged.kv = KvLayout::Create(layout).value();
  paged.q_heads = 1;
  const std::vector<int64_t> q_lens = {1, 1}, kv_lens = {300, 300};
  const std::vector<PrefixGroup> groups = {{0, 2, 256}};
  const std::vector<int32_t> members = {0, 1};
  AttentionScheduleStorage storage;
  VarlenAttentionArgs args;
  args.schedule =
      AttentionSchedule::Build(paged, {q_lens, kv_lens, {}, groups, members},
                               AttentionTiles(), 1, storage)
          .value();
  std::vector<float> q(2), kv(600), out(2);
  args.q = TensorView<float, 3>(q.data(), {2, 1, 1}, {1, 1, 1});
  args.k = args.v = TensorView<float, 3>(kv.data(), {600, 1, 1}, {1, 1, 1});
  args.out = TensorView<float, 3>(out.data(), {2, 1, 1}, {1, 1, 1});
  ExpectRefusal(plan.CheckArgs(args), "schedule.prefixes().size()=1; need 0");
}

}  // namespace
}  // namespace quern
