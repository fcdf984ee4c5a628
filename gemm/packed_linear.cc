#include "gemm/packed_linear.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/aligned_buffer.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/linear_kernels.h"
#include "gemm/packed_product.h"
#include "gemm/tile_loop.h"
#include "packing/vnni_layout.h"
#include "packing/vnni_pack.h"

namespace quern {
namespace {

constexpr char kOp[] = "packed_linear";
LinearKernels KernelsOf(const PackedLinearSpec& spec) {
  switch (spec.b) {
    case DType::kBF16:
      return GetLinearKernelsBF16(spec.a, spec.c);
    case DType::kF16:
      return GetLinearKernelsF16(spec.a, spec.c);
    default:
      return GetLinearKernelsF32(spec.a, spec.c);
  }
}

// From row to row. The stride of a single row means nothing.
int64_t RowBytes(const AnyTensorView& x) {
  return x.extent(0) <= 1
             ? 0
             : x.stride(0) * static_cast<int64_t>(SizeOf(x.dtype()));
}

PackedProduct<float> ProductOf(const VnniLayout& layout,
                               const LinearKernels& kernels, int64_t rows) {
  return {layout, kernels.table,
          static_cast<int64_t>(kernels.elements_per_line), rows};
}

}  // namespace

absl::StatusOr<PackedLinearPlan> PackedLinearPlan::Create(
    const PackedLinearSpec& spec, const AnyTensorView& weights,
    const AnyTensorView& bias, Executor& executor) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "n", spec.n, 1, kMaxExtent));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "k", spec.k, 1, kMaxExtent));
  const DType types[] = {DType::kF32, DType::kBF16, DType::kF16};
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "a", spec.a, types));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "b", spec.b, types));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "c", spec.c, types));
  const bool nk = spec.order == WeightOrder::kNK;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weights", weights, spec.b,
                 {nk ? spec.n : spec.k, nk ? spec.k : spec.n}));
  if (bias.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "bias", bias, DType::kF32, {spec.n}));
  }

  QUERN_ASSIGN_OR_RETURN(const VnniLayout layout,
                         VnniLayout::Create(spec.b, spec.k, spec.n));
  PackedLinearPlan plan(spec, layout, KernelsOf(spec));
  QUERN_ASSIGN_OR_RETURN(plan.packed_, AlignedBuffer::Create(layout.bytes()));
  VnniPackSpec pack_spec;
  pack_spec.layout = layout;
  pack_spec.order = spec.order;
  QUERN_ASSIGN_OR_RETURN(const VnniPackPlan pack,
                         VnniPackPlan::Create(pack_spec));
  pack.Pack(weights, plan.packed_.data(), executor);
  if (bias.rank() != 0) {
    QUERN_ASSIGN_OR_RETURN(plan.bias_, AlignedBuffer::Create(spec.n * 4));
    std::memcpy(plan.bias_.data(), bias.data(), plan.bias_.bytes());
  }
  return plan;
}

std::string PackedLinearPlan::Explain(int64_t m) const {
  const RowTiles tiles(std::max<int64_t>(1, std::min(m, kBlockRows)),
                       kernels_.table);
  const int64_t rows = tiles.max_size();
  return absl::StrCat("packed ", kernels_.target, " ", kernels_.arithmetic,
                      ", tiles of ", rows, " x ",
                      kernels_.table.panels[static_cast<size_t>(rows)] *
                          VnniLayout::kPanelCols);
}

int64_t PackedLinearPlan::WorkspaceBytes(int64_t max_m, int max_workers) const {
  return MostWorkspaceBytes(max_m, [&](int64_t rows) {
    WorkspaceLayout layout;
    ProductOf(layout_, kernels_, rows).LayOut(layout, max_workers);
    return layout.bytes();
  });
}

absl::Status PackedLinearPlan::CheckArgs(const AnyTensorView& a,
                                         const AnyTensorView& c) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a", a, spec_.a, {kAnyExtent, spec_.k}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "c", c, spec_.c, {a.extent(0), spec_.n}));
  return CheckApart(kOp, "a", a, "c", c);
}

void PackedLinearPlan::Execute(const AnyTensorView& a, const AnyTensorView& c,
                               Workspace workspace,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(a, c));
  const auto a_size = static_cast<int64_t>(SizeOf(spec_.a));
  const auto c_size = static_cast<int64_t>(SizeOf(spec_.c));
  const int64_t a_row_bytes = RowBytes(a), c_row_bytes = RowBytes(c);
  ForEachRowBlock(a.extent(0), [&](int64_t first, int64_t rows) {
    const auto* a_data =
        static_cast<const uint8_t*>(a.data()) + first * a_row_bytes;
    auto* c_data =
        static_cast<uint8_t*>(c.mutable_data()) + first * c_row_bytes;
    const PackedProduct<float> product = ProductOf(layout_, kernels_, rows);
    Workspace block = workspace;
    const auto scratch = product.LayOut(block, executor.num_workers());
    const auto pack = [&](int64_t row, uint32_t* to, int /*worker*/) {
      const uint8_t* from = a_data + row * a_row_bytes;
      for (int64_t k = 0; k < spec_.k; k += product.chunk_k()) {
        kernels_.pack_row(
            from + k * a_size,
            static_cast<size_t>(std::min(product.chunk_k(), spec_.k - k)), to);
        to += product.a_chunk();
      }
    };
    const auto finish = [&](const SumsBlock<float>& block) {
      FinishArgs args;
      args.sums = block.sums;
      args.sums_stride = static_cast<size_t>(block.stride);
      args.bias = bias_.empty() ? nullptr : bias_.data<float>() + block.col;
      args.rows = static_cast<size_t>(block.rows);
      args.cols = static_cast<size_t>(block.cols);
      args.c = c_data + block.row * c_row_bytes + block.col * c_size;
      args.c_row_bytes = static_cast<ptrdiff_t>(c_row_bytes);
      kernels_.finish(args);
    };
    product.Run(packed_.data(), scratch, executor, pack, finish);
  });
}

}  // namespace quern
