#include "quern/ops/registry/sglang/packing/pack.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/sglang/packing/layout.h"
#include "quern/ops/registry/sglang/packing/pack_kernels.h"

namespace quern {
namespace {

constexpr char kOp[] = "sglang_pack";

SglangPackKernels::Block KernelOf(const SglangPackKernels& kernels,
                                  DType dtype) {
  if (dtype == DType::kF8E4M3) return kernels.byte_pairs;
  if (dtype == DType::kU8) return kernels.nibbles;
  return kernels.dwords;
}

}  // namespace

absl::StatusOr<SglangPackPlan> SglangPackPlan::Create(
    const SglangLayout& layout) {
  if (layout == SglangLayout()) {
    return InvalidArgument(
        kOp, "layout is empty; need one from SglangLayout::Create");
  }
  return SglangPackPlan(layout, GetSglangPackKernels());
}

absl::Status SglangPackPlan::CheckArgs(const AnyTensorView& w,
                                       VectorView<const int32_t> compensation,
                                       const void* packed) const {
  const int64_t row_elements =
      layout_.plain_row_bytes() / static_cast<int64_t>(SizeOf(layout_.dtype()));
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "w", w.dtype(), layout_.dtype()));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "rank of w", w.rank(), 2, "a matrix"));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "rows of w", w.extent(0), layout_.n(), "the layout"));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "columns of w", w.extent(1), row_elements, "the layout"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "compensation", compensation.extent(0),
                                   layout_.has_compensation() ? layout_.n() : 0,
                                   "the layout"));
  if (w.data() == nullptr || packed == nullptr ||
      (layout_.has_compensation() && compensation.data() == nullptr)) {
    return InvalidArgument(kOp, "null data; need memory");
  }
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "w", w, layout_.dtype(), {w.extent(0), w.extent(1)}));
  QUERN_RETURN_IF_ERROR(CheckElementsApart(kOp, "w", w));
  const auto to =
      DenseVector(static_cast<const uint8_t*>(packed), layout_.bytes());
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "w", w, "packed", to));
  return CheckApart(kOp, "compensation", compensation, "packed", to);
}

void SglangPackPlan::Pack(const AnyTensorView& w,
                          VectorView<const int32_t> compensation, void* packed,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(w, compensation, packed));
  const SglangPackKernels::Block pack = KernelOf(kernels_, layout_.dtype());
  // n >= 16, so that the stride is one that CheckArgs has seen.
  const int64_t row_bytes =
      w.stride(0) * static_cast<int64_t>(SizeOf(layout_.dtype()));
  executor.ParallelFor(layout_.blocks(), [&](int64_t block, int /*worker*/) {
    const int64_t n0 = block * SglangLayout::kBlockCols;
    const int64_t cols = layout_.cols(block);
    uint8_t* to = static_cast<uint8_t*>(packed) + layout_.block_offset(block);
    pack(static_cast<const uint8_t*>(w.data()) + n0 * row_bytes,
         static_cast<ptrdiff_t>(row_bytes), static_cast<size_t>(cols),
         static_cast<size_t>(layout_.plain_row_bytes()), to);
    if (layout_.has_compensation()) {
      std::memcpy(to + layout_.compensation_offset(), compensation.data() + n0,
                  static_cast<size_t>(cols) * sizeof(int32_t));
    }
  });
}

}  // namespace quern
