#ifndef QUERN_QUANT_BF16_PAIRS_TESTUTIL_H_
#define QUERN_QUANT_BF16_PAIRS_TESTUTIL_H_

// For quant/convert_test.cc: the encoders of bf16 pairs of quant/convert-inl.h,
// which ConvertPlan does not use. Norms, rotations and activations do.

#include <cstddef>
#include <cstdint>

namespace quern {

struct BF16PairEncoders {
  // codes[2 i] = even[i] rounded to bf16, codes[2 i + 1] = odd[i], i < n. n is
  // a multiple of kMultiple.
  using Encode = void (*)(const float* even, const float* odd, size_t n,
                          uint16_t* codes);
  static constexpr size_t kMultiple = 64;

  const char* target() const { return name; }

  const char* name;
  Encode any;      // EncodeBF16Pairs
  Encode numbers;  // EncodeBF16NumberPairs: a NaN must have a lower half of 0
};

// The encoders of the best instruction set this CPU supports.
BF16PairEncoders GetBF16PairEncoders();

}  // namespace quern

#endif  // QUERN_QUANT_BF16_PAIRS_TESTUTIL_H_
