#ifndef QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PACKED_WEIGHTS_H_
#define QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PACKED_WEIGHTS_H_

// Private: one matrix of weights by SGLang's arguments.
//
//   weights        plain (is_vnni = false)       with is_vnni
//   f32 bf16 f16   [n, k]                        convert_weight_packed's, or
//                                                f32[k, n] where n < 16
//   i8             [n, k]                        [n, k + 4]
//   f8e4m3         [n, k]                        convert_weight_packed's
//   u8, MXFP4      [n, k / 2], two codes a byte  convert_weight_packed's
//   u8, 4 bits     u8[n / 32, k / block, 16 block + 128] in any case, as
//                  convert_weight_packed_scale_zp returns it
//
//   scales         i8 f32[n] or [1]; f8e4m3 f32[ceil(n / block_n), ceil(k /
//                  block_k)]; MXFP4 u8[n, k / 32], with is_vnni those of
//                  convert_scale_packed; 4 bits f32[n / 32, groups, 32], with
//                  zeros i8[n / 32, groups, 32]
//   bias           f32[n]

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_call.h"

namespace quern {

// Names that an operator's schema gives to a matrix and what goes with it.
// Literals.
struct SglangWeightNames {
  const char* w = "mat2";
  const char* scales = "scales2";
  const char* zeros = "";  // "" but for the 4 bits of int4_scaled_mm_cpu
};

// What a product was asked for. group_size is block_k for f8e4m3.
struct SglangWeightSpec : LinearWeightsSpec {
  SglangWeightNames names;
  TensorMeta w;
  TensorMeta scales;  // empty where the weights have none
  int64_t block_n = 0;
  bool packed = false;      // is_vnni
  bool transposed = false;  // f32[k, n]

  bool has_scales() const { return format >= WeightFormat::kI8Channel; }

  // Fills the format and the extents. Refuses, in the operator's name, a shape
  // that no matrix of this type has.
  absl::Status Fill(absl::string_view op, const TensorMeta& matrix);
  // Compares scales and zeros with the matrix. Needs block_n and group_size of
  // f8e4m3, and fills group_size of 4 bits.
  absl::Status CheckScales(const OpCall& call);
};

// The tensors of one matrix; rank 0 where it has none.
struct SglangWeights {
  AnyTensorView w, scales, zeros, bias;
};

// The weights in our packed form, of given's values. Refuses other shapes and
// dtypes than the spec's, gaps where SGLang's form has none, and zero points
// outside [0, 16], or of both 0 and 16. `native`: MXFP4 becomes f32, as the
// reference reads no blocks.
absl::StatusOr<LinearWeights> PackSglangWeights(const SglangWeightSpec& spec,
                                                const SglangWeights& given,
                                                bool native,
                                                Executor& executor);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PACKED_WEIGHTS_H_
