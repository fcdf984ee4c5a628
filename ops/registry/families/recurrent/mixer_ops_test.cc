// The layers over pools of states by name, over sequences of any length: the
// bits are those of the plans, and what is wrong is refused.

#include "quern/ops/registry/families/recurrent/mixer_ops.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mixer/gated_delta_net.h"
#include "quern/ops/mixer/mamba_mixer.h"
#include "quern/ops/mixer/mamba_mixer2.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/mixer/short_conv.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Floats = std::vector<float>;

constexpr int64_t kTokens = 9;
// Four sequences: of four tokens, of none, of three in no slot, and of one that
// begins. The first token is padding.
const std::vector<int64_t> kIndices = {3, 0, -1, 1};
const std::vector<int32_t> kStarts = {1, 5, 5, 8, 9};
const std::vector<uint8_t> kInitial = {1, 1, 1, 0};

SequenceBatch Batch() {
  SequenceBatch batch;
  batch.state_indices = DenseVector(kIndices.data(), 4);
  batch.query_start_loc = DenseVector(kStarts.data(), 5);
  batch.has_initial_state = kInitial;
  return batch;
}

// Dense f32 tensors by name.
class Tensors {
 public:
  void Add(const std::string& name, const TensorMeta& meta, Rng& rng) {
    int64_t count = 1;
    for (const int64_t extent : meta.extents) count *= extent;
    metas_[name] = meta;
    data_[name] = UniformReals<float>(rng, count, -1, 1);
  }
  // A tensor of rank 0 for a name that was not added.
  AnyTensorView operator[](const std::string& name) {
    const auto found = data_.find(name);
    if (found == data_.end()) return AnyTensorView();
    AnyTensorView::Dims extents{}, strides{};
    const std::vector<int64_t>& of = metas_[name].extents;
    int64_t stride = 1;
    for (size_t d = of.size(); d-- > 0;) {
      extents[d] = of[d];
      strides[d] = stride;
      stride *= of[d];
    }
    return AnyTensorView(DType::kF32, static_cast<void*>(found->second.data()),
                         static_cast<int>(of.size()), extents, strides);
  }
  const std::map<std::string, Floats>& data() const { return data_; }

 private:
  std::map<std::string, TensorMeta> metas_;
  std::map<std::string, Floats> data_;
};

class MixerOpsTest : public OpFixture {
 protected:
  MixerOpsTest() { EXPECT_EQ(RegisterMixerOps(registry_), absl::OkStatus()); }

  // The weights of a layer's example.
  const LinearWeights& WeightsOf(const std::string& op,
                                 const std::string& name) {
    for (const auto& [arg, value] : registry_.Find(op)->example(DType::kF32)) {
      if (arg != name) continue;
      return *static_cast<const LinearWeights*>(
          std::get<OpObjectRef>(value).object);
    }
    ADD_FAILURE() << op << " has no " << name;
    static const LinearWeights none;
    return none;
  }

  // Runs the example of `op` on nine tokens by name, and the plan that
  // make(tensors) returns with its arguments; both have the same tensors.
  template <typename Make>
  void ExpectThePlan(const std::string& op, const Make& make) {
    NamedArgs args = registry_.Find(op)->example(DType::kF32);
    args.emplace_back("query_start_loc", TensorMeta{DType::kI32, {5}});
    args.emplace_back("has_initial_state", TensorMeta{DType::kU8, {4}});
    TestRng rng;
    Tensors named;
    for (auto& [name, value] : args) {
      auto* const meta = std::get_if<TensorMeta>(&value);
      if (meta == nullptr) continue;
      if (name == "state_indices") meta->dtype = DType::kI64;
      if (meta->dtype != DType::kF32) continue;
      if (name == "x") meta->extents[0] = kTokens;
      named.Add(std::string(name), *meta, rng);
      if (name == "x") named.Add("out", *meta, rng);
    }
    Tensors direct = named;

    std::vector<NamedTensor> tensors = {
        {"state_indices", DenseVector(kIndices.data(), 4)},
        {"query_start_loc", DenseVector(kStarts.data(), 5)},
        {"has_initial_state", DenseVector(kInitial.data(), 4)}};
    for (const auto& [name, data] : named.data()) {
      tensors.emplace_back(name, named[name]);
    }
    Run(this->Make("simd", op, args), tensors);

    auto [plan, plan_args] = make(direct);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto bytes = plan->WorkspaceBytes(kTokens, 1);
    ASSERT_TRUE(bytes.ok());
    auto memory = AlignedBuffer::Create(*bytes);
    ASSERT_EQ(plan->CheckArgs(plan_args), absl::OkStatus());
    plan->Execute(plan_args, Workspace(*memory), executor_);
    for (const auto& [name, data] : named.data()) {
      SCOPED_TRACE(name);
      EXPECT_TRUE(AllBitsEqual(data, direct.data().at(name)));
    }
  }
  static MixerArgs Common(Tensors& t) {
    return {t["x"],          t["conv_weight"], t["conv_bias"],
            t["conv_state"], Batch(),          t["out"]};
  }
};
QUERN_INSTANTIATE_ISA_TEST(MixerOpsTest);

TEST_P(MixerOpsTest, ShortConvIsThePlan) {
  ExpectThePlan("short_conv", [this](Tensors& t) {
    ShortConvSpec spec;
    spec.hidden = 16;
    spec.channels = 12;
    return std::make_pair(
        ShortConvPlan::Create(spec, WeightsOf("short_conv", "in_proj"),
                              WeightsOf("short_conv", "out_proj"), executor_),
        Common(t));
  });
}

