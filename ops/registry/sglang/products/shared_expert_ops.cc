#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/products/packed_product.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"
#include "quern/ops/registry/sglang/products/product_declaration.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

struct SharedSpec {
  SglangWeightSpec w1, w2;
  DType dtype = DType::kF32;
  bool packed = false, inplace = false, int8 = false, fp8 = false;
  bool routed = false;  // whether fused_experts_out is given
  float factor = 1;
  int64_t block_n = 0, block_k = 0, hidden = 0;
};
struct SharedArgs {
  AnyTensorView x, w1, w2, routed, w1_scale, w2_scale, out;

  SglangWeights first() const { return {w1, w1_scale, {}, {}}; }
  SglangWeights second() const { return {w2, w2_scale, {}, {}}; }
};

class SharedPlan {
 public:
  static absl::StatusOr<SharedPlan> Create(bool native,
                                           const SharedSpec& spec) {
    LinearSpec linear;
    linear.a = linear.c = spec.dtype;
    linear.activation = LinearActivation::kSiluAndMul;
    QUERN_ASSIGN_OR_RETURN(SglangProduct first,
                           SglangProduct::CreateAny(native, linear, spec.w1));
    linear.activation = LinearActivation::kNone;
    linear.residual = spec.routed;
    if (spec.routed) linear.c = DType::kF32;
    QUERN_ASSIGN_OR_RETURN(SglangProduct second,
                           SglangProduct::CreateAny(native, linear, spec.w2));
    SharedPlan plan(spec, std::move(first), std::move(second));
    QUERN_ASSIGN_OR_RETURN(plan.widen_,
                           ConvertPlan::Create({spec.dtype, DType::kF32}));
    QUERN_ASSIGN_OR_RETURN(plan.round_,
                           ConvertPlan::Create({DType::kF32, spec.dtype}));
    return plan;
  }
  const SharedSpec& spec() const { return spec_; }
  const char* target() const { return first_.target(); }
  std::string Explain(int64_t rows) const { return first_.Explain(rows); }
  absl::Status Prepare(const SharedArgs& a, Executor& executor) {
    QUERN_RETURN_IF_ERROR(first_.Prepare(a.first(), executor));
    return second_.Prepare(a.second(), executor);
  }
  absl::Status CheckArgs(const SharedArgs& a) const {
    QUERN_RETURN_IF_ERROR(first_.CheckWeights(a.first()));
    QUERN_RETURN_IF_ERROR(second_.CheckWeights(a.second()));
    QUERN_RETURN_IF_ERROR(CheckInput(kSglangProduct, "hidden_states", a.x,
                                     spec_.dtype, {kAnyExtent, spec_.hidden}));
    const int64_t rows = a.x.extent(0);
    if (spec_.routed) {
      QUERN_RETURN_IF_ERROR(CheckInput(kSglangProduct, "fused_experts_out",
                                       a.routed, spec_.dtype,
                                       {rows, spec_.hidden}));
    }
    QUERN_RETURN_IF_ERROR(CheckOutput(kSglangProduct, "out", a.out, spec_.dtype,
                                      {rows, spec_.hidden}));
    QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kSglangProduct, "hidden_states",
                                              a.x, "out", a.out));
    if (spec_.inplace && rows > 0 && a.out.data() != a.x.data()) {
      return InvalidArgument(kSglangProduct,
                             "out is not hidden_states; need it with inplace");
    }
    return first_.CheckRows(a.x);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    QUERN_ASSIGN_OR_RETURN(const int64_t first,
                           first_.WorkspaceBytes(max_rows, max_workers));
    QUERN_ASSIGN_OR_RETURN(const int64_t second,
                           second_.WorkspaceBytes(max_rows, max_workers));
    WorkspaceLayout layout;
    LayOut(layout, max_rows);
    layout.Allocate<uint8_t>("products", std::max(first, second));
    return layout.overflow()
               ? absl::StatusOr<int64_t>(TooManyProductRows(max_rows))
               : layout.bytes();
  }
  void Execute(const SharedArgs& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const int64_t rows = a.x.extent(0);
    const Scratch scratch = LayOut(workspace, rows);
    const AnyTensorView inner(spec_.dtype, static_cast<void*>(scratch.inner), 2,
                              {rows, spec_.w2.k}, {spec_.w2.k, 1});
    LinearArgs args;
    args.a = a.x;
    args.c = inner;
    first_.Execute(args, workspace, executor);
    args.a = inner;
    args.c = a.out;
    if (!spec_.routed) return second_.Execute(args, workspace, executor);
    args.c = DenseMatrix(scratch.sum, rows, spec_.hidden);
    ConvertTerms factor;
    factor.scale = spec_.factor;
    widen_->Execute(a.routed, args.c, executor, factor);
    args.residual = args.c;
    second_.Execute(args, workspace, executor);
    round_->Execute(args.c, a.out, executor);
  }

 private:
  struct Scratch {
    uint8_t* inner;  // silu(gate) * up
    float* sum;
  };
  SharedPlan(const SharedSpec& spec, SglangProduct first, SglangProduct second)
      : spec_(spec), first_(std::move(first)), second_(std::move(second)) {}

  template <typename Allocator>
  Scratch LayOut(Allocator& a, int64_t rows) const {
    int64_t inner = 0, sum = 0;
    if (!CheckedMul(rows, spec_.w2.k, &inner) ||
        !CheckedMul(inner, static_cast<int64_t>(SizeOf(spec_.dtype)), &inner) ||
        !CheckedMul(rows, spec_.routed ? spec_.hidden : 0, &sum)) {
      inner = -1;
    }
    return {a.template Allocate<uint8_t>("silu", inner),
            a.template Allocate<float>("sum", sum)};
  }

  SharedSpec spec_;
  SglangProduct first_, second_;
  std::optional<ConvertPlan> widen_, round_;
};

