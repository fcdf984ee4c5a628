#include "quern/quant/convert.h"

#include <algorithm>
#include <cstring>

#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"

namespace quern {
namespace {

constexpr absl::string_view kOp = "convert";

// Elements per task: large enough that a task outweighs its start by far, small
// enough to share 1 Mi elements among 16 workers.
constexpr int64_t kTaskElements = 64 << 10;

// Elements that pass through a buffer between two kernels: 4 KiB of f32 stay in
// the first-level cache beside what they came from.
constexpr int64_t kBlockElements = 1024;

// Rows shorter than this are not streamed: their partial cache lines at both
// ends would cost more than is won.
constexpr int64_t kMinStreamRowBytes = 4096;

NarrowFormat FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return kNarrowF16;
    case DType::kF8E4M3:
      return kNarrowE4M3;
    case DType::kF8E5M2:
      return kNarrowE5M2;
    default:
      return kNarrowBF16;
  }
}

uint32_t ClampBits(DType to, OverflowMode overflow) {
  switch (to) {
    case DType::kF16:
      return quant_internal::ClampF32Bits<Float16>(overflow);
    case DType::kF8E4M3:
      return quant_internal::ClampF32Bits<Float8E4M3>(overflow);
    case DType::kF8E5M2:
      return quant_internal::ClampF32Bits<Float8E5M2>(overflow);
    default:
      return quant_internal::ClampF32Bits<BFloat16>(overflow);
  }
}

absl::Status CheckFloat(absl::string_view field, DType dtype) {
  return CheckDTypeIn(
      kOp, field, dtype,
      {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3, DType::kF8E5M2});
}

int64_t Rows(const AnyTensorView& view) {
  return view.rank() == 2 ? view.extent(0) : 1;
}
int64_t Cols(const AnyTensorView& view) { return view.extent(view.rank() - 1); }
// Elements from row to row; 0 for a vector, which is a single row.
int64_t RowStride(const AnyTensorView& view) {
  return view.rank() == 2 ? view.RowStride() : 0;
}

}  // namespace

// One Execute.
struct ConvertPlan::Job {
  const uint8_t* in;
  uint8_t* out;
  int64_t in_stride_bytes;
  int64_t out_stride_bytes;
  const float* bias;  // null: none
  float scale;
  bool scaled;
  bool stream;
};

absl::StatusOr<ConvertPlan> ConvertPlan::Create(const ConvertSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckFloat("from", spec.from));
  QUERN_RETURN_IF_ERROR(CheckFloat("to", spec.to));
  return ConvertPlan(spec, spec.stores == Stores::kAuto ? LastLevelBytes() : 0);
}

ConvertPlan::ConvertPlan(const ConvertSpec& spec, int64_t last_level_bytes)
    : spec_(spec),
      kernels_(GetConvertKernels()),
      last_level_bytes_(last_level_bytes),
      clamp_bits_(ClampBits(spec.to, spec.overflow)) {}

absl::Status ConvertPlan::CheckArgs(const AnyTensorView& in,
                                    const AnyTensorView& out,
                                    const ConvertTerms& terms) const {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "rank", in.rank(), 1, 2));
  const auto rank = static_cast<size_t>(in.rank());
  const int64_t any[] = {kAnyExtent, kAnyExtent};
  const int64_t shape[] = {in.extent(0), rank == 2 ? in.extent(1) : 0};
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "in", in, spec_.from, absl::MakeConstSpan(any, rank)));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", out, spec_.to, absl::MakeConstSpan(shape, rank)));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "in", in, "out", out));
  if (terms.bias.extent(0) == 0) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "bias", terms.bias, DType::kF32, {Cols(in)}));
  return CheckApart(kOp, "bias", terms.bias, "out", out);
}

