#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/parallel_rows.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/ops/conv/conv_kernels.h"
#include "quern/ops/conv/conv_parts.h"
#include "quern/ops/conv/padded_image.h"
#include "quern/ops/conv/patch_rows.h"

namespace quern {

using conv_internal::DenseRows;
using conv_internal::DirectScratch;
using conv_internal::ExtentsOf;
using conv_internal::IsMatrix;
using conv_internal::kBlock;
using conv_internal::kPatchRows;
using conv_internal::LayOutDirect;
using conv_internal::LayOutPatches;
using conv_internal::PatchScratch;

void ConvPlan::ExecutePatches(const AnyTensorView& in, const AnyTensorView& out,
                              Workspace workspace, Executor& executor) const {
  const ConvExtents e = ExtentsOf(out);
  const int64_t rows = out.extent(0) * e.depth * e.height * e.width;
  const int64_t most = std::min(rows, kPatchRows);
  const int64_t n = linear_->n(), k = linear_->k();
  const auto element = static_cast<int64_t>(SizeOf(spec_.dtype));
  const PatchScratch scratch =
      LayOutPatches(workspace, most * k * element, most * n * element);
  const bool read_in_place = ExtentsOf(in) == spec_.kernel && IsMatrix(in);
  const bool write_in_place = e == ConvExtents() && IsMatrix(out);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    LinearArgs args;
    if (read_in_place) {
      args.a = DenseRows(in, first, count, k);
    } else {
      GatherPatches(in, spec_.kernel, e, first, count, scratch.patches,
                    executor);
      args.a =
          AnyTensorView(spec_.dtype, static_cast<const void*>(scratch.patches),
                        2, {count, k}, {k, 1});
    }
    args.c = write_in_place ? DenseRows(out, first, count, n)
                            : AnyTensorView(spec_.dtype,
                                            static_cast<void*>(scratch.outputs),
                                            2, {count, n}, {n, 1});
    linear_->Execute(args, workspace, executor);
    if (!write_in_place) {
      ScatterChannels(scratch.outputs, first, count, out, executor);
    }
  }
}

void ConvPlan::ExecuteDirect(const AnyTensorView& in, const AnyTensorView& out,
                             Workspace workspace, Executor& executor) const {
  const ConvSpec& s = spec_;
  const ConvExtents e = ExtentsOf(out);
  const PaddedImage image(s.kernel, s.stride, s.padding, s.dilation, e);
  int64_t row_elements = 0;
  image.RowElements(&row_elements);
  const int64_t plane = image.height() * row_elements;
  const int64_t channel = image.depth() * plane;
  const DirectScratch scratch =
      LayOutDirect(workspace, s.kernel.width, s.in_channels * channel);
  for (int64_t dx = 0; dx < s.kernel.width; ++dx) {
    scratch.offsets[dx] = static_cast<size_t>(image.Offset(dx));
  }
  const int64_t of_group = s.out_channels / s.groups;
  const int64_t group_channels = s.in_channels / s.groups;
  const int64_t blocks = DivCeil(of_group, kBlock);
  int64_t taps = 0;
  conv_internal::WeightsOfOutput(s, &taps);
  const auto element = static_cast<int64_t>(SizeOf(s.dtype));
  const auto step = [&](int d, int64_t i) {
    return i == 0 ? 0 : i * out.stride(d) * element;
  };
  // Units are rows within blocks of channels: consecutive ones share weights.
  const int64_t rows = e.depth * e.height;
  // Says only how to divide the work: a cost of 2^63 or more is the most.
  int64_t cost = 0;
  if (!CheckedMul(taps, e.width, &cost)) {
    cost = std::numeric_limits<int64_t>::max();
  }
  for (int64_t b = 0; b < in.extent(0); ++b) {
    image.Fill(in, b, blocks_, scratch.image, executor);
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t group = unit / rows / blocks;
        const int64_t in_group = unit / rows % blocks * kBlock;
        const int64_t o = group * of_group + in_group;
        const int64_t z = unit % rows / e.height, y = unit % e.height;
        ConvRow row = {};
        row.in = scratch.image + group * group_channels * channel +
                 z * s.stride.depth * plane +
                 y * s.stride.height * row_elements;
        row.channel_stride = static_cast<size_t>(channel);
        row.depth_stride = static_cast<size_t>(s.dilation.depth * plane);
        row.height_stride =
            static_cast<size_t>(s.dilation.height * row_elements);
        row.channels = static_cast<size_t>(group_channels);
        row.depth = static_cast<size_t>(s.kernel.depth);
        row.height = static_cast<size_t>(s.kernel.height);
        row.width_taps = static_cast<size_t>(s.kernel.width);
        row.offsets = scratch.offsets;
        row.weights = weights_.data<const float>() + o * taps;
        row.bias = bias_.data<const float>() + o;
        row.out = static_cast<char*>(out.mutable_data()) + step(0, b) +
                  step(1, o) + step(2, z) + step(3, y);
        row.out_stride =
            s.out_channels > 1 ? static_cast<size_t>(out.stride(1)) : 0;
        row.width = static_cast<size_t>(e.width);
        kernels_.run[std::min(kBlock, of_group - in_group) - 1](row);
      }
    };
    ParallelRowRanges(executor, s.groups * blocks * rows, cost, 4, run);
  }
}

}  // namespace quern
