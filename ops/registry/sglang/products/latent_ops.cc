#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/rows/norm_declaration.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/reference/rope.h"
#include "quern/ops/registry/sglang/products/batch_product.h"
#include "quern/ops/registry/sglang/products/packed_product.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"
#include "quern/ops/registry/sglang/products/product_ops.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/ops/rope/table_rotary.h"

namespace quern {
namespace {

constexpr char kPlan[] = "product";

struct Spec {
  // first is q_a_proj, or both matrices; latent is kv_a_proj, if it is apart.
  SglangWeightSpec first, latent, q_b;
  SglangBatchSpec w_kc;
  DType dtype = DType::kF32, table_dtype = DType::kF32;
  DType q_norm_dtype = DType::kF32, kv_norm_dtype = DType::kF32;
  bool fused = false, packed = false, int8 = false, fp8 = false;
  int64_t hidden = 0, heads = 0, q_lora = 0, kv_lora = 0, nope = 0, rope = 0;
  int64_t max_positions = 0, block_n = 0, block_k = 0;
  float eps = 0;

  int64_t q_columns() const { return heads * (nope + rope); }
};
struct Args {
  AnyTensorView x, first, q_b, latent, w_kc, q_norm, kv_norm, positions, table;
  AnyTensorView first_scale, q_b_scale, latent_scale, w_scale, q_input, k_input;
};

// [rows, columns] of a wider matrix, from column `begin` on.
AnyTensorView Columns(const AnyTensorView& v, int64_t rows, int64_t row_stride,
                      int64_t begin, int64_t columns) {
  auto* const data = static_cast<uint8_t*>(v.mutable_data()) +
                     begin * static_cast<int64_t>(SizeOf(v.dtype()));
  return AnyTensorView(v.dtype(), static_cast<void*>(data), 2, {rows, columns},
                       {row_stride, 1});
}
// Columns of [rows, heads, n], as [rows, heads, columns].
AnyTensorView OfHeads(const AnyTensorView& v, int64_t begin, int64_t columns) {
  auto* const data = static_cast<uint8_t*>(v.mutable_data()) +
                     begin * static_cast<int64_t>(SizeOf(v.dtype()));
  return AnyTensorView(v.dtype(), static_cast<void*>(data), 3,
                       {v.extent(0), v.extent(1), columns},
                       {v.stride(0), v.stride(1), 1});
}
AnyTensorView HeadsFirst(const AnyTensorView& v) {
  return AnyTensorView(v.dtype(), v.mutable_data(), 3,
                       {v.extent(1), v.extent(0), v.extent(2)},
                       {v.stride(1), v.stride(0), 1});
}

class Plan {
 public:
  template <bool kNative>
  static absl::StatusOr<Plan> Make(const Spec& spec, const OpCall&) {
    LinearSpec linear;
    linear.a = linear.c = spec.dtype;
    Plan plan(kNative, spec);
    for (const SglangWeightSpec* of : {&spec.first, &spec.q_b, &spec.latent}) {
      if (of == &spec.latent && spec.fused) continue;
      QUERN_ASSIGN_OR_RETURN(SglangProduct product,
                             SglangProduct::CreateAny(kNative, linear, *of));
      plan.products_.push_back(std::move(product));
    }
    QUERN_ASSIGN_OR_RETURN(plan.batch_,
                           SglangBatch::Create(kNative, spec.w_kc));
    RmsNormSpec norm;
    norm.eps = spec.eps;
    norm.x_dtype = norm.out_dtype = norm.residual_dtype = spec.dtype;
    norm.hidden = spec.q_lora;
    norm.weight_dtype = spec.q_norm_dtype;
    QUERN_ASSIGN_OR_RETURN(plan.q_norm_, RmsNormPlan::Create(norm));
    norm.hidden = spec.kv_lora;
    norm.weight_dtype = spec.kv_norm_dtype;
    QUERN_ASSIGN_OR_RETURN(plan.kv_norm_, RmsNormPlan::Create(norm));
    TableRotarySpec rotary;
    rotary.rotary.head_dim = rotary.rotary.rot_dim = spec.rope;
    rotary.rotary.max_positions = spec.max_positions;
    rotary.rotary.style = RotaryStyle::kPairs;
    rotary.rotary.dtype = spec.dtype;
    rotary.table_dtype = spec.table_dtype;
    QUERN_ASSIGN_OR_RETURN(plan.rotary_, TableRotaryPlan::Create(rotary));
    return plan;
  }

