#include "quern/ops/registry/sglang/products/product_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
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
#include "quern/ops/activation/sigmoid_mul.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/products/batch_product.h"
#include "quern/ops/registry/sglang/products/packed_product.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"
#include "quern/ops/registry/sglang/products/product_declaration.h"

namespace quern {
namespace {

// ---- bmm_cpu

struct BatchArgs {
  AnyTensorView out, x, w, scale;
};

class BatchPlan {
 public:
  static absl::StatusOr<BatchPlan> Create(bool native,
                                          const SglangBatchSpec& spec) {
    QUERN_ASSIGN_OR_RETURN(SglangBatch batch,
                           SglangBatch::Create(native, spec));
    return BatchPlan(spec, std::move(batch));
  }
  const SglangBatchSpec& spec() const { return spec_; }
  const char* target() const { return batch_.target(); }
  absl::Status Prepare(const BatchArgs& a, Executor& executor) {
    return batch_.Prepare(a.w, a.scale, executor);
  }
  absl::Status CheckArgs(const BatchArgs& a) const {
    QUERN_RETURN_IF_ERROR(batch_.CheckWeights(a.w, a.scale));
    return batch_.CheckArgs(a.x, a.out);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t, int max_workers) const {
    return batch_.WorkspaceBytes(max_workers);
  }
  void Execute(const BatchArgs& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    batch_.Execute(a.x, a.out, workspace, executor);
  }

 private:
  BatchPlan(const SglangBatchSpec& spec, SglangBatch batch)
      : spec_(spec), batch_(std::move(batch)) {}

  SglangBatchSpec spec_;
  SglangBatch batch_;
};

absl::Status CheckBatch(SglangBatchSpec& spec, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(spec.Fill(call));
  const TensorMeta& x = *call.Tensor("mat1");
  QUERN_RETURN_IF_ERROR(
      CheckMeta(call.op(), "mat1", x,
                {spec.dtype, {spec.batch, x.extents[1], spec.each.k}},
                ", as mat2 has it"));
  return CheckMeta(call.op(), "out", *call.Tensor("out"),
                   {spec.dtype, {spec.batch, x.extents[1], spec.each.n}},
                   ", as mat1 and mat2 have it");
}

int64_t& BatchDim(SglangBatchSpec& spec) { return spec.batch; }

absl::Status AddBatch(OpRegistry& registry) {
  OpDeclaration<BatchPlan, SglangBatchSpec, BatchArgs> op("bmm_cpu");
  op.Then([](SglangBatchSpec& spec, const OpCall& call) {
      spec.each.names = {"mat2", "scale"};
      spec.each.packed = call.Bool("is_vnni");
      return absl::OkStatus();
    })
      .InOut("out", &BatchArgs::out, nullptr, {&BatchDim, kAny, kAny},
             SglangFloats<SglangBatchSpec>())
      .In("mat1", &BatchArgs::x, {&BatchDim, kAny, kAny}, Like("out"))
      .In("mat2", &BatchArgs::w, {&BatchDim, kAny, kAny})
      .Need<bool>("is_vnni")
      .Maybe("scale", &BatchArgs::scale)
      .Then(&CheckBatch);
  return WithProductProviders(op)
      .Example({{"out", {2, 4, 32}},
                {"mat1", {2, 4, 64}},
                {"mat2", {2, 32, 64}},
                {"is_vnni", false}})
      .AddTo(registry);
}

// ---- fused_linear_sigmoid_mul

struct GateSpec : SglangWeightSpec {
  int64_t d = 0;
  DType dtype = DType::kF32;
};
struct GateArgs {
  AnyTensorView x, w, bias, y, out;
};

class GatePlan {
 public:
  static absl::StatusOr<GatePlan> Create(bool native, const GateSpec& spec) {
    LinearSpec linear;
    linear.a = spec.dtype;
    linear.c = DType::kF32;
    QUERN_ASSIGN_OR_RETURN(SglangProduct product,
                           SglangProduct::CreateAny(native, linear, spec));
    SigmoidMulSpec multiply;
    multiply.d = spec.d;
    multiply.gate_cols = 1;
    multiply.x_dtype = multiply.out_dtype = spec.dtype;
    QUERN_ASSIGN_OR_RETURN(const SigmoidMulPlan multiplied,
                           SigmoidMulPlan::Create(multiply));
    return GatePlan(native, spec, std::move(product), multiplied);
  }
  const GateSpec& spec() const { return spec_; }
  const char* target() const { return product_.target(); }
  std::string Explain(int64_t rows) const { return product_.Explain(rows); }
  absl::Status Prepare(const GateArgs& a, Executor& executor) {
    return product_.Prepare({a.w, {}, {}, a.bias}, executor);
  }
  absl::Status CheckArgs(const GateArgs& a) const {
    QUERN_RETURN_IF_ERROR(product_.CheckWeights({a.w, {}, {}, a.bias}));
    QUERN_RETURN_IF_ERROR(CheckInput(kSglangProduct, "mat1", a.x, spec_.dtype,
                                     {kAnyExtent, spec_.k}));
    const int64_t rows = a.x.extent(0);
    QUERN_RETURN_IF_ERROR(CheckInput(kSglangProduct, "post_mul_mat", a.y,
                                     spec_.dtype, {rows, spec_.d}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kSglangProduct, "out", a.out, spec_.dtype,
                                      {rows, spec_.d}));
    return product_.CheckRows(a.x);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           product_.WorkspaceBytes(max_rows, max_workers));
    WorkspaceLayout layout;
    layout.Allocate<float>("gate", max_rows);
    layout.Allocate<uint8_t>("product", bytes);
    return layout.overflow()
               ? absl::StatusOr<int64_t>(TooManyProductRows(max_rows))
               : layout.bytes();
  }
  void Execute(const GateArgs& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const int64_t rows = a.x.extent(0);
    auto* const gates = workspace.Allocate<float>("gate", rows);
    LinearArgs args;
    args.a = a.x;
    args.c = DenseMatrix(gates, rows, 1);
    product_.Execute(args, workspace, executor);
    if (!native_) return multiply_.Execute(a.y, args.c, a.out, executor);
    for (int64_t t = 0; t < rows; ++t) {
      const ScalarRow y(a.y, t), out(a.out, t);
      for (int64_t i = 0; i < spec_.d; ++i) {
        out.Set(i, static_cast<float>(double{y[i]} /
                                      (1 + std::exp(-double{gates[t]}))));
      }
    }
  }

