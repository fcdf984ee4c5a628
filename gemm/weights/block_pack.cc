#include "quern/gemm/weights/block_pack.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/weights/block_pack_kernels.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"
#include "quern/packing/check_rows.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

constexpr char kOp[] = "block_pack";

// Records of one task: 8192 k of 16 columns.
constexpr int64_t kTaskRecords = 32;

}  // namespace

absl::StatusOr<BlockPackPlan> BlockPackPlan::Create(const BlockPackSpec& spec) {
  const auto number = static_cast<uint32_t>(spec.format);
  const BlockFormatInfo* info = FindBlockFormat(number);
  if (info == nullptr) {
    return InvalidArgument(kOp, "format=", number,
                           "; need one of quant/block_format.h");
  }
  if (spec.k % info->values != 0) {
    return InvalidArgument(kOp, "k=", spec.k, "; blocks of ", info->name,
                           " need a multiple of ", info->values);
  }
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "stream_from_bytes", spec.stream_from_bytes, 0));
  QUERN_ASSIGN_OR_RETURN(
      const BlockPanels layout,
      BlockPanels::Create(BlockTraitsOf(spec.format).codes, spec.k, spec.n));
  return BlockPackPlan(spec, layout,
                       BlockPanels::kRecordK / info->values * info->bytes);
}

absl::Status BlockPackPlan::CheckArgs(absl::Span<const uint8_t* const> rows,
                                      const uint8_t* packed) const {
  return CheckRowsToPack(kOp, rows, layout_.n(), "n of the spec", packed);
}

void BlockPackPlan::Pack(absl::Span<const uint8_t* const> rows, uint8_t* packed,
                         Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(rows, packed));
  constexpr int64_t kCols = BlockPanels::kPanelCols;
  const BlockPackKernels::Pack pack = layout_.bytes() >= spec_.stream_from_bytes
                                          ? kernels_.stream
                                          : kernels_.pack;
  const int64_t stretches = DivCeil(layout_.records(), kTaskRecords);
  executor.ParallelFor(
      layout_.panels() * stretches, [&](int64_t number, int /*worker*/) {
        const int64_t panel = number / stretches;
        const int64_t record = number % stretches * kTaskRecords;
        const int64_t cols = std::min(kCols, layout_.n() - panel * kCols);
        const uint8_t* first[kCols] = {};
        for (int64_t c = 0; c < cols; ++c) {
          first[c] = rows[static_cast<size_t>(panel * kCols + c)] +
                     record * record_bytes_;
        }
        BlockPackTask task;
        task.rows = first;
        task.cols = static_cast<size_t>(cols);
        task.record_bytes = static_cast<size_t>(record_bytes_);
        task.blocks = static_cast<size_t>(
            std::min(kTaskRecords * BlockPanels::kRecordBlocks,
                     layout_.blocks() - record * BlockPanels::kRecordBlocks));
        task.to = packed + panel * layout_.panel_bytes() +
                  record * layout_.record_bytes();
        pack(task);
      });
}

}  // namespace quern
