#include "quern/ops/registry/sglang_product.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/linear_provider.h"
#include "quern/ops/registry/native_linear.h"
#include "quern/ops/registry/sglang_packed.h"
#include "quern/packing/sglang_layout.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;

// Where the tensors of a request are among those of its operator, which come
// in the order of its schema.
struct Places {
  explicit Places(const SglangProduct& r)
      : has_x_scales(r.x_scales.has_value()),
        has_w_scales(r.w_scales.has_value()) {}
  size_t x() const { return 0; }
  size_t w() const { return 1; }
  size_t x_scales() const { return 2; }
  size_t w_scales() const { return has_x_scales ? 3 : 2; }
  size_t bias() const { return 2u + has_x_scales + has_w_scales; }
  size_t out() const { return bias() + 1; }
  size_t count() const { return bias() + 2; }

  bool has_x_scales, has_w_scales;
};

// A product whose plan is made by Prepare, when the weights are known.
class BoundProduct final : public BoundOp {
 public:
  BoundProduct(const SglangProduct& request, const LinearSpec& spec,
               LinearProvider provider, const char* target)
      : r_(request),
        at_(request),
        spec_(spec),
        provider_(provider),
        target_(target) {}

  const char* target() const override { return target_; }
  std::string Explain(int64_t rows) const override {
    if (native_.has_value() || !plan_.has_value()) return target_;
    return plan_->Explain(rows);
  }

