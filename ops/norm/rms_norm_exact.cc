// RmsNormPlan::ExecuteAdd with NormSum::kExact.

#include <cstddef>
#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/ops/norm/inverse_rms.h"
#include "quern/ops/norm/rms_norm.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/row_blocks.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

template <typename T>
double SumOfSquares(const void* x, const void* residual, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const double h = double{ToF32(static_cast<const T*>(x)[i])} +
                     double{ToF32(static_cast<const T*>(residual)[i])};
    sum += h * h;
  }
  return sum;
}

}  // namespace

// The sum is computed twice, because the rounded one may replace x or residual.
void RmsNormPlan::AddExact(const RmsNormArgs& args, Executor& executor) const {
  const RowsOf xs(args.x), residuals(args.residual);
  const RowsOf residual_out(args.residual_out), out(args.out);
  const size_t n = static_cast<size_t>(spec_.hidden);
  const size_t span = static_cast<size_t>(spec_.SpanColumns());
  const auto inverse_rms = [&](const void* x, const void* residual) {
    return InverseRms(kernels_.sum_squares_of_sum(x, residual, span),
                      spec_.SpanColumns(), spec_.eps, [&] {
                        return spec_.x_dtype == DType::kBF16
                                   ? SumOfSquares<BFloat16>(x, residual, span)
                                   : SumOfSquares<Float16>(x, residual, span);
                      });
  };
  ParallelRows(executor, args.x.extent(0), 4 * spec_.hidden,
               [&](int64_t begin, int64_t end) {
                 RmsNormScale scale = ScaleOf(args.weight, args.x.extent(0),
                                              /*may_stream=*/false);
                 for (int64_t i = begin; i < end; ++i) {
                   scale.scale = inverse_rms(xs[i], residuals[i]);
                   kernels_.add_scale(xs[i], residuals[i], scale,
                                      residual_out[i], out[i], n);
                 }
               });
}

}  // namespace quern