 private:
  GatePlan(bool native, const GateSpec& spec, SglangProduct product,
           const SigmoidMulPlan& multiply)
      : native_(native),
        spec_(spec),
        product_(std::move(product)),
        multiply_(multiply) {}

  bool native_;
  GateSpec spec_;
  SglangProduct product_;
  SigmoidMulPlan multiply_;
};

absl::Status FillGate(GateSpec& spec, const OpCall& call) {
  QUERN_RETURN_IF_ERROR(spec.Fill(call.op(), *call.Tensor("mat2")));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(call.op(), "columns of the product", spec.n, 1, "a gate has"));
  QUERN_RETURN_IF_ERROR(CheckEqual(call.op(), "columns of mat1",
                                   call.Tensor("mat1")->extents.back(), spec.k,
                                   "mat2 has"));
  if (!call.has("bias")) return absl::OkStatus();
  return CheckMeta(call.op(), "bias", *call.Tensor("bias"), {DType::kF32, {1}});
}

absl::Status AddGate(OpRegistry& registry) {
  OpDeclaration<GatePlan, GateSpec, GateArgs> op("fused_linear_sigmoid_mul");
  op.In("mat1", &GateArgs::x, {kRows, kAny}, SglangFloats<GateSpec>())
      .In("mat2", &GateArgs::w, {kAny, kAny},
          OpDType<GateSpec>::OneOf(
              {std::begin(kFloatDTypes), std::end(kFloatDTypes)}))
      .Maybe("bias", &GateArgs::bias)
      .Need("is_vnni", &GateSpec::packed)
      .In("post_mul_mat", &GateArgs::y, {kRows, &GateSpec::d}, Like("mat1"))
      .Then(&FillGate)
      .Out("out", &GateArgs::out, {kRows, &GateSpec::d}, Like("mat1"));
  return WithProductProviders(op)
      .Example({{"mat1", {4, 64}},
                {"mat2", {1, 64}},
                {"bias", {1}, DType::kF32},
                {"is_vnni", false},
                {"post_mul_mat", {4, 32}}})
      .AddTo(registry);
}

// ---- fused_input_proj_cpu

struct PairSpec {
  SglangWeightSpec first, second;
  DType dtype = DType::kF32;
  bool packed = false;
};
struct PairArgs {
  AnyTensorView x, first, second, out0, out1;
};

