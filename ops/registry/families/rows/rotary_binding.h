#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROTARY_BINDING_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROTARY_BINDING_H_

// Private: what the declarations of rotary operators share.

#include <cstdint>
#include <type_traits>

#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/rope.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

struct RotaryArgs {
  AnyTensorView positions, query, key;  // key: rank 0 if it is left out
};

// A plan with Execute(positions, x, out) and ExecuteQk(positions, q, k).
template <class Plan>
absl::Status CheckTurn(const Plan& plan, const RotaryArgs& a) {
  const IndexView positions = IndicesOf(a.positions);
  if (a.key.rank() == 0) return plan.CheckArgs(positions, a.query, a.query);
  return plan.CheckQkArgs(positions, a.query, a.key);
}
template <class Plan>
void ExecuteTurn(const Plan& plan, const RotaryArgs& a, Workspace,
                 Executor& executor) {
  const IndexView positions = IndicesOf(a.positions);
  if (a.key.rank() == 0) {
    plan.Execute(positions, a.query, a.query, executor);
  } else {
    plan.ExecuteQk(positions, a.query, a.key, executor);
  }
}

template <class Spec>
RotaryEmbeddingSpec& RotaryOf(Spec& spec) {
  if constexpr (std::is_same_v<Spec, RotaryEmbeddingSpec>) {
    return spec;
  } else {
    return spec.rotary;
  }
}
template <class Spec>
int64_t& RotaryHeadDim(Spec& spec) {
  return RotaryOf(spec).head_dim;
}
template <class Spec>
DType& RotaryDType(Spec& spec) {
  return RotaryOf(spec).dtype;
}

// The heads of a query or of a key.
template <class Spec>
OpShape<Spec> HeadsShape() {
  return {kRows, kAny, &RotaryHeadDim<Spec>};
}

// query and, if it is given, key, which are rotated in place.
template <class Plan, class Spec>
OpDeclaration<Plan, Spec, RotaryArgs>& InOutQk(
    OpDeclaration<Plan, Spec, RotaryArgs>& op) {
  return op
      .InOut("query", &RotaryArgs::query, nullptr, HeadsShape<Spec>(),
             &RotaryDType<Spec>)
      .Word("q", "query")
      .MaybeInOut("key", &RotaryArgs::key, HeadsShape<Spec>(), Like("query"))
      .Word("k", "key")
      .Calls(&CheckTurn<Plan>, &ExecuteTurn<Plan>);
}

// What a schema has last. A rot_dim of 0 means head_dim.
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& RotaryAttrs(
    OpDeclaration<Plan, Spec, Args>& op) {
  return op.Word("max_positions", "max_position")
      .Attr("rot_dim", int64_t{0})
      .Attr("base", 10000.0)
      .Attr("is_neox", true)
      .Then([](Spec& spec, const OpCall& call) {
        RotaryEmbeddingSpec& rotary = RotaryOf(spec);
        rotary.rot_dim = call.Int("rot_dim");
        if (rotary.rot_dim == 0) rotary.rot_dim = rotary.head_dim;
        rotary.max_positions = call.Int("max_position");
        rotary.base = call.Float("base");
        rotary.style = StyleOf(call.Bool("is_neox"));
        return absl::OkStatus();
      });
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_ROTARY_BINDING_H_
