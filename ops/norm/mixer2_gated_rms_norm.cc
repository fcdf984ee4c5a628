#include "quern/ops/norm/mixer2_gated_rms_norm.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_blocks.h"

namespace quern {
namespace {

constexpr char kOp[] = "mixer2_gated_rms_norm";

}  // namespace

Mixer2GatedRmsNormPlan::Mixer2GatedRmsNormPlan(
    const Mixer2GatedRmsNormSpec& spec, int rank, int size)
    : spec_(spec),
      rank_(rank),
      size_(size),
      columns_(spec.hidden / size),
      kernels_(GetRmsNormGatedKernels(NormGate::kSilu)),
      blocks_(GetRowBlockKernels(spec.dtype, spec.dtype)),
      weight_blocks_(GetRowBlockKernels(spec.weight_dtype, spec.dtype)) {}

absl::StatusOr<Mixer2GatedRmsNormPlan> Mixer2GatedRmsNormPlan::Create(
    const Mixer2GatedRmsNormSpec& spec, const Communicator& communicator) {
  const int size = communicator.size();
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "hidden", spec.hidden, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "groups", spec.groups, 1, spec.hidden));
  if (spec.hidden % spec.groups != 0) {
    return InvalidArgument(kOp, "groups=", spec.groups,
                           "; need a divisor of hidden=", spec.hidden);
  }
  if (spec.hidden % size != 0) {
    return InvalidArgument(kOp, "hidden=", spec.hidden,
                           "; need a multiple of the ", size, " ranks");
  }
  QUERN_RETURN_IF_ERROR(CheckNotNegative(kOp, "eps", spec.eps, "finite eps"));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "weight_dtype", spec.weight_dtype, kFloatDTypes));
  Mixer2GatedRmsNormPlan plan(spec, communicator.rank(), size);
  if (spec.groups % size != 0) return plan;
  RmsNormGatedSpec local;
  local.hidden = plan.columns_;
  local.group = spec.hidden / spec.groups;
  local.eps = spec.eps;
  local.dtype = spec.dtype;
  local.weight_dtype = spec.weight_dtype;
  QUERN_ASSIGN_OR_RETURN(plan.local_, RmsNormGatedPlan::Create(local));
  return plan;
}

// Lays out the workspace: one sum of squares for each row and group.
template <typename Allocator>
float* Mixer2GatedRmsNormPlan::LayOut(Allocator& a, int64_t rows) const {
  if (local_.has_value()) return nullptr;
  return a.template Allocate<float>("sums of squares", rows * spec_.groups);
}

absl::StatusOr<int64_t> Mixer2GatedRmsNormPlan::WorkspaceBytes(
    int64_t max_rows, int max_workers) const {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_rows", max_rows, 0));
  max_rows = std::min(max_rows, INT64_MAX / spec_.groups);
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_workers", max_workers, 1));
  WorkspaceLayout layout;
  LayOut(layout, max_rows);
  if (!layout.overflow()) return layout.bytes();
  return absl::ResourceExhaustedError(
      absl::StrCat(kOp, ": a workspace of 2^63 bytes or more"));
}

absl::Status Mixer2GatedRmsNormPlan::CheckArgs(
    const Mixer2GatedRmsNormArgs& args) const {
  const auto& [x, z, out, weight] = args;
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", x, spec_.dtype, {kAnyExtent, columns_}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "z", z, spec_.dtype, {x.extent(0), columns_}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", out, spec_.dtype, {x.extent(0), columns_}));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "x", x, "out", out));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "z", z, "out", out));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weight", weight, spec_.weight_dtype, {columns_}));
  return CheckApart(kOp, "weight", weight, "out", out);
}

// Calls fn(group, begin, count) with the range of this rank's columns that each
// group covers, leaving out groups without any.
template <typename Fn>
void Mixer2GatedRmsNormPlan::ForEachPiece(const Fn& fn) const {
  const int64_t group = spec_.hidden / spec_.groups, first = rank_ * columns_;
  for (int64_t i = 0; i < columns_;) {
    const int64_t g = (first + i) / group;
    const int64_t end = std::min((g + 1) * group - first, columns_);
    fn(g, i, end - i);
    i = end;
  }
}

void Mixer2GatedRmsNormPlan::Execute(const Mixer2GatedRmsNormArgs& args,
                                     Workspace workspace,
                                     Communicator& communicator,
                                     Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const AnyTensorView &x = args.x, &z = args.z, &out = args.out;
  QUERN_DCHECK(communicator.rank() == rank_ && communicator.size() == size_);
  if (local_.has_value())
    return local_->Execute(x, z, args.weight, out, executor);
  const int64_t rows = x.extent(0);
  if (rows == 0) return;
  float* const sums = LayOut(workspace, rows);
  const RowsOf xs(x), zs(z), outs(out);
  const char* const weights = static_cast<const char*>(args.weight.data());
  const size_t size = SizeOf(spec_.dtype);
  const size_t weight_size = SizeOf(spec_.weight_dtype);
  // Calls fn(i, n, h) for each block of columns [begin, begin + count) of row
  // t: h holds n gated values that start at column i.
  const auto for_blocks = [&](int64_t t, int64_t begin, int64_t count,
                              const auto& fn) {
    alignas(64) float h[kRowBlock];
    alignas(64) float gate[kRowBlock];
    const auto end = static_cast<size_t>(begin + count);
    for (auto i = static_cast<size_t>(begin); i < end; i += kRowBlock) {
      const size_t n = std::min(kRowBlock, end - i);
      blocks_.load(xs[t] + i * size, n, h);
      blocks_.load(zs[t] + i * size, n, gate);
      kernels_.gate(gate, n, h);
      fn(i, n, h);
    }
  };
  ParallelRows(executor, rows, 3 * columns_, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* const row = sums + t * spec_.groups;
      std::fill_n(row, spec_.groups, 0.0f);
      ForEachPiece([&](int64_t g, int64_t at, int64_t count) {
        for_blocks(t, at, count, [&](size_t, size_t n, float* h) {
          row[g] += kernels_.sum_squares(h, n);
        });
      });
    }
  });
  communicator.AllReduceSum(DenseMatrix(sums, rows, spec_.groups));
  const auto group = static_cast<float>(spec_.hidden / spec_.groups);
  ParallelRows(executor, rows, 4 * columns_, [&](int64_t begin, int64_t end) {
    alignas(64) float w[kRowBlock];
    for (int64_t t = begin; t < end; ++t) {
      ForEachPiece([&](int64_t g, int64_t at, int64_t count) {
        // No rank has the elements of all others to sum them again.
        const float sum = sums[t * spec_.groups + g];
        const float inverse = std::isinf(sum)
                                  ? std::numeric_limits<float>::quiet_NaN()
                                  : 1.0f / std::sqrt(sum / group + spec_.eps);
        for_blocks(t, at, count, [&](size_t i, size_t n, float* h) {
          kernels_.scale(inverse, n, h);
          weight_blocks_.load(weights + i * weight_size, n, w);
          blocks_.mul_store(h, w, n, false, outs[t] + i * size);
        });
      });
    }
  });
}

}  // namespace quern
