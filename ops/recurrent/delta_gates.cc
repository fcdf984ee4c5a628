#include "quern/ops/recurrent/delta_gates.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/parallel_rows.h"
#include "quern/ops/recurrent/delta_rule_kernels.h"
#include "quern/ops/recurrent/state_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "delta_gates";
// Work of a pair of gates, in elements touched: three of the C library's
// functions.
constexpr int64_t kGateCost = 64;

double Softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

}  // namespace

DeltaGatesPlan::DeltaGatesPlan(const DeltaGatesSpec& spec)
    : spec_(spec),
      target_(GetDeltaRuleKernels(DType::kF32).target),
      blocks_(GetRowBlockKernels(spec.dtype, spec.beta_dtype)),
      logs_(GetRowBlockKernels(spec.log_dtype, spec.log_dtype)),
      biases_(GetRowBlockKernels(spec.bias_dtype, spec.bias_dtype)) {}

absl::StatusOr<DeltaGatesPlan> DeltaGatesPlan::Create(
    const DeltaGatesSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "heads", spec.heads, 1, int64_t{1} << 24));
  const std::pair<absl::string_view, DType> dtypes[] = {
      {"a and b", spec.dtype},
      {"a_log", spec.log_dtype},
      {"dt_bias", spec.bias_dtype},
      {"beta", spec.beta_dtype}};
  for (const auto& [name, dtype] : dtypes) {
    QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, name, dtype, kFloatDTypes));
  }
  return DeltaGatesPlan(spec);
}

absl::Status DeltaGatesPlan::CheckArgs(const DeltaGatesArgs& args) const {
  const DeltaGatesSpec& s = spec_;
  const int64_t tokens = args.a.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a", args.a, s.dtype, {kAnyExtent, s.heads}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "b", args.b, s.dtype, {tokens, s.heads}));
  for (const AnyTensorView* view : {&args.a, &args.b}) {
    if (tokens > 1 && view->stride(0) < s.heads) {
      return InvalidArgument(kOp, "rows of ", view == &args.a ? "a" : "b",
                             " are ", view->stride(0), " apart; need ", s.heads,
                             " or more");
    }
  }
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a_log", args.a_log, s.log_dtype, {s.heads}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "dt_bias", args.dt_bias, s.bias_dtype, {s.heads}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "g", args.g, DType::kF32, {tokens, s.heads}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "beta", args.beta, s.beta_dtype, {tokens, s.heads}));
  const std::pair<absl::string_view, const AnyTensorView*> inputs[] = {
      {"a", &args.a},
      {"b", &args.b},
      {"a_log", &args.a_log},
      {"dt_bias", &args.dt_bias}};
  for (const auto& [name, view] : inputs) {
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "g", args.g));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "beta", args.beta));
  }
  return CheckApart(kOp, "g", args.g, "beta", args.beta);
}

void DeltaGatesPlan::Execute(const DeltaGatesArgs& args,
                             Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const int64_t heads = spec_.heads;
  const auto run = [&](int64_t begin, int64_t end) {
    alignas(64) float a[kRowBlock];
    alignas(64) float b[kRowBlock];
    alignas(64) float a_log[kRowBlock];
    alignas(64) float bias[kRowBlock];
    for (int64_t h = 0; h < heads; h += static_cast<int64_t>(kRowBlock)) {
      const int64_t count =
          std::min(static_cast<int64_t>(kRowBlock), heads - h);
      const auto n = static_cast<size_t>(count);
      logs_.load(ElementAt(args.a_log, h), n, a_log);
      biases_.load(ElementAt(args.dt_bias, h), n, bias);
      for (int64_t t = begin; t < end; ++t) {
        blocks_.load(ElementAt(args.a, t, h), n, a);
        blocks_.load(ElementAt(args.b, t, h), n, b);
        auto* const g = reinterpret_cast<float*>(ElementAt(args.g, t, h));
        for (size_t i = 0; i < n; ++i) {
          const double delta = Softplus(double{a[i]} + double{bias[i]});
          g[i] = static_cast<float>(-std::exp(double{a_log[i]}) * delta);
          b[i] = static_cast<float>(1 / (1 + std::exp(-double{b[i]})));
        }
        blocks_.store(b, n, /*stream=*/false, ElementAt(args.beta, t, h));
      }
    }
  };
  ParallelRowRanges(executor, args.a.extent(0), kGateCost * heads, 4, run);
}

}  // namespace quern
