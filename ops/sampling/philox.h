#ifndef QUERN_OPS_SAMPLING_PHILOX_H_
#define QUERN_OPS_SAMPLING_PHILOX_H_

// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): a bijection of the
// 128-bit counter, chosen by a 64-bit key. It has no state, so a draw needs
// only its number.

#include <array>
#include <cstdint>

namespace quern {

inline std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                          std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;  // the golden ratio
    key[1] += 0xBB67AE85u;  // sqrt(3) - 1
  }
  return counter;
}

// Draw number `step` of stream `seed`: a multiple of 2^-53 in [0, 1).
inline double PhiloxUniform(uint64_t seed, uint64_t step) {
  const std::array<uint32_t, 4> bits = Philox4x32(
      {static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), 0, 0},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t draw = (uint64_t{bits[1]} << 32) | bits[0];
  return static_cast<double>(draw >> 11) * 0x1.0p-53;
}

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_PHILOX_H_
