#include "quern/ops/activation/act_and_mul.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/prefetch.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_blocks.h"

namespace quern {
namespace {

absl::Status CheckSparsity(absl::string_view op, const ActAndMulSpec& spec) {
  if (spec.sparsity == 0.0) return absl::OkStatus();
  if (!(0.0 < spec.sparsity && spec.sparsity <= 1.0)) {
    return InvalidArgument(op, "sparsity=", spec.sparsity,
                           "; need 0 <= sparsity <= 1");
  }
  if ((spec.activation != Activation::kGelu &&
       spec.activation != Activation::kGeluTanh) ||
      spec.order == GateOrder::kInterleaved) {
    return Unimplemented(op, "sparsity=", spec.sparsity,
                         "; need gelu or gelu_tanh, not interleaved");
  }
  return absl::OkStatus();
}

// The kernel that works in one pass, if there is one.
ActivationKernels::Gated GatedOf(const ActAndMulSpec& spec,
                                 const ActivationKernels& kernels) {
  if (spec.sparsity != 0.0 || spec.x_dtype != spec.out_dtype) return nullptr;
  if (spec.x_dtype == DType::kBF16) return kernels.gated_bf16;
  return spec.x_dtype == DType::kF32 ? kernels.gated_f32 : nullptr;
}

}  // namespace

absl::string_view ActAndMulName(const ActAndMulSpec& spec) {
  const bool gate_first = spec.order == GateOrder::kGateFirst;
  switch (spec.activation) {
    case Activation::kSilu:
      if (spec.order == GateOrder::kGateSecond) return "mul_and_silu";
      return gate_first ? "silu_and_mul" : "act_and_mul";
    case Activation::kGelu:
    case Activation::kGeluTanh:
      if (!gate_first) return "act_and_mul";
      return spec.sparsity == 0.0 ? "gelu_and_mul" : "gelu_and_mul_sparse";
    case Activation::kFatrelu:
      return gate_first ? "fatrelu_and_mul" : "act_and_mul";
    case Activation::kSwigluOai:
      return "swigluoai_and_mul";
    default:
      return "act_and_mul";
  }
}

double NormalQuantile(double p) {
  if (p <= 0.0) return -std::numeric_limits<double>::infinity();
  if (p >= 1.0) return std::numeric_limits<double>::infinity();
  // Bisection of [-40, 40] always converges; 200 steps reach the last bit.
  double low = -40.0, high = 40.0;
  for (int i = 0; i < 200; ++i) {
    const double middle = 0.5 * (low + high);
    const double below = 0.5 * std::erfc(-middle / std::sqrt(2.0));
    (below < p ? low : high) = middle;
  }
  return high;
}

ActAndMulPlan::ActAndMulPlan(const ActAndMulSpec& spec)
    : spec_(spec),
      kernels_(GetActivationKernels(spec.activation)),
      blocks_(GetRowBlockKernels(spec.x_dtype, spec.out_dtype)),
      gated_(GatedOf(spec, kernels_)),
      // Streaming stores take 9.0 ms for 4096 rows of 14336, ordinary stores
      // 10.1 to 11.0 ms (2 threads, Zen 4, 2026). Streaming does not help the
      // kernels that work in blocks.
      stream_from_bytes_(StreamFrom(spec.stores, gated_ != nullptr)),
      deviations_(spec.sparsity == 0.0
                      ? 0.0f
                      : static_cast<float>(NormalQuantile(spec.sparsity))) {}

absl::StatusOr<ActAndMulPlan> ActAndMulPlan::Create(const ActAndMulSpec& spec) {
  const absl::string_view op = ActAndMulName(spec);
  QUERN_RETURN_IF_ERROR(CheckRange(op, "d", spec.d, 1, kMaxRowElements));
  QUERN_RETURN_IF_ERROR(
      CheckActivationParams(op, spec.activation, spec.params));
  QUERN_RETURN_IF_ERROR(CheckSparsity(op, spec));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(op, "x_dtype", spec.x_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(op, "out_dtype", spec.out_dtype, kFloatDTypes));
  return ActAndMulPlan(spec);
}

absl::Status ActAndMulPlan::CheckArgs(const AnyTensorView& x,
                                      const AnyTensorView& out) const {
  const absl::string_view op = ActAndMulName(spec_);
  QUERN_RETURN_IF_ERROR(
      CheckInput(op, "x", x, spec_.x_dtype, {kAnyExtent, 2 * spec_.d}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(op, "out", out, spec_.out_dtype, {x.extent(0), spec_.d}));
  if (spec_.order == GateOrder::kInterleaved) {
    return CheckApart(op, "x", x, "out", out);
  }
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(
      op, "the first half of x", ColumnSlice(x, 0, spec_.d), "out", out));
  return CheckInPlaceOrApart(op, "the second half of x",
                             ColumnSlice(x, spec_.d, spec_.d), "out", out);
}

absl::Status ActAndMulPlan::CheckSplitArgs(const AnyTensorView& gate,
                                           const AnyTensorView& up,
                                           const AnyTensorView& out) const {
  const absl::string_view op = ActAndMulName(spec_);
  QUERN_RETURN_IF_ERROR(
      CheckInput(op, "gate", gate, spec_.x_dtype, {kAnyExtent, spec_.d}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(op, "up", up, spec_.x_dtype, {gate.extent(0), spec_.d}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(op, "out", out, spec_.out_dtype, {gate.extent(0), spec_.d}));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(op, "gate", gate, "out", out));
  return CheckInPlaceOrApart(op, "up", up, "out", out);
}

// Computes the mean first and the squared deviations in a second pass, because
// the one-pass formula can cancel.
float ActAndMulPlan::Cutoff(const char* gate) const {
  const size_t n = static_cast<size_t>(spec_.d);
  const size_t size = SizeOf(spec_.x_dtype);
  alignas(64) float block[kRowBlock];
  const auto total = [&](const auto& of_block) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i += kRowBlock) {
      const size_t count = std::min(kRowBlock, n - i);
      blocks_.load(gate + i * size, count, block);
      sum += double{of_block(count)};
    }
    return sum / static_cast<double>(n);
  };
  const float mean = static_cast<float>(
      total([&](size_t count) { return kernels_.sum(block, count); }));
  const double variance = total(
      [&](size_t count) { return kernels_.sum_squares(block, mean, count); });
  return mean + static_cast<float>(std::sqrt(variance)) * deviations_;
}

