#include "quern/ops/registry/mla_ops.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/linear_activations.h"
#include "quern/ops/registry/native_mla.h"
#include "quern/ops/registry/step_workspace.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using MaybeMeta = std::optional<TensorMeta>;

constexpr char kOp[] = "multi_head_latent_attention";

// The tensors are hidden_states, positions, q_norm, kv_norm, cache, residual,
// out.
class BoundMla final : public BoundOp {
 public:
  BoundMla(MlaPlan plan, std::optional<NativeMla> native,
           const RotaryEmbeddingPlan* rope, const MlaStep* step,
           Communicator* ranks)
      : plan_(std::move(plan)),
        native_(std::move(native)),
        rope_(rope),
        step_(step),
        ranks_(ranks) {}

  const char* target() const override {
    return native_.has_value() ? "scalar" : plan_.target();
  }
  std::string Explain(int64_t) const override {
    if (native_.has_value()) return target();
    return absl::StrCat(target(), " ", plan_.arithmetic());
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 7));
    QUERN_RETURN_IF_ERROR(CheckIndexView(kOp, "positions", t[1], {kAnyExtent}));
    const int64_t page_bytes = plan_.spec().cache.page_bytes();
    // An output of u8 rows, which are contiguous as KvCacheView requires.
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "cache", t[4], DType::kU8, {kAnyExtent, page_bytes}));
    if (t[4].extent(0) > 1) {
      QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "stride of cache", t[4].stride(0),
                                       page_bytes, "pages have"));
    }
    return plan_.CheckArgs(ArgsOf(t));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if (native_.has_value()) return native_->WorkspaceBytes();
    return StepWorkspaceBytes(plan_, step_->schedule, step_->limits, max_rows,
                              max_workers);
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (native_.has_value()) {
      native_->Run(ArgsOf(t), workspace);
    } else {
      plan_.Execute(ArgsOf(t), workspace, executor);
    }
    if (ranks_ != nullptr) ranks_->AllReduceSum(t[6]);
  }

 private:
  MlaArgs ArgsOf(Tensors t) const {
    MlaArgs args;
    args.x = t[0];
    args.positions = IndicesOf(t[1]);
    args.q_norm = t[2];
    args.kv_norm = t[3];
    args.rope = rope_;
    args.cache =
        KvCacheView(plan_.spec().cache, t[4].extent(0), t[4].mutable_data());
    args.schedule = step_->schedule;
    args.residual = t[5];
    args.out = t[6];
    return args;
  }

  MlaPlan plan_;
  std::optional<NativeMla> native_;
  const RotaryEmbeddingPlan* rope_;
  const MlaStep* step_;
  Communicator* ranks_;
};

Metas Shapes(const TensorMeta& x, const TensorMeta& positions,
             const MaybeMeta& q_norm, const TensorMeta& kv_norm,
             const MutatedMeta& cache, const MaybeMeta& residual,
             const MlaWeights* weights, const KvLayout* layout,
             const RotaryEmbeddingPlan*, const MlaStep*, Communicator*, double,
             double, const std::string& out_dtype, const std::string&) {
  const int64_t hidden = weights->kv_a.spec().k;
  if (x.extents.size() != 2 || x.extents[1] != hidden) {
    return InvalidArgument(kOp, "hidden_states is ", PrintMeta(x),
                           "; need [tokens, ", hidden,
                           "], as kv_a's inputs are");
  }
  QUERN_RETURN_IF_ERROR(CheckIndexMeta(kOp, "positions", positions));
  QUERN_RETURN_IF_ERROR(CheckExtents(kOp, "positions", positions,
                                     {x.extents[0]},
                                     ", as hidden_states has rows"));
  if (q_norm.has_value() && q_norm->dtype != kv_norm.dtype) {
    return InvalidArgument(kOp, "q_norm is ", DTypeName(q_norm->dtype),
                           "; need ", DTypeName(kv_norm.dtype),
                           ", as kv_norm is");
  }
  if (q_norm.has_value() != weights->q_a.has_value()) {
    return InvalidArgument(kOp, "q_norm is ",
                           q_norm.has_value() ? "given" : "missing",
                           "; need it where the weights have q_a");
  }
  if (cache.dtype != DType::kU8 || cache.extents.size() != 2 ||
      cache.extents[1] != layout->page_bytes()) {
    return InvalidArgument(kOp, "cache is ", PrintMeta(cache),
                           "; need u8[pages, ", layout->page_bytes(),
                           "], as the layout's pages are");
  }
  TensorMeta out = x;
  QUERN_ASSIGN_OR_RETURN(out.dtype,
                         DTypeOr(kOp, "out_dtype", out_dtype, x.dtype));
  if (residual.has_value()) {
    QUERN_RETURN_IF_ERROR(
        CheckMeta(kOp, "residual", *residual, out, ", as the result is"));
  }
  return std::vector<TensorMeta>{out};
}

