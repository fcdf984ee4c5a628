#include "quern/ops/registry/vllm/linear_ops.h"

#include <cstdint>
#include <string>
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
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/linear/linear_declaration.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/vllm/linear.h"

namespace quern {

AnyTensorView EachRow(const AnyTensorView& bias, int64_t m) {
  if (bias.rank() != 1) return bias;
  return AnyTensorView(bias.dtype(), bias.data(), 2, {m, bias.extent(0)},
                       {0, bias.stride(0)});
}

absl::Status FillFromHandler(BoundLinearSpec& spec, const OpCall& call,
                             bool scaled) {
  const OneDnnHandler& handler = HandlerOf(call);
  const LinearWeightsSpec& w = handler.weights.spec();
  spec.weights = &handler.weights;
  if (w.n != 0 && (w.format == WeightFormat::kI8Channel) == scaled) {
    return absl::OkStatus();
  }
  return InvalidArgument(
      call.op(),
      w.n == 0 ? "handler has no weights" : "handler has other weights",
      "; need those that Prepare of ",
      scaled ? "create_onednn_scaled_mm" : "create_onednn_mm", " packs");
}

LinearWeights OnesForExamples(WeightFormat format) {
  constexpr int64_t kN = 48, kK = 64;
  const std::vector<float> floats(kN * kK, 1);
  const std::vector<int8_t> codes(kN * kK, 1);
  const float scale = 1;
  LinearWeightsSpec spec;
  spec.n = kN;
  spec.k = kK;
  spec.format = format;
  LinearSource source;
  if (format == WeightFormat::kI8Channel) {
    source.codes = DenseMatrix<const int8_t>(codes.data(), kN, kK);
    source.scales = DenseVector<const float>(&scale, 1);
  } else {
    source.codes = DenseMatrix<const float>(floats.data(), kN, kK);
  }
  InlineExecutor executor;
  const auto packed = LinearWeights::Pack(spec, {source}, executor);
  QUERN_CHECK(packed.ok());
  return *packed;
}

namespace {

constexpr char kCreate[] = "create_onednn_mm";

struct CreateSpec {
  WeightFormat format = WeightFormat::kF32;
  DType b = DType::kF32;
  OneDnnHandler made;  // what the handler becomes, but for the weights
  OneDnnHandler* handler = nullptr;
};
struct CreateArgs {
  AnyTensorView b, scales;
};

// Packs b into the handler.
class CreatePlan {
 public:
  static absl::StatusOr<CreatePlan> Create(const CreateSpec& spec) {
    CreatePlan plan;
    plan.spec_ = spec;
    return plan;
  }
  const char* target() const { return "scalar"; }
  absl::Status Prepare(const CreateArgs& args, Executor& executor) {
    QUERN_RETURN_IF_ERROR(CheckArgs(args));
    const AnyTensorView& b = args.b;
    LinearWeightsSpec spec;
    spec.format = spec_.format;
    spec.k = b.extent(0);
    spec.n = b.extent(1);
    LinearSource source;
    // The last stride of a single column is meaningless and is not used.
    source.codes = AnyTensorView(b.dtype(), b.data(), 2, {spec.k, spec.n},
                                 {b.stride(0), 1});
    source.layout = WeightLayout::kKN;
    if (!RowMajor(b)) {
      source.codes = AnyTensorView(b.dtype(), b.data(), 2, {spec.n, spec.k},
                                   {b.stride(1), 1});
      source.layout = WeightLayout::kNK;
    }
    source.scales = args.scales;
    QUERN_ASSIGN_OR_RETURN(const LinearWeights weights,
                           LinearWeights::Pack(spec, {source}, executor));
    *spec_.handler = spec_.made;
    spec_.handler->weights = weights;
    return absl::OkStatus();
  }
  absl::Status CheckArgs(const CreateArgs& args) const {
    const AnyTensorView &b = args.b, &scales = args.scales;
    if (b.rank() != 2) {
      return InvalidArgument(kCreate, "b has rank ", b.rank(), "; need 2");
    }
    if (!RowMajor(b) && b.stride(0) != 1) {
      return InvalidArgument(kCreate, "b has strides ", b.stride(0), " and ",
                             b.stride(1),
                             "; need one of 1, as rows or columns have");
    }
    if (spec_.format != WeightFormat::kI8Channel) return absl::OkStatus();
    const bool one = scales.rank() == 1 && scales.extent(0) == 1;
    return CheckInput(kCreate, "b_scales", scales, DType::kF32,
                      {one ? 1 : b.extent(1)});
  }
  void Execute(const CreateArgs&, Executor&) const noexcept {}

 private:
  static bool RowMajor(const AnyTensorView& b) {
    return b.stride(1) == 1 || b.extent(1) == 1;
  }

