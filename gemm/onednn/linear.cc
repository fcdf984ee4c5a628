#include "quern/gemm/onednn/linear.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/cache_stats.h"
#include "quern/gemm/onednn/check_args.h"
#include "quern/gemm/onednn/packed_matmul.h"
#include "quern/gemm/onednn/scratch.h"
#include "quern/packing/vnni_pack.h"

namespace quern {
namespace {

constexpr char kOp[] = "onednn_linear";

absl::Status CheckFloat(const char* field, DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16) {
    return absl::OkStatus();
  }
  return InvalidArgument(kOp, field, " is ", DTypeName(dtype),
                         "; need f32, bf16 or f16");
}

// The narrowest types that oneDNN has a kernel for.
absl::StatusOr<std::unique_ptr<PackedMatmul>> ChooseTypes(
    const OneDnnLinearSpec& spec, DType weights, bool bias) {
  // f32 by bf16 is not asked for, though oneDNN 3.7.2 has it: with packed
  // weights and k > 1024 its answers are wrong (avx512_core, Zen 5, 2026).
  constexpr DType kWide = DType::kF32;
  MatmulConfig config;
  config.op = kOp;
  config.n = spec.n;
  config.k = spec.k;
  config.a = spec.a;
  config.c = spec.c;
  config.bias = bias;
  absl::Status status;
  for (const DType operand : {spec.a, kWide}) {
    if (operand != kWide && operand != weights) continue;
    for (const DType c : {spec.c, kWide}) {
      config.inner_a = config.inner_b = operand;
      config.inner_c = c;
      config.reference_kernel = operand == kWide && c == kWide;
      auto matmul = PackedMatmul::Create(config);
      if (matmul.ok() || !absl::IsUnimplemented(matmul.status())) return matmul;
      status = matmul.status();
    }
  }
  return status;
}

}  // namespace

struct OneDnnLinearPlan::State {
  OneDnnLinearSpec spec;
  std::unique_ptr<PackedMatmul> matmul;
  AlignedBuffer bias;
};

absl::StatusOr<OneDnnLinearPlan> OneDnnLinearPlan::Create(
    const OneDnnLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& bias, Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "n", spec.n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "k", spec.k, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckFloat("a", spec.a));
  QUERN_RETURN_IF_ERROR(CheckFloat("c", spec.c));
  QUERN_RETURN_IF_ERROR(CheckFloat("weights", weights.dtype()));
  const bool by_rows = spec.order == WeightOrder::kNK;
  QUERN_RETURN_IF_ERROR(CheckWeights(kOp, weights, spec.n, spec.k, by_rows));
  QUERN_RETURN_IF_ERROR(CheckBias(kOp, bias, spec.n));

  auto state = std::make_unique<State>();
  state->spec = spec;
  const bool has_bias = bias.rank() != 0;
  if (has_bias) {
    QUERN_ASSIGN_OR_RETURN(
        state->bias,
        AlignedBuffer::Create(spec.n * static_cast<int64_t>(sizeof(float))));
    std::memcpy(state->bias.data(), bias.data(), state->bias.bytes());
  }
  QUERN_ASSIGN_OR_RETURN(state->matmul,
                         ChooseTypes(spec, weights.dtype(), has_bias));
  QUERN_RETURN_IF_ERROR(state->matmul->Pack(weights, by_rows, executor));
  return OneDnnLinearPlan(std::move(state));
}

absl::Status OneDnnLinearPlan::CheckArgs(const AnyTensorView& a,
                                         const AnyTensorView& c) const {
  const OneDnnLinearSpec& spec = state_->spec;
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "a", a.dtype(), spec.a));
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "c", c.dtype(), spec.c));
  QUERN_RETURN_IF_ERROR(CheckMatrix(kOp, "a", a, spec.k));
  return CheckResult(kOp, a, c, spec.n);
}

absl::StatusOr<int64_t> OneDnnLinearPlan::WorkspaceBytes(int64_t max_m,
                                                         int workers) const {
  return state_->matmul->WorkspaceBytes(max_m, workers);
}

void OneDnnLinearPlan::Execute(const AnyTensorView& a, const AnyTensorView& c,
                               OneDnnScratch& scratch,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(a, c));
  MatmulCall call;
  call.a = a;
  call.c = c;
  call.bias = state_->bias.data<float>();
  state_->matmul->Execute(call, scratch, executor);
}

const OneDnnLinearSpec& OneDnnLinearPlan::spec() const { return state_->spec; }

size_t OneDnnLinearPlan::packed_bytes() const {
  return state_->matmul->packed_bytes();
}

size_t OneDnnLinearPlan::HugePageBytes() const {
  return state_->matmul->HugePageBytes();
}

OneDnnCacheStats OneDnnLinearPlan::cache_stats() const {
  return state_->matmul->cache_stats();
}

std::string OneDnnLinearPlan::Explain(int64_t m) const {
  return state_->matmul->Explain(m);
}

OneDnnLinearPlan::OneDnnLinearPlan(std::unique_ptr<State> state)
    : state_(std::move(state)) {}
OneDnnLinearPlan::OneDnnLinearPlan(OneDnnLinearPlan&&) noexcept = default;
OneDnnLinearPlan& OneDnnLinearPlan::operator=(OneDnnLinearPlan&&) noexcept =
    default;
OneDnnLinearPlan::~OneDnnLinearPlan() = default;

}  // namespace quern
