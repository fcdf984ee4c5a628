#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/linear.h"
#include "quern/ops/registry/sglang/packed.h"
#include "quern/ops/registry/sglang/packing/layout.h"
#include "quern/ops/registry/sglang/sglang_ops.h"

namespace quern {
namespace {

// What an operator was asked for; a group of weights is block_k.
struct Spec : LinearWeightsSpec {
  DType x_dtype = DType::kF32, out_dtype = DType::kF32;
  TensorMeta w;
  int64_t block_n = 0;
  bool packed = false;  // is_vnni
  // Whether mat2 is f32[k, n], as SGLang has n < 16.
  bool transposed = false;

  // Whether mat1 is codes, which scales1 belongs to.
  bool codes() const { return x_dtype == DType::kU8; }
  LinearSpec linear() const {
    LinearSpec spec;
    spec.a = codes() ? DType::kI8 : x_dtype;
    spec.c = out_dtype;
    return spec;
  }
};

struct Args {
  AnyTensorView x, w, x_scales, w_scales, bias, out;
};

constexpr char kPlan[] = "product";

absl::Status NoWeights() {
  return absl::FailedPreconditionError(
      absl::StrCat(kPlan, ": has no weights; need a call of Prepare before"));
}

// Our kernels take signed codes: code + 128 with its highest bit flipped.
void Flip(const AnyTensorView& x, int8_t* to, Executor& executor) {
  const int64_t k = x.extent(1);
  const int64_t stride = x.RowStride();
  const auto* const from = static_cast<const uint8_t*>(x.data());
  executor.ParallelFor(x.extent(0), [&](int64_t m, int /*worker*/) {
    for (int64_t i = 0; i < k; ++i) {
      to[m * k + i] = static_cast<int8_t>(from[m * stride + i] ^ 0x80);
    }
  });
}

class Plan {
 public:
  static absl::StatusOr<Plan> Create(
      const Spec& spec, LinearProvider provider = LinearProvider::kSimd) {
    // A layer with a single weight shows whether the provider can run the
    // dtypes.
    LinearWeightsSpec single = spec;
    single.n = single.k = 1;
    const float zero = 0, one = 1;
    LinearSource source;
    source.codes = AnyTensorView(spec.w.dtype, static_cast<const void*>(&zero),
                                 2, {1, 1}, {1, 1});
    if (single.format == WeightFormat::kI8Channel) {
      source.scales = DenseVector<const float>(&one, 1);
    } else if (single.format == WeightFormat::kE4M3Block) {
      source.scales = DenseMatrix<const float>(&one, 1, 1);
      source.block_n = spec.block_n;
    }
    InlineExecutor executor;
    QUERN_ASSIGN_OR_RETURN(const LinearWeights weights,
                           LinearWeights::Pack(single, {source}, executor));
    QUERN_ASSIGN_OR_RETURN(
        const LinearPlan probe,
        LinearPlanOf(kPlan, provider, spec.linear(), weights));
    Plan plan(spec, provider);
    if (provider != LinearProvider::kReference) plan.target_ = probe.target();
    return plan;
  }

  const Spec& spec() const { return spec_; }
  const char* target() const { return target_; }
  std::string Explain(int64_t rows) const {
    if (native_.has_value() || !plan_.has_value()) return target_;
    return plan_->Explain(rows);
  }

  absl::Status Prepare(const Args& args, Executor& executor) {
    plan_.reset();
    QUERN_ASSIGN_OR_RETURN(const LinearWeights weights, Pack(args, executor));
    if (provider_ == LinearProvider::kReference) {
      QUERN_ASSIGN_OR_RETURN(
          native_, NativeLinear::Create(weights, LinearActivation::kNone));
      scales_ = weights;
    }
    QUERN_ASSIGN_OR_RETURN(
        plan_, LinearPlanOf(kPlan, provider_, spec_.linear(), weights));
    prepared_ = args;
    return absl::OkStatus();
  }