  const Spec& spec() const { return spec_; }
  const char* target() const { return products_[0].target(); }
  std::string Explain(int64_t rows) const { return products_[0].Explain(rows); }

  absl::Status Prepare(const Args& a, Executor& executor) {
    for (size_t i = 0; i < products_.size(); ++i) {
      QUERN_RETURN_IF_ERROR(products_[i].Prepare(WeightsOf(a, i), executor));
    }
    return batch_->Prepare(a.w_kc, a.w_scale, executor);
  }

  absl::Status CheckArgs(const Args& a) const {
    for (size_t i = 0; i < products_.size(); ++i) {
      QUERN_RETURN_IF_ERROR(products_[i].CheckWeights(WeightsOf(a, i)));
    }
    QUERN_RETURN_IF_ERROR(batch_->CheckWeights(a.w_kc, a.w_scale));
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "hidden_states", a.x, spec_.dtype,
                                     {kAnyExtent, spec_.hidden}));
    const int64_t rows = a.x.extent(0), width = spec_.kv_lora + spec_.rope;
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "q_a_layernorm_weight", a.q_norm,
                                     spec_.q_norm_dtype, {spec_.q_lora}));
    QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "kv_a_layernorm_weight", a.kv_norm,
                                     spec_.kv_norm_dtype, {spec_.kv_lora}));
    QUERN_RETURN_IF_ERROR(
        CheckIndexView(kPlan, "positions", a.positions, {rows}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kPlan, "q_input", a.q_input, spec_.dtype,
                                      {rows, spec_.heads, width}));
    QUERN_RETURN_IF_ERROR(CheckOutput(kPlan, "k_input", a.k_input, spec_.dtype,
                                      {rows, 1, width}));
    if (rows > 0) {
      const AnyTensorView q = OfHeads(a.q_input, spec_.kv_lora, spec_.rope);
      const AnyTensorView k = OfHeads(a.k_input, spec_.kv_lora, spec_.rope);
      TableRotaryArgs rotary;
      rotary.positions[0] = IndicesOf(a.positions, rows);
      rotary.table = a.table;
      rotary.query = {q, q};
      rotary.key = {k, k};
      QUERN_RETURN_IF_ERROR(rotary_->CheckArgs(rotary));
    }
    return products_[0].CheckRows(a.x);
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    QUERN_ASSIGN_OR_RETURN(int64_t most, batch_->WorkspaceBytes(max_workers));
    for (const SglangProduct& product : products_) {
      QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                             product.WorkspaceBytes(max_rows, max_workers));
      most = std::max(most, bytes);
    }
    WorkspaceLayout layout;
    LayOut(layout, max_rows);
    layout.Allocate<uint8_t>("products", most);
    if (!layout.overflow()) return layout.bytes();
    return absl::ResourceExhaustedError(
        absl::StrCat(kPlan, ": ", max_rows, " rows take more than 2^63 bytes"));
  }

  void Execute(const Args& a, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(a));
    const int64_t rows = a.x.extent(0), q_head = spec_.nope + spec_.rope;
    if (rows == 0) return;
    const Scratch scratch = LayOut(workspace, rows);
    const AnyTensorView first = Dense(scratch.first, {rows, spec_.first.n});
    const AnyTensorView q = Dense(scratch.q, {rows, spec_.heads, q_head});
    const int64_t width = spec_.kv_lora + spec_.rope;
    const AnyTensorView k_input =
        Columns(a.k_input, rows, a.k_input.stride(0), 0, width);
    const AnyTensorView latent =
        spec_.fused ? Columns(first, rows, spec_.first.n, spec_.q_lora, width)
                    : k_input;
    const auto multiply = [&](size_t i, const AnyTensorView& x,
                              const AnyTensorView& out) {
      LinearArgs args;
      args.a = x;
      args.c = out;
      products_[i].Execute(args, workspace, executor);
    };
    multiply(0, a.x, first);
    if (!spec_.fused) multiply(2, a.x, k_input);
    const AnyTensorView q_a =
        Columns(first, rows, spec_.first.n, 0, spec_.q_lora);
    Norm(*q_norm_, q_a, a.q_norm, q_a, executor);
    Norm(*kv_norm_, Columns(latent, rows, latent.stride(0), 0, spec_.kv_lora),
         a.kv_norm, Columns(k_input, rows, k_input.stride(0), 0, spec_.kv_lora),
         executor);
    multiply(1, q_a, Dense(scratch.q, {rows, spec_.q_columns()}));
    batch_->Execute(HeadsFirst(OfHeads(q, 0, spec_.nope)),
                    HeadsFirst(OfHeads(a.q_input, 0, spec_.kv_lora)), workspace,
                    executor);
    const auto one_head = [&](const AnyTensorView& v) {
      return AnyTensorView(v.dtype(), v.mutable_data(), 3, {rows, 1, width},
                           {v.stride(0), width, 1});
    };
    TableRotaryArgs rotary;
    rotary.positions[0] = IndicesOf(a.positions, rows);
    rotary.table = a.table;
    rotary.query = {OfHeads(q, spec_.nope, spec_.rope),
                    OfHeads(a.q_input, spec_.kv_lora, spec_.rope)};
    rotary.key = {OfHeads(one_head(latent), spec_.kv_lora, spec_.rope),
                  OfHeads(one_head(k_input), spec_.kv_lora, spec_.rope)};
    Rotate(rotary, executor);
  }

 private:
  struct Scratch {
    uint8_t* first;
    uint8_t* q;
  };
  Plan(bool native, const Spec& spec) : native_(native), spec_(spec) {}

  static SglangWeights WeightsOf(const Args& a, size_t i) {
    if (i == 0) return {a.first, a.first_scale, {}, {}};
    if (i == 1) return {a.q_b, a.q_b_scale, {}, {}};
    return {a.latent, a.latent_scale, {}, {}};
  }
  AnyTensorView Dense(uint8_t* data, std::initializer_list<int64_t> of) const {
    AnyTensorView::Dims extents{}, strides{};
    int64_t stride = 1;
    for (size_t d = of.size(); d-- > 0;) {
      extents[d] = of.begin()[d];
      strides[d] = stride;
      stride *= extents[d];
    }
    return AnyTensorView(spec_.dtype, static_cast<void*>(data),
                         static_cast<int>(of.size()), extents, strides);
  }

  template <typename Allocator>
  Scratch LayOut(Allocator& a, int64_t rows) const {
    const auto bytes = [&](int64_t columns) {
      int64_t size = 0;
      return CheckedMul(columns, static_cast<int64_t>(SizeOf(spec_.dtype)),
                        &size) &&
                     CheckedMul(rows, size, &size)
                 ? size
                 : int64_t{-1};
    };
    return {a.template Allocate<uint8_t>("first", bytes(spec_.first.n)),
            a.template Allocate<uint8_t>("q", bytes(spec_.q_columns()))};
  }

  void Norm(const RmsNormPlan& plan, const AnyTensorView& x,
            const AnyTensorView& weight, const AnyTensorView& out,
            Executor& executor) const {
    if (!native_) return plan.Execute(x, weight, out, executor);
    RmsNormArgs args;
    args.x = x;
    args.weight = weight;
    args.out = out;
    NativeRmsNorm(plan.spec(), args);
  }
  void Rotate(const TableRotaryArgs& args, Executor& executor) const {
    if (!native_) return rotary_->Execute(args, executor);
    const RotaryEmbeddingSpec& spec = rotary_->spec().rotary;
    for (const TableRotaryHeads& heads : {args.query, args.key}) {
      for (int64_t t = 0; t < heads.x.extent(0); ++t) {
        const ScalarRow row(args.table, args.positions[0][t]);
        for (int64_t h = 0; h < heads.x.extent(1); ++h) {
          for (int64_t j = 0; j < spec_.rope / 2; ++j) {
            NativeTurn(spec, j, row[j], row[spec_.rope / 2 + j],
                       NativeHead(heads.x, 0, t, h),
                       NativeHead(heads.out, 0, t, h));
          }
        }
      }
    }
  }

  bool native_;
  Spec spec_;
  std::vector<SglangProduct> products_;  // first, q_b, and latent if apart
  std::optional<SglangBatch> batch_;
  std::optional<RmsNormPlan> q_norm_, kv_norm_;
  std::optional<TableRotaryPlan> rotary_;
};

