#include <cstdint>
#include <cstring>
#include <optional>
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
#include "quern/ops/dense_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/packing/int8_pack.h"
#include "quern/ops/registry/sglang/packing/layout.h"
#include "quern/ops/registry/sglang/packing/pack.h"
#include "quern/ops/registry/sglang/packing/packed.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/quant/s8s8_compensation.h"

namespace quern {
namespace {

constexpr char kPlan[] = "pack";
// SGLang packs from so many columns on.
constexpr int64_t kLeastColumns = 16;

struct Args {
  AnyTensorView weight, out;
};

// How weights are packed.
struct Packing {
  TensorMeta weight;
  std::vector<int64_t> extents;  // of out
  DType dtype = DType::kF32;
  SglangLayout layout;  // of one expert
  int64_t experts = 1;
  bool transposed = false;  // to f32[k, n] instead
};

// A kernel [n, channels, depth, height, width] is one matrix, [n, k].
absl::Status FillKernel(Packing& packing, const OpCall& call) {
  packing.weight = *call.Tensor("weight");
  packing.extents = packing.weight.extents;
  packing.dtype = packing.weight.dtype;
  int64_t k = 1;
  for (size_t d = 1; d < packing.extents.size(); ++d) {
    if (!CheckedMul(k, packing.extents[d], &k)) {
      return InvalidArgument(call.op(), "weight has 2^63 elements or more");
    }
  }
  QUERN_ASSIGN_OR_RETURN(
      packing.layout,
      SglangLayout::Create(packing.dtype, k, packing.extents[0]));
  return absl::OkStatus();
}

absl::Status FillPacking(Packing& packing, const OpCall& call) {
  packing.weight = *call.Tensor("weight");
  const std::vector<int64_t>& w = packing.weight.extents;
  const DType dtype = packing.weight.dtype;
  if (w.size() != 2 && w.size() != 3) {
    return InvalidArgument(call.op(), "weight has rank ", w.size(),
                           "; need [n, k] or [experts, n, k]");
  }
  if (w.size() == 3) packing.experts = w[0];
  const int64_t n = w[w.size() - 2];
  if (w.size() == 2 && n < kLeastColumns &&
      (dtype == DType::kBF16 || dtype == DType::kF16)) {
    packing.transposed = true;
    packing.extents = {w[1], w[0]};
    return absl::OkStatus();
  }
  QUERN_ASSIGN_OR_RETURN(
      packing.layout,
      SglangLayout::Create(dtype, w.back() * (dtype == DType::kU8 ? 2 : 1), n));
  packing.extents = w;
  packing.dtype = dtype;
  if (packing.layout.has_compensation()) packing.extents.back() += 4;
  return absl::OkStatus();
}
std::vector<int64_t> PackedShape(const Packing& packing, const OpCall&,
                                 int64_t) {
  return packing.extents;
}

class PackPlan {
 public:
  static absl::StatusOr<PackPlan> Create(const Packing& spec, const OpCall&) {
    if (spec.transposed) {
      return Unimplemented(kPlan, "n < 16 has the reference alone");
    }
    PackPlan plan(spec);
    QUERN_ASSIGN_OR_RETURN(plan.plan_, SglangPackPlan::Create(spec.layout));
    if (spec.layout.has_compensation()) {
      QUERN_ASSIGN_OR_RETURN(plan.int8_, SglangInt8PackPlan::Create(
                                             spec.layout.k(), spec.layout.n()));
    }
    return plan;
  }
  static absl::StatusOr<PackPlan> Native(const Packing& spec,
                                         const OpCall& call) {
    PackPlan plan(spec);
    if (!spec.transposed) {
      QUERN_ASSIGN_OR_RETURN(plan, Create(spec, call));
    }
    plan.native_ = true;
    return plan;
  }