  CreateSpec spec_;
};

using CreateOp = OpDeclaration<CreatePlan, CreateSpec, CreateArgs>;

absl::Status FillHandler(CreateSpec& spec, const OpCall& call) {
  spec.handler = &HandlerOf(call);
  spec.format =
      spec.b == DType::kI8 ? WeightFormat::kI8Channel : FormatOfFloats(spec.b);
  return CheckAtLeast(call.op(), "primitive_cache_size",
                      call.Int("primitive_cache_size"), 0);
}

absl::Status FillScaled(CreateSpec& spec, const OpCall& call) {
  const TensorMeta &b = *call.Tensor("b"), &scales = *call.Tensor("b_scales");
  QUERN_ASSIGN_OR_RETURN(
      spec.made.output_type,
      DTypeOr(call.op(), "output_type", call.Text("output_type"), DType::kF32));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(call.op(), "output_type",
                                     spec.made.output_type, kFloatDTypes));
  spec.made.dynamic_act_quant = call.Bool("dynamic_act_quant");
  spec.made.use_azp = call.Bool("use_azp");
  if (scales == TensorMeta{DType::kF32, {1}}) return absl::OkStatus();
  if (scales == TensorMeta{DType::kF32, {b.extents[1]}}) {
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), "b_scales is ", PrintMeta(scales),
                         "; need f32[", b.extents[1], "] or f32[1]");
}

absl::Status AddCreate(CreateOp& op, OpExample example, OpRegistry& registry) {
  return op.Object<OneDnnHandler>("handler")
      .Attr("primitive_cache_size", int64_t{128})
      .Then(&FillHandler)
      .Layer()
      .Providers({"reference"})
      .ExampleOf(std::move(example))
      .AddTo(registry);
}

NamedArgs CreateExample(DType dtype) {
  static OneDnnHandler handler;
  return {{"b", TensorMeta{dtype, {64, 48}}}, {"handler", &handler}};
}
NamedArgs CreateScaledExample(DType dtype) {
  static OneDnnHandler handler;
  return {{"b", TensorMeta{DType::kI8, {64, 48}}},
          {"b_scales", TensorMeta{DType::kF32, {48}}},
          {"output_type", DTypeName(dtype)},
          {"dynamic_act_quant", true},
          {"use_azp", false},
          {"handler", &handler}};
}
NamedArgs MmExample(DType dtype) {
  static OneDnnHandler* const handler = [] {
    auto* const made = new OneDnnHandler;
    made->weights = OnesForExamples(WeightFormat::kF32);
    return made;
  }();
  return {{"c", TensorMeta{dtype, {4, 48}}},
          {"a", TensorMeta{dtype, {4, 64}}},
          {"handler", handler}};
}

}  // namespace

absl::Status RegisterVllmLinearOps(OpRegistry& registry) {
  // vLLM's wrappers in Python, and what they call.
  for (const char* name : {kCreate, "create_onednn_mm_handler"}) {
    CreateOp create(name);
    create.In("b", &CreateArgs::b, {kAny, kAny}, FloatOf(&CreateSpec::b));
    QUERN_RETURN_IF_ERROR(AddCreate(create, &CreateExample, registry));
  }
  for (const char* name :
       {"create_onednn_scaled_mm", "create_onednn_scaled_mm_handler"}) {
    CreateOp create(name);
    create
        .In("b", &CreateArgs::b, {kAny, kAny},
            OpDType<CreateSpec>::OneOf({DType::kI8}, {&CreateSpec::b}))
        .In("b_scales", &CreateArgs::scales)
        .Need<std::string>("output_type")
        .Need<bool>("dynamic_act_quant")
        .Need<bool>("use_azp")
        .Then(&FillScaled);
    QUERN_RETURN_IF_ERROR(AddCreate(create, &CreateScaledExample, registry));
  }

  using Spec = BoundLinearSpec;
  LinearDeclaration mm("onednn_mm");
  BeginProduct(mm, /*scaled=*/false);
  mm.InOut("c", &LinearArgs::c, nullptr, {&Spec::rows, &Spec::columns},
           &Spec::c)
      .In("a", &LinearArgs::a, {&Spec::rows, &Spec::k}, FloatOf<Spec>(&Spec::a))
      .Word("residual", "bias")
      .Finish([](LinearArgs& args) {
        args.residual = EachRow(args.residual, args.a.extent(0));
      });
  EndProduct(mm, &LinearArgs::residual);
  mm.ExampleOf(&MmExample);
  QUERN_RETURN_IF_ERROR(OnWeights(mm).AddTo(registry));
  QUERN_RETURN_IF_ERROR(RegisterVllmScaledMm(registry));
  return RegisterVllmWna16(registry);
}

}  // namespace quern
