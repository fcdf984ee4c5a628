#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/ops/dense_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/products/packed_product.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"
#include "quern/ops/registry/sglang/products/product_ops.h"

namespace quern {
namespace {

constexpr char kPlan[] = "product";

struct Spec : SglangWeightSpec {
  DType dtype = DType::kF32;
  TensorMeta weight;  // [n, channels, depth, height, width]
};
struct Args {
  AnyTensorView x, w, bias, out;
};

// [n, channels, depth, height, width] as [n, k], where kernels are dense.
absl::StatusOr<AnyTensorView> AsMatrix(const char* field,
                                       const AnyTensorView& v) {
  if (!IsDense(v, 1)) {
    return InvalidArgument(kPlan, field,
                           " has gaps within its patches; need dense ones");
  }
  int64_t k = 1;
  for (int d = 1; d < v.rank(); ++d) k *= v.extent(d);
  return AnyTensorView(v.dtype(), v.data(), 2, {v.extent(0), k},
                       {v.extent(0) > 1 ? v.stride(0) : k, 1});
}

class Plan {
 public:
  static absl::StatusOr<Plan> Create(bool native, const Spec& spec) {
    LinearSpec linear;
    linear.a = linear.c = spec.dtype;
    QUERN_ASSIGN_OR_RETURN(SglangProduct product,
                           SglangProduct::CreateAny(native, linear, spec));
    return Plan(spec, std::move(product));
  }
  template <bool kNative>
  static absl::StatusOr<Plan> Make(const Spec& spec, const OpCall&) {
    return Create(kNative, spec);
  }
  const Spec& spec() const { return spec_; }
  const char* target() const { return product_.target(); }
  std::string Explain(int64_t rows) const { return product_.Explain(rows); }

  absl::Status Prepare(const Args& a, Executor& executor) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kPlan, "weight", a.w, spec_.dtype, spec_.weight.extents));
    QUERN_RETURN_IF_ERROR(
        CheckInput(kPlan, "bias", a.bias, spec_.dtype, {spec_.n}));
    QUERN_ASSIGN_OR_RETURN(const AnyTensorView w, AsMatrix("weight", a.w));
    std::vector<float> bias;
    for (int64_t i = 0; i < spec_.n; ++i) {
      bias.push_back(ScalarRow(a.bias, 0)[i]);
    }
    prepared_ = a;
    return product_.Prepare(
        {w, {}, {}, DenseVector<const float>(bias.data(), spec_.n)}, executor);
  }
  absl::Status CheckArgs(const Args& a) const {
    if (!prepared_.has_value()) return product_.CheckWeights({});
    if (!SameView(a.w, prepared_->w) || !SameView(a.bias, prepared_->bias)) {
      return InvalidArgument(kPlan,
                             "weight or bias is not what Prepare was given");
    }
    const std::vector<int64_t>& w = spec_.weight.extents;
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "input", a.x, spec_.dtype,
                                     {kAnyExtent, w[1], w[2], w[3], w[4]}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kPlan, "out", a.out, spec_.dtype,
                                      {a.x.extent(0), spec_.n}));
    QUERN_ASSIGN_OR_RETURN(const AnyTensorView x, AsMatrix("input", a.x));
    return product_.CheckRows(x);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    return product_.WorkspaceBytes(max_rows, max_workers);
  }
  void Execute(const Args& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    LinearArgs args;
    args.a = *AsMatrix("input", a.x);
    args.c = a.out;
    product_.Execute(args, workspace, executor);
  }

 private:
  Plan(const Spec& spec, SglangProduct product)
      : spec_(spec), product_(std::move(product)) {}

  Spec spec_;
  SglangProduct product_;
  std::optional<Args> prepared_;
};

absl::Status Complete(Spec& spec, const OpCall& call) {
  spec.names.w = "weight";
  spec.weight = *call.Tensor("weight");
  const std::vector<int64_t>& w = spec.weight.extents;
  int64_t k = 1;
  for (size_t d = 1; d < w.size(); ++d) {
    if (!CheckedMul(k, w[d], &k)) {
      return InvalidArgument(call.op(), "weight has 2^63 elements or more");
    }
  }
  if (spec.packed && spec.dtype == DType::kF32) {
    return InvalidArgument(call.op(),
                           "weight is f32 with is_vnni; need bf16 or f16");
  }
  const TensorMeta& x = *call.Tensor("input");
  QUERN_RETURN_IF_ERROR(
      CheckMeta(call.op(), "input", x,
                {spec.dtype, {x.extents[0], w[1], w[2], w[3], w[4]}},
                ", patches of the size of weight"));
  return spec.Fill(call.op(), {spec.dtype, {w[0], k}});
}

}  // namespace

absl::Status RegisterSglangEmbedOps(OpRegistry& registry) {
  return OpDeclaration<Plan, Spec, Args>("conv3d_embed_cpu")
      .In("input", &Args::x, {kRows, kAny, kAny, kAny, kAny},
          OpDType<Spec>::OneOf(
              {std::begin(kFloatDTypes), std::end(kFloatDTypes)},
              {&Spec::dtype}))
      .In("weight", &Args::w, {kAny, kAny, kAny, kAny, kAny}, Like("input"))
      .In("bias", &Args::bias, {kAny}, Like("input"))
      .Need("is_vnni", &Spec::packed)
      .Then(&Complete)
      .Then([](Spec& spec, const OpCall& call) {
        return CheckMeta(call.op(), "bias", *call.Tensor("bias"),
                         {spec.dtype, {spec.n}});
      })
      .Out("out", &Args::out, {kRows, &Spec::n}, Like("input"))
      .Provider("simd", &Plan::Make<false>)
      .Provider("reference", &Plan::Make<true>)
      .Layer()
      .Example({{"input", {4, 2, 2, 4, 4}},
                {"weight", {32, 2, 2, 4, 4}},
                {"bias", {32}},
                {"is_vnni", false}})
      .AddTo(registry);
}

}  // namespace quern
