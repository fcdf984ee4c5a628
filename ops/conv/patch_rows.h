#ifndef QUERN_OPS_CONV_PATCH_ROWS_H_
#define QUERN_OPS_CONV_PATCH_ROWS_H_

// Private: the rows of a product of patches, and where its results go. Patch r
// is at position (z, y, x) of input b, with r = ((b * depth + z) * height + y)
// * width + x over the extents `out`.

#include <cstdint>

#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/conv/conv_extents.h"

namespace quern {

// rows[r - first, (c, dz, dy, dx)] = in[b, c, z * kernel.depth + dz,
// y * kernel.height + dy, x * kernel.width + dx], for `count` patches.
void GatherPatches(const AnyTensorView& in, const ConvExtents& kernel,
                   const ConvExtents& out, int64_t first, int64_t count,
                   void* rows, Executor& executor);

// out[b, o, z, y, x] = rows[r - first, o], for `count` patches.
void ScatterChannels(const void* rows, int64_t first, int64_t count,
                     const AnyTensorView& out, Executor& executor);

}  // namespace quern

#endif  // QUERN_OPS_CONV_PATCH_ROWS_H_
