#include "quern/packing/code_pack.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/packing/check_rows.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/code_pack_kernels.h"

namespace quern {
namespace {

constexpr char kOp[] = "code_pack";

}  // namespace

CodePackPlan::CodePackPlan(const CodePackSpec& spec) : spec_(spec) {
  const CodePackKernels kernels = GetCodePackKernels();
  target_ = kernels.target;
  pack_ = spec.layout.bits() == 4 ? kernels.bytes_of_4 : kernels.bytes_of_8;
}

absl::StatusOr<CodePackPlan> CodePackPlan::Create(const CodePackSpec& spec) {
  const CodeLayout& layout = spec.layout;
  if (layout.n() == 0) {
    return InvalidArgument(kOp,
                           "layout is empty; need one from CodeLayout::Create");
  }
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "fill", spec.fill, 0, (1 << layout.bits()) - 1));
  return CodePackPlan(spec);
}

absl::Status CodePackPlan::CheckArgs(absl::Span<const uint8_t* const> rows,
                                     const uint8_t* packed) const {
  return CheckRowsToPack(kOp, rows, spec_.layout.n(), "n of the layout",
                         packed);
}

void CodePackPlan::Pack(absl::Span<const uint8_t* const> rows, uint8_t* packed,
                        Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(rows, packed));
  constexpr int64_t kCols = CodeLayout::kPanelCols;
  const CodeLayout& layout = spec_.layout;
  executor.ParallelFor(layout.panels(), [&](int64_t panel, int /*worker*/) {
    CodePackTask task;
    task.rows = rows.data() + panel * kCols;
    task.cols =
        static_cast<size_t>(std::min(kCols, layout.n() - panel * kCols));
    task.k = static_cast<size_t>(layout.k());
    task.fill = spec_.fill;
    task.to = packed + panel * layout.panel_bytes();
    pack_(task);
  });
}

}  // namespace quern