absl::Status FillShared(SharedSpec& spec, const OpCall& call) {
  const absl::string_view op = call.op();
  spec.routed = call.has("fused_experts_out");
  spec.w1.gated = true;
  for (const auto& [w, names] :
       {std::pair(&spec.w1, SglangWeightNames{"w1", "w1_scale"}),
        std::pair(&spec.w2, SglangWeightNames{"w2", "w2_scale"})}) {
    w->names = names;
    w->packed = spec.packed;
    w->block_n = spec.block_n;
    w->group_size = spec.block_k;
    const TensorMeta& meta = *call.Tensor(names.w);
    const bool is_int8 = meta.dtype == DType::kI8;
    const bool is_fp8 = meta.dtype == DType::kF8E4M3;
    if (is_int8 != spec.int8 || is_fp8 != spec.fp8 ||
        meta.dtype == DType::kU8) {
      return InvalidArgument(op, names.w, " is ", DTypeName(meta.dtype),
                             "; need i8 with use_int8_w8a8, f8e4m3 with "
                             "use_fp8_w8a16, else f32, bf16 or f16");
    }
    QUERN_RETURN_IF_ERROR(w->Fill(op, meta));
    QUERN_RETURN_IF_ERROR(w->CheckScales(call));
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(op, "columns of w1", spec.w1.k, spec.hidden,
                                   "hidden_states has"));
  QUERN_RETURN_IF_ERROR(CheckEqual(op, "rows of w2", spec.w2.n, spec.hidden,
                                   "hidden_states has columns"));
  return CheckEqual(op, "columns of w2", spec.w2.k, spec.w1.n / 2,
                    "half the rows of w1 are");
}

}  // namespace

absl::Status AddSglangSharedExpert(OpRegistry& registry) {
  OpDeclaration<SharedPlan, SharedSpec, SharedArgs> op("shared_expert_cpu");
  op.In("hidden_states", &SharedArgs::x, {kRows, &SharedSpec::hidden},
        SglangFloats<SharedSpec>())
      .In("w1", &SharedArgs::w1, {kAny, kAny})
      .In("w2", &SharedArgs::w2, {kAny, kAny})
      .Maybe("fused_experts_out", &SharedArgs::routed,
             {kRows, &SharedSpec::hidden}, Like("hidden_states"))
      .Attr("routed_scaling_factor", 1.0, &SharedSpec::factor)
      .Attr("inplace", false, &SharedSpec::inplace)
      .Attr("use_int8_w8a8", false, &SharedSpec::int8)
      .Attr("use_fp8_w8a16", false, &SharedSpec::fp8)
      .Maybe("w1_scale", &SharedArgs::w1_scale)
      .Maybe("w2_scale", &SharedArgs::w2_scale)
      .Attr("block_n", int64_t{0}, &SharedSpec::block_n)
      .Attr("block_k", int64_t{0}, &SharedSpec::block_k)
      .Need("is_vnni", &SharedSpec::packed)
      .Then(&FillShared)
      .Out("out", &SharedArgs::out, Like("hidden_states"),
           Like("hidden_states"))
      .InPlace("hidden_states", "out");
  return WithProductProviders(op)
      .Example({{"hidden_states", {4, 64}},
                {"w1", {64, 64}},
                {"w2", {64, 32}},
                {"fused_experts_out", {4, 64}},
                {"is_vnni", false}})
      .AddTo(registry);
}

}  // namespace quern
