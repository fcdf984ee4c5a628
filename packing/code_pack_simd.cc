// Packs rows of codes into the lines of packing/code_layout.h.

#include <cstddef>
#include <cstdint>

#include "quern/core/stores.h"
#include "quern/packing/code_pack_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "packing/code_pack_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/packing/transpose-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kUnit = 32;

// Puts bytes 0 and 1 of the four columns of each 128 bits before bytes 2 and 3.
HWY_INLINE V32 PairsApart(V32 v) {
  alignas(16) static constexpr uint8_t kOrder[16] = {
      0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
  const auto order = hn::LoadDup128(D8(), kOrder);
  return hn::BitCast(D32(), hn::TableLookupBytes(hn::BitCast(D8(), v), order));
}

// The word of eight codes of 4 bits: bytes of `a` are codes 0 to 3, of `b` 4 to
// 7.
HWY_INLINE V32 Word(V32 a, V32 b) {
  const D32 d;
  // Bytes 0 and 1: codes 0 and 2, 1 and 3.
  const V32 lower = hn::Or(a, hn::ShiftRight<12>(a));
  const V32 upper = hn::Or(b, hn::ShiftRight<12>(b));
  const V32 first = hn::Set(d, 0xFFu), second = hn::Set(d, 0xFF00u);
  return hn::Or(
      hn::Or(hn::And(lower, first), hn::ShiftLeft<8>(hn::And(lower, second))),
      hn::Or(hn::ShiftLeft<8>(hn::And(upper, first)),
             hn::ShiftLeft<16>(hn::And(upper, second))));
}

// Each of these structs packs a unit, whose columns' codes begin `at` bytes
// behind `rows`.
struct BytesOf8 {
  static constexpr size_t kLineK = 4;
  static HWY_INLINE void Pack(const uint8_t* const* rows, size_t at,
                              uint8_t* HWY_RESTRICT to) {
    for (size_t half = 0; half < 2; ++half, to += 4 * kLine) {
      for (size_t c = 0; c < kCols; c += kLanes) {
        const Quad strip = LoadStrip(rows + c, at + 16 * half);
        Put<Stores::kCached>(PairsApart(strip.l0), to + 4 * c);
        Put<Stores::kCached>(PairsApart(strip.l1), to + kLine + 4 * c);
        Put<Stores::kCached>(PairsApart(strip.l2), to + 2 * kLine + 4 * c);
        Put<Stores::kCached>(PairsApart(strip.l3), to + 3 * kLine + 4 * c);
      }
    }
  }
};

struct BytesOf4 {
  static constexpr size_t kLineK = 8;
  static HWY_INLINE void Pack(const uint8_t* const* rows, size_t at,
                              uint8_t* HWY_RESTRICT to) {
    for (size_t half = 0; half < 2; ++half, to += 2 * kLine) {
      for (size_t c = 0; c < kCols; c += kLanes) {
        const Quad strip = LoadStrip(rows + c, at + 16 * half);
        Put<Stores::kCached>(Word(strip.l0, strip.l1), to + 4 * c);
        Put<Stores::kCached>(Word(strip.l2, strip.l3), to + kLine + 4 * c);
      }
    }
  }
};

template <class Unit>
void Pack(const CodePackTask& task) {
  alignas(kLine) uint8_t missing[kUnit];
  for (uint8_t& byte : missing) byte = task.fill;
  const uint8_t* rows[kCols];
  for (size_t c = 0; c < kCols; ++c) {
    rows[c] = c < task.cols ? task.rows[c] : missing;
  }
  uint8_t* to = task.to;
  size_t k = 0;
  for (; k + kUnit <= task.k; k += kUnit) {
    Unit::Pack(rows, 0, to);
    to += kUnit / Unit::kLineK * kLine;
    if (k + kUnit == task.k) continue;  // nothing lies behind the last unit
    for (size_t c = 0; c < task.cols; ++c) rows[c] += kUnit;
  }
  if (k == task.k) return;
  // Codes beyond k are `fill`.
  alignas(kLine) uint8_t ends[kCols][kUnit];
  for (size_t c = 0; c < kCols; ++c) {
    hwy::CopyBytes<kUnit>(missing, ends[c]);
    if (c < task.cols) hwy::CopyBytes(rows[c], ends[c], task.k - k);
    rows[c] = ends[c];
  }
  alignas(kLine) uint8_t lines[kUnit / 4 * kLine];
  Unit::Pack(rows, 0, lines);
  hwy::CopyBytes(lines, to, hwy::DivCeil(task.k - k, Unit::kLineK) * kLine);
}

CodePackKernels GetKernels() {
  return {hwy::TargetName(HWY_TARGET), &Pack<BytesOf8>, &Pack<BytesOf4>};
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
CodePackKernels GetCodePackKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
