#ifndef QUERN_QUANT_BLOCK_FIELDS_H_
#define QUERN_QUANT_BLOCK_FIELDS_H_

// Private: what the reader and the writer of quant/block_format.h share.

#include <array>

namespace quern {
namespace block_fields {

inline constexpr std::array<float, 16> kIQ4Table = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Twice the values of e2m1.
inline constexpr std::array<float, 16> kTwiceE2M1 = {
    0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Where the sub-block b of 16 values has its fields of 2 bits, in Q2_K, Q3_K
// and Q6_K: the first byte, and the bit in each byte.
inline int FirstByte(int b) { return b / 8 * 32 + b % 2 * 16; }
inline int FirstBit(int b) { return b / 2 % 4 * 2; }

}  // namespace block_fields
}  // namespace quern

#endif  // QUERN_QUANT_BLOCK_FIELDS_H_
