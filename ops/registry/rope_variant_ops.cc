#include "quern/ops/registry/rope_variant_ops.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/index_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_rope.h"
#include "quern/ops/rope/apply_rotary.h"
#include "quern/ops/rope/dual_chunk_rotary.h"
#include "quern/ops/rope/mrope.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_tables.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMutated = std::optional<MutatedMeta>;

constexpr char kMrope[] = "mrope";
constexpr char kApply[] = "apply_rotary_emb";
constexpr char kDual[] = "dual_chunk_rotary_embedding";

NamedArgs MropeExample(DType dtype) {
  return {{"positions", TensorMeta{DType::kI32, {3, 4}}},
          {"query", TensorMeta{dtype, {4, 2, 64}}},
          {"key", TensorMeta{dtype, {4, 1, 64}}},
          {"max_position", int64_t{128}},
          {"section_t", int64_t{8}},
          {"section_h", int64_t{12}},
          {"section_w", int64_t{12}}};
}

Metas MropeShapes(const TensorMeta& positions, const MutatedMeta& query,
                  const MaybeMutated& key, int64_t, int64_t, int64_t, int64_t,
                  bool, int64_t, double, bool) {
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(kMrope, "positions", positions));
  if (query.extents.size() != 3 || positions.extents.size() != 2 ||
      positions.extents[0] != 3 || positions.extents[1] != query.extents[0] ||
      (key.has_value() && key->extents.size() != 3)) {
    return InvalidArgument(
        kMrope, "need positions[3, n], query and key [n, heads, head_dim]");
  }
  return std::vector<TensorMeta>();
}

// Views dense positions[3, n] as the plan takes them.
IndexView Streams(const AnyTensorView& v) { return IndicesOf(v); }

absl::Status CheckMrope(const MropePlan& plan, Tensors t) {
  QUERN_RETURN_IF_ERROR(CheckTensorCount(kMrope, t, 3));
  QUERN_RETURN_IF_ERROR(
      CheckIndexView(kMrope, "positions", t[0], {3, kAnyExtent}));
  if (t[0].extent(1) > 0 && t[0].stride(0) != t[0].extent(1)) {
    return InvalidArgument(kMrope, "positions have stride ", t[0].stride(0),
                           "; need ", t[0].extent(1));
  }
  if (t[2].rank() == 0) return plan.CheckArgs(Streams(t[0]), t[1], t[1]);
  return plan.CheckQkArgs(Streams(t[0]), t[1], t[2]);
}

void NativeMrope(const MropeSpec& spec, Tensors tensors) {
  const IndexView positions = Streams(tensors[0]);
  const int64_t tokens = tensors[1].extent(0);
  const auto stream = [&](int64_t j) -> int64_t {
    const std::vector<int64_t>& s = spec.sections;
    if (spec.order == MropeOrder::kContiguous) {
      return j < s[0] ? 0 : j < s[0] + s[1] ? 1 : 2;
    }
    if (j % 3 == 1 && j < 3 * s[1]) return 1;
    return j % 3 == 2 && j < 3 * s[2] ? 2 : 0;
  };
  for (const size_t which : {size_t{1}, size_t{2}}) {
    const AnyTensorView& x = tensors[which];
    if (x.rank() == 0) continue;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < x.extent(1); ++h) {
        const ScalarRow head = NativeHead(x, 0, t, h);
        for (int64_t j = 0; j < spec.rotary.rot_dim / 2; ++j) {
          NativeTurnTo(spec.rotary, j, positions[stream(j) * tokens + t], head,
                       head);
        }
      }
    }
  }
}

