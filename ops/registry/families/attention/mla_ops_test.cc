// multi_head_latent_attention by name: the bits are the plan's, a sum over
// ranks follows, the providers are the formula, and what is wrong is refused.

#include "quern/ops/registry/families/attention/mla_ops.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_testutil.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/mla/reference_mla_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr char kOp[] = "multi_head_latent_attention";
constexpr int64_t kTokens = 41, kPages = 4, kHidden = 16, kLatent = 8;
using Floats = std::vector<float>;

class MlaOpsTest : public OpFixture {
 protected:
  MlaOpsTest() {
    EXPECT_EQ(RegisterMlaOps(registry_), absl::OkStatus());
    args_ = registry_.Find(kOp)->example(DType::kF32);
    table_.Append({2, 0, 3});
    table_.Append({1});
    pages_ = table_.Build(16, kPages).value();
    spec_ =
        MlaSpecOf(Object<MlaWeights>("weights"), Object<KvLayout>("layout"));
    // A prompt of 38 tokens, which is direct, and three more of another.
    schedule_ =
        MlaSchedule::Build(spec_, {q_lens_, kv_lens_, pages_}, 1, storage_)
            .value();
    EXPECT_EQ(schedule_.direct_tokens().size(), 38u);
    for (int64_t p = 0; p < 38; ++p) positions_.push_back(p);
    positions_.insert(positions_.end(), {0, 1, 2});
    TestRng rng;
    x_ = UniformReals<float>(rng, kTokens * kHidden, -1, 1);
    norm_ = UniformReals<float>(rng, kLatent, 0.5, 1.5);
  }

  // An object of the example.
  template <typename T>
  const T& Object(const std::string& name) {
    const void* found = nullptr;
    for (const auto& [arg, value] : args_) {
      if (arg == name) found = std::get<OpObjectRef>(value).object;
    }
    QUERN_CHECK(found != nullptr);
    return *static_cast<const T*>(found);
  }
  void Set(const std::string& name, OpArg value) {
    for (auto& [arg, old] : args_) {
      if (arg == name) old = std::move(value);
    }
  }
  std::vector<NamedTensor> Tensors(AlignedBuffer& cache, Floats& out) {
    const int64_t bytes = spec_.cache.page_bytes();
    return {
        {"hidden_states",
         DenseMatrix<const float>(x_.data(), kTokens, kHidden)},
        {"positions", DenseVector<const int64_t>(positions_.data(), kTokens)},
        {"kv_norm", DenseVector<const float>(norm_.data(), kLatent)},
        {"cache", DenseMatrix<uint8_t>(reinterpret_cast<uint8_t*>(cache.data()),
                                       kPages, bytes)},
        {"out", DenseMatrix<float>(out.data(), kTokens, kHidden)}};
  }
  AlignedBuffer Cache() {
    return AlignedBuffer::Create(kPages * spec_.cache.page_bytes()).value();
  }

  NamedArgs args_;
  std::vector<int64_t> q_lens_ = {38, 3}, kv_lens_ = {38, 3}, positions_;
  PageTableStorage table_;
  PageTable pages_;
  MlaSpec spec_;
  MlaScheduleStorage storage_;
  MlaSchedule schedule_;
  Floats x_, norm_;
  MlaStep many_workers_step_;
};
QUERN_INSTANTIATE_ISA_TEST(MlaOpsTest);

