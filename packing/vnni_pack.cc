#include "quern/packing/vnni_pack.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack_kernels.h"

namespace quern {
namespace {

constexpr char kOp[] = "vnni_pack";

// The tile of one task. From [N, K] it is one panel and a stretch of k. From
// [K, N] it has so few rows that one cache line of each stays in L2 until its
// neighbour is wanted, and it is as wide as whole pages: 128 rows were faster
// than 64 or 256, and 256 panels 10 % faster than 64 (Zen 4, 2026).
struct Tile {
  int64_t panels;
  int64_t lines;
};

Tile TileOf(const VnniPackSpec& spec) {
  if (spec.order == WeightOrder::kNK) return {1, 1024};
  return {256, 128 / spec.layout.v()};
}

const VnniPackKernels::Direction& DirectionOf(const VnniPackSpec& spec,
                                              const VnniPackKernels& kernels) {
  if (spec.order == WeightOrder::kNK) return kernels.nk;
  switch (SizeOf(spec.layout.dtype())) {
    case 4:
      return kernels.kn32;
    case 2:
      return kernels.kn16;
    default:
      return kernels.kn8;
  }
}

// Calls fn(plain block, packed block) for every tile. The rows of the plain
// side start at `plain_data` and are row_stride elements apart.
template <typename PlainByte, typename PackedByte, typename Fn>
void ForEachTile(const VnniPackSpec& spec, PlainByte* plain_data,
                 int64_t row_stride, PackedByte* packed, Executor& executor,
                 const Fn& fn) {
  const VnniLayout& layout = spec.layout;
  const Tile tile = TileOf(spec);
  const int64_t size = static_cast<int64_t>(SizeOf(layout.dtype()));
  const int64_t across = DivCeil(layout.panels(), tile.panels);
  const int64_t down = DivCeil(layout.lines(), tile.lines);
  executor.ParallelFor(across * down, [&](int64_t task, int /*worker*/) {
    const int64_t panel = task / down * tile.panels;
    const int64_t line = task % down * tile.lines;
    const int64_t n0 = panel * VnniLayout::kPanelCols;
    const int64_t k0 = line * layout.v();
    const int64_t n = std::min(tile.panels * VnniLayout::kPanelCols,  //
                               layout.n() - n0);
    const int64_t k = std::min(tile.lines * layout.v(), layout.k() - k0);
    const bool nk = spec.order == WeightOrder::kNK;

    VnniPlainBlock<PlainByte> plain;
    plain.row_bytes = static_cast<ptrdiff_t>(row_stride * size);
    plain.data =
        plain_data + (nk ? n0 : k0) * plain.row_bytes + (nk ? k0 : n0) * size;
    plain.rows = static_cast<size_t>(nk ? n : k);
    plain.cols_bytes = static_cast<size_t>((nk ? k : n) * size);
    VnniPackedBlock<PackedByte> block;
    block.data =
        packed + panel * layout.panel_bytes() + line * VnniLayout::kLineBytes;
    block.panel_bytes = static_cast<size_t>(layout.panel_bytes());
    fn(plain, block);
  });
}

}  // namespace

absl::StatusOr<VnniPackPlan> VnniPackPlan::Create(const VnniPackSpec& spec) {
  if (spec.layout == VnniLayout()) {
    return InvalidArgument(kOp,
                           "layout is empty; need one from "
                           "VnniLayout::Create");
  }
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "stream_from_bytes", spec.stream_from_bytes, 0));
  return VnniPackPlan(spec, GetVnniPackKernels());
}

absl::Status VnniPackPlan::CheckArgs(const AnyTensorView& w,
                                     const void* packed) const {
  const bool nk = spec_.order == WeightOrder::kNK;
  const VnniLayout& layout = spec_.layout;
  QUERN_RETURN_IF_ERROR(CheckDType(kOp, "w", w.dtype(), layout.dtype()));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "rank of w", w.rank(), 2, "a matrix"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, nk ? "n" : "k", w.extent(0),
                                   nk ? layout.n() : layout.k(), "the layout"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, nk ? "k" : "n", w.extent(1),
                                   nk ? layout.k() : layout.n(), "the layout"));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "w", w, layout.dtype(), {w.extent(0), w.extent(1)}));
  QUERN_RETURN_IF_ERROR(CheckElementsApart(kOp, "w", w));
  if (packed == nullptr) {
    return InvalidArgument(kOp, "packed is null; need memory");
  }
  const uintptr_t past =
      reinterpret_cast<uintptr_t>(packed) % VnniLayout::kAlignment;
  if (past != 0) {
    return InvalidArgument(kOp, "packed is ", past,
                           " bytes past a cache line; need alignment ",
                           VnniLayout::kAlignment);
  }
  return CheckApart(
      kOp, "w", w, "packed",
      DenseVector(static_cast<const uint8_t*>(packed), layout.bytes()));
}

PackedView VnniPackPlan::Pack(const AnyTensorView& w, void* packed,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(w, packed));
  const VnniPackKernels::Direction& kernel = DirectionOf(spec_, kernels_);
  const VnniPackKernels::Pack pack =
      layout().bytes() >= spec_.stream_from_bytes ? kernel.stream : kernel.pack;
  ForEachTile(spec_, static_cast<const uint8_t*>(w.data()), w.RowStride(),
              static_cast<uint8_t*>(packed), executor, pack);
  return {layout(), packed};
}

void VnniPackPlan::Unpack(const PackedView& packed, const AnyTensorView& w,
                          Executor& executor) const noexcept {
  QUERN_DCHECK(packed.layout() == layout() && w.writable());
  QUERN_DCHECK_OK(CheckArgs(w, packed.data()));
  ForEachTile(spec_, static_cast<uint8_t*>(w.mutable_data()), w.RowStride(),
              packed.data(), executor, DirectionOf(spec_, kernels_).unpack);
}

}  // namespace quern