// How far ahead of the computed element the input is prefetched. kAhead is in
// bytes and applies to blocks: it covers the latency of memory at half of a
// core's bandwidth. The one-pass kernel fetches whole rows at least
// kRowAheadElements ahead, because 4 KiB after the gate half of a short row
// lies its up half.
constexpr size_t kAhead = 4096;
constexpr int64_t kRowAheadElements = 4096;

// Largest range of a row that one worker takes when there are few rows; then
// the cost of one element, in elements that are merely copied (Zen 4, 2026).
constexpr int64_t kRange = 8192;
constexpr int64_t kCostInOnePass = 4;
constexpr int64_t kCostOfGelu = 8;
constexpr int64_t kCostInBlocks = 10;

// Elements in one range of a row of n: a multiple of the block, so that every
// worker gets the same number of ranges.
int64_t RangeOf(int64_t rows, int64_t n, int64_t workers) {
  constexpr int64_t kBlock = static_cast<int64_t>(kRowBlock);
  if (rows >= 4 * workers) return n;
  const int64_t ranges = workers * DivCeil(n, workers * kRange);
  return std::min(n, kBlock * DivCeil(n, ranges * kBlock));
}

// Computes out = activation(gate) * up. A null `up` means that gate and up are
// interleaved in `gate`.
void ActAndMulPlan::Run(const AnyTensorView& gate, const AnyTensorView* up,
                        const AnyTensorView& out, Executor& executor) const {
  const RowsOf gates(gate), ups(up != nullptr ? *up : gate), outs(out);
  const size_t n = static_cast<size_t>(spec_.d);
  const size_t x_size = SizeOf(spec_.x_dtype);
  const size_t out_size = SizeOf(spec_.out_dtype);
  const int64_t bytes = static_cast<int64_t>(2 * x_size + out_size) * spec_.d;
  const bool in_one_pass = gated_ != nullptr && up != nullptr;
  // Streaming wins only where out is apart from the inputs: in place, the
  // stores need not read the cache lines of out.
  const bool apart = outs[0] != gates[0] && outs[0] != ups[0];
  const bool stream =
      bytes >= kMinStreamRowBytes &&
      gate.extent(0) * bytes >= stream_from_bytes_ &&
      (spec_.stores == Stores::kStream || (in_one_pass && apart));
  // With few rows, several workers share each row as ranges. Sparsity needs the
  // statistics of the whole row, so rows are then not divided.
  const size_t range =
      spec_.sparsity == 0.0
          ? static_cast<size_t>(
                RangeOf(gate.extent(0), spec_.d, executor.num_workers()))
          : n;
  const int64_t ranges = DivCeil(spec_.d, static_cast<int64_t>(range));
  const int64_t ahead = ranges * DivCeil(kRowAheadElements, spec_.d);
  const size_t in_step = up == nullptr ? 2 * x_size : x_size;
  const int64_t cost = !in_one_pass                            ? kCostInBlocks
                       : spec_.activation == Activation::kGelu ? kCostOfGelu
                                                               : kCostInOnePass;
  ParallelRows(
      executor, gate.extent(0) * ranges, cost * static_cast<int64_t>(range),
      [&](int64_t begin, int64_t end) {
        alignas(64) float g[kRowBlock];
        alignas(64) float u[kRowBlock];
        for (int64_t task = begin; task < end; ++task) {
          const int64_t t = task / ranges;
          const size_t from = static_cast<size_t>(task % ranges) * range;
          const char* const gate_row = gates[t] + from * in_step;
          const char* const up_row = ups[t] + from * in_step;
          char* const out_row = outs[t] + from * out_size;
          if (in_one_pass) {
            // Nothing is prefetched after the last row, because needless
            // prefetches take L2 bandwidth.
            const bool fetch = task + ahead < end;
            const int64_t next = (task + ahead) / ranges;
            gated_(gate_row, up_row, std::min(range, n - from),
                   fetch ? gates[next] + from * x_size : nullptr,
                   fetch ? ups[next] + from * x_size : nullptr, stream,
                   out_row);
            continue;
          }
          const float cutoff = spec_.sparsity == 0.0 ? 0.0f : Cutoff(gate_row);
          ForEachBlock(std::min(range, n - from), out_row, out_size, stream,
                       [&](size_t i, size_t count, bool stream_block) {
                         if (up == nullptr) {
                           blocks_.load_pairs(gate_row + 2 * i * x_size, count,
                                              g, u);
                         } else {
                           blocks_.load(gate_row + i * x_size, count, g);
                           blocks_.load(up_row + i * x_size, count, u);
                         }
                         // Near the end of a row, the prefetch runs into the
                         // next row, which usually follows it in memory.
                         const size_t ahead = i * in_step + kAhead;
                         for (size_t b = 0; b < count * in_step; b += 64) {
                           PrefetchL2Behind(gate_row, ahead + b);
                           if (up == nullptr) continue;
                           PrefetchL2Behind(up_row, ahead + b);
                         }
                         if (spec_.sparsity != 0.0) {
                           kernels_.excess(cutoff, count, g);
                         }
                         kernels_.apply(spec_.params, count, g, u);
                         blocks_.mul_store(g, u, count, stream_block,
                                           out_row + i * out_size);
                       });
        }
        if (stream) blocks_.flush();
      });
}

void ActAndMulPlan::Execute(const AnyTensorView& x, const AnyTensorView& out,
                            Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, out));
  if (spec_.order == GateOrder::kInterleaved) {
    Run(x, nullptr, out, executor);
    return;
  }
  const AnyTensorView first = ColumnSlice(x, 0, spec_.d);
  const AnyTensorView second = ColumnSlice(x, spec_.d, spec_.d);
  if (spec_.order == GateOrder::kGateFirst) {
    Run(first, &second, out, executor);
  } else {
    Run(second, &first, out, executor);
  }
}

void ActAndMulPlan::ExecuteSplit(const AnyTensorView& gate,
                                 const AnyTensorView& up,
                                 const AnyTensorView& out,
                                 Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckSplitArgs(gate, up, out));
  Run(gate, &up, out, executor);
}

}  // namespace quern