using Op = OpDeclaration<Plan, Spec, Args>;

// The heads from w_kc and the rest from the other matrices.
absl::Status Complete(Spec& s, const OpCall& call) {
  const auto op = call.op();
  s.first.names =
      s.fused ? SglangWeightNames{"qkv_a_proj_weight", "qkv_a_proj_scale"}
              : SglangWeightNames{"q_a_proj_weight", "q_a_proj_scale"};
  s.q_b.names = {"q_b_proj_weight", "q_b_proj_scale"};
  s.latent.names = {"kv_a_proj_weight", "kv_a_proj_scale"};
  for (SglangWeightSpec* w : {&s.first, &s.q_b, &s.latent}) {
    if (w == &s.latent && s.fused) continue;
    w->packed = s.packed;
    w->block_n = s.block_n;
    w->group_size = s.block_k;
    const TensorMeta& meta = *call.Tensor(w->names.w);
    if ((meta.dtype == DType::kI8) != s.int8 ||
        (meta.dtype == DType::kF8E4M3) != s.fp8 || meta.dtype == DType::kU8) {
      return InvalidArgument(op, w->names.w, " is ", DTypeName(meta.dtype),
                             "; need i8 with use_int8_w8a8, f8e4m3 with "
                             "use_fp8_w8a16, else f32, bf16 or f16");
    }
    QUERN_RETURN_IF_ERROR(w->Fill(op, meta));
    QUERN_RETURN_IF_ERROR(w->CheckScales(call));
    QUERN_RETURN_IF_ERROR(
        CheckEqual(op, absl::StrCat("columns of ", w->names.w), w->k,
                   w == &s.q_b ? s.q_lora : s.hidden,
                   w == &s.q_b ? "q_a_layernorm_weight has elements"
                               : "hidden_states has columns"));
  }
  s.w_kc.each.names = {"w_kc", "w_scale"};
  s.w_kc.each.packed = s.packed;
  s.w_kc.dtype = s.dtype;
  QUERN_RETURN_IF_ERROR(s.w_kc.Fill(call));
  s.heads = s.w_kc.batch;
  s.nope = s.w_kc.each.k;
  const std::pair<const char*, int64_t> sizes[] = {
      {"columns of cos_sin_cache", s.rope},
      {"columns of w_kc", s.nope},
      {"elements of q_a_layernorm_weight", s.q_lora},
      {"elements of kv_a_layernorm_weight", s.kv_lora}};
  for (const auto& [what, size] : sizes) {
    QUERN_RETURN_IF_ERROR(
        CheckRange(op, what, size, 1, LinearWeights::kMaxExtent));
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(op, "rows of w_kc", s.w_kc.each.n, s.kv_lora,
                                   "kv_a_layernorm_weight has elements"));
  const int64_t latent = s.kv_lora + s.rope;
  QUERN_RETURN_IF_ERROR(CheckEqual(
      op, absl::StrCat("rows of ", s.first.names.w), s.first.n,
      s.q_lora + (s.fused ? latent : 0), "the norms and cos_sin_cache have"));
  if (!s.fused) {
    QUERN_RETURN_IF_ERROR(CheckEqual(op, "rows of kv_a_proj_weight", s.latent.n,
                                     latent,
                                     "kv_a_layernorm_weight and cos_sin_cache "
                                     "have"));
  }
  return CheckEqual(op, "rows of q_b_proj_weight", s.q_b.n, s.q_columns(),
                    "the heads of w_kc and cos_sin_cache have");
}