  const Packing& spec() const { return spec_; }
  const char* target() const { return native_ ? "scalar" : plan_->target(); }
  absl::Status CheckArgs(const Args& args) const {
    const AnyTensorView &w = args.weight, &out = args.out;
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "weight", w, spec_.weight.dtype,
                                     spec_.weight.extents));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kPlan, "out", out, spec_.dtype, spec_.extents));
    const bool kernel = w.rank() == 5;
    QUERN_RETURN_IF_ERROR(
        CheckElementsApart(kPlan, "weight", w, kernel ? 0 : w.rank() - 2));
    if (kernel && !IsDense(w, 1)) {
      return InvalidArgument(kPlan,
                             "weight has gaps within its kernels; need dense "
                             "kernels");
    }
    if (spec_.transposed || IsDense(out)) return absl::OkStatus();
    return InvalidArgument(kPlan,
                           "out has gaps; need a dense tensor, as blocks "
                           "follow each other");
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t, int) const {
    WorkspaceLayout layout;
    LayOut(layout);
    return layout.bytes();
  }
  void Execute(const Args& args, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(args));
    if (spec_.transposed) return Transpose(args);
    const VectorView<int32_t> compensation =
        DenseVector(LayOut(workspace), Sums());
    auto* const out = static_cast<uint8_t*>(args.out.mutable_data());
    for (int64_t e = 0; e < spec_.experts; ++e) {
      const AnyTensorView w = ExpertOf(args.weight, e);
      uint8_t* const to = out + e * spec_.layout.bytes();
      if (native_) {
        PackOneByOne(w, to);
      } else if (int8_.has_value()) {
        int8_->Pack(w.As<const int8_t, 2>(), compensation, to, executor);
      } else {
        plan_->Pack(w, {}, to, executor);
      }
    }
  }

 private:
  explicit PackPlan(const Packing& spec) : spec_(spec) {}

  int64_t Sums() const { return int8_.has_value() ? spec_.layout.n() : 0; }
  template <typename Allocator>
  int32_t* LayOut(Allocator& a) const {
    return a.template Allocate<int32_t>("compensation", Sums());
  }
  static AnyTensorView ExpertOf(const AnyTensorView& w, int64_t e) {
    if (w.rank() == 2) return w;
    if (w.rank() == 5) {
      const int64_t n = w.extent(0);
      int64_t k = 1;
      for (int d = 1; d < 5; ++d) k *= w.extent(d);
      return AnyTensorView(w.dtype(), w.data(), 2, {n, k},
                           {n > 1 ? w.stride(0) : k, 1});
    }
    const auto* const data =
        static_cast<const uint8_t*>(w.data()) +
        e * w.RowStride() * static_cast<int64_t>(SizeOf(w.dtype()));
    return AnyTensorView(w.dtype(), static_cast<const void*>(data), 2,
                         {w.extent(1), w.extent(2)},
                         {w.stride(1), w.stride(2)});
  }

  // f32[k, n] of w[n, k].
  static void Transpose(const Args& args) {
    for (int64_t n = 0; n < args.weight.extent(0); ++n) {
      const ScalarRow from(args.weight, n);
      for (int64_t k = 0; k < args.weight.extent(1); ++k) {
        *args.out.As<float, 2>().At(k, n) = from[k];
      }
    }
  }

  void PackOneByOne(const AnyTensorView& w, uint8_t* to) const {
    const SglangLayout& layout = spec_.layout;
    const auto* const plain = static_cast<const uint8_t*>(w.data());
    const int64_t row_bytes =
        w.stride(0) * static_cast<int64_t>(SizeOf(w.dtype()));
    if (layout.dtype() != DType::kU8) {
      CopyToSglang(layout, plain, row_bytes, to);
    } else {
      PackNibbles(plain, row_bytes, to);
    }
    for (int64_t n = 0; layout.has_compensation() && n < layout.n(); ++n) {
      int32_t sum = 0;
      for (int64_t k = 0; k < layout.k(); ++k) {
        sum += static_cast<int8_t>(plain[n * row_bytes + k]);
      }
      sum *= 128;
      const int64_t block = n / SglangLayout::kBlockCols;
      std::memcpy(to + layout.block_offset(block) +
                      layout.compensation_offset() +
                      n % SglangLayout::kBlockCols * 4,
                  &sum, sizeof(sum));
    }
  }
  // A pair of k has 64 codes, two of each column. Those of the first 16 columns
  // go to the lower halves of 32 bytes, and the others to the upper halves.
  void PackNibbles(const uint8_t* plain, int64_t row_bytes, uint8_t* to) const {
    const SglangLayout& layout = spec_.layout;
    std::memset(to, 0, static_cast<size_t>(layout.bytes()));
    for (int64_t n = 0; n < layout.n(); ++n) {
      const int64_t c = n % SglangLayout::kBlockCols;
      uint8_t* const block =
          to + layout.block_offset(n / SglangLayout::kBlockCols);
      for (int64_t k = 0; k < layout.k(); ++k) {
        const int code =
            (plain[n * row_bytes + k / 2] >> (k % 2 != 0 ? 4 : 0)) & 15;
        const int64_t place = 2 * c + k % 2;
        uint8_t& byte = block[k / 2 * 32 + place % 32];
        byte = static_cast<uint8_t>(byte | code << (place < 32 ? 0 : 4));
      }
    }
  }

  Packing spec_;
  std::optional<SglangPackPlan> plan_;
  std::optional<SglangInt8PackPlan> int8_;
  bool native_ = false;
};