template <bool kNative>
Bound Mrope(RotaryTables& tables, const TensorMeta& positions,
            const MutatedMeta& query, const MaybeMutated& key,
            int64_t max_position, int64_t section_t, int64_t section_h,
            int64_t section_w, bool interleaved, int64_t rot_dim, double base,
            bool is_neox) {
  QUERN_RETURN_IF_ERROR(MropeShapes(positions, query, key, max_position,
                                    section_t, section_h, section_w,
                                    interleaved, rot_dim, base, is_neox)
                            .status());
  MropeSpec spec;
  QUERN_ASSIGN_OR_RETURN(
      spec.rotary, RotarySpecOf(kMrope, query, nullptr, max_position, rot_dim,
                                base, is_neox));
  spec.sections = {section_t, section_h, section_w};
  spec.order = interleaved ? MropeOrder::kInterleaved : MropeOrder::kContiguous;
  QUERN_ASSIGN_OR_RETURN(MropePlan made, MropePlan::Create(spec, &tables));
  const auto plan = std::make_shared<const MropePlan>(std::move(made));
  const auto check = [plan](Tensors t) { return CheckMrope(*plan, t); };
  if (kNative) {
    return std::unique_ptr<BoundOp>(
        new BoundCalls("scalar", check,
                       [spec](Tensors t, Executor&) { NativeMrope(spec, t); }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan->target(), check, [plan](Tensors t, Executor& e) {
        if (t[2].rank() == 0) {
          plan->Execute(Streams(t[0]), t[1], t[1], e);
        } else {
          plan->ExecuteQk(Streams(t[0]), t[1], t[2], e);
        }
      }));
}

NamedArgs ApplyExample(DType dtype) {
  return {{"x", TensorMeta{dtype, {2, 4, 2, 64}}},
          {"cos", TensorMeta{dtype, {4, 32}}},
          {"sin", TensorMeta{dtype, {4, 32}}}};
}

Metas ApplyShapes(const TensorMeta& x, const TensorMeta& cosines,
                  const TensorMeta& sines, bool, bool) {
  const size_t rank = x.extents.size();
  int64_t head_dim = 0;
  if ((rank != 3 && rank != 4) || cosines.extents.size() != 2 ||
      !(cosines == sines) || cosines.extents[0] != x.extents[rank - 3] ||
      !CheckedMul(2, cosines.extents[1], &head_dim) ||
      head_dim != x.extents[rank - 1]) {
    return InvalidArgument(kApply,
                           "need x[.., n, heads, head_dim], cos and sin [n, "
                           "head_dim / 2] of one dtype");
  }
  return std::vector<TensorMeta>{x};
}

void NativeApply(const RotaryEmbeddingSpec& spec, bool fp32, Tensors t) {
  const AnyTensorView &x = t[0], &out = t[3];
  const int r = x.rank();
  RotaryEmbeddingSpec steps = spec;
  if (fp32) steps.dtype = DType::kF32;
  for (int64_t b = 0; b < (r == 4 ? x.extent(0) : 1); ++b) {
    for (int64_t token = 0; token < x.extent(r - 3); ++token) {
      const ScalarRow c(t[1], token), s(t[2], token);
      for (int64_t h = 0; h < x.extent(r - 2); ++h) {
        for (int64_t j = 0; j < spec.rot_dim / 2; ++j) {
          NativeTurn(steps, j, c[j], s[j], NativeHead(x, b, token, h),
                     NativeHead(out, b, token, h));
        }
      }
    }
  }
}

template <bool kNative>
Bound Apply(const TensorMeta& x, const TensorMeta& cosines,
            const TensorMeta& sines, bool is_neox_style,
            bool enable_fp32_compute) {
  QUERN_RETURN_IF_ERROR(
      ApplyShapes(x, cosines, sines, is_neox_style, enable_fp32_compute)
          .status());
  ApplyRotarySpec spec;
  spec.head_dim = x.extents.back();
  spec.style = StyleOf(is_neox_style);
  spec.dtype = x.dtype;
  spec.table_dtype = cosines.dtype;
  QUERN_ASSIGN_OR_RETURN(const ApplyRotaryPlan plan,
                         ApplyRotaryPlan::Create(spec));
  const auto check = [plan](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kApply, t, 4));
    return plan.CheckArgs(t[0], t[1], t[2], t[3]);
  };
  if (kNative) {
    RotaryEmbeddingSpec rotary;
    rotary.head_dim = rotary.rot_dim = spec.head_dim;
    rotary.style = spec.style;
    rotary.dtype = spec.dtype;
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar", check, [rotary, enable_fp32_compute](Tensors t, Executor&) {
          NativeApply(rotary, enable_fp32_compute, t);
        }));
  }
  return std::unique_ptr<BoundOp>(
      new BoundCalls(plan.target(), check, [plan](Tensors t, Executor& e) {
        plan.Execute(t[0], t[1], t[2], t[3], e);
      }));
}

NamedArgs DualExample(DType dtype) {
  return {{"positions", TensorMeta{DType::kI32, {4}}},
          {"query", TensorMeta{dtype, {4, 2, 64}}},
          {"key", TensorMeta{dtype, {4, 1, 64}}},
          {"max_position", int64_t{128}},
          {"chunk_size", int64_t{16}},
          {"local_size", int64_t{4}}};
}

Metas DualShapes(const TensorMeta& positions, const TensorMeta& query,
                 const TensorMeta& key, int64_t, int64_t, int64_t, int64_t,
                 double, bool) {
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(kDual, "positions", positions));
  if (query.extents.size() != 3 || positions.extents.size() != 1 ||
      key.extents.size() != 3) {
    return InvalidArgument(
        kDual, "need positions[n], query and key [n, heads, head_dim]");
  }
  TensorMeta copies = query;
  if (!CheckedMul(query.extents[1], DualChunkRotaryPlan::kCopies,
                  &copies.extents[1])) {
    return InvalidArgument(kDual, "query has ", query.extents[1],
                           " heads; need ", DualChunkRotaryPlan::kCopies,
                           " times as many to be below 2^63");
  }
  return std::vector<TensorMeta>{copies, key};
}

DualChunkRotaryArgs DualArgs(Tensors t) {
  return {IndicesOf(t[0]), t[1], t[2], t[3], t[4]};
}

// Rotates the first elements of a head and copies the others.
void NativeHeadTo(const RotaryEmbeddingSpec& spec, int64_t position,
                  const ScalarRow& x, const ScalarRow& out) {
  for (int64_t j = 0; j < spec.rot_dim / 2; ++j) {
    NativeTurnTo(spec, j, position, x, out);
  }
  for (int64_t i = spec.rot_dim; i < spec.head_dim; ++i) out.Set(i, x[i]);
}

