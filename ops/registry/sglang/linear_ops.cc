#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/linear/linear_provider.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/products/packed_product.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"
#include "quern/ops/registry/sglang/sglang_ops.h"

namespace quern {
namespace {

// What an operator was asked for.
struct Spec : SglangWeightSpec {
  DType x_dtype = DType::kF32, out_dtype = DType::kF32;
  const char* x_name = "mat1";

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
  AnyTensorView x, w, x_scales, w_scales, w_zeros, bias, out;

  SglangWeights weights() const { return {w, w_scales, w_zeros, bias}; }
};

constexpr char kPlan[] = "product";

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
    QUERN_ASSIGN_OR_RETURN(
        SglangProduct product,
        SglangProduct::Create(provider, spec.linear(), spec));
    return Plan(spec, std::move(product));
  }

  const Spec& spec() const { return spec_; }
  const char* target() const { return product_.target(); }
  std::string Explain(int64_t rows) const { return product_.Explain(rows); }

  absl::Status Prepare(const Args& args, Executor& executor) {
    return product_.Prepare(args.weights(), executor);
  }

  absl::Status CheckArgs(const Args& args) const {
    QUERN_RETURN_IF_ERROR(product_.CheckWeights(args.weights()));
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, spec_.x_name, args.x, spec_.x_dtype,
                                     {kAnyExtent, spec_.k}));
    const int64_t rows = args.x.extent(0);
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kPlan, "out", args.out, spec_.out_dtype, {rows, spec_.n}));
    if (!spec_.codes()) return product_.CheckRows(args.x);
    return CheckInput(kPlan, "scales1", args.x_scales, DType::kF32, {rows});
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           product_.WorkspaceBytes(max_rows, max_workers));
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
    LinearArgs linear;
    linear.a = args.x;
    linear.c = args.out;
    if (spec_.codes()) {
      if (product_.native() != nullptr) return MultiplyCodes(args);
      const int64_t m = args.x.extent(0), k = args.x.extent(1);
      int8_t* const codes = LayOut(workspace, m);
      Flip(args.x, codes, executor);
      linear.a = DenseMatrix<const int8_t>(codes, m, k);
      linear.a_scales = args.x_scales;
    }
    product_.Execute(linear, workspace, executor);
  }

 private:
  Plan(const Spec& spec, SglangProduct product)
      : spec_(spec), product_(std::move(product)) {}

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
          sum +=
              (codes[m * stride + k] - 128) * product_.native()->Weight(k, n);
        }
        sum *= double{x_scales[m]} * double{product_.kept().scales()[n]};
        if (product_.kept().has_bias())
          sum += double{product_.kept().bias()[n]};
        out.Set(n, static_cast<float>(sum));
      }
    }
  }

  Spec spec_;
  SglangProduct product_;
};

using Op = OpDeclaration<Plan, Spec, Args>;