TEST_P(MixerOpsTest, MambaMixersAreThePlan) {
  for (const std::string op : {"mamba_mixer", "plamo2_mamba_mixer"}) {
    ExpectThePlan(op, [this, &op](Tensors& t) {
      const bool mamba = op == "mamba_mixer";
      MambaMixerSpec spec;
      spec.form = mamba ? MambaForm::kMamba : MambaForm::kPlamo2;
      spec.hidden = 16;
      spec.heads = mamba ? 1 : 3;
      spec.head_dim = mamba ? 12 : 4;
      spec.d_state = 2;
      spec.dt_rank = 3;
      spec.norm = mamba ? MambaNorm::kNone : MambaNorm::kRms;
      return std::make_pair(
          MambaMixerPlan::Create(
              spec,
              {WeightsOf(op, "in_proj"), WeightsOf(op, "x_proj"),
               WeightsOf(op, "dt_proj"), WeightsOf(op, "out_proj")},
              executor_),
          MambaMixerArgs{Common(t), t["ssm_state"], t["a"], t["d"],
                         t["dt_bias"], t["dt_norm"], t["b_norm"], t["c_norm"]});
    });
  }
}

TEST_P(MixerOpsTest, MambaMixer2IsThePlan) {
  ExpectThePlan("mamba_mixer2", [this](Tensors& t) {
    MambaMixer2Spec spec;
    spec.hidden = 16;
    spec.heads = 3;
    spec.head_dim = 4;
    spec.d_state = 2;
    return std::make_pair(MambaMixer2Plan::Create(
                              spec, WeightsOf("mamba_mixer2", "in_proj"),
                              WeightsOf("mamba_mixer2", "out_proj"), executor_),
                          MambaMixer2Args{Common(t), t["ssm_state"], t["a"],
                                          t["d"], t["dt_bias"], t["norm"]});
  });
}

TEST_P(MixerOpsTest, GatedDeltaNetIsThePlan) {
  ExpectThePlan("gated_delta_net", [this](Tensors& t) {
    GatedDeltaNetSpec spec;
    spec.hidden = 16;
    spec.key_heads = 1;
    spec.value_heads = 2;
    spec.dk = spec.dv = 4;
    return std::make_pair(
        GatedDeltaNetPlan::Create(spec, WeightsOf("gated_delta_net", "in_proj"),
                                  WeightsOf("gated_delta_net", "out_proj"),
                                  executor_),
        GatedDeltaNetArgs{Common(t), t["state"], t["a_log"], t["dt_bias"],
                          t["norm"]});
  });
}

TEST(MixerOpsRefusalTest, NamesWhatIsWrong) {
  OpRegistry registry;
  ASSERT_EQ(RegisterMixerOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const TensorMeta flat = {DType::kF32, {4}};
  struct Case {
    std::string op, field;
    OpArg value;
    std::string words;
  };
  const Case cases[] = {
      {"short_conv", "x", flat, "short_conv: x is f32[4]; need [n, n]"},
      {"short_conv", "conv_weight", flat, "conv_weight is f32[4]; need [n, n]"},
      {"short_conv", "conv_state", flat,
       "conv_state is f32[4]; need [n, n, n]"},
      {"short_conv", "x", TensorMeta{DType::kF32, {4, 17}},
       "short_conv: k of in_proj=16; need 17, as the layer has"},
      {"mamba_mixer", "ssm_state", flat,
       "mamba_mixer: ssm_state is f32[4]; need [n, n, n, n]"},
      {"mamba_mixer2", "ssm_state", flat,
       "mamba_mixer2: ssm_state is f32[4]; need"},
      {"gated_delta_net", "state", flat,
       "gated_delta_net: state is f32[4]; need"},
      {"mamba_mixer", "ssm_state", TensorMeta{DType::kF32, {128, 3, 4, 2}},
       "mamba_mixer: heads=3; need 1"},
      {"plamo2_mamba_mixer", "b_norm", OpArg(),
       "dt_norm, b_norm and c_norm are not given together"},
      {"mamba_mixer2", "n_groups", int64_t{2},
       "mamba_mixer2: n_groups=2; need a divisor of 3, the heads of ssm_"},
      {"mamba_mixer2", "n_groups", int64_t{0},
       "mamba_mixer2: n_groups=0; need"},
      {"gated_delta_net", "num_k_heads", int64_t{0},
       "gated_delta_net: num_k_heads=0; need a divisor of 2, the heads of "},
      {"gated_delta_net", "num_k_heads", int64_t{3},
       "gated_delta_net: num_k_heads=3; need a divisor of 2"},
  };
  for (const Case& c : cases) {
    NamedArgs args = registry.Find(c.op)->example(DType::kF32);
    bool found = false;
    for (auto& [name, value] : args) {
      if (name != c.field) continue;
      value = c.value;
      found = true;
    }
    if (!found) args.emplace_back(c.field, c.value);
    ExpectRefusal(ops.Make(c.op, args).status(), c.words);
  }
  for (const std::string op :
       {"short_conv", "mamba_mixer", "plamo2_mamba_mixer", "mamba_mixer2",
        "gated_delta_net"}) {
    NamedArgs args = registry.Find(op)->example(DType::kF32);
    for (auto& [name, value] : args) {
      if (name == "state_indices") value = flat;
    }
    ExpectRefusal(ops.Make(op, args).status(), absl::StatusCode::kUnimplemented,
                  op + ": state_indices is f32; need i32 or i64");
  }
  const auto none = OpPolicy::Parse("-short_conv");
  ASSERT_TRUE(none.ok());
  ExpectRefusal(
      OpDispatcher(registry, *none)
          .Make("short_conv", registry.Find("short_conv")->example(DType::kF32))
          .status(),
      absl::StatusCode::kUnimplemented,
      "short_conv: is disabled and has no reference");
}

}  // namespace
}  // namespace quern
