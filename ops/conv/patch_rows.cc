#include "quern/ops/conv/patch_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/threads/parallel_rows.h"

namespace quern {
namespace {

// The position of patch r.
struct Position {
  Position(int64_t r, const ConvExtents& out) {
    x = r % out.width, r /= out.width;
    y = r % out.height, r /= out.height;
    z = r % out.depth, b = r / out.depth;
  }
  int64_t b, z, y, x;
};

// Offset of [i, j, k, l, m] in elements. The stride of a dimension of extent 1
// may be any number, and its only index is 0.
int64_t OffsetOf(const AnyTensorView& v, int64_t i, int64_t j, int64_t k,
                 int64_t l, int64_t m) {
  const int64_t at[] = {i, j, k, l, m};
  int64_t offset = 0;
  for (int d = 0; d < 5; ++d) {
    if (at[d] != 0) offset += at[d] * v.stride(d);
  }
  return offset;
}

// One tile: 16 outputs of a channel are a cache line of f32, and 32 channels
// two of a row.
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileChannels = 32;

// out[o * out_stride + x] = rows[x * channels + o]
template <typename Code>
void Transpose(const Code* rows, int64_t channels, int64_t columns, Code* out,
               int64_t out_stride) {
  for (int64_t o = 0; o < channels; o += kTileChannels) {
    const int64_t last = std::min(o + kTileChannels, channels);
    for (int64_t x = 0; x < columns; x += kTileColumns) {
      const int64_t end = std::min(x + kTileColumns, columns);
      for (int64_t i = o; i < last; ++i) {
        for (int64_t j = x; j < end; ++j) {
          out[i * out_stride + j] = rows[j * channels + i];
        }
      }
    }
  }
}

template <typename Code>
void ScatterCodes(const Code* rows, int64_t first, int64_t count,
                  const AnyTensorView& out, Executor& executor) {
  const ConvExtents extents = {out.extent(2), out.extent(3), out.extent(4)};
  const int64_t channels = out.extent(1), width = extents.width;
  const int64_t channel_stride = channels > 1 ? out.stride(1) : 0;
  auto* const data = static_cast<Code*>(out.mutable_data());
  // Rows of outputs; the first and the last may be parts.
  const int64_t from = first / width;
  const int64_t lines = DivCeil(first + count, width) - from;
  ParallelRowRanges(
      executor, lines, 2 * channels * width, 4,
      [&](int64_t begin, int64_t end) {
        for (int64_t line = begin; line < end; ++line) {
          const int64_t r = std::max(first, (from + line) * width);
          const int64_t last =
              std::min(first + count, (from + line + 1) * width);
          const Position p(r, extents);
          Transpose(rows + (r - first) * channels, channels, last - r,
                    data + OffsetOf(out, p.b, 0, p.z, p.y, p.x),
                    channel_stride);
        }
      });
}

}  // namespace

void GatherPatches(const AnyTensorView& in, const ConvExtents& kernel,
                   const ConvExtents& out, int64_t first, int64_t count,
                   void* rows, Executor& executor) {
  const auto element = static_cast<int64_t>(SizeOf(in.dtype()));
  const int64_t channels = in.extent(1);
  const int64_t line = kernel.width * element;
  const int64_t row_bytes = channels * kernel.depth * kernel.height * line;
  const auto* const data = static_cast<const char*>(in.data());
  ParallelRowRanges(
      executor, count, 2 * row_bytes / element, 4,
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          char* to = static_cast<char*>(rows) + i * row_bytes;
          const Position p(first + i, out);
          for (int64_t c = 0; c < channels; ++c) {
            for (int64_t dz = 0; dz < kernel.depth; ++dz) {
              for (int64_t dy = 0; dy < kernel.height; ++dy) {
                const int64_t at =
                    OffsetOf(in, p.b, c, p.z * kernel.depth + dz,
                             p.y * kernel.height + dy, p.x * kernel.width);
                std::memcpy(to, data + at * element, static_cast<size_t>(line));
                to += line;
              }
            }
          }
        }
      });
}

void ScatterChannels(const void* rows, int64_t first, int64_t count,
                     const AnyTensorView& out, Executor& executor) {
  if (SizeOf(out.dtype()) == 4) {
    ScatterCodes(static_cast<const uint32_t*>(rows), first, count, out,
                 executor);
  } else {
    ScatterCodes(static_cast<const uint16_t*>(rows), first, count, out,
                 executor);
  }
}

}  // namespace quern