  absl::Status Prepare(Tensors t, Executor& executor) override {
    plan_.reset();
    QUERN_RETURN_IF_ERROR(CheckTensorCount(r_.op, t, at_.count()));
    QUERN_ASSIGN_OR_RETURN(const LinearWeights weights, Pack(t, executor));
    if (provider_ == LinearProvider::kReference) {
      QUERN_ASSIGN_OR_RETURN(
          native_, NativeLinear::Create(weights, LinearActivation::kNone));
      scales_ = weights;
    }
    auto plan = LinearPlanOf(r_.op, provider_, spec_, weights);
    if (!plan.ok()) return OfOp(r_.op, plan.status());
    plan_.emplace(*std::move(plan));
    prepared_.assign(t.begin(), t.end());
    return absl::OkStatus();
  }

  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(r_.op, t, at_.count()));
    if (!plan_.has_value()) return NoWeights();
    for (size_t i = 1; i < at_.out(); ++i) {
      if (at_.has_x_scales && i == at_.x_scales()) continue;
      if (SameView(t[i], prepared_[i])) continue;
      return InvalidArgument(
          r_.op, "mat2, scales2 or bias is not what Prepare was given");
    }
    const AnyTensorView x = AsRows(t[at_.x()]), out = AsRows(t[at_.out()]);
    QUERN_RETURN_IF_ERROR(
        CheckInput(r_.op, "mat1", x, r_.x.dtype, {kAnyExtent, r_.weights.k}));
    QUERN_RETURN_IF_ERROR(CheckOutput(r_.op, "out", out, r_.out.dtype,
                                      {x.extent(0), r_.weights.n}));
    if (!at_.has_x_scales) {
      return OfOp(r_.op, plan_->CheckRows(x));
    }
    const AnyTensorView& scales = t[at_.x_scales()];
    return CheckInput(r_.op, "scales1", scales, DType::kF32, {x.extent(0)});
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    if (!plan_.has_value()) return NoWeights();
    if (native_.has_value()) return 0;
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           plan_->WorkspaceBytes(max_rows, max_workers));
    WorkspaceLayout layout;
    LayOut(layout, max_rows);
    layout.Allocate<uint8_t>("product", bytes);
    if (!layout.overflow()) return layout.bytes();
    return absl::ResourceExhaustedError(
        absl::StrCat(r_.op, ": ", max_rows, " rows take more than 2^63 bytes"));
  }

  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    LinearArgs args;
    args.a = AsRows(t[at_.x()]);
    args.c = AsRows(t[at_.out()]);
    if (native_.has_value()) {
      if (at_.has_x_scales) {
        MultiplyCodes(args, t[at_.x_scales()]);
      } else {
        native_->Multiply(args.a, AnyTensorView(), args.c);
      }
      return;
    }
    if (at_.has_x_scales) {
      const int64_t m = args.a.extent(0), k = args.a.extent(1);
      int8_t* const codes = LayOut(workspace, m);
      Flip(args.a, codes, executor);
      args.a = DenseMatrix<const int8_t>(codes, m, k);
      args.a_scales = t[at_.x_scales()];
    }
    plan_->Execute(args, workspace, executor);
  }

 private:
  absl::Status NoWeights() const {
    return absl::FailedPreconditionError(
        absl::StrCat(r_.op, ": has no weights; need a call of Prepare before"));
  }
  template <typename Allocator>
  int8_t* LayOut(Allocator& a, int64_t rows) const {
    int64_t bytes = 0;
    if (at_.has_x_scales && !CheckedMul(rows, r_.weights.k, &bytes)) bytes = -1;
    return a.template Allocate<int8_t>("codes", bytes);
  }

  // Our kernels take signed codes: code + 128 with its highest bit flipped.
  static void Flip(const AnyTensorView& x, int8_t* to, Executor& executor) {
    const int64_t k = x.extent(1);
    const int64_t stride = x.extent(0) > 1 ? x.stride(0) : 0;
    const auto* const from = static_cast<const uint8_t*>(x.data());
    executor.ParallelFor(x.extent(0), [&](int64_t m, int /*worker*/) {
      for (int64_t i = 0; i < k; ++i) {
        to[m * k + i] = static_cast<int8_t>(from[m * stride + i] ^ 0x80);
      }
    });
  }
  // The reference of codes with scales: sums in double, one rounding.
  void MultiplyCodes(const LinearArgs& args,
                     const AnyTensorView& scales) const {
    const auto* const x_scales = static_cast<const float*>(scales.data());
    const int64_t stride = args.a.extent(0) > 1 ? args.a.stride(0) : 0;
    const auto* const codes = static_cast<const uint8_t*>(args.a.data());
    for (int64_t m = 0; m < args.a.extent(0); ++m) {
      const ScalarRow out(args.c, m);
      for (int64_t n = 0; n < r_.weights.n; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < r_.weights.k; ++k) {
          sum += (codes[m * stride + k] - 128) * native_->Weight(k, n);
        }
        sum *= double{x_scales[m]} * double{scales_.scales()[n]};
        if (scales_.has_bias()) sum += double{scales_.bias()[n]};
        out.Set(n, static_cast<float>(sum));
      }
    }
  }

  absl::StatusOr<LinearWeights> Pack(Tensors t, Executor& executor) const {
    const AnyTensorView& w = t[at_.w()];
    QUERN_RETURN_IF_ERROR(
        CheckInput(r_.op, "mat2", w, r_.w.dtype, r_.w.extents));
    LinearSource source;
    source.codes = w;
    source.block_n = r_.block_n;
    source.bias = t[at_.bias()];
    if (at_.has_w_scales) source.scales = t[at_.w_scales()];
    AlignedBuffer plain;
    if (r_.transposed) {
      source.layout = WeightLayout::kKN;
    } else if (r_.packed) {
      QUERN_ASSIGN_OR_RETURN(plain, Unpack(w));
      const int64_t k = r_.weights.k;
      source.codes =
          AnyTensorView(w.dtype(), static_cast<const void*>(plain.data()), 2,
                        {r_.weights.n, k}, {k, 1});
    }
    auto weights = LinearWeights::Pack(r_.weights, {source}, executor);
    if (!weights.ok()) return OfOp(r_.op, weights.status());
    return *weights;
  }
  absl::StatusOr<AlignedBuffer> Unpack(const AnyTensorView& w) const {
    if (w.extent(0) > 1 && w.stride(0) != w.extent(1)) {
      return InvalidArgument(r_.op,
                             "mat2 has gaps between its rows; need the "
                             "dense tensor of convert_weight_packed");
    }
    QUERN_ASSIGN_OR_RETURN(
        const SglangLayout layout,
        SglangLayout::Create(w.dtype(), r_.weights.k, r_.weights.n));
    const int64_t row_bytes = layout.plain_row_bytes();
    QUERN_ASSIGN_OR_RETURN(AlignedBuffer plain,
                           AlignedBuffer::Create(r_.weights.n * row_bytes));
    CopyFromSglang(layout, static_cast<const uint8_t*>(w.data()),
                   static_cast<uint8_t*>(plain.data()), row_bytes);
    return plain;
  }

  SglangProduct r_;
  Places at_;
  LinearSpec spec_;
  LinearProvider provider_;
  const char* target_;
  std::optional<LinearPlan> plan_;
  std::optional<NativeLinear> native_;
  LinearWeights scales_;  // of the reference
  std::vector<AnyTensorView> prepared_;
};

}  // namespace

