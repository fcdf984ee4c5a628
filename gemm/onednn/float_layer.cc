// Linear layers on f32, bf16 and f16 by oneDNN.
//
// Operands are never rounded to a narrower type. Where oneDNN has no kernel for
// the types, operands are widened: weights to f32 at Create (twice the memory),
// rows of a to f32 scratch. That is the case
//
// - for bf16 by bf16 with AVX2 alone,
// - for f16 by f16 without AVX512-FP16,
// - for both where the kernel uses AMX and k is not a multiple of 32, because
//   it would spread a NaN that lies behind a row (packed_matmul.cc),
// - for mixed types everywhere.
//
// A narrow c that oneDNN does not write goes through f32 scratch. Explain()
// tells the types.
//
// The bits are the same for any number of threads: columns are divided at
// Create, rows in blocks, and each piece is a oneDNN primitive for one thread.
// With AVX-512 a row also has the same bits alone and in a batch, so that many
// threads take smaller blocks of rows. oneDNN does not promise that its sums
// over k do not depend on the number of rows; float_layer_test.cc tests it.
// With AVX2 alone (Explain: gemm:jit:f32) they do depend on it; nobody has
// looked at AMX yet. There the blocks depend on the shape alone.

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/layers.h"
#include "quern/gemm/onednn/packed_matmul.h"
#include "quern/gemm/weights/packed_form.h"

namespace quern {
namespace {

class OneDnnFloatLayer final : public OneDnnLayer {
 public:
  using OneDnnLayer::OneDnnLayer;

  void Execute(const LinearArgs& args, const Workspace& workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(args));
    MatmulCall call;
    call.a = args.a;
    call.c = args.c;
    call.bias = bias();
    matmul().Execute(call, workspace, executor);
  }
};

// The narrowest types that oneDNN has a kernel for.
absl::StatusOr<std::unique_ptr<PackedMatmul>> ChooseTypes(
    const LinearSpec& spec, const LinearWeights& weights) {
  // f32 by bf16 is not asked for, though oneDNN 3.7.2 has it: with packed
  // weights and k > 1024 its answers are wrong (avx512_core, Zen 5, 2026).
  constexpr DType kWide = DType::kF32;
  MatmulConfig config;
  config.n = weights.spec().n;
  config.k = weights.spec().k;
  config.a = spec.a;
  config.b = FloatOrI8(weights.spec().format);
  config.c = spec.c;
  config.bias = weights.has_bias();
  absl::Status status;
  for (const DType operand : {spec.a, kWide}) {
    if (operand != kWide && operand != config.b) continue;
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

OneDnnLayerOr CreateOneDnnFloat(const LinearSpec& spec,
                                const LinearWeights& weights,
                                const uint8_t* plain, Executor& executor) {
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer bias,
                         CopyOfColumns(weights.bias(), weights.spec().n));
  QUERN_ASSIGN_OR_RETURN(std::unique_ptr<PackedMatmul> matmul,
                         ChooseTypes(spec, weights));
  QUERN_RETURN_IF_ERROR(matmul->Pack(plain, executor));
  return std::make_unique<const OneDnnFloatLayer>(std::move(matmul),
                                                  std::move(bias));
}

}  // namespace quern
