// oneDNN as an implementation of gemm/linear.h, in programs that link this
// target. It packs weights of its own, from the packed form.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/onednn/layers.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"

namespace quern {

// gemm/linear.cc declares this function as weak.
const LinearImplementation* LinkedOneDnn();

namespace {

constexpr char kOp[] = "linear";

std::string WhyNot(const LinearSpec& spec, const LinearWeightsSpec& weights) {
  if (HasGroups(weights.format) || weights.format == WeightFormat::kBlocks) {
    return absl::StrCat("has no kernel for ", WeightFormatName(weights.format));
  }
  if (spec.activation != LinearActivation::kNone) return "has no activation";
  if (spec.residual) return "adds no residual";
  if (weights.n > kMaxOneDnnExtent || weights.k > kMaxOneDnnExtent) {
    return absl::StrCat("takes n and k up to ", kMaxOneDnnExtent);
  }
  return {};
}

// The packed weights as b[n, k] in plain memory.
absl::StatusOr<AlignedBuffer> Unpack(const LinearWeights& weights,
                                     Executor& executor) {
  const LinearWeightsSpec& w = weights.spec();
  QUERN_ASSIGN_OR_RETURN(const VnniLayout layout,
                         VnniLayout::Create(FloatOrI8(w.format), w.k, w.n));
  VnniPackSpec spec;
  spec.layout = layout;
  QUERN_ASSIGN_OR_RETURN(const VnniPackPlan pack, VnniPackPlan::Create(spec));
  const auto size = static_cast<int64_t>(SizeOf(layout.dtype()));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer plain,
                         AlignedBuffer::Create(w.n * w.k * size));
  pack.Unpack(PackedView(layout, weights.panels()),
              AnyTensorView(layout.dtype(), static_cast<void*>(plain.data()), 2,
                            {w.n, w.k}, {w.k, 1}),
              executor);
  return plain;
}

absl::StatusOr<std::unique_ptr<const LinearLayer>> Create(
    const LinearSpec& spec, const LinearWeights& weights, Executor& executor) {
  return CreateOneDnnLayer(spec, weights, executor);
}

absl::Status CheckStride(absl::string_view field, const AnyTensorView& view,
                         const LinearLayer::RowStrides& may) {
  if (view.extent(0) <= 1) return absl::OkStatus();
  return CheckRange(kOp, field, view.stride(0), may.least, may.most);
}

}  // namespace

absl::Status OneDnnLayer::CheckRows(const AnyTensorView& a) const {
  return CheckStride("a.stride(0)", a, row_strides(matmul_->config().k));
}

absl::Status OneDnnLayer::CheckArgs(const LinearArgs& args) const {
  QUERN_RETURN_IF_ERROR(CheckRows(args.a));
  return CheckStride("c.stride(0)", args.c, row_strides(matmul_->config().n));
}

absl::StatusOr<AlignedBuffer> CopyOfColumns(const void* from, int64_t n) {
  if (from == nullptr) return AlignedBuffer();
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer copy, AlignedBuffer::Create(n * 4));
  std::memcpy(copy.data(), from, copy.bytes());
  return copy;
}

OneDnnLayerOr CreateOneDnnLayer(const LinearSpec& spec,
                                const LinearWeights& weights,
                                Executor& executor) {
  QUERN_ASSIGN_OR_RETURN(const AlignedBuffer plain, Unpack(weights, executor));
  return weights.spec().format == WeightFormat::kI8Channel
             ? CreateOneDnnInt8(spec, weights, plain.data(), executor)
             : CreateOneDnnFloat(spec, weights, plain.data(), executor);
}

const LinearImplementation* LinkedOneDnn() {
  static constexpr LinearImplementation kOneDnn = {"onednn", &WhyNot, &Create};
  return &kOneDnn;
}

}  // namespace quern
