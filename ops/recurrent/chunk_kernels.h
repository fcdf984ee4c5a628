#ifndef QUERN_OPS_RECURRENT_CHUNK_KERNELS_H_
#define QUERN_OPS_RECURRENT_CHUNK_KERNELS_H_

// Private seam between the forms of the recurrences that take a chunk of tokens
// at a time (plain C++) and the SIMD translation units.
//
// Matrices are f32, rows `stride` floats apart, and begin at a cache line. A
// stride is a multiple of kChunkLine, so kernels compute whole vectors: what
// follows the columns of a row up to a multiple of kChunkLine is computed on
// and not used.

#include <cstddef>
#include <cstdint>

#include "quern/core/math_util.h"

namespace quern {

// Floats of a cache line, a multiple of every vector's length.
inline constexpr int64_t kChunkLine = 16;

// Stride of rows of n floats: an odd number of cache lines, because rows that
// lie a power of two apart would share a few sets of L1.
inline int64_t ChunkStride(int64_t n) {
  return (DivCeil(n, kChunkLine) | 1) * kChunkLine;
}

// c[i, n] = scale[i] c[i, n] + sum over k of a[i * a_row + k * a_k] b[k, n],
// for 0 <= i < rows, k < depth, n < columns; the sum alone without scale. Every
// sum is one chain over k, so its bits do not depend on rows or columns.
struct ChunkProduct {
  const float* a;
  size_t a_row, a_k;
  const float* b;
  size_t b_stride;
  const float* scale;  // or null
  float* c;
  size_t c_stride;
  size_t rows, depth, columns;
};

// A product with the lower triangle of a[n, n], which is read nowhere else.
struct ChunkTriangle {
  const float* a;
  size_t a_stride;
  const float* b;
  size_t b_stride;
  float* c;
  size_t c_stride;
  size_t n, columns;
};

// A chunk of n tokens with one decay a token. With P(j, i) the product of
// a[j + 1] to a[i]:
//   key_scores[i, j]   *= -beta[i] P(j, i)   for j < i
//   query_scores[i, j] *= P(j, i)            for j <= i
//   from_start[i] = a[0] P(0, i)
//   to_end[i] = P(i, n - 1)
// key_scores may be null, and beta is not read then. The vectors have room for
// n rounded up to kChunkLine.
struct ChunkDecays {
  size_t n;
  const float* a;
  const float* beta;
  float* key_scores;
  float* query_scores;
  size_t stride;
  float* from_start;
  float* to_end;
};

// Tokens of a sub-block with a decay a channel: pairs of tokens in it are
// multiplied one by one, and all earlier tokens by a matrix product.
inline constexpr int64_t kChannelBlock = 8;

// A chunk of n tokens with a decay a channel, a[n, dk]. P(j, i) is the product
// of rows j + 1 to i of a, channel by channel.
//   key_scores[i, j] = -beta[i] (k[i] . (P(j, i) k[j]))   for j < i
//   query_scores[i, j] = q[i] . (P(j, i) k[j])            for j <= i
//   q[i] *= a[0] P(0, i)
//   from_start[i] = -beta[i] a[0] P(0, i) k[i]
//   k[i] *= P(i, n - 1), once all above are done
//   kept = a[0] P(0, n - 1)
// All matrices but the scores have rows of dk floats at `stride`.
struct ChannelChunk {
  size_t n, dk, stride, score_stride;
  const float* a;
  const float* beta;
  float* q;
  float* k;
  float* key_scores;
  float* query_scores;
  float* from_start;
  float* kept;
  float* transposed;         // scratch: dk rows at transposed_stride
  size_t transposed_stride;  // room for n rounded up to kChunkLine
  float* block;              // scratch: 3 kChannelBlock rows
};

struct ChunkKernels {
  const char* target;
  void (*product)(const ChunkProduct& p);
  // c[i] += sum over j < i of a[i, j] c[j], for i from 0 to n - 1; b is c.
  void (*solve)(const ChunkTriangle& t);
  // c[i] += sum over j <= i of a[i, j] b[j]
  void (*add_lower)(const ChunkTriangle& t);
  // t[j, i] = x[i, j], for rows and columns rounded up to kChunkLine.
  void (*transpose)(const float* x, size_t x_stride, size_t rows,
                    size_t columns, float* t, size_t t_stride);
  // a[i] = exp(min(g[i], 0))
  void (*decay)(const float* g, size_t n, float* a);
  // x[i] *= scale, divided by sqrt(sum of squares of the row + eps) if l2. What
  // follows the n floats of a row is zero up to a whole vector.
  void (*normalize)(float* x, size_t stride, size_t rows, size_t n, bool l2,
                    float eps, float scale);
  void (*weigh)(const ChunkDecays& d);
  // to[i] = s[i] x[i] for each row
  void (*scale_rows)(const float* x, size_t stride, size_t rows, size_t n,
                     const float* s, float* to);
  void (*channel_scores)(const ChannelChunk& chunk);
};

// The kernels of the best instruction set this CPU supports.
ChunkKernels GetChunkKernels();

// The kernel on ChannelChunk of the best instruction set this CPU supports.
void (*GetChannelChunkKernel())(const ChannelChunk& chunk);

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_CHUNK_KERNELS_H_
