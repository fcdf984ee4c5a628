#include "quern/ops/registry/sglang/products/batch_product.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_call.h"
#include "quern/ops/registry/sglang/products/packed_product.h"
#include "quern/ops/registry/sglang/products/packed_weights.h"

namespace quern {
namespace {

constexpr char kPlan[] = "product";
// Rows of one product, so that the workspace does not depend on their number.
constexpr int64_t kRowsAtOnce = 256;

// Rows [begin, begin + rows) of matrix b.
AnyTensorView RowsOfMatrix(const AnyTensorView& v, int64_t b, int64_t begin,
                           int64_t rows) {
  const int64_t offset = (b * v.stride(0) + begin * v.stride(1)) *
                         static_cast<int64_t>(SizeOf(v.dtype()));
  const AnyTensorView::Dims extents{rows, v.extent(2)};
  const AnyTensorView::Dims strides{v.stride(1), v.stride(2)};
  if (v.writable()) {
    return AnyTensorView(
        v.dtype(),
        static_cast<void*>(static_cast<uint8_t*>(v.mutable_data()) + offset), 2,
        extents, strides);
  }
  return AnyTensorView(
      v.dtype(),
      static_cast<const void*>(static_cast<const uint8_t*>(v.data()) + offset),
      2, extents, strides);
}

}  // namespace

absl::Status SglangBatchSpec::Fill(const OpCall& call) {
  const TensorMeta& w = *call.Tensor(each.names.w);
  batch = w.extents[0];
  QUERN_RETURN_IF_ERROR(CheckRange(call.op(), "batch", batch, 1, 1 << 20));
  QUERN_RETURN_IF_ERROR(
      each.Fill(call.op(), {w.dtype, {w.extents[1], w.extents[2]}}));
  if (each.format != WeightFormat::kE4M3Block && each.has_scales()) {
    return InvalidArgument(call.op(), each.names.w, " is ", DTypeName(w.dtype),
                           "; need f32, bf16, f16 or f8e4m3");
  }
  each.block_n = std::max<int64_t>(1, each.n);
  each.group_size = std::max<int64_t>(1, each.k);
  if (!each.has_scales()) return each.CheckScales(call);
  // One block is the whole matrix.
  const TensorMeta* const scale = call.Tensor(each.names.scales);
  if (scale != nullptr && *scale == TensorMeta{DType::kF32, {1}}) {
    each.scales = *scale;
    return absl::OkStatus();
  }
  return InvalidArgument(call.op(), each.names.scales, " is ",
                         scale == nullptr ? "missing" : PrintMeta(*scale),
                         ", and ", each.names.w, " is f8e4m3; need f32[1]");
}

absl::StatusOr<SglangBatch> SglangBatch::Create(bool native,
                                                const SglangBatchSpec& spec) {
  LinearSpec linear;
  linear.a = linear.c = spec.dtype;
  std::vector<SglangProduct> products;
  products.reserve(static_cast<size_t>(spec.batch));
  for (int64_t b = 0; b < spec.batch; ++b) {
    QUERN_ASSIGN_OR_RETURN(SglangProduct product,
                           SglangProduct::CreateAny(native, linear, spec.each));
    products.push_back(std::move(product));
  }
  return SglangBatch(spec, std::move(products));
}

SglangWeights SglangBatch::WeightsOf(const AnyTensorView& w,
                                     const AnyTensorView& scale,
                                     int64_t b) const {
  SglangWeights weights;
  weights.w = RowsOfMatrix(w, b, 0, w.extent(1));
  if (scale.rank() != 0) {
    weights.scales =
        DenseMatrix<const float>(static_cast<const float*>(scale.data()), 1, 1);
  }
  return weights;
}

absl::Status SglangBatch::Prepare(const AnyTensorView& w,
                                  const AnyTensorView& scale,
                                  Executor& executor) {
  const int64_t rows = spec_.each.w.extents[0], bytes = spec_.each.w.extents[1];
  QUERN_RETURN_IF_ERROR(CheckInput(kPlan, spec_.each.names.w, w,
                                   spec_.each.w.dtype,
                                   {spec_.batch, rows, bytes}));
  if (spec_.each.has_scales()) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kPlan, spec_.each.names.scales, scale, DType::kF32, {1}));
  }
  prepared_ = false;
  for (int64_t b = 0; b < spec_.batch; ++b) {
    QUERN_RETURN_IF_ERROR(products_[static_cast<size_t>(b)].Prepare(
        WeightsOf(w, scale, b), executor));
  }
  prepared_ = true;
  return absl::OkStatus();
}