absl::Status CompleteProduct(SglangProduct& r, const std::string& out_dtype) {
  const TensorMeta &x = r.x, &w = r.w;
  if (w.extents.size() != 2) {
    return InvalidArgument(r.op, "mat2 has rank ", w.extents.size(),
                           "; need 2");
  }
  if (x.extents.size() < 2) {
    return InvalidArgument(r.op, "mat1 has rank ", x.extents.size(),
                           "; need 2 or more");
  }
  QUERN_RETURN_IF_ERROR(LeadingRows(r.op, "mat1", x).status());
  r.transposed = r.packed && w.dtype == DType::kF32;
  r.weights.n = w.extents[r.transposed ? 1 : 0];
  r.weights.k = w.extents[r.transposed ? 0 : 1];
  if (r.packed && w.dtype == DType::kI8) r.weights.k -= 4;
  if (r.packed && !r.transposed) {
    const auto layout = SglangLayout::Create(w.dtype, r.weights.k, r.weights.n);
    if (!layout.ok()) return OfOp(r.op, layout.status());
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(r.op, "columns of mat1", x.extents.back(),
                                   r.weights.k, "mat2 has"));
  r.out = x;
  r.out.extents.back() = r.weights.n;
  QUERN_ASSIGN_OR_RETURN(r.out.dtype,
                         DTypeOr(r.op, "out_dtype", out_dtype, x.dtype));
  if (!r.bias.has_value() ||
      *r.bias == TensorMeta{DType::kF32, {r.weights.n}}) {
    return absl::OkStatus();
  }
  return InvalidArgument(r.op, "bias is not f32[", r.weights.n, "]");
}

absl::StatusOr<std::unique_ptr<BoundOp>> BindSglangProduct(
    const SglangProduct& r, LinearProvider provider) {
  LinearSpec spec;
  spec.a = r.x_scales.has_value() ? DType::kI8 : r.x.dtype;
  spec.c = r.out.dtype;
  // A layer with a single weight shows whether the provider can run the dtypes.
  LinearWeightsSpec single = r.weights;
  single.n = single.k = 1;
  const float zero = 0, one = 1;
  LinearSource source;
  source.codes = AnyTensorView(r.w.dtype, static_cast<const void*>(&zero), 2,
                               {1, 1}, {1, 1});
  if (single.format == WeightFormat::kI8Channel) {
    source.scales = DenseVector<const float>(&one, 1);
  } else if (single.format == WeightFormat::kE4M3Block) {
    source.scales = DenseMatrix<const float>(&one, 1, 1);
    source.block_n = r.block_n;
  }
  InlineExecutor executor;
  const auto weights = LinearWeights::Pack(single, {source}, executor);
  if (!weights.ok()) return OfOp(r.op, weights.status());
  const auto probe = LinearPlanOf(r.op, provider, spec, *weights);
  if (!probe.ok()) return OfOp(r.op, probe.status());
  return std::unique_ptr<BoundOp>(new BoundProduct(
      r, spec, provider,
      provider == LinearProvider::kReference ? "scalar" : probe->target()));
}

}  // namespace quern