// Columns [col, col + cols) of one row: up to three kernels one after the
// other, of which the last writes to `out` and the others to a buffer.
void ConvertPlan::Row(const Job& job, int64_t row, int64_t col,
                      int64_t cols) const {
  const bool decode = spec_.from != DType::kF32;
  const bool encode = spec_.to != DType::kF32;
  const bool biased = job.bias != nullptr;
  const int64_t in_bytes = static_cast<int64_t>(SizeOf(spec_.from));
  const int64_t out_bytes = static_cast<int64_t>(SizeOf(spec_.to));
  const uint8_t* in = job.in + row * job.in_stride_bytes + col * in_bytes;
  uint8_t* out = job.out + row * job.out_stride_bytes + col * out_bytes;

  const int kernels = (decode ? 1 : 0) + (job.scaled ? 1 : 0) +
                      (biased ? 1 : 0) + (encode ? 1 : 0);
  if (kernels == 0) {
    std::memmove(out, in, static_cast<size_t>(cols * out_bytes));
    return;
  }
  alignas(64) float buffer[kBlockElements];
  const int64_t block = kernels == 1 ? cols : kBlockElements;
  for (int64_t begin = 0; begin < cols; begin += block) {
    const size_t n = static_cast<size_t>(std::min(block, cols - begin));
    const void* from = in + begin * in_bytes;
    void* const to = out + begin * out_bytes;
    int left = kernels;
    // The destination of the next f32 kernel.
    const auto next = [&]() -> float* {
      return --left == 0 ? static_cast<float*>(to) : buffer;
    };
    const float* values = static_cast<const float*>(from);
    if (decode) {
      float* const dst = next();
      kernels_.decode[FormatOf(spec_.from)](from, n, dst,
                                            left == 0 && job.stream);
      values = dst;
    }
    if (job.scaled) {
      float* const dst = next();
      kernels_.scale(values, job.scale, n, dst, left == 0 && job.stream);
      values = dst;
    }
    if (biased) {
      float* const dst = next();
      kernels_.add(values, job.bias + col + begin, n, dst,
                   left == 0 && job.stream);
      values = dst;
    }
    if (encode) {
      kernels_.encode[FormatOf(spec_.to)](values, n, clamp_bits_, to,
                                          job.stream);
    }
  }
}

void ConvertPlan::Execute(const AnyTensorView& in, const AnyTensorView& out,
                          Executor& executor,
                          const ConvertTerms& terms) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(in, out, terms));
  int64_t rows = Rows(in), cols = Cols(in);
  if (rows == 0 || cols == 0) return;
  const int64_t out_bytes = static_cast<int64_t>(SizeOf(spec_.to));
  Job job = {};
  job.in = static_cast<const uint8_t*>(in.data());
  job.out = static_cast<uint8_t*>(out.mutable_data());
  job.bias = terms.bias.extent(0) != 0 ? terms.bias.data() : nullptr;
  job.scale = terms.scale;
  job.scaled = !(terms.scale == 1.0f);
  if (RowStride(in) == cols && RowStride(out) == cols && job.bias == nullptr) {
    cols *= rows;  // no gaps, no columns: one long row
    rows = 1;
  }
  job.in_stride_bytes =
      RowStride(in) * static_cast<int64_t>(SizeOf(spec_.from));
  job.out_stride_bytes = RowStride(out) * out_bytes;
  job.stream = spec_.stores == Stores::kStream ||
               (spec_.stores == Stores::kAuto &&
                cols * out_bytes >= kMinStreamRowBytes &&
                rows * cols * out_bytes > last_level_bytes_);

  // Long rows are cut, short ones grouped.
  const int64_t tasks_per_row = DivCeil(cols, kTaskElements);
  if (tasks_per_row > 1) {
    executor.ParallelFor(rows * tasks_per_row, [&](int64_t task, int) {
      const int64_t col = task % tasks_per_row * kTaskElements;
      Row(job, task / tasks_per_row, col, std::min(kTaskElements, cols - col));
    });
  } else {
    const int64_t group = std::max<int64_t>(1, kTaskElements / cols);
    executor.ParallelFor(DivCeil(rows, group), [&](int64_t task, int) {
      const int64_t end = std::min(rows, (task + 1) * group);
      for (int64_t row = task * group; row < end; ++row) Row(job, row, 0, cols);
    });
  }
}

}  // namespace quern
