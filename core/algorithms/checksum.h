#ifndef QUERN_CORE_ALGORITHMS_CHECKSUM_H_
#define QUERN_CORE_ALGORITHMS_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace quern {

inline constexpr uint64_t kFnv1aBasis = 0xcbf29ce484222325u;

// FNV-1a, 64 bits, of these bytes. With the result of another call in place of
// the basis, the checksum of the bytes of both calls, one after the other.
inline uint64_t Fnv1a(const void* data, size_t bytes,
                      uint64_t hash = kFnv1aBasis) {
  const auto* from = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ from[i]) * 0x100000001b3u;
  return hash;
}

}  // namespace quern

#endif  // QUERN_CORE_ALGORITHMS_CHECKSUM_H_
