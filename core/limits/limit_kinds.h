#ifndef QUERN_CORE_LIMITS_LIMIT_KINDS_H_
#define QUERN_CORE_LIMITS_LIMIT_KINDS_H_

// The kinds of limits of a machine: what memory is asked for, and what
// multiplies.

#include <string>

#include "quern/core/dtype.h"

namespace quern {

// What a loop does with memory, as small whole numbers of cache lines. A limit
// of DRAM is the rate of one such loop, in bytes read plus bytes written; an
// update in place is both. The rates differ: a store past the caches is not a
// read and a store of the same line, so a copy does not bound an update.
struct DramKind {
  int reads = 0;
  int writes = 0;
  int updates = 0;

  static const DramKind kRead;
  static const DramKind kWrite;
  static const DramKind kCopy;
  static const DramKind kUpdate;

  // Lines that are touched, and lines that move.
  int touched() const { return reads + writes + updates; }
  int moved() const { return touched() + updates; }
  friend bool operator==(DramKind a, DramKind b) {
    return a.reads == b.reads && a.writes == b.writes && a.updates == b.updates;
  }
};
inline constexpr DramKind DramKind::kRead = {1, 0, 0};
inline constexpr DramKind DramKind::kWrite = {0, 1, 0};
inline constexpr DramKind DramKind::kCopy = {1, 1, 0};
inline constexpr DramKind DramKind::kUpdate = {0, 0, 1};

// The first kind of at most eight lines whose shares are within 1/32 of those
// of these bytes, or else the nearest. What is less than a sixteenth of the
// whole may count as nothing.
DramKind DramKindOf(double read, double written, double updated);
// "read", "write", "copy", "update", else e.g. "2r+1w+1u".
std::string DramKindName(DramKind kind);

// The dot product whose peak is the arithmetic limit.
// kI6: int8 by unsigned codes of at most six bits. Sums of several products fit
// in 16 bits, which is faster than kI8 where no instruction multiplies bytes
// and adds to sums of 32 bits.
enum class PeakKind { kF32, kBF16, kI8, kI6 };
// "f32", "bf16", "i8", "i6".
const char* PeakKindName(PeakKind kind);
// The widest that may multiply elements of `dtype`.
PeakKind PeakKindOf(DType dtype);

}  // namespace quern

#endif  // QUERN_CORE_LIMITS_LIMIT_KINDS_H_
