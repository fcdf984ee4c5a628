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
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "gemm/epilogue.h"
#include "gemm/epilogue_kernels.h"
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

PackedProduct<float> ProductOf(const PackedLinearSpec& spec,
                               const VnniLayout& layout,
                               const LinearKernels& kernels, int64_t rows) {
  return {layout, kernels.table,
          static_cast<int64_t>(kernels.elements_per_line), rows,
          PartsOf(spec.activation)};
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
  QUERN_RETURN_IF_ERROR(CheckActivation(kOp, spec.activation, spec.n));
  const bool nk = spec.order == WeightOrder::kNK;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weights", weights, spec.b,
                 {nk ? spec.n : spec.k, nk ? spec.k : spec.n}));
  if (bias.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "bias", bias, DType::kF32, {spec.n}));
  }

  const int64_t parts = PartsOf(spec.activation);
  QUERN_ASSIGN_OR_RETURN(const VnniLayout layout,
                         VnniLayout::Create(spec.b, spec.k, spec.n / parts));
  PackedLinearPlan plan(spec, layout, KernelsOf(spec));
  int64_t bytes = 0;
  if (!CheckedMul(parts, layout.bytes(), &bytes)) {
    return InvalidArgument(kOp, "n=", spec.n, ", k=", spec.k,
                           "; the packed weights have more than 2^63 bytes");
  }
  QUERN_ASSIGN_OR_RETURN(plan.packed_, AlignedBuffer::Create(bytes));
  VnniPackSpec pack_spec;
  pack_spec.layout = layout;
  pack_spec.order = spec.order;
  QUERN_ASSIGN_OR_RETURN(const VnniPackPlan pack,
                         VnniPackPlan::Create(pack_spec));
  for (int64_t part = 0; part < parts; ++part) {
    pack.Pack(PartOf(weights, nk ? 0 : 1, part, layout.n()),
              plan.packed_.data() + part * layout.bytes(), executor);
  }
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
  return MostWorkspaceBytes(
      max_m, max_workers, [&](int64_t rows, int64_t workers) {
        WorkspaceLayout layout;
        ProductOf(spec_, layout_, kernels_, rows).LayOut(layout, workers);
        return layout.bytes();
      });
}

absl::Status PackedLinearPlan::CheckArgs(const AnyTensorView& a,
                                         const AnyTensorView& c,
                                         const AnyTensorView& residual) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a", a, spec_.a, {kAnyExtent, spec_.k}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "c", c, spec_.c,
                  {a.extent(0), ColumnsOfC(spec_.activation, spec_.n)}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "a", a, "c", c));
  return CheckResidual(kOp, residual, c);
}

void PackedLinearPlan::Execute(const AnyTensorView& a, const AnyTensorView& c,
                               const AnyTensorView& residual,
                               Workspace workspace,
                               Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(a, c, residual));
  const auto a_size = static_cast<int64_t>(SizeOf(spec_.a));
  const int64_t a_row_bytes = RowBytes(a);
  ForEachRowBlock(a.extent(0), [&](int64_t first, int64_t rows) {
    const auto* a_data =
        static_cast<const uint8_t*>(a.data()) + first * a_row_bytes;
    const PackedProduct<float> product =
        ProductOf(spec_, layout_, kernels_, rows);
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
      FinishArgs args = {};
      args.sums_stride = static_cast<size_t>(block.stride);
      const float* bias = bias_.empty() ? nullptr : bias_.data<float>();
      const EpilogueRows to = RowsOfC(block.rows, block.cols, first + block.row,
                                      block.col, c, residual);
      if (spec_.activation == LinearActivation::kNone &&
          to.residual == nullptr) {
        args.sums = block.sums;
        args.bias = bias == nullptr ? nullptr : bias + block.col;
        args.rows = static_cast<size_t>(block.rows);
        args.cols = static_cast<size_t>(block.cols);
        args.c = to.c;
        args.c_row_bytes = static_cast<ptrdiff_t>(to.c_row_bytes);
        kernels_.finish(args);
        return;
      }
      args.rows = 1;
      ApplyEpilogue(
          epilogue_, PartsOf(spec_.activation), to,
          [&](int64_t part, int64_t row, int64_t col, int64_t cols, float* v) {
            args.sums = block.sums + part * block.part_stride +
                        row * block.stride + col;
            args.bias = bias == nullptr
                            ? nullptr
                            : bias + part * layout_.n() + block.col + col;
            args.cols = static_cast<size_t>(cols);
            args.c = v;
            finish_f32_(args);
          });
    };
    product.Run(packed_.data(), scratch, executor, pack, finish);
  });
}

}  // namespace quern
