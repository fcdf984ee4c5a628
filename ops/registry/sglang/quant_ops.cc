#include <cstdint>
#include <iterator>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/quantised_row.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/quant/convert.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

struct Args {
  AnyTensorView x, out, scales;
};

template <class Spec>
OpDType<Spec> Floats(DType Spec::*to) {
  return OpDType<Spec>::OneOf(
      {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, {to});
}

absl::Status CheckCopy(const ConvertPlan& plan, const Args& a) {
  return plan.CheckArgs(a.x, a.out);
}
void ExecuteCopy(const ConvertPlan& plan, const Args& a, Workspace,
                 Executor& executor) {
  plan.Execute(a.x, a.out, executor);
}
void NativeCopy(const ConvertSpec&, const Args& a) {
  for (int64_t r = 0; r < RowsOf(a.x); ++r) {
    const ScalarRow from(a.x, r), to(a.out, r);
    for (int64_t i = 0; i < a.x.extent(1); ++i) to.Set(i, from[i]);
  }
}

absl::Status CheckQuantise(const Int8QuantizePlan& plan, const Args& a) {
  constexpr char kOp[] = "quantize";
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "mat1", a.x, plan.spec().dtype,
                                   {kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out0", a.out, DType::kU8,
                                    {a.x.extent(0), a.x.extent(1)}));
  return CheckOutput(kOp, "out1", a.scales, DType::kF32, {a.x.extent(0)});
}

// Calls fn(row of x, its codes, its scale) for row m.
template <class Fn>
void OnRow(const Args& a, int64_t m, const Fn& fn) {
  fn(static_cast<const uint8_t*>(a.x.data()) +
         m * a.x.RowStride() * static_cast<int64_t>(SizeOf(a.x.dtype())),
     static_cast<uint8_t*>(a.out.mutable_data()) + m * a.out.RowStride(),
     static_cast<float*>(a.scales.mutable_data()) + m);
}
void ExecuteQuantise(const Int8QuantizePlan& plan, const Args& a, Workspace,
                     Executor& executor) {
  executor.ParallelFor(a.x.extent(0), [&](int64_t m, int /*worker*/) {
    OnRow(a, m, [&](const uint8_t* x, uint8_t* q, float* scale) {
      plan.QuantizeRowU8(x, a.x.extent(1), q, scale, nullptr);
    });
  });
}
void NativeQuantise(const Int8QuantizeSpec&, const Args& a) {
  for (int64_t m = 0; m < a.x.extent(0); ++m) {
    OnRow(a, m, [&](const uint8_t*, uint8_t* q, float* scale) {
      const ScalarRow x(a.x, m);
      const QuantisedRow codes(x, a.x.extent(1));
      *scale = codes.scale();
      for (int64_t i = 0; i < a.x.extent(1); ++i) {
        q[i] = static_cast<uint8_t>(128 + static_cast<int>(codes[i]));
      }
    });
  }
}

absl::Status AddCopy(OpRegistry& registry) {
  using Spec = ConvertSpec;
  return OpDeclaration<ConvertPlan, Spec, Args>("copy_stub")
      .InOut("out", &Args::out, nullptr, {kLeading, kAny}, Floats(&Spec::to))
      .In("input", &Args::x, Like("out"), Floats(&Spec::from))
      .InPlace("input", "out")
      .Word("in", "input")
      .Calls(&CheckCopy, &ExecuteCopy)
      .Reference(&NativeCopy)
      .ExampleOf([](DType dtype) {
        const DType other = dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
        return NamedArgs{{"out", TensorMeta{other, {4, 64}}},
                         {"input", TensorMeta{dtype, {4, 64}}}};
      })
      .AddTo(registry);
}

absl::Status AddQuantise(OpRegistry& registry) {
  using Spec = Int8QuantizeSpec;
  return OpDeclaration<Int8QuantizePlan, Spec, Args>("per_token_quant_int8_cpu")
      .In("mat1", &Args::x, {kLeading, kAny, kAny}, Floats(&Spec::dtype))
      .Out("out0", &Args::out, Like("mat1"), DType::kU8)
      .Out("out1", &Args::scales, {kRows}, DType::kF32)
      .Calls(&CheckQuantise, &ExecuteQuantise)
      .Reference(&NativeQuantise)
      .Example({{"mat1", {4, 64}}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangQuantOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddCopy(registry));
  return AddQuantise(registry);
}

}  // namespace quern
