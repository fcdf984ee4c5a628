#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_testutil.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

class MlaRefusalTest : public testing::Test {
 protected:
  MlaRefusalTest()
      : spec_(SmallMla(DType::kF32, 14)),
        weights_(spec_, rng_),
        in_(DType::kF32, 3, spec_.hidden, spec_.hidden),
        out_(DType::kF32, 3, spec_.hidden, spec_.hidden),
        layer_(spec_, weights_, {3}, rng_) {}

  absl::Status Create(const MlaSpec& spec, const MlaWeights& weights) {
    return MlaPlan::Create(spec, weights, executor_).status();
  }

  TestRng rng_;
  InlineExecutor executor_;
  MlaSpec spec_;
  TestMlaWeights weights_;
  AnyMatrix in_, out_;
  MlaSequences layer_;
};

TEST_F(MlaRefusalTest, SpecsNameTheField) {
  EXPECT_EQ(Create(spec_, weights_.packed), absl::OkStatus());
  struct Case {
    void (*spoil)(MlaSpec&);
    std::string words;
  };
  const Case cases[] = {
      {[](MlaSpec& s) { s.hidden = 0; },
       "multi_head_latent_attention: hidden=0; need 1"},
      {[](MlaSpec& s) { s.heads = -1; }, "heads=-1; need 1"},
      {[](MlaSpec& s) { s.q_lora = -1; }, "q_lora=-1; need 0"},
      {[](MlaSpec& s) { s.kv_lora = 0; }, "kv_lora=0; need 1"},
      {[](MlaSpec& s) { s.nope = 0; }, "nope=0; need 1"},
      {[](MlaSpec& s) { s.rope = 0; }, "rope=0; need 2"},
      {[](MlaSpec& s) { s.rope = 5; }, "rope=5; need an even number"},
      {[](MlaSpec& s) { s.v_head_dim = 0; }, "v_head_dim=0; need 1"},
      {[](MlaSpec& s) { s.heads = s.nope = 1 << 20; }, "heads * (nope + rope)"},
      {[](MlaSpec& s) { s.scale = -1; }, "scale=-1; need a finite number"},
      {[](MlaSpec& s) { s.eps = -1; },
       "multi_head_latent_attention: eps=-1; need finite eps >= 0"},
      {[](MlaSpec& s) { s.cache = KvLayout(); },
       "the cache's form is plain; need latent"},
      {[](MlaSpec& s) { s.kv_lora = 24; },
       "head_dim of the cache=26; need 30, as kv_lora + rope is"},
      {[](MlaSpec& s) { s.kv_lora = 22, s.rope = 4; },
       "v_head_dim of the cache=20; need 22, as kv_lora is"},
      {[](MlaSpec& s) { s.q_lora = 0; }, "q_a is given and q_lora=0"},
      {[](MlaSpec& s) { s.q_lora = 13; },
       "columns of q_a=14; need 13, as the layer has"},
      {[](MlaSpec& s) { s.hidden = 21; }, "k of q_a=22; need 21"},
      {[](MlaSpec& s) { s.heads = 2; }, "columns of q=51; need 34"},
      {[](MlaSpec& s) { s.v_head_dim = 8; }, "columns of v_up=9; need 8"},
      {[](MlaSpec& s) { s.kernels = "none"; }, "none"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    MlaSpec spec = spec_;
    c.spoil(spec);
    ExpectRefusal(Create(spec, weights_.packed), c.words);
  }
  MlaSpec spec = spec_;
  spec.dtype = DType::kI8;
  ExpectRefusal(Create(spec, weights_.packed), absl::StatusCode::kUnimplemented,
                "dtype is i8");
  spec = spec_;
  spec.out_dtype = DType::kI8;
  ExpectRefusal(Create(spec, weights_.packed), absl::StatusCode::kUnimplemented,
                "out_dtype is i8");
  spec = spec_;
  spec.norm_dtype = DType::kI8;
  ExpectRefusal(Create(spec, weights_.packed), absl::StatusCode::kUnimplemented,
                "multi_head_latent_attention: norm_dtype is i8");
}

TEST_F(MlaRefusalTest, WeightsNameTheMatrix) {
  struct Case {
    void (*spoil)(MlaWeights&);
    std::string words;
  };
  const Case cases[] = {
      {[](MlaWeights& w) { w.q_a.reset(); }, "q_a is none and q_lora=14"},
      {[](MlaWeights& w) { w.q_a = w.kv_a; }, "columns of q_a=26; need 14"},
      {[](MlaWeights& w) { w.q = w.kv_a; }, "columns of q=26; need 51"},
      {[](MlaWeights& w) { w.kv_a = w.out; }, "columns of kv_a=22; need 26"},
      {[](MlaWeights& w) { w.q_absorb.pop_back(); },
       "number of q_absorb=2; need 3"},
      {[](MlaWeights& w) { w.q_absorb[1] = w.v_up[1]; },
       "columns of q_absorb=9; need 20"},
      {[](MlaWeights& w) { w.v_up.clear(); }, "number of v_up=0; need 3"},
      {[](MlaWeights& w) { w.v_up[2] = w.q_absorb[2]; },
       "columns of v_up=20; need 9"},
      {[](MlaWeights& w) { w.kv_b = w.out; }, "columns of kv_b=22; need 60"},
      {[](MlaWeights& w) { w.kv_b.reset(); },
       "kv_b is missing; need it, or the absorbed form"},
      {[](MlaWeights& w) { w.out = w.kv_a; }, "columns of out=26; need 22"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    MlaWeights weights = weights_.packed;
    c.spoil(weights);
    ExpectRefusal(Create(spec_, weights), c.words);
  }
  // A bias per head has no absorbed form.
  KnownWeights biased =
      FloatWeights(DType::kF32, 9, 20, std::vector<double>(9 * 20));
  biased.bias.resize(9);
  MlaWeights weights = weights_.packed;
  weights.v_up[1] = biased.Pack(executor_);
  ExpectRefusal(Create(spec_, weights), "v_up has a bias; need none");
}

TEST_F(MlaRefusalTest, PackKvBNamesTheMatrix) {
  MlaWeights weights;
  const AnyMatrix kv_b(DType::kF32, 59, 20, 20);
  ExpectRefusal(PackKvB(spec_, kv_b.const_view(), executor_, weights),
                "kv_b is");
  MlaSpec spec = spec_;
  spec.nope = 0;
  ExpectRefusal(PackKvB(spec, kv_b.const_view(), executor_, weights),
                "nope=0; need 1");
  const std::vector<int8_t> codes(60 * 20);
  ExpectRefusal(
      PackKvB(spec_, DenseMatrix(codes.data(), 60, 20), executor_, weights),
      absl::StatusCode::kUnimplemented, "kv_b is i8");
}

TEST_F(MlaRefusalTest, SpecOfWeightsIsTheirSpec) {
  const MlaSpec spec = MlaSpecOf(weights_.packed, spec_.cache);
  EXPECT_EQ(spec.hidden, spec_.hidden);
  EXPECT_EQ(spec.heads, spec_.heads);
  EXPECT_EQ(spec.q_lora, spec_.q_lora);
  EXPECT_EQ(spec.kv_lora, spec_.kv_lora);
  EXPECT_EQ(spec.nope, spec_.nope);
  EXPECT_EQ(spec.rope, spec_.rope);
  EXPECT_EQ(spec.v_head_dim, spec_.v_head_dim);
  EXPECT_EQ(spec.form, MlaForm::kAutomatic);
  MlaWeights absorbed = weights_.packed;
  absorbed.kv_b.reset();
  EXPECT_EQ(MlaSpecOf(absorbed, spec_.cache).form, MlaForm::kAbsorbed);
}

class MlaArgsTest : public MlaRefusalTest {
 protected:
  MlaArgsTest()
      : plan_(MlaPlan::Create(spec_, weights_.packed, executor_).value()) {
    const std::vector<int32_t> first = {0};
    table_.Append(first);
    batch_ = {lens_, lens_, table_.Build(16, layer_.num_pages()).value()};
    good_ = layer_.Args(in_, out_, positions_, Build(spec_, storage_));
  }

  MlaSchedule Build(const MlaSpec& spec, MlaScheduleStorage& storage) const {
    return MlaSchedule::Build(spec, batch_, 1, storage).value();
  }
  template <typename Spoil>
  void Expect(const std::string& words, const Spoil& spoil) {
    SCOPED_TRACE(words);
    ASSERT_EQ(plan_.CheckArgs(good_), absl::OkStatus());
    MlaArgs args = good_;
    spoil(args);
    ExpectRefusal(plan_.CheckArgs(args), words);
  }

  MlaPlan plan_;
  std::vector<int64_t> positions_ = {0, 1, 2}, lens_ = {3};
  PageTableStorage table_;
  MlaBatch batch_;
  MlaScheduleStorage storage_;
  MlaArgs good_;
};

TEST_F(MlaArgsTest, TensorsAreNamed) {
  const AnyMatrix narrow(DType::kF32, 3, 21, 21);
  const AnyMatrix two(DType::kF32, 2, spec_.hidden, spec_.hidden);
  const AnyMatrix bf16(DType::kBF16, 3, spec_.hidden, spec_.hidden);
  Expect("x is", [&](MlaArgs& a) { a.x = narrow.const_view(); });
  Expect("x is", [&](MlaArgs& a) { a.x = two.const_view(); });
  Expect("x is", [&](MlaArgs& a) { a.x = bf16.const_view(); });
  Expect("out is", [&](MlaArgs& a) { a.out = out_.const_view(); });
  Expect("out overlaps x", [&](MlaArgs& a) { a.out = in_.view(); });
  Expect("kv_norm is", [&](MlaArgs& a) { a.kv_norm = a.q_norm; });
  Expect("q_norm is", [&](MlaArgs& a) { a.q_norm = {}; });
  Expect("the cache has another layout",
         [&](MlaArgs& a) { a.cache = KvCacheView(); });
  Expect("pages of the schedule's table=2; need 0", [&](MlaArgs& a) {
    a.cache = KvCacheView(spec_.cache, 1, good_.cache.K(0, 0));
  });
  Expect("keys of the cache overlaps out", [&](MlaArgs& a) {
    a.out = DenseMatrix(reinterpret_cast<float*>(good_.cache.K(0, 0)), 3,
                        spec_.hidden);
  });
  const MlaSpec one_spec = SmallMla(DType::kF32, 0);
  const TestMlaWeights one_weights(one_spec, rng_);
  const auto one = MlaPlan::Create(one_spec, one_weights.packed, executor_);
  ASSERT_TRUE(one.ok());
  ExpectRefusal(one->CheckArgs(good_), "q_norm is given; need none");
}

TEST_F(MlaArgsTest, ResidualsAreNamed) {
  const AnyMatrix apart(DType::kF32, 3, spec_.hidden, spec_.hidden);
  const AnyMatrix narrow(DType::kF32, 3, 21, 21);
  const AnyMatrix bf16(DType::kBF16, 3, spec_.hidden, spec_.hidden);
  Expect("residual is given; need a spec that allows it",
         [&](MlaArgs& a) { a.residual = apart.const_view(); });
  MlaSpec spec = spec_;
  spec.residual = true;
  const auto plan = MlaPlan::Create(spec, weights_.packed, executor_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  MlaArgs args = good_;
  EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
  args.residual = args.out;
  EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
  args.residual = apart.const_view();
  EXPECT_EQ(plan->CheckArgs(args), absl::OkStatus());
  for (const AnyTensorView& wrong : {narrow.const_view(), bf16.const_view()}) {
    args.residual = wrong;
    ExpectRefusal(plan->CheckArgs(args), "residual is");
  }
  args.residual = DenseMatrix<const float>(
      reinterpret_cast<const float*>(good_.cache.K(0, 0)), 3, spec_.hidden);
  ExpectRefusal(plan->CheckArgs(args), "residual");
}

TEST_F(MlaArgsTest, PositionsInWrittenMemoryAreNamed) {
  auto* const rows = static_cast<int64_t*>(good_.out.mutable_data());
  auto* const keys = reinterpret_cast<int64_t*>(good_.cache.K(0, 0));
  for (int64_t i = 0; i < 3; ++i) rows[i] = keys[i] = i;
  Expect("out overlaps positions",
         [&](MlaArgs& a) { a.positions = DenseVector(rows, 3); });
  Expect("keys of the cache overlaps positions",
         [&](MlaArgs& a) { a.positions = DenseVector(keys, 3); });
  auto* const narrow = reinterpret_cast<int32_t*>(rows + 1);
  for (int32_t i = 0; i < 3; ++i) narrow[i] = i;
  Expect("out overlaps positions",
         [&](MlaArgs& a) { a.positions = DenseVector(narrow, 3); });
}

TEST_F(MlaArgsTest, StridesThatOneDnnCannotHoldAreNamed) {
  MlaSpec spec = spec_;
  spec.kernels = "onednn";
  const auto plan = MlaPlan::Create(spec, weights_.packed, executor_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->CheckArgs(good_), absl::OkStatus());
  const AnyTensorView::Dims extents = {3, spec_.hidden};
  const std::string range = absl::StrCat("; need ", spec_.hidden, " <= ");
  for (const int64_t stride :
       {int64_t{1} << 29, spec_.hidden - 1, int64_t{0}}) {
    const AnyTensorView::Dims strides = {stride, 1};
    MlaArgs args = good_;
    args.x = AnyTensorView(DType::kF32, good_.x.data(), 2, extents, strides);
    ExpectRefusal(plan->CheckArgs(args),
                  absl::StrCat("multi_head_latent_attention: x.stride(0)=",
                               stride, range, "x.stride(0) <= 536870911"));
  }
  MlaArgs args = good_;
  args.out = AnyTensorView(DType::kF32, good_.out.mutable_data(), 2, extents,
                           {int64_t{1} << 29, 1});
  ExpectRefusal(plan->CheckArgs(args),
                absl::StrCat("multi_head_latent_attention: "
                             "out.stride(0)=536870912",
                             range, "out.stride(0) <= 536870911"));
}

TEST_F(MlaArgsTest, RotationsAreNamed) {
  const std::vector<int64_t> late = {0, 1, 400};
  Expect("rope is null", [&](MlaArgs& a) { a.rope = nullptr; });
  Expect("positions", [&](MlaArgs& a) { a.positions = {}; });
  Expect("position",
         [&](MlaArgs& a) { a.positions = DenseVector(late.data(), 3); });
  RotaryEmbeddingSpec rope = layer_.rope().spec();
  rope.head_dim = 8;
  const auto wide = RotaryEmbeddingPlan::Create(rope).value();
  Expect("head_dim of the rotation=8; need 6",
         [&](MlaArgs& a) { a.rope = &wide; });
  rope.head_dim = 6;
  rope.rot_dim = 4;
  const auto part = RotaryEmbeddingPlan::Create(rope).value();
  Expect("rot_dim of the rotation=4; need 6",
         [&](MlaArgs& a) { a.rope = &part; });
  rope.rot_dim = 6;
  rope.dtype = DType::kBF16;
  const auto other = RotaryEmbeddingPlan::Create(rope).value();
  Expect("the rotation is bf16; need f32",
         [&](MlaArgs& a) { a.rope = &other; });
}

TEST_F(MlaArgsTest, SchedulesAreNamed) {
  MlaSpec narrow = spec_, direct_spec = spec_, absorbed_spec = spec_;
  narrow.heads = 2;
  MlaScheduleStorage of_two, of_direct;
  Expect("heads of the schedule=2; need 3",
         [&](MlaArgs& a) { a.schedule = Build(narrow, of_two); });
  direct_spec.form = MlaForm::kDirect;
  absorbed_spec.form = MlaForm::kAbsorbed;
  MlaWeights weights = weights_.packed;
  weights.kv_b.reset();
  const auto absorbed = MlaPlan::Create(absorbed_spec, weights, executor_);
  ASSERT_TRUE(absorbed.ok()) << absorbed.status();
  EXPECT_LT(absorbed->packed_bytes(), plan_.packed_bytes());
  MlaArgs args = good_;
  EXPECT_EQ(absorbed->CheckArgs(args), absl::OkStatus());
  args.schedule = Build(direct_spec, of_direct);
  EXPECT_EQ(plan_.CheckArgs(args), absl::OkStatus());
  ExpectRefusal(absorbed->CheckArgs(args), "for which there is no kv_b");
}

TEST_F(MlaRefusalTest, WorkspacesBeyondReasonAreRefused) {
  const auto plan = MlaPlan::Create(spec_, weights_.packed, executor_);
  ASSERT_TRUE(plan.ok());
  AttentionLimits limits;
  limits.max_tokens = int64_t{1} << 30;
  limits.max_sequences = 1;
  limits.max_kv_len = int64_t{1} << 30;
  EXPECT_EQ(plan->WorkspaceBytes(limits, 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  limits.max_tokens = -1;
  ExpectRefusal(plan->WorkspaceBytes(limits, 1).status(), "max_tokens=-1");
  limits.max_tokens = 1;
  ExpectRefusal(plan->WorkspaceBytes(limits, 0).status(), "max_workers=0");
}

}  // namespace
}  // namespace quern
