#ifndef QUERN_GEMM_KERNELS_CODES_KERNELS_H_
#define QUERN_GEMM_KERNELS_CODES_KERNELS_H_

// Private seam between gemm/schedule/codes_product.cc (plain C++) and the SIMD
// file.

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/kernel_set.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/weights/code_type.h"

namespace quern {

// The bytes of bf16(code) of the 128 codes of e4m3fn that are not negative. A
// normal number's bits move, and its exponent is 120 more; the NaN gets the
// upper exponent bits as well.
struct E4M3Tables {
  uint8_t lower[128];
  uint8_t upper[128];
};
constexpr E4M3Tables MakeE4M3Tables() {
  E4M3Tables tables = {};
  for (int code = 0; code < 128; ++code) {
    tables.lower[code] = static_cast<uint8_t>(code << 4);
    tables.upper[code] = static_cast<uint8_t>(0x3C + (code >> 4));
  }
  tables.upper[127] = 0x7F;
  // 0 to 7 units of 2^-9, which are no normal numbers there.
  constexpr uint16_t kSmall[8] = {0,      0x3B00, 0x3B80, 0x3BC0,
                                  0x3C00, 0x3C20, 0x3C40, 0x3C60};
  for (int code = 0; code < 8; ++code) {
    tables.lower[code] = static_cast<uint8_t>(kSmall[code] & 0xFF);
    tables.upper[code] = static_cast<uint8_t>(kSmall[code] >> 8);
  }
  return tables;
}
alignas(64) inline constexpr E4M3Tables kE4M3Tables = MakeE4M3Tables();

// bf16(q - 8), twice, as many as a table of 512 bits has; and its bytes apart.
struct I4Tables {
  uint16_t words[32];
  uint8_t lower[16];
  uint8_t upper[16];
};
constexpr I4Tables MakeI4Tables() {
  constexpr uint16_t kWords[16] = {
      0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
      0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
  I4Tables tables = {};
  for (int q = 0; q < 16; ++q) {
    tables.words[q] = tables.words[q + 16] = kWords[q];
    tables.lower[q] = static_cast<uint8_t>(kWords[q] & 0xFF);
    tables.upper[q] = static_cast<uint8_t>(kWords[q] >> 8);
  }
  return tables;
}
alignas(64) inline constexpr I4Tables kI4Tables = MakeI4Tables();

// to[r, p, c] (+)=
//     scales[p, c] * (unit * sums[r, p, c] - zeros[p, c] * row_sums[r])
// for r < rows, p < panels, c < 16.
struct ScaleArgs {
  const float* sums;  // dense
  float unit;         // a power of two
  size_t rows;
  size_t panels;
  const float* scales;
  const float* zeros;   // or null
  size_t panel_stride;  // of scales and zeros
  const float* row_sums;
  size_t row_sums_stride;
  float* to;
  size_t to_stride;
  bool add;  // to what `to` holds; else it is overwritten
};

struct CodesKernels {
  const char* target;
  TileSums sums;  // in all tiles of both tables
  // `lines` of packing/code_layout.h to 2 (8 bits) or 4 times as many lines of
  // pairs of bf16, or to what `decoded` reads.
  void (*decode)(const uint8_t* codes, size_t lines, uint8_t* to);
  // Tiles that decode on their way, for up to fused.max_rows rows: TileArgs::b
  // and steps are of codes. None, max_rows = 0, where decoding once is faster.
  TileTable fused;
  // What LinearKernels::elements_per_line must be for `fused`: 1 for pairs of
  // bf16, 2 for f32.
  size_t fused_elements;
  // With more rows than this it is faster to decode once, and to have larger
  // tiles.
  size_t fused_most_rows;
  // Where `decode` writes something else than pairs of bf16: the tiles that
  // multiply it by rows of f32. None, max_rows = 0, elsewhere.
  TileTable decoded;
  // Consecutive k of one step of the tiles that read what `decode` has written.
  int64_t decoded_k;
  // What the sums of all these tiles must be multiplied by, a power of two.
  float unit;
  void (*scale)(const ScaleArgs&);
  // The sum of a[k], in one order for all.
  float (*sum)(const void* a, size_t k);
};

// Chosen by the codes and by a: f32, bf16 or f16.
using CodesKernelSet = KernelSet<CodesKernels, CodeType, DType>;

// All sets, best first.
absl::Span<const CodesKernelSet> CodesKernelSets();
// The kernels of the first that runs on this CPU.
CodesKernels GetCodesKernels(CodeType codes, DType a);

}  // namespace quern

#endif  // QUERN_GEMM_KERNELS_CODES_KERNELS_H_