template <bool kNative>
Bound Make(const TensorMeta& x, const TensorMeta& positions,
           const MaybeMeta& q_norm, const TensorMeta& kv_norm,
           const MutatedMeta& cache, const MaybeMeta& residual,
           const MlaWeights* weights, const KvLayout* layout,
           const RotaryEmbeddingPlan* rope, const MlaStep* step,
           Communicator* ranks, double scale, double eps,
           const std::string& out_dtype, const std::string& activations) {
  QUERN_ASSIGN_OR_RETURN(
      const std::vector<TensorMeta> out,
      Shapes(x, positions, q_norm, kv_norm, cache, residual, weights, layout,
             rope, step, ranks, scale, eps, out_dtype, activations));
  MlaSpec spec = MlaSpecOf(*weights, *layout);
  spec.scale = static_cast<float>(scale);
  if (scale != 0 && spec.scale == 0) {
    return InvalidArgument(kOp, "scale=", scale,
                           "; need 0, or a number that f32 can hold");
  }
  spec.eps = static_cast<float>(eps);
  spec.dtype = x.dtype;
  spec.norm_dtype = kv_norm.dtype;
  spec.out_dtype = out[0].dtype;
  spec.residual = residual.has_value();
  QUERN_ASSIGN_OR_RETURN(spec.activations,
                         LinearActivationsOf(kOp, activations));
  InlineExecutor executor;
  QUERN_ASSIGN_OR_RETURN(MlaPlan plan,
                         MlaPlan::Create(spec, *weights, executor));
  std::optional<NativeMla> native;
  if (kNative) {
    QUERN_ASSIGN_OR_RETURN(native,
                           NativeMla::Create(spec, *weights, rope->spec()));
  }
  return std::unique_ptr<BoundOp>(
      new BoundMla(std::move(plan), std::move(native), rope, step, ranks));
}

// What follows lives as long as the program, for listings and tests: a layer of
// two heads on 16 columns.
constexpr int64_t kHidden = 16, kHeads = 2, kLatent = 8, kNope = 4, kRope = 4;
constexpr int64_t kValue = 4;

std::vector<float> Codes(int64_t n, int64_t k) {
  std::vector<float> codes(static_cast<size_t>(n * k));
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<float>(static_cast<int>(i * 7 % 17) - 8) / 16;
  }
  return codes;
}
LinearWeights Matrix(int64_t n, int64_t k) {
  const std::vector<float> codes = Codes(n, k);
  LinearWeightsSpec spec;
  spec.n = n;
  spec.k = k;
  spec.format = WeightFormat::kF32;
  LinearSource source;
  source.codes = DenseMatrix<const float>(codes.data(), n, k);
  InlineExecutor executor;
  const auto packed = LinearWeights::Pack(spec, {source}, executor);
  QUERN_CHECK(packed.ok());
  return *packed;
}
const MlaWeights* ExampleWeights() {
  static const MlaWeights* const weights = [] {
    auto* made = new MlaWeights;
    made->q = Matrix(kHeads * (kNope + kRope), kHidden);
    made->kv_a = Matrix(kLatent + kRope, kHidden);
    made->out = Matrix(kHidden, kHeads * kValue);
    MlaSpec spec;
    spec.heads = kHeads;
    spec.nope = kNope;
    spec.v_head_dim = kValue;
    const std::vector<float> kv_b = Codes(kHeads * (kNope + kValue), kLatent);
    InlineExecutor executor;
    QUERN_CHECK(PackKvB(spec,
                        DenseMatrix<const float>(
                            kv_b.data(), kHeads * (kNope + kValue), kLatent),
                        executor, *made)
                    .ok());
    return made;
  }();
  return weights;
}
const KvLayout* ExampleLayout() {
  static const KvLayout layout = [] {
    KvLayoutSpec spec;
    spec.dtype = DType::kF32;
    spec.kv_heads = 1;
    spec.head_dim = kLatent + kRope;
    spec.v_head_dim = kLatent;
    spec.page_size = 16;
    spec.form = KvForm::kLatent;
    auto made = KvLayout::Create(spec);
    QUERN_CHECK(made.ok());
    return *made;
  }();
  return &layout;
}
template <DType kType>
const RotaryEmbeddingPlan* ExampleRope() {
  static const RotaryEmbeddingPlan* const rope = [] {
    RotaryEmbeddingSpec spec;
    spec.head_dim = spec.rot_dim = kRope;
    spec.max_positions = 64;
    spec.style = RotaryStyle::kPairs;
    spec.dtype = kType;
    auto made = RotaryEmbeddingPlan::Create(spec);
    QUERN_CHECK(made.ok());
    return new RotaryEmbeddingPlan(*std::move(made));
  }();
  return rope;
}
NamedArgs Example(DType dtype) {
  static const MlaStep step = {};
  const RotaryEmbeddingPlan* const rope =
      dtype == DType::kF32    ? ExampleRope<DType::kF32>()
      : dtype == DType::kBF16 ? ExampleRope<DType::kBF16>()
                              : ExampleRope<DType::kF16>();
  return {{"hidden_states", TensorMeta{dtype, {4, kHidden}}},
          {"positions", TensorMeta{DType::kI64, {4}}},
          {"kv_norm", TensorMeta{dtype, {kLatent}}},
          {"cache", TensorMeta{DType::kU8, {2, ExampleLayout()->page_bytes()}}},
          {"weights", ExampleWeights()},
          {"layout", ExampleLayout()},
          {"rope", rope},
          {"step", &step}};
}

}  // namespace

absl::Status RegisterMlaOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(r.Define<&Shapes>(
      "multi_head_latent_attention(Tensor hidden_states, Tensor positions, "
      "Tensor? q_norm, Tensor kv_norm, Tensor(a4!) cache, Tensor? residual, "
      "MlaWeights weights, KvLayout layout, RotaryEmbeddingPlan rope, "
      "MlaStep step, Communicator? ranks, float scale=0.0, float eps=1e-06, "
      "str out_dtype=\"\", str activations=\"exact\") -> Tensor",
      &Example, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Declare(
      kOp,
      {{{"residual", "out"}}, OpRows::kFirst, "", {{"x", "hidden_states"}}}));
  QUERN_RETURN_IF_ERROR(r.Add<&Make<false>>(kOp, "simd"));
  return r.Add<&Make<true>>(kOp, OpRegistry::kReference);
}

}  // namespace quern
