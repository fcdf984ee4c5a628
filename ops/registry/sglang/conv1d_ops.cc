#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/recurrent/causal_conv1d.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/recurrent/recurrent_binding.h"
#include "quern/ops/registry/op_call.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/op_shape.h"
#include "quern/ops/registry/reference/recurrent.h"
#include "quern/ops/registry/sglang/recurrent_ops.h"

namespace quern {
namespace {

struct PackSpec {
  int64_t channels = 0;
  DType dtype = DType::kBF16;
};
struct PackArgs {
  AnyTensorView weight, out;
};

// Packs weights for a convolution that takes pairs, which it also makes, so
// that what it refuses is refused here.
class PackPlan {
 public:
  static absl::StatusOr<PackPlan> Create(const PackSpec& spec) {
    CausalConv1dSpec conv;
    conv.channels = spec.channels;
    conv.dtype = conv.weight_dtype = spec.dtype;
    conv.weight_layout = ConvWeightLayout::kPairs;
    QUERN_ASSIGN_OR_RETURN(const CausalConv1dPlan plan,
                           CausalConv1dPlan::Create(conv));
    return PackPlan(spec, plan.target());
  }
  // The instruction set of the convolution.
  const char* target() const { return target_; }
  absl::Status CheckArgs(const PackArgs& args) const {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "weight", args.weight, spec_.dtype,
                                     {spec_.channels, 4}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "out", args.out, spec_.dtype, {spec_.channels, 4}));
    if (args.weight.stride(0) < 4 || args.out.stride(0) != 4) {
      return InvalidArgument(kOp, "strides of weight and out are ",
                             args.weight.stride(0), " and ", args.out.stride(0),
                             "; need 4 or more, and 4");
    }
    return CheckApart(kOp, "weight", args.weight, "out", args.out);
  }
  void Execute(const PackArgs& args, Executor& /*executor*/) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(args));
    const size_t element = SizeOf(spec_.dtype);
    const auto* const from = static_cast<const char*>(args.weight.data());
    auto* const to = static_cast<char*>(args.out.mutable_data());
    const auto at = [element](int64_t i) {
      return static_cast<size_t>(i) * element;
    };
    for (int64_t c = 0; c < spec_.channels; ++c) {
      for (int64_t j = 0; j < 4; ++j) {
        std::memcpy(to + at(ConvPairOffset(c, j)),
                    from + at(c * args.weight.stride(0) + j), element);
      }
    }
  }

 private:
  static constexpr char kOp[] = "causal_conv1d_weight_pack";
  PackPlan(const PackSpec& spec, const char* target)
      : spec_(spec), target_(target) {}
  PackSpec spec_;
  const char* target_;
};

absl::Status RegisterPack(OpRegistry& registry) {
  return OpDeclaration<PackPlan, PackSpec, PackArgs>(
             "causal_conv1d_weight_pack")
      .In("weight", &PackArgs::weight, {&PackSpec::channels, 4},
          &PackSpec::dtype)
      .Out("out", &PackArgs::out, Like("weight"), Like("weight"))
      .Reference([](const PackSpec& spec, const PackArgs& args) {
        const ScalarRow out(args.out, 0);
        for (int64_t c = 0; c < spec.channels; ++c) {
          const ScalarRow weight(args.weight, c);
          for (int64_t j = 0; j < 4; ++j) {
            out.Set(ConvPairOffset(c, j), weight[j]);
          }
        }
      })
      .Example({{"weight", {32, 4}}})
      .AddTo(registry);
}

using Spec = CausalConv1dSpec;
using Args = SequenceArgs<CausalConv1dArgs>;
using Conv = OpDeclaration<CausalConv1dPlan, Spec, Args>;

Conv& States(Conv& op) {
  return op.InOut("conv_states", &Args::state, nullptr, {kAny, kAny, kAny})
      .Word("state", "conv_states")
      .Word("rows of state", "rows of conv_states");
}
Conv& Weight(Conv& op) {
  return op
      .In("weight", &Args::weight, {kAny, &Spec::width}, &Spec::weight_dtype)
      .Maybe("bias", &Args::bias);
}
absl::Status FillFlags(Spec& spec, const OpCall& call) {
  spec.activation = call.Bool("silu_activation") ? ConvActivation::kSilu
                                                 : ConvActivation::kNone;
  spec.weight_layout = call.Bool("is_vnni") ? ConvWeightLayout::kPairs
                                            : ConvWeightLayout::kPlain;
  spec.state_layout =
      ConvStateLayoutOf(*call.Tensor("conv_states"), spec.channels);
  return CausalConv1dPlan::Create(spec).status();
}
absl::Status AddConv(Conv& op, const char* slots, OpRegistry& registry) {
  return op.Need("pad_slot_id", &Spec::null_slot)
      .Need<bool>("is_vnni")
      .Then(&FillFlags)
      .Out("out", &Args::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .Reference([](const Spec& spec, const Args& args) {
        NativeCausalConv1d(spec, args);
      })
      .Example({{"x", {4, 32}},
                {"weight", {32, 4}},
                {"conv_states", {128, 3, 32}},
                {slots, {4}, DType::kI32},
                {"silu_activation", true},
                {"pad_slot_id", int64_t{-1}},
                {"is_vnni", false}})
      .AddTo(registry);
}

absl::Status RegisterFwd(OpRegistry& registry) {
  Conv op("causal_conv1d_fwd_cpu");
  op.In("x", &Args::x, {kRows, &Spec::channels}, &Spec::dtype);
  States(Weight(op))
      .Maybe("query_start_loc", &Args::starts, {kAny}, IndexDType<Spec>());
  InTokens(op, "cache_indices")
      .Maybe("has_initial_state", &Args::initial, {kAny})
      .Need<bool>("silu_activation");
  return AddConv(op, "cache_indices", registry);
}

absl::Status RegisterUpdate(OpRegistry& registry) {
  Conv op("causal_conv1d_update_cpu");
  op.In("x", &Args::x, {kRows, &Spec::channels}, &Spec::dtype);
  Weight(States(op)).Need<bool>("silu_activation");
  op.Maybe("cache_seqlens", &Args::starts, {kAny}, IndexDType<Spec>())
      .Then([](Spec&, const OpCall& call) {
        return call.Tensor("cache_seqlens") == nullptr
                   ? absl::OkStatus()
                   : InvalidArgument(call.op(),
                                     "cache_seqlens is given; need none");
      });
  InTokens(op, "conv_state_indices");
  return AddConv(op, "conv_state_indices", registry);
}

}  // namespace

absl::Status RegisterSglangConvOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterPack(registry));
  QUERN_RETURN_IF_ERROR(RegisterFwd(registry));
  return RegisterUpdate(registry);
}

}  // namespace quern
