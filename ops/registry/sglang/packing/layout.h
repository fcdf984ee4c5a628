#ifndef QUERN_OPS_REGISTRY_SGLANG_PACKING_LAYOUT_H_
#define QUERN_OPS_REGISTRY_SGLANG_PACKING_LAYOUT_H_

// The packed weights of SGLang's CPU kernels, so that what was packed for them
// can be compared byte for byte. For our own kernels use vnni_layout.h.
//
// Weights w[n, k] are cut into blocks of 32 columns n; if n % 32 == 16 the last
// block has 16. A block of `cols` columns starts at column n0:
//
//   bf16, f16   block[k/2][cols][2] = w[n0 + c, 2 * j + i]    two bytes each
//   f8e4m3      the same, one byte each
//   i8          block[k/4][32][4] = w[n0 + c, 4 * j + i], and behind it
//               int32 compensation[32], little-endian
//   u8          two 4-bit codes in a byte, the even k in the low half:
//               block[k/2][16][2] = code(n0 + c, 2 * j + i)
//                                   | code(n0 + 16 + c, 2 * j + i) << 4
//
// Blocks follow each other without padding, header or alignment. SGLang also
// takes experts, [e, n, k]: they follow each other in the same way, so expert e
// is packed at e * bytes().

#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/dtype.h"

namespace quern {

class SglangLayout {
 public:
  static constexpr int64_t kBlockCols = 32;

  // The layout of nothing: 0 x 0, 0 bytes. A spec starts with it.
  SglangLayout() = default;

  // `k` counts weights, also where two share a byte (u8). Unimplemented for
  // other types and for n < 16, which SGLang does not pack but keeps as f32
  // [k, n]; InvalidArgument unless n % 16 == 0 (i8 and u8: n % 32 == 0),
  // k % 32 == 0, k >= 32 and the packed size fits in int64_t.
  static absl::StatusOr<SglangLayout> Create(DType dtype, int64_t k, int64_t n);

  DType dtype() const { return dtype_; }
  int64_t k() const { return k_; }
  int64_t n() const { return n_; }
  int64_t blocks() const { return n_ / kBlockCols + (n_ % kBlockCols != 0); }
  // 32, or 16 for the last block.
  int64_t cols(int64_t block) const;
  // Bytes of a row of the plain matrix, whose elements are of dtype().
  int64_t plain_row_bytes() const;
  // Bytes of packed data for each column: the plain ones, and for i8 four more.
  int64_t col_bytes() const;
  int64_t block_offset(int64_t block) const {
    return block * kBlockCols * col_bytes();
  }
  // Only i8 has compensation.
  bool has_compensation() const { return dtype_ == DType::kI8; }
  // Bytes from the start of a block to its compensation.
  int64_t compensation_offset() const { return kBlockCols * k_; }
  int64_t bytes() const { return n_ * col_bytes(); }

  friend bool operator==(const SglangLayout& x, const SglangLayout& y) {
    return x.dtype_ == y.dtype_ && x.k_ == y.k_ && x.n_ == y.n_;
  }
  friend bool operator!=(const SglangLayout& x, const SglangLayout& y) {
    return !(x == y);
  }

 private:
  SglangLayout(DType dtype, int64_t k, int64_t n)
      : dtype_(dtype), k_(k), n_(n) {}

  DType dtype_ = DType::kBF16;
  int64_t k_ = 0;
  int64_t n_ = 0;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PACKING_LAYOUT_H_
