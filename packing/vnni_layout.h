#ifndef QUERN_PACKING_VNNI_LAYOUT_H_
#define QUERN_PACKING_VNNI_LAYOUT_H_

// The packed form of weights b[k, n] for dot-product instructions:
//
//   packed[p][l][c][i] = b[l * v + i, p * 16 + c], or 0 beyond k or n
//
//   p < ceil(n / 16)   panel: 16 output columns
//   l < ceil(k / v)    line: 64 bytes, one cache line, one 512-bit vector
//   c < 16             column within the panel
//   i < v              consecutive k, together 32 bits: what one lane of a
//                      dot-product instruction takes
//   v = 2 for bf16 and f16 (pairs), 4 for int8 (quads), 1 for f32
//
// A panel is contiguous, so a kernel streams it with one pointer; an N-block of
// several panels is several streams, panel_bytes() apart. The layout does not
// depend on the instruction set: weights packed on one machine may be executed
// on another. A picture is in docs/layouts.md.

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"

namespace quern {

class VnniLayout {
 public:
  static constexpr int64_t kPanelCols = 16;
  static constexpr int64_t kLineBytes = 64;
  // Alignment of the first byte of packed data; every line then has it.
  static constexpr size_t kAlignment = 64;

  // The layout of nothing: 0 x 0, 0 bytes. A spec starts with it.
  VnniLayout() = default;

  // InvalidArgument unless k, n >= 1 and the packed size fits in int64_t;
  // Unimplemented unless dtype is bf16, f16, f32 or i8.
  static absl::StatusOr<VnniLayout> Create(DType dtype, int64_t k, int64_t n);

  DType dtype() const { return dtype_; }
  int64_t k() const { return k_; }
  int64_t n() const { return n_; }
  // Consecutive k in 32 bits: 1, 2 or 4.
  int64_t v() const { return 4 / static_cast<int64_t>(SizeOf(dtype_)); }
  // Rounded up without forming n + 15, which could overflow.
  int64_t panels() const { return n_ / kPanelCols + (n_ % kPanelCols != 0); }
  int64_t lines() const { return k_ / v() + (k_ % v() != 0); }
  // Columns of `panel` that exist in b; only the last panel may have fewer
  // than kPanelCols.
  int64_t cols(int64_t panel) const;
  int64_t panel_bytes() const { return lines() * kLineBytes; }
  int64_t bytes() const { return panels() * panel_bytes(); }

  friend bool operator==(const VnniLayout& x, const VnniLayout& y) {
    return x.dtype_ == y.dtype_ && x.k_ == y.k_ && x.n_ == y.n_;
  }
  friend bool operator!=(const VnniLayout& x, const VnniLayout& y) {
    return !(x == y);
  }

 private:
  VnniLayout(DType dtype, int64_t k, int64_t n) : dtype_(dtype), k_(k), n_(n) {}

  DType dtype_ = DType::kBF16;
  int64_t k_ = 0;
  int64_t n_ = 0;
};

// Packed weights that someone else owns: layout().bytes() bytes, aligned to
// VnniLayout::kAlignment. The data travels with its layout, so that weights
// packed for another shape are a failed check and not garbage.
class PackedView {
 public:
  // No weights: the empty layout.
  PackedView() = default;
  PackedView(const VnniLayout& layout, const void* data)
      : layout_(layout), data_(static_cast<const uint8_t*>(data)) {
    QUERN_DCHECK(reinterpret_cast<uintptr_t>(data) % VnniLayout::kAlignment ==
                 0);
  }

  const VnniLayout& layout() const { return layout_; }
  const uint8_t* data() const { return data_; }

  // The lines of `panel` as elements: [lines()][kPanelCols][v()]. T is the C++
  // type of layout().dtype().
  template <typename T>
  const T* Panel(int64_t panel) const {
    QUERN_DCHECK(DTypeOf<T> == layout_.dtype());
    QUERN_DCHECK(0 <= panel && panel < layout_.panels());
    return reinterpret_cast<const T*>(data_ + panel * layout_.panel_bytes());
  }

 private:
  VnniLayout layout_;
  const uint8_t* data_ = nullptr;
};

}  // namespace quern

#endif  // QUERN_PACKING_VNNI_LAYOUT_H_