  absl::Status CheckArgs(const Args& args) const {
    if (!plan_.has_value()) return NoWeights();
    if (!SameView(args.w, prepared_.w) ||
        !SameView(args.w_scales, prepared_.w_scales) ||
        !SameView(args.bias, prepared_.bias)) {
      return InvalidArgument(
          kPlan, "mat2, scales2 or bias is not what Prepare was given");
    }
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "mat1", args.x, spec_.x_dtype,
                                     {kAnyExtent, spec_.k}));
    const int64_t rows = args.x.extent(0);
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kPlan, "out", args.out, spec_.out_dtype, {rows, spec_.n}));
    if (!spec_.codes()) return plan_->CheckRows(args.x);
    return CheckInput(kPlan, "scales1", args.x_scales, DType::kF32, {rows});
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    if (!plan_.has_value()) return NoWeights();
    if (native_.has_value()) return 0;
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           plan_->WorkspaceBytes(max_rows, max_workers));
    WorkspaceLayout layout;
    LayOut(layout, max_rows);
    layout.Allocate<uint8_t>("product", bytes);
    if (!layout.overflow()) return layout.bytes();
    return absl::ResourceExhaustedError(
        absl::StrCat(kPlan, ": ", max_rows, " rows take more than 2^63 bytes"));
  }

  void Execute(const Args& args, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(args));
    if (native_.has_value()) {
      if (spec_.codes()) return MultiplyCodes(args);
      return native_->Multiply(args.x, AnyTensorView(), args.out);
    }
    LinearArgs linear;
    linear.a = args.x;
    linear.c = args.out;
    if (spec_.codes()) {
      const int64_t m = args.x.extent(0), k = args.x.extent(1);
      int8_t* const codes = LayOut(workspace, m);
      Flip(args.x, codes, executor);
      linear.a = DenseMatrix<const int8_t>(codes, m, k);
      linear.a_scales = args.x_scales;
    }
    plan_->Execute(linear, workspace, executor);
  }

 private:
  Plan(const Spec& spec, LinearProvider provider)
      : spec_(spec), provider_(provider) {}

  template <typename Allocator>
  int8_t* LayOut(Allocator& a, int64_t rows) const {
    int64_t bytes = 0;
    if (spec_.codes() && !CheckedMul(rows, spec_.k, &bytes)) bytes = -1;
    return a.template Allocate<int8_t>("codes", bytes);
  }

  // The reference of codes with scales: sums in double, one rounding.
  void MultiplyCodes(const Args& args) const {
    const auto* const x_scales =
        static_cast<const float*>(args.x_scales.data());
    const int64_t stride = args.x.RowStride();
    const auto* const codes = static_cast<const uint8_t*>(args.x.data());
    for (int64_t m = 0; m < args.x.extent(0); ++m) {
      const ScalarRow out(args.out, m);
      for (int64_t n = 0; n < spec_.n; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < spec_.k; ++k) {
          sum += (codes[m * stride + k] - 128) * native_->Weight(k, n);
        }
        sum *= double{x_scales[m]} * double{scales_.scales()[n]};
        if (scales_.has_bias()) sum += double{scales_.bias()[n]};
        out.Set(n, static_cast<float>(sum));
      }
    }
  }

  absl::StatusOr<LinearWeights> Pack(const Args& args,
                                     Executor& executor) const {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kPlan, "mat2", args.w, spec_.w.dtype, spec_.w.extents));
    LinearSource source;
    source.codes = args.w;
    source.block_n = spec_.block_n;
    source.bias = args.bias;
    source.scales = args.w_scales;
    AlignedBuffer plain;
    if (spec_.transposed) {
      source.layout = WeightLayout::kKN;
    } else if (spec_.packed) {
      QUERN_ASSIGN_OR_RETURN(plain, Unpack(args.w));
      source.codes =
          AnyTensorView(args.w.dtype(), static_cast<const void*>(plain.data()),
                        2, {spec_.n, spec_.k}, {spec_.k, 1});
    }
    return LinearWeights::Pack(spec_, {source}, executor);
  }

  absl::StatusOr<AlignedBuffer> Unpack(const AnyTensorView& w) const {
    if (w.extent(0) > 1 && w.stride(0) != w.extent(1)) {
      return InvalidArgument(kPlan,
                             "mat2 has gaps between its rows; need the "
                             "dense tensor of convert_weight_packed");
    }
    QUERN_ASSIGN_OR_RETURN(const SglangLayout layout,
                           SglangLayout::Create(w.dtype(), spec_.k, spec_.n));
    const int64_t row_bytes = layout.plain_row_bytes();
    QUERN_ASSIGN_OR_RETURN(AlignedBuffer plain,
                           AlignedBuffer::Create(spec_.n * row_bytes));
    CopyFromSglang(layout, static_cast<const uint8_t*>(w.data()),
                   static_cast<uint8_t*>(plain.data()), row_bytes);
    return plain;
  }

  Spec spec_;
  LinearProvider provider_;
  const char* target_ = "scalar";
  std::optional<LinearPlan> plan_;
  std::optional<NativeLinear> native_;
  LinearWeights scales_;  // of the reference
  Args prepared_;
};

