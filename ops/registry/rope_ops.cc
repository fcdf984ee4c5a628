#include "ops/registry/rope_ops.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "ops/index_view.h"
#include "ops/registry/bound_rows.h"
#include "ops/registry/native_activation.h"
#include "ops/rope/rotary_embedding.h"

namespace quern {
namespace {

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

// positions[n], query[n, heads, head_dim], and key or nothing.
class BoundRope : public BoundOp {
 public:
  explicit BoundRope(RotaryEmbeddingPlan plan) : plan_(std::move(plan)) {}

  const char* target() const override { return plan_.target(); }
  absl::Status CheckArgs(
      absl::Span<const AnyTensorView> tensors) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, tensors, 3));
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "positions", tensors[0], DType::kI32, {kAnyExtent}));
    if (tensors[2].rank() == 0) {
      return plan_.CheckArgs(Positions(tensors), tensors[1], tensors[1]);
    }
    return plan_.CheckQkArgs(Positions(tensors), tensors[1], tensors[2]);
  }
  void Execute(absl::Span<const AnyTensorView> tensors,
               Executor& executor) const noexcept override {
    if (tensors[2].rank() == 0) {
      plan_.Execute(Positions(tensors), tensors[1], tensors[1], executor);
    } else {
      plan_.ExecuteQk(Positions(tensors), tensors[1], tensors[2], executor);
    }
  }

 protected:
  static IndexView Positions(absl::Span<const AnyTensorView> tensors) {
    return tensors[0].As<const int32_t, 1>();
  }
  const RotaryEmbeddingSpec& spec() const { return plan_.spec(); }

 private:
  RotaryEmbeddingPlan plan_;
};

// rd(rd(a c) - rd(b s)) and rd(rd(b c) + rd(a s)), c and s rounded first.
class NativeRope final : public BoundRope {
 public:
  using BoundRope::BoundRope;

  const char* target() const override { return "scalar"; }
  void Execute(absl::Span<const AnyTensorView> tensors,
               Executor&) const noexcept override {
    const IndexView positions = Positions(tensors);
    for (const size_t which : {size_t{1}, size_t{2}}) {
      const AnyTensorView& x = tensors[which];
      if (x.rank() == 0) continue;
      for (int64_t t = 0; t < x.extent(0); ++t) {
        for (int64_t h = 0; h < x.extent(1); ++h) {
          Rotate(positions[t], ScalarRow(Head(x, t, h), 0));
        }
      }
    }
  }

 private:
  static AnyTensorView Head(const AnyTensorView& x, int64_t t, int64_t h) {
    const int64_t at = t * x.stride(0) + h * x.stride(1);
    char* const data = static_cast<char*>(x.mutable_data()) +
                       at * static_cast<int64_t>(SizeOf(x.dtype()));
    return AnyTensorView(x.dtype(), static_cast<void*>(data), 1, {x.extent(2)},
                         {1});
  }

  void Rotate(int64_t position, const ScalarRow& head) const {
    const NativeRound rd(spec().dtype);
    const bool halves = spec().style == RotaryStyle::kHalves;
    const int64_t half = spec().rot_dim / 2;
    for (int64_t j = 0; j < half; ++j) {
      const double angle = static_cast<double>(position) *
                           std::pow(spec().base, -static_cast<double>(j) /
                                                     static_cast<double>(half));
      const float c = rd(static_cast<float>(std::cos(angle)));
      const float s = rd(static_cast<float>(std::sin(angle)));
      const int64_t ia = halves ? j : 2 * j;
      const int64_t ib = halves ? j + half : 2 * j + 1;
      const float a = head[ia], b = head[ib];
      head.Set(ia, rd(a * c) - rd(b * s));
      head.Set(ib, rd(b * c) + rd(a * s));
    }
  }
};

Metas Shapes(const TensorMeta& positions, const MutatedMeta& query,
             const MaybeMutated& key, int64_t, int64_t, double, bool) {
  if (query.extents.size() != 3 || positions.extents.size() != 1 ||
      positions.extents[0] != query.extents[0] ||
      (key.has_value() && key->extents.size() != 3)) {
    return InvalidArgument(
        kOp, "need positions[n], query and key [n, heads, head_dim]");
  }
  return std::vector<TensorMeta>();
}

template <class Op>
Bound Make(const TensorMeta& positions, const MutatedMeta& query,
           const MaybeMutated& key, int64_t max_position, int64_t rot_dim,
           double base, bool is_neox) {
  QUERN_RETURN_IF_ERROR(
      Shapes(positions, query, key, max_position, rot_dim, base, is_neox)
          .status());
  RotaryEmbeddingSpec spec;
  spec.head_dim = query.extents[2];
  spec.rot_dim = rot_dim == 0 ? spec.head_dim : rot_dim;
  spec.max_positions = max_position;
  spec.base = base;
  spec.style = is_neox ? RotaryStyle::kHalves : RotaryStyle::kPairs;
  spec.dtype = query.dtype;
  QUERN_ASSIGN_OR_RETURN(RotaryEmbeddingPlan plan,
                         RotaryEmbeddingPlan::Create(spec));
  return std::unique_ptr<BoundOp>(new Op(std::move(plan)));
}

}  // namespace

absl::Status RegisterRopeOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(
      r.Define<&Shapes>("rotary_embedding(Tensor positions, Tensor(a1!) query, "
                        "Tensor(a2!)? key, int max_position, int rot_dim=0, "
                        "float base=10000.0, bool is_neox=True) -> ()",
                        &Example));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<BoundRope>>(kOp, "simd"));
  return r.Add<&Make<NativeRope>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
