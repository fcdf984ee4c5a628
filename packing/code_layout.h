#ifndef QUERN_PACKING_CODE_LAYOUT_H_
#define QUERN_PACKING_CODE_LAYOUT_H_

// The packed form of weights that are codes of 8 or 4 bits, q[k, n], made to be
// turned into pairs of bf16 (packing/vnni_layout.h) in registers:
//
//   8 bits: packed[p][l][c / 4][i / 2][c % 4][i % 2] = q[4 l + i, 16 p + c]
//   4 bits: packed[p][l][c] = sum over i of
//                      q[8 l + i, 16 p + c] << (16 (i % 2) + 4 (i / 2))
//
//   p < ceil(n / 16)   panel: 16 output columns
//   l < ceil(k / i)    line: 64 bytes, 16 columns of 4 or 8 consecutive k
//
// With codes of 8 bits, each 16 bytes hold four columns: interleaving two
// vectors that hold the lower and the upper byte of each code's bf16 gives two
// lines of pairs. With codes of 4 bits, a word of 32 bits is one column:
// shifting its halves right by 4 i leaves pair i in their lowest bits, as
// indices of a table.
//
// What lies beyond k and n is `fill`. The layout does not depend on the
// instruction set.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/status/statusor.h"
#include "quern/core/executor.h"

namespace quern {

class CodeLayout {
 public:
  static constexpr int64_t kPanelCols = 16;
  static constexpr int64_t kLineBytes = 64;

  // The layout of nothing.
  CodeLayout() = default;

  // InvalidArgument unless bits is 4 or 8, k, n >= 1 and the packed size fits
  // in int64_t.
  static absl::StatusOr<CodeLayout> Create(int64_t bits, int64_t k, int64_t n);

  int64_t bits() const { return bits_; }
  int64_t k() const { return k_; }
  int64_t n() const { return n_; }
  // Consecutive k of one line.
  int64_t line_k() const { return 32 / bits_; }
  int64_t lines() const { return k_ / line_k() + (k_ % line_k() != 0); }
  int64_t panels() const { return n_ / kPanelCols + (n_ % kPanelCols != 0); }
  int64_t panel_bytes() const { return lines() * kLineBytes; }
  int64_t bytes() const { return panels() * panel_bytes(); }

  // Where in its line the code of column c < 16 and of k = i lies.
  int64_t Byte(int64_t c, int64_t i) const {
    return bits_ == 8 ? 16 * (c / 4) + 8 * (i / 2) + 2 * (c % 4) + i % 2
                      : 4 * c + 2 * (i % 2) + i / 4;
  }
  int Shift(int64_t i) const {
    return bits_ == 8 ? 0 : static_cast<int>(4 * (i / 2 % 2));
  }

 private:
  CodeLayout(int64_t bits, int64_t k, int64_t n) : bits_(bits), k_(k), n_(n) {}

  int64_t bits_ = 8;
  int64_t k_ = 0;
  int64_t n_ = 0;
};

// Writes layout.bytes() bytes: code_at(column_at(n), k) is the code of column n
// there, fill what lies beyond. Panels are divided between the workers.
template <typename ColumnAt, typename CodeAt>
void PackCodes(const CodeLayout& layout, uint8_t fill,
               const ColumnAt& column_at, const CodeAt& code_at, uint8_t* to,
               Executor& executor) {
  executor.ParallelFor(layout.panels(), [&](int64_t panel, int /*worker*/) {
    constexpr int64_t kCols = CodeLayout::kPanelCols;
    const int64_t cols = std::min(kCols, layout.n() - panel * kCols);
    decltype(column_at(int64_t{0})) columns[kCols] = {};
    for (int64_t c = 0; c < cols; ++c)
      columns[c] = column_at(panel * kCols + c);
    const int64_t step = layout.line_k();
    uint8_t* line = to + panel * layout.panel_bytes();
    for (int64_t k = 0; k < layout.k(); k += step) {
      std::memset(line, 0, CodeLayout::kLineBytes);
      for (int64_t c = 0; c < kCols; ++c) {
        for (int64_t i = 0; i < step; ++i) {
          const bool inside = c < cols && k + i < layout.k();
          const uint8_t code =
              inside ? static_cast<uint8_t>(code_at(columns[c], k + i)) : fill;
          uint8_t& byte = line[layout.Byte(c, i)];
          byte = static_cast<uint8_t>(byte | code << layout.Shift(i));
        }
      }
      line += CodeLayout::kLineBytes;
    }
  });
}

}  // namespace quern

#endif  // QUERN_PACKING_CODE_LAYOUT_H_
