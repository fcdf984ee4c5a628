#ifndef QUERN_OPS_REGISTRY_NATIVE_ROPE_H_
#define QUERN_OPS_REGISTRY_NATIVE_ROPE_H_

// Rotations as a framework composes them from elementwise operators, for the
// providers called "reference"; and the spec that the rotary operators share.

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

RotaryStyle StyleOf(bool is_neox);

// Makes the spec for query[n, heads, head_dim] and, unless null, a key of the
// same form. A rot_dim of 0 means head_dim. InvalidArgument for other ranks.
absl::StatusOr<RotaryEmbeddingSpec> RotarySpecOf(
    absl::string_view op, const TensorMeta& query, const TensorMeta* key,
    int64_t max_position, int64_t rot_dim, double base, bool is_neox);

// Head h of token t of v[.., tokens, heads, head_dim]. b is the index in the
// dimension before the tokens, if there is one.
ScalarRow NativeHead(const AnyTensorView& v, int64_t b, int64_t t, int64_t h);

// Rotates pair j of a head, with c = rd(cosine) and s = rd(sine):
//
//   out[a] = rd(rd(x[a] c) - rd(x[b] s))
//   out[b] = rd(rd(x[b] c) + rd(x[a] s))
//
// rd rounds to spec.dtype; the stored result is rounded to the dtype of out.
// out may be x.
void NativeTurn(const RotaryEmbeddingSpec& spec, int64_t j, float cosine,
                float sine, const ScalarRow& x, const ScalarRow& out);

// Like NativeTurn, by the angle position * base^(-2 j / rot_dim).
void NativeTurnTo(const RotaryEmbeddingSpec& spec, int64_t j, int64_t position,
                  const ScalarRow& x, const ScalarRow& out);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_NATIVE_ROPE_H_