class PairPlan {
 public:
  static absl::StatusOr<PairPlan> Create(bool native, const PairSpec& spec) {
    LinearSpec linear;
    linear.a = linear.c = spec.dtype;
    QUERN_ASSIGN_OR_RETURN(
        SglangProduct first,
        SglangProduct::CreateAny(native, linear, spec.first));
    QUERN_ASSIGN_OR_RETURN(
        SglangProduct second,
        SglangProduct::CreateAny(native, linear, spec.second));
    return PairPlan(spec, std::move(first), std::move(second));
  }
  const PairSpec& spec() const { return spec_; }
  const char* target() const { return first_.target(); }
  std::string Explain(int64_t rows) const { return first_.Explain(rows); }
  absl::Status Prepare(const PairArgs& a, Executor& executor) {
    QUERN_RETURN_IF_ERROR(first_.Prepare({a.first, {}, {}, {}}, executor));
    return second_.Prepare({a.second, {}, {}, {}}, executor);
  }
  absl::Status CheckArgs(const PairArgs& a) const {
    QUERN_RETURN_IF_ERROR(first_.CheckWeights({a.first, {}, {}, {}}));
    QUERN_RETURN_IF_ERROR(second_.CheckWeights({a.second, {}, {}, {}}));
    QUERN_RETURN_IF_ERROR(CheckInput(kSglangProduct, "hidden_states", a.x,
                                     spec_.dtype, {kAnyExtent, spec_.first.k}));
    const int64_t rows = a.x.extent(0);
    QUERN_RETURN_IF_ERROR(CheckOutput(kSglangProduct, "out0", a.out0,
                                      spec_.dtype, {rows, spec_.first.n}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kSglangProduct, "out1", a.out1,
                                      spec_.dtype, {rows, spec_.second.n}));
    QUERN_RETURN_IF_ERROR(first_.CheckRows(a.x));
    return second_.CheckRows(a.x);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    QUERN_ASSIGN_OR_RETURN(const int64_t first,
                           first_.WorkspaceBytes(max_rows, max_workers));
    QUERN_ASSIGN_OR_RETURN(const int64_t second,
                           second_.WorkspaceBytes(max_rows, max_workers));
    return std::max(first, second);
  }
  void Execute(const PairArgs& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    LinearArgs args;
    args.a = a.x;
    args.c = a.out0;
    first_.Execute(args, workspace, executor);
    args.c = a.out1;
    second_.Execute(args, workspace, executor);
  }

 private:
  PairPlan(const PairSpec& spec, SglangProduct first, SglangProduct second)
      : spec_(spec), first_(std::move(first)), second_(std::move(second)) {}

  PairSpec spec_;
  SglangProduct first_, second_;
};

absl::Status FillPair(PairSpec& spec, const OpCall& call) {
  for (const auto& [of, name] : {std::pair(&spec.first, "qkvz_weight"),
                                 std::pair(&spec.second, "ba_weight")}) {
    of->names = {name};
    of->packed = spec.packed;
    QUERN_RETURN_IF_ERROR(of->Fill(call.op(), *call.Tensor(name)));
    QUERN_RETURN_IF_ERROR(
        CheckEqual(call.op(), "columns of hidden_states",
                   call.Tensor("hidden_states")->extents.back(), of->k,
                   absl::StrCat(name, " has")));
  }
  return absl::OkStatus();
}

absl::Status AddPair(OpRegistry& registry) {
  const auto floats = OpDType<PairSpec>::OneOf(
      {std::begin(kFloatDTypes), std::end(kFloatDTypes)});
  OpDeclaration<PairPlan, PairSpec, PairArgs> op("fused_input_proj_cpu");
  op.In("hidden_states", &PairArgs::x, {kRows, kAny}, SglangFloats<PairSpec>())
      .In("qkvz_weight", &PairArgs::first, {kAny, kAny}, floats)
      .In("ba_weight", &PairArgs::second, {kAny, kAny}, floats)
      .Need("is_vnni", &PairSpec::packed)
      .Then(&FillPair)
      .Out("out0", &PairArgs::out0,
           {kRows, +[](const PairSpec& s) { return s.first.n; }},
           Like("hidden_states"))
      .Out("out1", &PairArgs::out1,
           {kRows, +[](const PairSpec& s) { return s.second.n; }},
           Like("hidden_states"));
  return WithProductProviders(op)
      .Example({{"hidden_states", {4, 64}},
                {"qkvz_weight", {32, 64}},
                {"ba_weight", {16, 64}},
                {"is_vnni", false}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangProductOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddBatch(registry));
  QUERN_RETURN_IF_ERROR(AddGate(registry));
  QUERN_RETURN_IF_ERROR(AddPair(registry));
  return AddSglangSharedExpert(registry);
}

}  // namespace quern