absl::Status SglangBatch::CheckWeights(const AnyTensorView& w,
                                       const AnyTensorView& scale) const {
  if (!prepared_) {
    return absl::FailedPreconditionError(
        absl::StrCat(kPlan, ": has no packed weights; need a call of Prepare"));
  }
  // The first matrix and the last tell where all lie.
  for (const int64_t b : {int64_t{0}, spec_.batch - 1}) {
    QUERN_RETURN_IF_ERROR(products_[static_cast<size_t>(b)].CheckWeights(
        w.rank() == 3 ? WeightsOf(w, scale, b) : SglangWeights()));
  }
  return absl::OkStatus();
}

absl::Status SglangBatch::CheckArgs(const AnyTensorView& x,
                                    const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kPlan, "mat1", x, spec_.dtype,
                                   {spec_.batch, kAnyExtent, spec_.each.k}));
  QUERN_RETURN_IF_ERROR(
      products_[0].CheckRows(RowsOfMatrix(x, 0, 0, x.extent(1))));
  // Rows of all matrices may alternate, as in [rows, heads, n].
  if (out.rank() == 3 && out.writable() && out.stride(0) < out.stride(1)) {
    return CheckOutput(
        kPlan, "out",
        AnyTensorView(out.dtype(), out.mutable_data(), 3,
                      {out.extent(1), out.extent(0), out.extent(2)},
                      {out.stride(1), out.stride(0), out.stride(2)}),
        spec_.dtype, {x.extent(1), spec_.batch, spec_.each.n});
  }
  return CheckOutput(kPlan, "out", out, spec_.dtype,
                     {spec_.batch, x.extent(1), spec_.each.n});
}

absl::StatusOr<int64_t> SglangBatch::WorkspaceBytes(int max_workers) const {
  QUERN_ASSIGN_OR_RETURN(const int64_t shared,
                         products_[0].WorkspaceBytes(kRowsAtOnce, max_workers));
  QUERN_ASSIGN_OR_RETURN(const int64_t own,
                         products_[0].WorkspaceBytes(kRowsAtOnce, 1));
  return std::max(shared,
                  RoundUp(own, AlignedBuffer::kAlignment) * max_workers);
}

void SglangBatch::Execute(const AnyTensorView& x, const AnyTensorView& out,
                          Workspace workspace,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, out));
  const auto multiply = [&](int64_t b, const Workspace& scratch, Executor& by) {
    for (int64_t m = 0; m < x.extent(1); m += kRowsAtOnce) {
      const int64_t rows = std::min(kRowsAtOnce, x.extent(1) - m);
      LinearArgs args;
      args.a = RowsOfMatrix(x, b, m, rows);
      args.c = RowsOfMatrix(out, b, m, rows);
      products_[static_cast<size_t>(b)].Execute(args, scratch, by);
    }
  };
  const int workers = executor.num_workers();
  if (spec_.batch < workers) {
    for (int64_t b = 0; b < spec_.batch; ++b) multiply(b, workspace, executor);
    return;
  }
  const int64_t own = RoundUp(*products_[0].WorkspaceBytes(kRowsAtOnce, 1),
                              AlignedBuffer::kAlignment);
  auto* const all = workspace.Allocate<uint8_t>("products", own * workers);
  executor.ParallelFor(spec_.batch, [&](int64_t b, int worker) {
    InlineExecutor alone;
    multiply(b,
             Workspace(own == 0 ? nullptr : all + own * worker,
                       static_cast<size_t>(own)),
             alone);
  });
}

}  // namespace quern