using Op = OpDeclaration<Plan, Spec, Args>;

using Fields = std::initializer_list<OpField<Spec, DType>>;
OpDType<Spec> Floats(Fields fields = {}) {
  return OpDType<Spec>::OneOf(
      {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, fields);
}

// What follows from mat1 and mat2: the extents of the product, and the format
// of the weights.
absl::Status Complete(Spec& s, const OpCall& call) {
  s.w = *call.Tensor("mat2");
  s.format = s.w.dtype == DType::kI8       ? WeightFormat::kI8Channel
             : s.w.dtype == DType::kF8E4M3 ? WeightFormat::kE4M3Block
                                           : FormatOfFloats(s.w.dtype);
  s.transposed = s.packed && s.w.dtype == DType::kF32;
  s.n = s.w.extents[s.transposed ? 1 : 0];
  s.k = s.w.extents[s.transposed ? 0 : 1];
  if (s.packed && s.w.dtype == DType::kI8) s.k -= 4;
  if (s.packed && !s.transposed) {
    QUERN_RETURN_IF_ERROR(SglangLayout::Create(s.w.dtype, s.k, s.n).status());
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(call.op(), "columns of mat1",
                                   call.Tensor("mat1")->extents.back(), s.k,
                                   "mat2 has"));
  if (!call.has("bias")) return absl::OkStatus();
  return CheckMeta(call.op(), "bias", *call.Tensor("bias"),
                   {DType::kF32, {s.n}});
}

absl::Status CheckScales(Spec& s, const OpCall& call) {
  const TensorMeta& scales = *call.Tensor("scales2");
  if (scales == TensorMeta{DType::kF32, {1}}) return absl::OkStatus();
  return CheckMeta(call.op(), "scales2", scales, {DType::kF32, {s.n}},
                   " or f32[1]");
}
absl::Status CheckRowScales(Spec&, const OpCall& call) {
  QUERN_ASSIGN_OR_RETURN(const int64_t rows,
                         LeadingRows(call.op(), "mat1", *call.Tensor("mat1")));
  return CheckMeta(call.op(), "scales1", *call.Tensor("scales1"),
                   {DType::kF32, {rows}}, ", one for each row of mat1");
}
absl::Status CheckBlocks(Spec& s, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(call.op(), "block_n", s.block_n, 1));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(call.op(), "block_k", s.group_size, 1));
  return CheckMeta(
      call.op(), "scales2", *call.Tensor("scales2"),
      {DType::kF32, {DivCeil(s.n, s.block_n), DivCeil(s.k, s.group_size)}},
      ", one for each block");
}