NamedArgs PackExample(DType dtype) {
  // f32 stands for int8, as weights of f32 are not packed.
  return {{"weight",
           TensorMeta{dtype == DType::kF32 ? DType::kI8 : dtype, {32, 64}}}};
}

absl::Status AddPack(OpDeclaration<PackPlan, Packing, Args> op,
                     OpExample example, OpRegistry& registry) {
  return op.Out("out", &Args::out, &PackedShape, &Packing::dtype)
      .Provider("simd", &PackPlan::Create)
      .Provider("reference", &PackPlan::Native)
      .Layer()
      .ExampleOf(std::move(example))
      .AddTo(registry);
}
absl::Status AddMatrixPack(const char* name, OpRegistry& registry) {
  OpDeclaration<PackPlan, Packing, Args> op(name);
  op.In("weight", &Args::weight).Then(&FillPacking);
  return AddPack(std::move(op), &PackExample, registry);
}

NamedArgs KernelExample(DType dtype) {
  // bf16 stands for f32, as in PackExample.
  return {{"weight", TensorMeta{dtype == DType::kF32 ? DType::kBF16 : dtype,
                                {32, 2, 2, 4, 4}}}};
}
absl::Status AddKernelPack(OpRegistry& registry) {
  OpDeclaration<PackPlan, Packing, Args> op("conv3d_embed_weight_pack");
  op.In("weight", &Args::weight, {kAny, kAny, kAny, kAny, kAny},
        OpDType<Packing>::OneOf({DType::kBF16, DType::kF16}))
      .Then(&FillKernel);
  return AddPack(std::move(op), &KernelExample, registry);
}

using SumsPlan = S8S8CompensationPlan;
using SumsSpec = S8S8CompensationSpec;

absl::Status CheckPacked(SumsSpec& spec, const OpCall&) {
  return SglangLayout::Create(DType::kI8, spec.k, spec.n).status();
}
absl::Status CheckSums(const SumsPlan& plan, const Args& args) {
  const SumsSpec& spec = plan.spec();
  QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "packed", args.weight, DType::kI8,
                                   {spec.n, spec.k + 4}));
  QUERN_RETURN_IF_ERROR(CheckEqual(kPlan, "row stride of packed",
                                   args.weight.stride(0), spec.k + 4,
                                   "a dense matrix has"));
  return CheckOutput(kPlan, "out", args.out, DType::kI32, {spec.n});
}
void ExecuteSums(const SumsPlan& plan, const Args& args, Workspace,
                 Executor& executor) {
  constexpr int64_t kCols = SglangLayout::kBlockCols;
  plan.FromPanels({static_cast<const int8_t*>(args.weight.data()), kCols,
                   kCols * (plan.spec().k + 4)},
                  args.out.As<int32_t, 1>(), executor);
}
void NativeSums(const SumsSpec& spec, const Args& args) {
  const auto* const packed = static_cast<const int8_t*>(args.weight.data());
  const auto layout = SglangLayout::Create(DType::kI8, spec.k, spec.n);
  for (int64_t n = 0; n < spec.n; ++n) {
    int32_t sum = 0;
    for (int64_t k = 0; k < spec.k; ++k) {
      sum += packed[SglangByte(*layout, n, k)];
    }
    *args.out.As<int32_t, 1>().At(n) = 128 * sum;
  }
}

absl::Status AddCompensation(OpRegistry& registry) {
  return OpDeclaration<SumsPlan, SumsSpec, Args>("s8s8_compensation")
      .In("packed", &Args::weight, {&SumsSpec::n, Plus(4, &SumsSpec::k)},
          OpDType<SumsSpec>::OneOf({DType::kI8}))
      .Then(&CheckPacked)
      .Out("out", &Args::out, {&SumsSpec::n}, DType::kI32)
      .Calls(&CheckSums, &ExecuteSums)
      .Reference(&NativeSums)
      .Layer()
      .Example({{"packed", {32, 68}, DType::kI8}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangPackOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddMatrixPack("convert_weight_packed", registry));
  // The name of SGLang's packing of one block.
  QUERN_RETURN_IF_ERROR(AddMatrixPack("pack_vnni", registry));
  QUERN_RETURN_IF_ERROR(AddKernelPack(registry));
  return AddCompensation(registry);
}

}  // namespace quern