void NativeDual(const DualChunkRotarySpec& spec, Tensors tensors) {
  const DualChunkRotaryArgs args = DualArgs(tensors);
  const int64_t length = spec.chunk - spec.local;
  const int64_t heads = args.query.extent(1);
  for (int64_t t = 0; t < args.query.extent(0); ++t) {
    const int64_t m = args.positions[t] % length;
    const int64_t at[] = {m, std::min(m + length, spec.chunk),
                          std::min(2 * length - 1, spec.chunk), m + length,
                          m + spec.chunk};
    for (int64_t h = 0; h < args.key.extent(1); ++h) {
      NativeHeadTo(spec.rotary, m, NativeHead(args.key, 0, t, h),
                   NativeHead(args.key_out, 0, t, h));
    }
    for (int64_t c = 0; c < DualChunkRotaryPlan::kCopies; ++c) {
      for (int64_t h = 0; h < heads; ++h) {
        NativeHeadTo(spec.rotary, at[c], NativeHead(args.query, 0, t, h),
                     NativeHead(args.query_out, 0, t, c * heads + h));
      }
    }
  }
}

template <bool kNative>
Bound Dual(RotaryTables& tables, const TensorMeta& positions,
           const TensorMeta& query, const TensorMeta& key, int64_t max_position,
           int64_t chunk_size, int64_t local_size, int64_t rot_dim, double base,
           bool is_neox) {
  QUERN_RETURN_IF_ERROR(DualShapes(positions, query, key, max_position,
                                   chunk_size, local_size, rot_dim, base,
                                   is_neox)
                            .status());
  DualChunkRotarySpec spec;
  QUERN_ASSIGN_OR_RETURN(
      spec.rotary,
      RotarySpecOf(kDual, query, &key, max_position, rot_dim, base, is_neox));
  spec.chunk = chunk_size;
  spec.local = local_size;
  QUERN_ASSIGN_OR_RETURN(DualChunkRotaryPlan made,
                         DualChunkRotaryPlan::Create(spec, &tables));
  const auto plan =
      std::make_shared<const DualChunkRotaryPlan>(std::move(made));
  const auto check = [plan](Tensors t) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kDual, t, 5));
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(kDual, "positions", t[0], {kAnyExtent}));
    return plan->CheckArgs(DualArgs(t));
  };
  if (kNative) {
    return std::unique_ptr<BoundOp>(
        new BoundCalls("scalar", check,
                       [spec](Tensors t, Executor&) { NativeDual(spec, t); }));
  }
  return std::unique_ptr<BoundOp>(new BoundCalls(
      plan->target(), check,
      [plan](Tensors t, Executor& e) { plan->Execute(DualArgs(t), e); }));
}

}  // namespace

absl::Status RegisterRopeVariantOps(OpRegistry& r) {
  const auto tables = std::make_shared<RotaryTables>();
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&MropeShapes>(
      "mrope(Tensor positions, Tensor(a1!) query, Tensor(a2!)? key, "
      "int max_position, int section_t, int section_h, int section_w, "
      "bool interleaved=False, int rot_dim=0, float base=10000.0, "
      "bool is_neox=True) -> ()",
      &MropeExample));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kMrope,
      {{},
       OpRows::kFirst,
       "",
       {{"q", "query"}, {"k", "key"}, {"max_positions", "max_position"}}}));
  QUERN_RETURN_IF_ERROR(r.AddSharing<&Mrope<false>>(tables, kMrope, kSimd));
  QUERN_RETURN_IF_ERROR(r.AddSharing<&Mrope<true>>(tables, kMrope, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&ApplyShapes>(
      "apply_rotary_emb(Tensor x, Tensor cos, Tensor sin, "
      "bool is_neox_style=True, bool enable_fp32_compute=False) -> Tensor",
      &ApplyExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kApply, {{{"x", "out"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Apply<false>>(kApply, kSimd));
  QUERN_RETURN_IF_ERROR(r.Add<&Apply<true>>(kApply, kReference));
  QUERN_RETURN_IF_ERROR(r.Define<&DualShapes>(
      "dual_chunk_rotary_embedding(Tensor positions, Tensor query, "
      "Tensor key, int max_position, int chunk_size, int local_size, "
      "int rot_dim=0, float base=10000.0, bool is_neox=True) -> "
      "(Tensor, Tensor)",
      &DualExample));
  QUERN_RETURN_IF_ERROR(r.Declare(kDual, {{{"key", "out1"}},
                                          OpRows::kFirst,
                                          "",
                                          {{"query_out", "out0"},
                                           {"key_out", "out1"},
                                           {"max_positions", "max_position"},
                                           {"chunk", "chunk_size"},
                                           {"local", "local_size"}}}));
  QUERN_RETURN_IF_ERROR(r.AddSharing<&Dual<false>>(tables, kDual, kSimd));
  return r.AddSharing<&Dual<true>>(tables, kDual, kReference);
}

}  // namespace quern