TEST_P(MlaOpsTest, IsThePlan) {
  AlignedBuffer cache = Cache();
  Floats want(kTokens * kHidden);
  MlaSpec spec = spec_;
  spec.scale = 0.25f;
  spec.eps = 1e-5f;
  const auto plan =
      MlaPlan::Create(spec, Object<MlaWeights>("weights"), executor_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  MlaArgs plan_args;
  plan_args.x = DenseMatrix<const float>(x_.data(), kTokens, kHidden);
  plan_args.positions = DenseVector<const int64_t>(positions_.data(), kTokens);
  plan_args.kv_norm = DenseVector<const float>(norm_.data(), kLatent);
  plan_args.rope = &Object<RotaryEmbeddingPlan>("rope");
  plan_args.cache = KvCacheView(spec.cache, kPages, cache.data());
  plan_args.schedule = schedule_;
  plan_args.out = DenseMatrix<float>(want.data(), kTokens, kHidden);
  AlignedBuffer memory =
      AlignedBuffer::Create(plan->WorkspaceBytes(schedule_, 1).value()).value();
  ASSERT_EQ(plan->CheckArgs(plan_args), absl::OkStatus());
  plan->Execute(plan_args, Workspace(memory), executor_);

  MlaStep step;
  step.schedule = schedule_;
  Set("step", &step);
  args_.emplace_back("scale", 0.25);
  args_.emplace_back("eps", 1e-5);
  const MadeOp op = Make("simd", kOp, args_);
  Floats got(want.size());
  AlignedBuffer other = Cache();
  Run(op, Tensors(other, got));
  EXPECT_TRUE(AllBitsEqual(got, want));
  // The workspace of limits is enough, too.
  step.limits.max_sequences = 2;
  step.limits.max_kv_len = 38;
  Floats again(want.size());
  Run(op, Tensors(other, again));
  EXPECT_TRUE(AllBitsEqual(again, want));

  // A residual is added, in place.
  NamedArgs adding = args_;
  adding.emplace_back("residual", TensorMeta{DType::kF32, {4, kHidden}});
  adding.emplace_back("out_dtype", "f32");
  for (const char* provider : {"simd", "reference"}) {
    Floats added(want.size(), 1.0f);
    std::vector<NamedTensor> in_place = Tensors(other, added);
    in_place.push_back(
        {"residual", DenseMatrix<const float>(added.data(), kTokens, kHidden)});
    Run(Make(provider, kOp, adding), in_place);
    for (size_t i = 0; i < added.size(); ++i) {
      EXPECT_NEAR(added[i], want[i] + 1.0f, 1e-5f) << provider << " " << i;
    }
  }

  // Two ranks of the same heads sum to twice their result.
  for (float& v : want) v *= 2;
  RunRanks(2, [&](ThreadCommunicator& ranks) {
    NamedArgs args = args_;
    args.emplace_back("ranks", &ranks);
    const OpDispatcher ops(registry_, OpPolicy());
    const auto of_rank = ops.MakeFrom("simd", kOp, args);
    ASSERT_TRUE(of_rank.ok()) << of_rank.status();
    AlignedBuffer mine = Cache();
    Floats sum(want.size());
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(of_rank->Bind(Tensors(mine, sum), tensors), absl::OkStatus());
    AlignedBuffer scratch =
        AlignedBuffer::Create(of_rank->op->WorkspaceBytes(kTokens, 1).value())
            .value();
    InlineExecutor executor;
    of_rank->op->Execute(tensors, Workspace(scratch), executor);
    EXPECT_TRUE(AllBitsEqual(sum, want));
  });
}

// A schedule may be built for more workers than run it. Its partial results
// need memory all the same: the workspace counts the schedule of the step, and
// with max_schedule_workers the limits alone are enough.
TEST_P(MlaOpsTest, LimitsAreEnoughForSchedulesOfMoreWorkers) {
  TestRng rng;
  const MadeOp op = [&] {
    Set("step", &many_workers_step_);
    return Make("simd", kOp, args_);
  }();
  const auto plan =
      MlaPlan::Create(spec_, Object<MlaWeights>("weights"), executor_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  constexpr int64_t kPageSize = 16;
  for (int shape = 0; shape < 300; ++shape) {
    std::vector<int64_t> q_lens, kv_lens;
    PageTableStorage table;
    int32_t pages = 0;
    AttentionLimits limits;
    int64_t tokens = 0;
    limits.max_sequences = rng.Integer(1, 5);
    for (int64_t s = 0; s < limits.max_sequences; ++s) {
      const int64_t kv_len = rng.Integer(1, 6000);
      q_lens.push_back(rng.Integer(0, 2) == 0
                           ? 1
                           : rng.Integer(0, std::min<int64_t>(kv_len, 600)));
      kv_lens.push_back(kv_len);
      tokens += q_lens.back();
      limits.max_kv_len = std::max(limits.max_kv_len, kv_len);
      std::vector<int32_t> of_sequence;
      for (int64_t t = 0; t < kv_len; t += kPageSize) {
        of_sequence.push_back(pages++);
      }
      table.Append(of_sequence);
    }
    const auto built_for = static_cast<int>(rng.Integer(1, 256));
    const auto workers = static_cast<int>(rng.Integer(1, 8));
    MlaScheduleStorage storage;
    const auto schedule = MlaSchedule::Build(
        spec_, {q_lens, kv_lens, table.Build(kPageSize, pages).value()},
        built_for, storage);
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    const int64_t need = plan->WorkspaceBytes(*schedule, workers).value();
    SCOPED_TRACE(testing::Message()
                 << "shape " << shape << ": " << tokens << " tokens, built for "
                 << built_for << " workers, run by " << workers);
    many_workers_step_.limits = limits;
    many_workers_step_.schedule = *schedule;
    EXPECT_GE(op.op->WorkspaceBytes(tokens, workers).value(), need);
    // Planned before the step, of which the limits say all.
    many_workers_step_.limits.max_schedule_workers = built_for;
    many_workers_step_.schedule = MlaSchedule();
    EXPECT_GE(op.op->WorkspaceBytes(tokens, workers).value(), need);
    if (HasFailure()) return;
  }
}

// Both providers are within the oracle's bounds, which allow for any order of
// sums. Numbers are f32, in which the reference rounds no more often.
TEST_P(MlaOpsTest, ProvidersAreTheFormula) {
  TestRng rng;
  const MlaSpec spec = SmallMla(DType::kF32, 14);
  const TestMlaWeights weights(spec, rng);
  const int64_t hidden = spec.hidden;
  const ReferenceMla reference(spec, weights.values, RotaryStyle::kPairs, 100);
  RotaryEmbeddingSpec rope_spec;
  rope_spec.head_dim = rope_spec.rot_dim = spec.rope;
  rope_spec.max_positions = 38;
  rope_spec.base = 100;
  rope_spec.style = RotaryStyle::kPairs;
  const auto rope = RotaryEmbeddingPlan::Create(rope_spec).value();
  MlaStep step;
  step.schedule =
      MlaSchedule::Build(spec, {q_lens_, kv_lens_, pages_}, 1, storage_)
          .value();
  EXPECT_EQ(step.schedule.direct_tokens().size(), 38u);
  const Floats x = UniformReals<float>(rng, kTokens * hidden, -2, 2);
  std::vector<double> values, errors;
  std::vector<ReferenceMlaKey> keys;
  for (int64_t t = 0; t < kTokens; ++t) {
    const int64_t position = positions_[static_cast<size_t>(t)];
    if (position == 0) keys.clear();
    const std::vector<double> row(x.begin() + t * hidden,
                                  x.begin() + (t + 1) * hidden);
    keys.push_back(reference.Key(row, position));
    // The reference takes the absorbed form for all.
    const BoundedRow direct = reference.Token(true, row, position, keys);
    const BoundedRow absorbed = reference.Token(false, row, position, keys);
    for (size_t i = 0; i < direct.size(); ++i) {
      values.push_back(direct[i].value);
      errors.push_back(std::max(direct[i].error, absorbed[i].error) + 1e-12);
    }
  }
  const NamedArgs args = {
      {"hidden_states", TensorMeta{DType::kF32, {kTokens, hidden}}},
      {"positions", TensorMeta{DType::kI64, {kTokens}}},
      {"q_norm", TensorMeta{DType::kF32, {spec.q_lora}}},
      {"kv_norm", TensorMeta{DType::kF32, {spec.kv_lora}}},
      {"cache", TensorMeta{DType::kU8, {kPages, spec.cache.page_bytes()}}},
      {"weights", &weights.packed},
      {"layout", &spec.cache},
      {"rope", &rope},
      {"step", &step}};
  for (const std::string provider : {"simd", "reference"}) {
    SCOPED_TRACE(provider);
    AlignedBuffer cache =
        AlignedBuffer::Create(kPages * spec.cache.page_bytes()).value();
    Floats out(x.size());
    Run(Make(provider, kOp, args),
        {{"hidden_states", DenseMatrix<const float>(x.data(), kTokens, hidden)},
         {"positions", DenseVector<const int64_t>(positions_.data(), kTokens)},
         {"q_norm", weights.q_norm->vector()},
         {"kv_norm", weights.kv_norm->vector()},
         {"cache",
          DenseMatrix<uint8_t>(cache.data(), kPages, spec.cache.page_bytes())},
         {"out", DenseMatrix<float>(out.data(), kTokens, hidden)}});
    EXPECT_TRUE(AllWithin(out, values, [&](double, int64_t i) {
      return errors[static_cast<size_t>(i)];
    }));
  }
}

TEST_P(MlaOpsTest, NamesWhatIsWrong) {
  MlaStep step;
  step.schedule = schedule_;
  Set("step", &step);
  const MadeOp op = Make("simd", kOp, args_);
  AlignedBuffer cache = Cache();
  Floats out(kTokens * kHidden);
  const std::vector<NamedTensor> good = Tensors(cache, out);
  std::vector<AnyTensorView> tensors;
  ASSERT_EQ(op.Bind(good, tensors), absl::OkStatus());
  ASSERT_EQ(op.op->CheckArgs(tensors), absl::OkStatus());
  std::vector<AnyTensorView> bad = tensors;
  bad.pop_back();
  ExpectRefusal(op.op->CheckArgs(bad), "tensors=6; need 7");
  bad = tensors;
  bad[1] = tensors[0];
  ExpectRefusal(op.op->CheckArgs(bad), "positions is");
  bad = tensors;
  bad[4] = tensors[6];
  ExpectRefusal(op.op->CheckArgs(bad), "cache is");
  bad = tensors;
  bad[4] = AnyTensorView(DType::kU8, tensors[4].mutable_data(), 2,
                         {2, spec_.cache.page_bytes()},
                         {2 * spec_.cache.page_bytes(), 1});
  ExpectRefusal(op.op->CheckArgs(bad), "stride of cache");
  bad = tensors;
  bad[0] = tensors[3];
  ExpectRefusal(op.op->CheckArgs(bad), "x is");
}

TEST(MlaOpsRefusalTest, NamesWhatIsWrong) {
  OpRegistry registry;
  ASSERT_EQ(RegisterMlaOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  struct Case {
    std::string field;
    OpArg value;
    std::string words;
  };
  const Case cases[] = {
      {"hidden_states", TensorMeta{DType::kF32, {4, 15}},
       "multi_head_latent_attention: hidden_states is f32[4, 15]; need [4, "
       "16]"},
      {"hidden_states", TensorMeta{DType::kF32, {16}},
       "hidden_states is f32[16]; need [n, 16]"},
      {"positions", TensorMeta{DType::kI64, {5}},
       "positions is i64[5]; need [4]"},
      {"q_norm", TensorMeta{DType::kF32, {8}}, "q_norm is given; need it"},
      {"q_norm", TensorMeta{DType::kBF16, {8}}, "q_norm is bf16; need f32"},
      {"cache", TensorMeta{DType::kU8, {2, 16}},
       "cache is u8[2, 16]; need [n, 768]"},
      {"cache", TensorMeta{DType::kI8, {2, 768}},
       "cache is i8[2, 768]; need u8"},
      {"residual", TensorMeta{DType::kF32, {4, 15}},
       "residual is f32[4, 15]; need f32[4, 16], as the result is"},
      {"residual", TensorMeta{DType::kBF16, {4, 16}},
       "residual is bf16[4, 16]; need f32[4, 16]"},
      {"rope", OpArg(), "rope is of another type; need RotaryEmbeddingPlan"},
      {"scale", -1.0, "scale=-1; need a finite number"},
      {"scale", 1e-50, "scale=1e-50; need 0, or a number that f32 can hold"},
      {"eps", -1.0, "eps"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    NamedArgs args = registry.Find(kOp)->example(DType::kF32);
    bool found = false;
    for (auto& [name, value] : args) {
      if (name != c.field) continue;
      value = c.value;
      found = true;
    }
    if (!found) args.emplace_back(c.field, c.value);
    ExpectRefusal(ops.Make(kOp, args).status(), c.words);
  }
}

}  // namespace
}  // namespace quern
