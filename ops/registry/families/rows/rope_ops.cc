#include "quern/ops/registry/families/rows/rope_ops.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "quern/ops/registry/families/rows/rotary_binding.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/rope.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_tables.h"

namespace quern {
namespace {

using Plan = RotaryEmbeddingPlan;
using Spec = RotaryEmbeddingSpec;
using Args = RotaryArgs;

absl::Status CheckPositions(const Args& a) {
  return CheckIndexView("rotary_embedding", "positions", a.positions,
                        {kAnyExtent});
}

void Native(const RotaryEmbeddingSpec& spec, const RotaryFrequencies& of,
            const Args& args) {
  const IndexView positions = IndicesOf(args.positions);
  for (const AnyTensorView& x : {args.query, args.key}) {
    if (x.rank() == 0) continue;
    for (int64_t t = 0; t < x.extent(0); ++t) {
      for (int64_t h = 0; h < x.extent(1); ++h) {
        const ScalarRow head = NativeHead(x, 0, t, h);
        for (int64_t j = 0; j < spec.rot_dim / 2; ++j) {
          const double angle = static_cast<double>(positions[t]) *
                               of.frequencies[static_cast<size_t>(j)];
          NativeTurn(
              spec, j, static_cast<float>(of.magnitude * std::cos(angle)),
              static_cast<float>(of.magnitude * std::sin(angle)), head, head);
        }
      }
    }
  }
}

absl::StatusOr<std::function<void(const Args&)>> NativeOf(const Spec& spec) {
  QUERN_ASSIGN_OR_RETURN(
      const RotaryFrequencies of,
      ComputeRotaryFrequencies(spec.rot_dim, spec.base, spec.scaling));
  return [spec, of](const Args& args) { Native(spec, of, args); };
}

absl::Status FillScaling(Spec& spec, const OpCall& call) {
  const auto* scaling = call.Object<const RotaryScaling>("scaling");
  if (scaling != nullptr) spec.scaling = *scaling;
  return absl::OkStatus();
}

}  // namespace

absl::Status RegisterRopeOps(OpRegistry& registry) {
  const auto tables = std::make_shared<RotaryTables>();
  OpDeclaration<Plan, Spec, Args> op("rotary_embedding");
  op.In("positions", &Args::positions, {kRows}, IndexDType<Spec>());
  InOutQk(op)
      .Object<const RotaryScaling>("scaling", true)
      .Then(&FillScaling)
      .Need<int64_t>("max_position");
  return RotaryAttrs(op)
      .Creates([tables](const Spec& spec, const OpCall&) {
        return Plan::Create(spec, tables.get());
      })
      .CheckFirst(&CheckPositions)
      .ReferenceOf(&NativeOf)
      .Example({{"positions", {4}, DType::kI32},
                {"query", {4, 2, 64}},
                {"key", {4, 1, 64}},
                {"max_position", int64_t{128}}})
      .AddTo(registry);
}

}  // namespace quern