absl::Status CheckRanks(Spec& s, const OpCall& call) {
  const auto op = call.op();
  QUERN_RETURN_IF_ERROR(CheckEqual(op, "q_lora_rank", call.Int("q_lora_rank"),
                                   s.q_lora, "q_a_layernorm_weight has"));
  QUERN_RETURN_IF_ERROR(CheckEqual(op, "kv_lora_rank", call.Int("kv_lora_rank"),
                                   s.kv_lora, "kv_a_layernorm_weight has"));
  return CheckEqual(op, "qk_rope_head_dim", call.Int("qk_rope_head_dim"),
                    s.rope, "cos_sin_cache has");
}

absl::Status AddLatent(OpRegistry& registry, bool fused) {
  const auto floats = [](DType Spec::*to) {
    return OpDType<Spec>::OneOf(
        {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, {to});
  };
  constexpr auto kWidth = +[](const Spec& s) { return s.kv_lora + s.rope; };
  Op op(fused ? "qkv_proj_with_rope_fused_weight" : "qkv_proj_with_rope");
  op.Given(&Spec::fused, fused)
      .In("hidden_states", &Args::x, {kRows, &Spec::hidden},
          floats(&Spec::dtype))
      .In(fused ? "qkv_a_proj_weight" : "q_a_proj_weight", &Args::first,
          {kAny, kAny})
      .In("q_b_proj_weight", &Args::q_b, {kAny, kAny});
  if (!fused) op.In("kv_a_proj_weight", &Args::latent, {kAny, kAny});
  op.In("w_kc", &Args::w_kc, {kAny, kAny, kAny})
      .In("q_a_layernorm_weight", &Args::q_norm, {&Spec::q_lora},
          floats(&Spec::q_norm_dtype))
      .In("kv_a_layernorm_weight", &Args::kv_norm, {&Spec::kv_lora},
          floats(&Spec::kv_norm_dtype))
      .In("positions", &Args::positions, {kRows}, IndexDType<Spec>())
      .In("cos_sin_cache", &Args::table, {&Spec::max_positions, &Spec::rope},
          floats(&Spec::table_dtype))
      .Need("eps", &Spec::eps)
      .Attr("use_int8_w8a8", false, &Spec::int8)
      .Attr("use_fp8_w8a16", false, &Spec::fp8)
      .Maybe(fused ? "qkv_a_proj_scale" : "q_a_proj_scale", &Args::first_scale)
      .Maybe("q_b_proj_scale", &Args::q_b_scale);
  if (!fused) op.Maybe("kv_a_proj_scale", &Args::latent_scale);
  op.Maybe("w_scale", &Args::w_scale)
      .Need("is_vnni", &Spec::packed)
      .Attr("block_n", int64_t{0}, &Spec::block_n)
      .Attr("block_k", int64_t{0}, &Spec::block_k);
  if (fused) {
    op.Need<int64_t>("q_lora_rank")
        .Need<int64_t>("kv_lora_rank")
        .Need<int64_t>("qk_rope_head_dim")
        .Then(&CheckRanks);
  }
  return op.Then(&Complete)
      .Out("q_input", &Args::q_input, {kRows, &Spec::heads, kWidth},
           Like("hidden_states"))
      .Out("k_input", &Args::k_input, {kRows, 1, kWidth}, Like("hidden_states"))
      .Word("table", "cos_sin_cache")
      .Provider("simd", &Plan::Make<false>)
      .Provider("reference", &Plan::Make<true>)
      .Layer()
      .ExampleOf([fused](DType dtype) {
        const auto of = [dtype](std::vector<int64_t> extents) {
          return TensorMeta{dtype, std::move(extents)};
        };
        NamedArgs args = {{"hidden_states", of({4, 64})},
                          {"q_b_proj_weight", of({48, 32})},
                          {"w_kc", of({2, 32, 16})},
                          {"q_a_layernorm_weight", of({32})},
                          {"kv_a_layernorm_weight", of({32})},
                          {"positions", TensorMeta{DType::kI32, {4}}},
                          {"cos_sin_cache", of({128, 8})},
                          {"eps", 1e-6},
                          {"is_vnni", false}};
        if (fused) {
          args.emplace_back("qkv_a_proj_weight", of({72, 64}));
          args.emplace_back("q_lora_rank", int64_t{32});
          args.emplace_back("kv_lora_rank", int64_t{32});
          args.emplace_back("qk_rope_head_dim", int64_t{8});
        } else {
          args.emplace_back("q_a_proj_weight", of({32, 64}));
          args.emplace_back("kv_a_proj_weight", of({40, 64}));
        }
        return args;
      })
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangLatentOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddLatent(registry, false));
  return AddLatent(registry, true);
}

}  // namespace quern
