#include "quern/ops/registry/families/rows/rope_variant_ops.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "quern/ops/registry/families/rows/rotary_binding.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/rope.h"
#include "quern/ops/rope/apply_rotary.h"
#include "quern/ops/rope/dual_chunk_rotary.h"
#include "quern/ops/rope/mrope.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/rotary_tables.h"

namespace quern {
namespace {

constexpr char kMrope[] = "mrope";
constexpr char kApply[] = "apply_rotary_emb";
constexpr char kDual[] = "dual_chunk_rotary_embedding";

// Dense positions[3, n].
absl::Status CheckStreams(const RotaryArgs& a) {
  const AnyTensorView& positions = a.positions;
  QUERN_RETURN_IF_ERROR(
      CheckIndexView(kMrope, "positions", positions, {3, kAnyExtent}));
  if (positions.extent(1) == 0) return absl::OkStatus();
  return CheckEqual(kMrope, "stride of positions", positions.stride(0),
                    positions.extent(1), "dense rows have");
}

void NativeMrope(const MropeSpec& spec, const RotaryArgs& args) {
  const IndexView positions = IndicesOf(args.positions);
  const int64_t tokens = args.query.extent(0);
  const auto stream = [&](int64_t j) -> int64_t {
    const std::vector<int64_t>& s = spec.sections;
    if (spec.order == MropeOrder::kContiguous) {
      return j < s[0] ? 0 : j < s[0] + s[1] ? 1 : 2;
    }
    if (j % 3 == 1 && j < 3 * s[1]) return 1;
    return j % 3 == 2 && j < 3 * s[2] ? 2 : 0;
  };
  for (const AnyTensorView& x : {args.query, args.key}) {
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

absl::Status FillMrope(MropeSpec& spec, const OpCall& call) {
  spec.sections = {call.Int("section_t"), call.Int("section_h"),
                   call.Int("section_w")};
  spec.order = call.Bool("interleaved") ? MropeOrder::kInterleaved
                                        : MropeOrder::kContiguous;
  return absl::OkStatus();
}

absl::Status AddMrope(const std::shared_ptr<RotaryTables>& tables,
                      OpRegistry& registry) {
  OpDeclaration<MropePlan, MropeSpec, RotaryArgs> op(kMrope);
  op.In("positions", &RotaryArgs::positions, {3, kRows},
        IndexDType<MropeSpec>());
  InOutQk(op)
      .Need<int64_t>("max_position")
      .Need<int64_t>("section_t")
      .Need<int64_t>("section_h")
      .Need<int64_t>("section_w")
      .Attr("interleaved", false)
      .Then(&FillMrope);
  return RotaryAttrs(op)
      .Creates([tables](const MropeSpec& spec, const OpCall&) {
        return MropePlan::Create(spec, tables.get());
      })
      .CheckFirst(&CheckStreams)
      .Reference(&NativeMrope)
      .Example({{"positions", {3, 4}, DType::kI32},
                {"query", {4, 2, 64}},
                {"key", {4, 1, 64}},
                {"max_position", 128},
                {"section_t", 8},
                {"section_h", 12},
                {"section_w", 12}})
      .AddTo(registry);
}

struct ApplySpec : ApplyRotarySpec {
  bool fp32 = false;  // whether the reference rounds once
};
struct ApplyArgs {
  AnyTensorView x, cos, sin, out;
};

absl::Status FillApply(ApplySpec& spec, const OpCall& call) {
  const TensorMeta &x = *call.Tensor("x"), &cos = *call.Tensor("cos");
  const size_t rank = x.extents.size();
  int64_t head_dim = 0;
  if ((rank != 3 && rank != 4) || cos.extents.size() != 2 ||
      cos.extents[0] != x.extents[rank - 3] ||
      !CheckedMul(2, cos.extents[1], &head_dim) ||
      head_dim != x.extents[rank - 1]) {
    return InvalidArgument(call.op(), "x is ", PrintMeta(x), " and cos is ",
                           PrintMeta(cos),
                           "; need x[.., n, heads, head_dim], cos and sin [n, "
                           "head_dim / 2]");
  }
  spec.head_dim = head_dim;
  spec.style = StyleOf(call.Bool("is_neox_style"));
  return absl::OkStatus();
}

void NativeApply(const ApplySpec& spec, const ApplyArgs& args) {
  const AnyTensorView& x = args.x;
  const int r = x.rank();
  RotaryEmbeddingSpec steps;
  steps.head_dim = steps.rot_dim = spec.head_dim;
  steps.style = spec.style;
  steps.dtype = spec.fp32 ? DType::kF32 : spec.dtype;
  for (int64_t b = 0; b < (r == 4 ? x.extent(0) : 1); ++b) {
    for (int64_t token = 0; token < x.extent(r - 3); ++token) {
      const ScalarRow c(args.cos, token), s(args.sin, token);
      for (int64_t h = 0; h < x.extent(r - 2); ++h) {
        for (int64_t j = 0; j < spec.head_dim / 2; ++j) {
          NativeTurn(steps, j, c[j], s[j], NativeHead(x, b, token, h),
                     NativeHead(args.out, b, token, h));
        }
      }
    }
  }
}

absl::Status AddApply(OpRegistry& registry) {
  return OpDeclaration<ApplyRotaryPlan, ApplySpec, ApplyArgs>(kApply)
      .In("x", &ApplyArgs::x, {}, &ApplySpec::dtype)
      .In("cos", &ApplyArgs::cos, {}, &ApplySpec::table_dtype)
      .In("sin", &ApplyArgs::sin, Like("cos"), Like("cos"))
      .Attr("is_neox_style", true)
      .Attr("enable_fp32_compute", false, &ApplySpec::fp32)
      .Then(&FillApply)
      .Out("out", &ApplyArgs::out, Like("x"), Like("x"))
      .InPlace("x", "out")
      .Takes<&ApplyArgs::x, &ApplyArgs::cos, &ApplyArgs::sin, &ApplyArgs::out>()
      .Reference(&NativeApply)
      .Example({{"x", {2, 4, 2, 64}}, {"cos", {4, 32}}, {"sin", {4, 32}}})
      .AddTo(registry);
}

using DualSpec = DualChunkRotarySpec;
struct DualArgs : DualChunkRotaryArgs {
  AnyTensorView at;  // the positions
};

absl::Status CheckAt(const DualArgs& a) {
  return CheckIndexView(kDual, "positions", a.at, {kAnyExtent});
}

// query with five times as many heads, and key.
absl::Status CheckCopies(DualSpec&, const OpCall& call) {
  const int64_t heads = call.Tensor("query")->extents[1];
  int64_t copies = 0;
  if (CheckedMul(heads, DualChunkRotaryPlan::kCopies, &copies)) {
    return absl::OkStatus();
  }
  return InvalidArgument(kDual, "query has ", heads, " heads; need ",
                         DualChunkRotaryPlan::kCopies,
                         " times as many to be below 2^63");
}
std::vector<int64_t> CopiesShape(const DualSpec&, const OpCall& call, int64_t) {
  std::vector<int64_t> copies = call.Tensor("query")->extents;
  copies[1] *= DualChunkRotaryPlan::kCopies;
  return copies;
}

// Rotates the first elements of a head and copies the others.
void NativeHeadTo(const RotaryEmbeddingSpec& spec, int64_t position,
                  const ScalarRow& x, const ScalarRow& out) {
  for (int64_t j = 0; j < spec.rot_dim / 2; ++j) {
    NativeTurnTo(spec, j, position, x, out);
  }
  for (int64_t i = spec.rot_dim; i < spec.head_dim; ++i) out.Set(i, x[i]);
}

void NativeDual(const DualSpec& spec, const DualArgs& args) {
  const IndexView positions = IndicesOf(args.at);
  const int64_t length = spec.chunk - spec.local;
  const int64_t heads = args.query.extent(1);
  for (int64_t t = 0; t < args.query.extent(0); ++t) {
    const int64_t m = positions[t] % length;
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

absl::Status AddDual(const std::shared_ptr<RotaryTables>& tables,
                     OpRegistry& registry) {
  using Spec = DualSpec;
  OpDeclaration<DualChunkRotaryPlan, Spec, DualArgs> op(kDual);
  op.In("positions", &DualArgs::at, {kRows}, IndexDType<Spec>())
      .In("query", &DualArgs::query, HeadsShape<Spec>(), &RotaryDType<Spec>)
      .Then(&CheckCopies)
      .In("key", &DualArgs::key, HeadsShape<Spec>(), Like("query"))
      .Need<int64_t>("max_position")
      .Need("chunk_size", &Spec::chunk)
      .Word("chunk", "chunk_size")
      .Need("local_size", &Spec::local)
      .Word("local", "local_size");
  return RotaryAttrs(op)
      .Out("query_out", &DualArgs::query_out, &CopiesShape, Like("query"))
      .Out("key_out", &DualArgs::key_out, Like("key"), Like("key"))
      .InPlace("key", "out1")
      .Finish([](DualArgs& a) { a.positions = IndicesOf(a.at); })
      .CheckFirst(&CheckAt)
      .Creates([tables](const Spec& spec, const OpCall&) {
        return DualChunkRotaryPlan::Create(spec, tables.get());
      })
      .Reference(&NativeDual)
      .Example({{"positions", {4}, DType::kI32},
                {"query", {4, 2, 64}},
                {"key", {4, 1, 64}},
                {"max_position", 128},
                {"chunk_size", 16},
                {"local_size", 4}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterRopeVariantOps(OpRegistry& registry) {
  const auto tables = std::make_shared<RotaryTables>();
  QUERN_RETURN_IF_ERROR(AddMrope(tables, registry));
  QUERN_RETURN_IF_ERROR(AddApply(registry));
  return AddDual(tables, registry);
}

}  // namespace quern
