#ifndef QUERN_CORE_LIMITS_LIMITS_KERNELS_H_
#define QUERN_CORE_LIMITS_LIMITS_KERNELS_H_

// The loops whose speed is called the limit of this machine. Private to limits.

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/kernel_set.h"
#include "quern/core/limits/limit_kinds.h"

namespace quern {

// Memory loops touch whole blocks: two of the widest vectors of x86. Blocks of
// 512 bytes took 1.02 of the time (two reads and a write, Zen 5, 2026).
constexpr size_t kLimitBlockBytes = 128;
// Places that a memory loop may be at by turns. More of them occupy more of the
// hardware's prefetchers.
constexpr size_t kMaxStreams = 4;

// One way to run a memory loop. The best of several ways is the limit.
struct StreamWay {
  size_t streams = 1;  // 1 or kMaxStreams
  // How far software prefetch is ahead of the loads. With 0, only the hardware
  // prefetches.
  size_t prefetch_bytes = 0;
  bool past_caches = false;  // non-temporal stores, of kind.writes alone
};

// The three regions of a memory loop, each aligned to a block, none of which
// overlaps another: `rounds` * kind.reads blocks that are read, and likewise
// for writes and updates.
struct StreamRegions {
  const uint8_t* read;
  uint8_t* write;
  uint8_t* update;
  size_t rounds;  // a multiple of kMaxStreams
};

// Independent multiply-adds on operands that stay in registers: no loads, no
// stores, and enough sums to hide the latency of one.
struct PeakKernel {
  // sum[i, lane] += a * b, `steps` times on every sum and lane. Returns the
  // total of all sums, which depends on every step. int8: 0 <= a <= 255 and
  // -128 <= b <= 127, and each sum is below 2^31.
  double (*run)(size_t steps, int a, int b);
  int sums;              // independent chains of additions
  double ops_per_sum;    // of one step of one sum; a multiply-add is two
  const char* sequence;  // the instructions of one step of one sum
  double ops_per_step() const { return sums * ops_per_sum; }
};

struct StreamKernels {
  const char* target;
  // A round reads kind.reads blocks, stores kind.writes blocks of ones, and
  // flips the lowest bit of every byte of kind.updates blocks. The result
  // depends on every byte that was read.
  uint64_t (*stream)(DramKind kind, StreamWay way,
                     const StreamRegions& regions);
};

struct PeakKernels {
  const char* target;
  PeakKernel f32;
  PeakKernel bf16;  // sums in f32; the f32 kernel where bf16 must be widened
  PeakKernel i8;    // u8 * s8, or s8 * s8, sums in i32
  PeakKernel i6;    // u8 below 64 * s8; the i8 kernel where that is fastest
};

using PeakKernelSet = KernelSet<PeakKernels>;

StreamKernels GetStreamKernels();
// All sets, best first.
absl::Span<const PeakKernelSet> PeakKernelSets();
// The kernels of the first that runs on this CPU.
PeakKernels GetPeakKernels();
// Rows of the list: AVX2 with AVX-VNNI, and with AVX-VNNI-INT8. Defined where
// QUERN_AVX_VNNI is 1.
PeakKernels GetPeakAvxVnniKernels();
PeakKernels GetPeakAvxVnniInt8Kernels();

}  // namespace quern

#endif  // QUERN_CORE_LIMITS_LIMITS_KERNELS_H_
