#include <cstddef>
#include <cstdint>

#include "quern/core/limits/limit_kinds.h"
#include "quern/core/limits/limits_kernels.h"
#include "quern/core/sets/avx3.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/limits/stream_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kBlockWords = kLimitBlockBytes / sizeof(uint64_t);
using DU64 = hn::CappedTag<uint64_t, kBlockWords / 2>;
using VU64 = hn::VFromD<DU64>;
constexpr uint64_t kOnes = 0x0101010101010101u;

// Brings one block into the caches, line by line.
HWY_INLINE void PrefetchBlock(const uint8_t* p) {
  for (size_t line = 0; line < kLimitBlockBytes; line += 64) {
    hwy::Prefetch(p + line);
  }
}

// Two sums: two loads a cycle.
struct Seen {
  VU64 even, odd;
};

HWY_INLINE void ReadBlock(const uint8_t* HWY_RESTRICT block, Seen& seen) {
  const DU64 d;
  const size_t n = hn::Lanes(d);
  const auto* p = reinterpret_cast<const uint64_t*>(block);
  for (const auto* end = p + kBlockWords; p < end; p += 2 * n) {
    seen.even = hn::Xor(seen.even, hn::Load(d, p));
    seen.odd = hn::Xor(seen.odd, hn::Load(d, p + n));
  }
}

template <bool kPastCaches>
HWY_INLINE void WriteBlock(uint8_t* HWY_RESTRICT block) {
  const DU64 d;
  const size_t n = hn::Lanes(d);
  const VU64 ones = hn::Set(d, kOnes);
  auto* p = reinterpret_cast<uint64_t*>(block);
  for (auto* end = p + kBlockWords; p < end; p += n) {
    if constexpr (kPastCaches) {
      hn::Stream(ones, d, p);
    } else {
      hn::Store(ones, d, p);
    }
  }
}

HWY_INLINE void UpdateBlock(uint8_t* HWY_RESTRICT block) {
  const DU64 d;
  const size_t n = hn::Lanes(d);
  const VU64 ones = hn::Set(d, kOnes);
  auto* p = reinterpret_cast<uint64_t*>(block);
  for (auto* end = p + kBlockWords; p < end; p += n) {
    hn::Store(hn::Xor(hn::Load(d, p), ones), d, p);
  }
}

template <bool kPrefetch, bool kPastCaches>
uint64_t StreamLoop(DramKind kind, StreamWay way,
                    const StreamRegions& regions) {
  const size_t reads = static_cast<size_t>(kind.reads) * kLimitBlockBytes;
  const size_t writes = static_cast<size_t>(kind.writes) * kLimitBlockBytes;
  const size_t updates = static_cast<size_t>(kind.updates) * kLimitBlockBytes;
  const size_t ahead = way.prefetch_bytes;
  const size_t rounds = regions.rounds / way.streams;  // of each stream
  const DU64 d;
  Seen seen = {hn::Zero(d), hn::Zero(d)};
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t stream = 0; stream < way.streams; ++stream) {
      const size_t at = stream * rounds + round;
      const uint8_t* read = regions.read + at * reads;
      for (size_t i = 0; i < reads; i += kLimitBlockBytes) {
        if constexpr (kPrefetch) PrefetchBlock(read + i + ahead);
        ReadBlock(read + i, seen);
      }
      uint8_t* update = regions.update + at * updates;
      for (size_t i = 0; i < updates; i += kLimitBlockBytes) {
        if constexpr (kPrefetch) PrefetchBlock(update + i + ahead);
        UpdateBlock(update + i);
      }
      uint8_t* write = regions.write + at * writes;
      for (size_t i = 0; i < writes; i += kLimitBlockBytes) {
        WriteBlock<kPastCaches>(write + i);
      }
    }
  }
  if constexpr (kPastCaches) hwy::FlushStream();
  return hn::ReduceSum(d, hn::Xor(seen.even, seen.odd));
}

uint64_t Stream(DramKind kind, StreamWay way, const StreamRegions& regions) {
  if (way.prefetch_bytes == 0) {
    return way.past_caches ? StreamLoop<false, true>(kind, way, regions)
                           : StreamLoop<false, false>(kind, way, regions);
  }
  return way.past_caches ? StreamLoop<true, true>(kind, way, regions)
                         : StreamLoop<true, false>(kind, way, regions);
}

StreamKernels GetKernels() { return {hwy::TargetName(HWY_TARGET), &Stream}; }

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
StreamKernels GetStreamKernels() { return HWY_DYNAMIC_DISPATCH(GetKernels)(); }
}  // namespace quern
#endif  // HWY_ONCE