using Fields = std::initializer_list<OpField<Spec, DType>>;
OpDType<Spec> Floats(Fields fields = {}) {
  return OpDType<Spec>::OneOf(
      {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, fields);
}

// What follows from the matrix: the extents of the product, and its format.
absl::Status Complete(Spec& s, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(s.Fill(call.op(), *call.Tensor(s.names.w)));
  QUERN_RETURN_IF_ERROR(CheckEqual(call.op(),
                                   absl::StrCat("columns of ", s.x_name),
                                   call.Tensor(s.x_name)->extents.back(), s.k,
                                   absl::StrCat(s.names.w, " has")));
  if (!call.has("bias")) return absl::OkStatus();
  return CheckMeta(call.op(), "bias", *call.Tensor("bias"),
                   {DType::kF32, {s.n}});
}

absl::Status CheckScales(Spec& s, const OpCall& call) {
  return s.CheckScales(call);
}
absl::Status CheckRowScales(Spec&, const OpCall& call) {
  QUERN_ASSIGN_OR_RETURN(const int64_t rows,
                         LeadingRows(call.op(), "mat1", *call.Tensor("mat1")));
  return CheckMeta(call.op(), "scales1", *call.Tensor("scales1"),
                   {DType::kF32, {rows}}, ", one for each row of mat1");
}
Op& Factors(Op& op, OpDType<Spec> x, OpDType<Spec> w) {
  return op.In("mat1", &Args::x, {kLeading, kAny, kAny}, std::move(x))
      .In("mat2", &Args::w, {kAny, kAny}, std::move(w));
}
Op& OutDType(Op& op) {
  return op.Maybe("bias", &Args::bias)
      .DTypeAttr("out_dtype", Like("mat1"), &Spec::out_dtype)
      .Need("is_vnni", &Spec::packed);
}
// What ends each declaration; x is the tensor of rows.
Op& Product(Op& op, const char* x = "mat1") {
  const auto by = [](LinearProvider provider) {
    return [provider](const Spec& spec, const OpCall&) {
      return Plan::Create(spec, provider);
    };
  };
  return op.Then(&Complete)
      .Out("out", &Args::out, {Like(x), &Spec::n}, &Spec::out_dtype)
      .Provider("simd", by(LinearProvider::kSimd))
      .Provider("onednn", by(LinearProvider::kOneDnn))
      .Provider("reference", by(LinearProvider::kReference))
      .Layer();
}

absl::Status AddLinear(OpRegistry& registry) {
  Op op("weight_packed_linear");
  Factors(op, Floats({&Spec::x_dtype, &Spec::out_dtype}), Floats())
      .Maybe("bias", &Args::bias)
      .Need("is_vnni", &Spec::packed);
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
      .Then(&FillOutDType)
      .Need("is_vnni", &Spec::packed);
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
      .Then(&CheckScales)
      .Example({{"mat1", {4, 64}},
                {"mat2", {32, 64}, DType::kF8E4M3},
                {"scales2", {1, 1}, DType::kF32},
                {"block_n", 128},
                {"block_k", 128},
                {"is_vnni", false}})
      .AddTo(registry);
}

absl::Status AddMxfp4(OpRegistry& registry) {
  Op op("mxfp4_scaled_mm_cpu");
  Factors(op, Floats({&Spec::x_dtype, &Spec::out_dtype}), DType::kU8)
      .In("scales2", &Args::w_scales)
      .Maybe("bias", &Args::bias)
      .Need("is_vnni", &Spec::packed);
  return Product(op)
      .Then(&CheckScales)
      .Example({{"mat1", {4, 64}},
                {"mat2", {32, 32}, DType::kU8},
                {"scales2", {32, 2}, DType::kU8},
                {"is_vnni", false}})
      .AddTo(registry);
}

constexpr SglangWeightNames kInt4Names = {"w", "w_scales", "w_zeros"};
absl::Status AddInt4(OpRegistry& registry) {
  Op op("int4_scaled_mm_cpu");
  op.Given(&Spec::x_name, "x")
      .Given(&SglangWeightSpec::names, kInt4Names)
      .In("x", &Args::x, {kLeading, kAny, kAny},
          Floats({&Spec::x_dtype, &Spec::out_dtype}))
      .In("w", &Args::w, {kAny, kAny, kAny}, DType::kU8)
      .In("w_zeros", &Args::w_zeros, {kAny, kAny, kAny}, DType::kI8)
      .In("w_scales", &Args::w_scales, {kAny, kAny, kAny}, DType::kF32)
      .Maybe("bias", &Args::bias);
  return Product(op, "x")
      .Then(&CheckScales)
      .Example({{"x", {4, 64}},
                {"w", {1, 2, 640}, DType::kU8},
                {"w_zeros", {1, 2, 32}, DType::kI8},
                {"w_scales", {1, 2, 32}, DType::kF32}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangLinearOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddLinear(registry));
  QUERN_RETURN_IF_ERROR(AddInt8(registry));
  QUERN_RETURN_IF_ERROR(AddInt8WithQuant(registry));
  QUERN_RETURN_IF_ERROR(AddMxfp4(registry));
  QUERN_RETURN_IF_ERROR(AddInt4(registry));
  return AddFp8(registry);
}

}  // namespace quern
