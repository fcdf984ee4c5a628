#include "quern/ops/registry/rope_ops.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_rope.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_tables.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMutated = std::optional<MutatedMeta>;
constexpr char kOp[] = "rotary_embedding";

NamedArgs Example(DType dtype) {
  return {{"positions", TensorMeta{DType::kI32, {4}}},
          {"query", TensorMeta{dtype, {4, 2, 64}}},
          {"key", TensorMeta{dtype, {4, 1, 64}}},
          {"max_position", int64_t{128}}};
}

// The tensors are positions[n], query[n, heads, head_dim], and key (or
// nothing).
IndexView Positions(Tensors t) { return IndicesOf(t[0]); }

absl::Status Check(const RotaryEmbeddingPlan& plan, Tensors t) {
  QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 3));
  QUERN_RETURN_IF_ERROR(CheckIndexView(kOp, "positions", t[0], {kAnyExtent}));
  if (t[2].rank() == 0) return plan.CheckArgs(Positions(t), t[1], t[1]);
  return plan.CheckQkArgs(Positions(t), t[1], t[2]);
}

void Native(const RotaryEmbeddingSpec& spec, const RotaryFrequencies& of,
            Tensors tensors) {
  const IndexView positions = Positions(tensors);
  for (const size_t which : {size_t{1}, size_t{2}}) {
    const AnyTensorView& x = tensors[which];
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

Metas Shapes(const TensorMeta& positions, const MutatedMeta& query,
             const MaybeMutated& key, const RotaryScaling*, int64_t, int64_t,
             double, bool) {
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(kOp, "positions", positions));
  if (query.extents.size() != 3 || positions.extents.size() != 1 ||
      positions.extents[0] != query.extents[0] ||
      (key.has_value() && key->extents.size() != 3)) {
    return InvalidArgument(
        kOp, "need positions[n], query and key [n, heads, head_dim]");
  }
  return std::vector<TensorMeta>();
}

template <bool kNative>
Bound Make(RotaryTables& tables, const TensorMeta& positions,
           const MutatedMeta& query, const MaybeMutated& key,
           const RotaryScaling* scaling, int64_t max_position, int64_t rot_dim,
           double base, bool is_neox) {
  QUERN_RETURN_IF_ERROR(Shapes(positions, query, key, scaling, max_position,
                               rot_dim, base, is_neox)
                            .status());
  QUERN_ASSIGN_OR_RETURN(
      RotaryEmbeddingSpec spec,
      RotarySpecOf(kOp, query, nullptr, max_position, rot_dim, base, is_neox));
  if (scaling != nullptr) spec.scaling = *scaling;
  QUERN_ASSIGN_OR_RETURN(RotaryEmbeddingPlan made,
                         RotaryEmbeddingPlan::Create(spec, &tables));
  const auto plan =
      std::make_shared<const RotaryEmbeddingPlan>(std::move(made));
  const auto check = [plan](Tensors t) { return Check(*plan, t); };
  if (kNative) {
    QUERN_ASSIGN_OR_RETURN(
        const RotaryFrequencies of,
        ComputeRotaryFrequencies(spec.rot_dim, spec.base, spec.scaling));
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar", check,
        [spec, of](Tensors t, Executor&) { Native(spec, of, t); }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan->target(), check, [plan](Tensors t, Executor& e) {
        if (t[2].rank() == 0) {
          plan->Execute(Positions(t), t[1], t[1], e);
        } else {
          plan->ExecuteQk(Positions(t), t[1], t[2], e);
        }
      }));
}

}  // namespace

absl::Status RegisterRopeOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(
      r.Define<&Shapes>("rotary_embedding(Tensor positions, Tensor(a1!) query, "
                        "Tensor(a2!)? key, RotaryScaling? scaling, "
                        "int max_position, int rot_dim=0, "
                        "float base=10000.0, bool is_neox=True) -> ()",
                        &Example));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kOp,
      {{},
       OpRows::kFirst,
       "",
       {{"q", "query"}, {"k", "key"}, {"max_positions", "max_position"}}}));
  const auto tables = std::make_shared<RotaryTables>();
  QUERN_RETURN_IF_ERROR(r.AddSharing<&Make<false>>(tables, kOp, "simd"));
  return r.AddSharing<&Make<true>>(tables, kOp, OpRegistry::kReference);
}

}  // namespace quern
