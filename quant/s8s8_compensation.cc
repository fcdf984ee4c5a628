#include "quern/quant/s8s8_compensation.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr absl::string_view kOp = "s8s8_compensation";

// Columns per task of [k, n]: four cache lines of each row, so that the
// hardware prefetcher finds a neighbour to fetch.
constexpr int64_t kTaskCols = 256;

// Bytes per task where a task may have any number of rows or panels.
constexpr int64_t kTaskBytes = 64 << 10;

absl::Status CheckComp(VectorView<int32_t> comp, int64_t n) {
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "size of comp", comp.extent(0), n, "spec.n"));
  if (n > 0 && comp.data() == nullptr) {
    return InvalidArgument(kOp, "comp is null; need n=", n, " int32");
  }
  return absl::OkStatus();
}

// What lies `count` strides away still has an address.
absl::Status CheckSpan(absl::string_view field, int64_t count, int64_t stride) {
  int64_t bytes = 0;
  if (CheckedMul(count, stride, &bytes)) return absl::OkStatus();
  return InvalidArgument(kOp, field, "=", stride, "; need ", count,
                         " of them within 2^63 bytes");
}

absl::Status CheckWeights(MatrixView<const int8_t> b, int64_t rows,
                          int64_t cols) {
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "rows of b", b.extent(0), rows, "spec has"));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "columns of b", b.extent(1), cols, "spec has"));
  if (rows > 1) {
    QUERN_RETURN_IF_ERROR(CheckSpan("row stride of b", rows, b.stride(0)));
    QUERN_RETURN_IF_ERROR(CheckElementsApart(kOp, "b", b));
  }
  if (rows > 0 && cols > 0 && b.data() == nullptr) {
    return InvalidArgument(kOp, "b is null; need ", rows, " rows of ", cols);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<S8S8CompensationPlan> S8S8CompensationPlan::Create(
    const S8S8CompensationSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "k", spec.k, 0, kMaxK));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "n", spec.n, 0));
  return S8S8CompensationPlan(spec);
}

absl::Status S8S8CompensationPlan::CheckKN(MatrixView<const int8_t> b,
                                           VectorView<int32_t> comp) const {
  QUERN_RETURN_IF_ERROR(CheckWeights(b, spec_.k, spec_.n));
  return CheckComp(comp, spec_.n);
}

absl::Status S8S8CompensationPlan::CheckNK(MatrixView<const int8_t> b,
                                           VectorView<int32_t> comp) const {
  QUERN_RETURN_IF_ERROR(CheckWeights(b, spec_.n, spec_.k));
  return CheckComp(comp, spec_.n);
}

absl::Status S8S8CompensationPlan::CheckPanels(const Vnni4Panels& b,
                                               VectorView<int32_t> comp) const {
  // Lines of more than 2^40 bytes would overflow the sizes below.
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "panel_cols", b.panel_cols, 1, int64_t{1} << 40));
  if (spec_.n > b.panel_cols) {
    QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "panel_stride", b.panel_stride,
                                       quads() * b.panel_cols * 4));
    QUERN_RETURN_IF_ERROR(CheckSpan(
        "panel_stride", DivCeil(spec_.n, b.panel_cols), b.panel_stride));
  }
  if (spec_.n > 0 && spec_.k > 0 && b.data == nullptr) {
    return InvalidArgument(kOp, "panels are null");
  }
  return CheckComp(comp, spec_.n);
}

void S8S8CompensationPlan::FromKN(MatrixView<const int8_t> b,
                                  VectorView<int32_t> comp,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckKN(b, comp));
  const int64_t stride = b.RowStride();
  executor.ParallelFor(DivCeil(spec_.n, kTaskCols), [&](int64_t task, int) {
    const int64_t begin = task * kTaskCols;
    kernels_.columns(b.data() + begin, static_cast<size_t>(stride),
                     static_cast<size_t>(spec_.k),
                     static_cast<size_t>(std::min(kTaskCols, spec_.n - begin)),
                     comp.data() + begin);
  });
}

void S8S8CompensationPlan::FromNK(MatrixView<const int8_t> b,
                                  VectorView<int32_t> comp,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckNK(b, comp));
  const int64_t stride = b.RowStride();
  const int64_t rows = DivCeil(kTaskBytes, std::max<int64_t>(spec_.k, 1));
  executor.ParallelFor(DivCeil(spec_.n, rows), [&](int64_t task, int) {
    const int64_t begin = task * rows;
    kernels_.rows(b.data() + begin * stride, static_cast<size_t>(stride),
                  static_cast<size_t>(std::min(rows, spec_.n - begin)),
                  static_cast<size_t>(spec_.k), comp.data() + begin);
  });
}

void S8S8CompensationPlan::FromPanels(const Vnni4Panels& b,
                                      VectorView<int32_t> comp,
                                      Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckPanels(b, comp));
  const int64_t line_bytes = b.panel_cols * 4;
  const int64_t panels = DivCeil(spec_.n, b.panel_cols);
  const int64_t group =
      DivCeil(kTaskBytes, std::max<int64_t>(quads() * line_bytes, 1));
  executor.ParallelFor(DivCeil(panels, group), [&](int64_t task, int) {
    const int64_t end = std::min(panels, (task + 1) * group);
    for (int64_t panel = task * group; panel < end; ++panel) {
      const int64_t begin = panel * b.panel_cols;
      kernels_.panel(
          b.data + panel * b.panel_stride, static_cast<size_t>(line_bytes),
          static_cast<size_t>(quads()),
          static_cast<size_t>(std::min(b.panel_cols, spec_.n - begin)),
          comp.data() + begin);
    }
  });
}

}  // namespace quern