Op& Factors(Op& op, OpDType<Spec> x, OpDType<Spec> w) {
  return op.In("mat1", &Args::x, {kLeading, kAny, kAny}, std::move(x))
      .In("mat2", &Args::w, {kAny, kAny}, std::move(w));
}
Op& OutDType(Op& op) {
  return op.Maybe("bias", &Args::bias)
      .DTypeAttr("out_dtype", Like("mat1"), &Spec::out_dtype);
}
// What ends each declaration.
Op& Product(Op& op) {
  const auto by = [](LinearProvider provider) {
    return [provider](const Spec& spec, const OpCall&) {
      return Plan::Create(spec, provider);
    };
  };
  return op.Need("is_vnni", &Spec::packed)
      .Then(&Complete)
      .Out("out", &Args::out, {Like("mat1"), &Spec::n}, &Spec::out_dtype)
      .Provider("simd", by(LinearProvider::kSimd))
      .Provider("onednn", by(LinearProvider::kOneDnn))
      .Provider("reference", by(LinearProvider::kReference))
      .Layer();
}

absl::Status AddLinear(OpRegistry& registry) {
  Op op("weight_packed_linear");
  Factors(op, Floats({&Spec::x_dtype, &Spec::out_dtype}), Floats())
      .Maybe("bias", &Args::bias);
  return Product(op)
      .Example({{"mat1", {4, 64}},
                {"mat2", {32, 64}},
                {"bias", {32}, DType::kF32},
                {"is_vnni", false}})
      .AddTo(registry);
}

absl::Status FillOutDType(Spec& spec, const OpCall& call) {
  const std::string& text = call.Text("out_dtype");
  if (text.empty()) {
    return InvalidArgument(call.op(),
                           "out_dtype is empty; need f32, bf16 or f16");
  }
  QUERN_ASSIGN_OR_RETURN(spec.out_dtype,
                         DTypeOr(call.op(), "out_dtype", text, DType::kF32));
  return absl::OkStatus();
}
NamedArgs Int8Example(DType dtype) {
  return {{"mat1", TensorMeta{DType::kU8, {4, 64}}},
          {"mat2", TensorMeta{DType::kI8, {32, 64}}},
          {"scales1", TensorMeta{DType::kF32, {4}}},
          {"scales2", TensorMeta{DType::kF32, {32}}},
          {"out_dtype", DTypeName(dtype)},
          {"is_vnni", false}};
}
absl::Status AddInt8(OpRegistry& registry) {
  Op op("int8_scaled_mm_cpu");
  Factors(op, DType::kU8, DType::kI8)
      .Given(&Spec::x_dtype, DType::kU8)
      .In("scales1", &Args::x_scales)
      .In("scales2", &Args::w_scales)
      .Maybe("bias", &Args::bias)
      .Need<std::string>("out_dtype")
      .Then(&FillOutDType);
  return Product(op)
      .Then(&CheckRowScales)
      .Then(&CheckScales)
      .ExampleOf(&Int8Example)
      .AddTo(registry);
}

absl::Status AddInt8WithQuant(OpRegistry& registry) {
  Op op("int8_scaled_mm_with_quant");
  Factors(op, Floats({&Spec::x_dtype}), DType::kI8)
      .In("scales2", &Args::w_scales);
  return Product(OutDType(op))
      .Then(&CheckScales)
      .Example({{"mat1", {4, 64}},
                {"mat2", {32, 64}, DType::kI8},
                {"scales2", {32}, DType::kF32},
                {"is_vnni", false}})
      .AddTo(registry);
}

absl::Status AddFp8(OpRegistry& registry) {
  Op op("fp8_scaled_mm_cpu");
  Factors(op, Floats({&Spec::x_dtype}), DType::kF8E4M3)
      .In("scales2", &Args::w_scales)
      .Need("block_n", &Spec::block_n)
      .Need("block_k", &Spec::group_size);
  return Product(OutDType(op))
      .Then(&CheckBlocks)
      .Example({{"mat1", {4, 64}},
                {"mat2", {32, 64}, DType::kF8E4M3},
                {"scales2", {1, 1}, DType::kF32},
                {"block_n", 128},
                {"block_k", 128},
                {"is_vnni", false}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangLinearOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddLinear(registry));
  QUERN_RETURN_IF_ERROR(AddInt8(registry));
  QUERN_RETURN_IF_ERROR(AddInt8WithQuant(registry));
  return AddFp8(registry);
}

}  // namespace quern
