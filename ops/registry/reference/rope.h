#ifndef QUERN_OPS_REGISTRY_REFERENCE_ROPE_H_
#define QUERN_OPS_REGISTRY_REFERENCE_ROPE_H_

// Rotations as a framework composes them from elementwise operators, for the
// providers called "reference".

#include <cstdint>

#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

RotaryStyle StyleOf(bool is_neox);

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

#endif  // QUERN_OPS_REGISTRY_REFERENCE_ROPE_H_
