#include "quern/quant/block_quantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "hwy/base.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/quant/block_fields.h"
#include "quern/quant/block_format.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

using block_fields::Block;
using block_fields::Place;
using block_fields::SplitPlace;
using F = BlockFormat;

constexpr char kOp[] = "quantize_blocks";
constexpr float kLargest = 65504;  // of f16

// Arithmetic is in double, in which the products of f16 numbers, sub-scales and
// codes are exact.
double StoreF16(uint16_t bits, uint8_t* to) {
  std::memcpy(to, &bits, sizeof(bits));
  return static_cast<double>(ToF32(Float16::FromBits(bits)));
}

uint16_t NearestF16(double x) {
  return hwy::BitCastScalar<uint16_t>(FromF32<Float16>(static_cast<float>(x)));
}

// Stores the f16 next to x that is not smaller in magnitude, and returns it.
double StoreAway(double x, uint8_t* to) {
  uint16_t bits = NearestF16(x);
  if (std::abs(StoreF16(bits, to)) < std::abs(x)) ++bits;
  return StoreF16(bits, to);
}

// Stores the f16 next to x that is not greater, and returns it.
double StoreBelow(double x, uint8_t* to) {
  uint16_t bits = NearestF16(x);
  if (StoreF16(bits, to) > x)
    bits = static_cast<uint16_t>(x < 0 ? bits + 1 : bits - 1);
  return StoreF16(bits, to);
}

struct Range {
  double least, most;
};
Range RangeOf(const float* x, int count) {
  const auto [least, most] = std::minmax_element(x, x + count);
  return {static_cast<double>(*least), static_cast<double>(*most)};
}

// The step of smallest magnitude for which codes from -below to above reach
// every x.
double SignedStep(const float* x, int count, double below, double above) {
  const Range range = RangeOf(x, count);
  const double least = std::max(0.0, -range.least);
  const double most = std::max(0.0, range.most);
  const double positive = std::max(most / above, least / below);
  const double negative = std::max(most / below, least / above);
  return positive <= negative ? positive : -negative;
}

int NearestCode(double x, double step, int least, int most) {
  const double code = step == 0 ? 0 : std::nearbyint(x / step);
  return static_cast<int>(std::clamp<double>(code, least, most));
}

int NearestIQ4(double x, double step) {
  int best = 8;
  for (int code = 0; code < 16; ++code) {
    const auto error = [x, step](int c) {
      return std::abs(
          x - step * static_cast<double>(
                         block_fields::kIQ4Table[static_cast<size_t>(c)]));
    };
    if (error(code) < error(best)) best = code;
  }
  return best;
}

// Puts a number into bits that are 0.
void Put(int number, Place place, uint8_t* field) {
  uint8_t& byte = field[place.byte];
  byte = static_cast<uint8_t>(byte | number << place.bit);
}

// Puts a number whose two parts lie in two fields.
void PutSixBits(int number, SplitPlace place, uint8_t* low, uint8_t* high) {
  Put(number % 16, place.low, low);
  Put(number / 16, place.high, high);
}

// Puts the code of 4 bits of value i of 32.
void PutNibble(int code, int i, uint8_t* codes) {
  Put(code, block_fields::HalfByte(i % 16, i / 16), codes);
}

// Sub-scales s with |d * s[b]| >= |steps[b]| and |s[b]| <= limit; d is stored.
template <size_t kSubBlocks>
struct SubScales {
  SubScales(const std::array<double, kSubBlocks>& steps, int limit,
            uint8_t* to) {
    double largest = 0;
    for (const double step : steps) largest = std::max(largest, std::abs(step));
    d = StoreAway(largest / limit, to);
    for (size_t b = 0; b < kSubBlocks; ++b) {
      const double s = d == 0 ? 0 : std::ceil(std::abs(steps[b]) / d);
      const int magnitude = std::min(limit, static_cast<int>(s));
      numbers[b] = steps[b] < 0 ? -magnitude : magnitude;
    }
  }
  double Step(int b) const { return d * numbers[static_cast<size_t>(b)]; }
  int operator[](int b) const { return numbers[static_cast<size_t>(b)]; }

  double d;
  std::array<int, kSubBlocks> numbers;
};

void Quantize(const float* x, Block<F::kQ4_0>& out) {
  const double d = StoreAway(SignedStep(x, 32, 8.5, 7.5), out.d);
  for (int i = 0; i < 32; ++i) {
    PutNibble(NearestCode(x[i], d, -8, 7) + 8, i, out.codes);
  }
}

// Stores m and d of codes from 0 to `most`, and returns them.
struct Affine {
  double d, m;
};
template <class B>
Affine StoreAffine(const float* x, int most, B& out) {
  const Range range = RangeOf(x, 32);
  const double m = StoreBelow(range.least, out.m);
  return {StoreAway((range.most - m) / most, out.d), m};
}

void Quantize(const float* x, Block<F::kQ4_1>& out) {
  const auto [d, m] = StoreAffine(x, 15, out);
  for (int i = 0; i < 32; ++i) {
    PutNibble(NearestCode(x[i] - m, d, 0, 15), i, out.codes);
  }
}

// Puts the code of 5 bits of value i of 32.
template <class B>
void PutFive(int code, int i, B& out) {
  PutNibble(code % 16, i, out.codes);
  Put(code / 16, {i / 8, i % 8}, out.high);
}

void Quantize(const float* x, Block<F::kQ5_0>& out) {
  const double d = StoreAway(SignedStep(x, 32, 16.5, 15.5), out.d);
  for (int i = 0; i < 32; ++i) {
    PutFive(NearestCode(x[i], d, -16, 15) + 16, i, out);
  }
}

void Quantize(const float* x, Block<F::kQ5_1>& out) {
  const auto [d, m] = StoreAffine(x, 31, out);
  for (int i = 0; i < 32; ++i) {
    PutFive(NearestCode(x[i] - m, d, 0, 31), i, out);
  }
}

void Quantize(const float* x, Block<F::kQ8_0>& out) {
  const double d = StoreAway(std::abs(SignedStep(x, 32, 127, 127)), out.d);
  for (int i = 0; i < 32; ++i) {
    out.codes[i] = static_cast<int8_t>(NearestCode(x[i], d, -127, 127));
  }
}

void Quantize(const float* x, Block<F::kIQ4_NL>& out) {
  const double d = StoreAway(SignedStep(x, 32, 127, 113), out.d);
  for (int i = 0; i < 32; ++i) PutNibble(NearestIQ4(x[i], d), i, out.codes);
}

void Quantize(const float* x, Block<F::kMXFP4>& out) {
  // The smallest power of two that is not below the largest |x| / 7.
  int exponent = -127;
  const double quotient = std::abs(SignedStep(x, 32, 7, 7));
  if (quotient > 0 && std::frexp(quotient, &exponent) == 0.5) --exponent;
  exponent = std::max(exponent, -127);
  out.e = static_cast<uint8_t>(exponent + 127);
  for (int i = 0; i < 32; ++i) {
    const double twice =
        std::ldexp(std::abs(static_cast<double>(x[i])), 1 - exponent);
    int best = 0;
    for (int code = 1; code < 8; ++code) {
      const auto error = [twice](int c) {
        return std::abs(twice -
                        static_cast<double>(
                            block_fields::kTwiceE2M1[static_cast<size_t>(c)]));
      };
      if (error(code) < error(best)) best = code;
    }
    PutNibble(best + (x[i] < 0 && best > 0 ? 8 : 0), i, out.codes);
  }
}

// Scales and minima of sub-blocks in Q2_K, Q4_K and Q5_K, at most `limit`, for
// codes from 0 to `most`. d and dmin are stored.
template <size_t kSubBlocks>
struct ScalesAndMins {
  template <class B>
  ScalesAndMins(const float* x, int limit, int most, B& out)
      : mins(Mins(x), limit, out.dmin), scales(Steps(x, most), limit, out.d) {}

  int Code(float x, int b, int most) const {
    return NearestCode(x + mins.Step(b), scales.Step(b), 0, most);
  }

  static constexpr int kValues = 256 / static_cast<int>(kSubBlocks);
  SubScales<kSubBlocks> mins, scales;

 private:
  static std::array<double, kSubBlocks> Mins(const float* x) {
    std::array<double, kSubBlocks> result;
    for (double& min : result) {
      min = std::max(0.0, -RangeOf(x, kValues).least);
      x += kValues;
    }
    return result;
  }
  std::array<double, kSubBlocks> Steps(const float* x, int most) const {
    std::array<double, kSubBlocks> result;
    for (size_t b = 0; b < kSubBlocks; ++b, x += kValues) {
      const double min = mins.Step(static_cast<int>(b));
      result[b] = std::max(0.0, RangeOf(x, kValues).most + min) / most;
    }
    return result;
  }
};

void Quantize(const float* x, Block<F::kQ2_K>& out) {
  const ScalesAndMins<16> s(x, 15, 3, out);
  for (int b = 0; b < 16; ++b) {
    Put(s.scales[b], out.Scale(b), out.scales);
    Put(s.mins[b], out.Min(b), out.scales);
    for (int j = 0; j < 16; ++j) {
      Put(s.Code(*x++, b, 3), out.Codes(b), out.codes + j);
    }
  }
}

// Signed steps of the sub-blocks of a block.
template <size_t kSubBlocks>
std::array<double, kSubBlocks> SignedSteps(const float* x, double below,
                                           double above) {
  constexpr int kValues = 256 / static_cast<int>(kSubBlocks);
  std::array<double, kSubBlocks> steps;
  for (double& step : steps) {
    step = SignedStep(x, kValues, below, above);
    x += kValues;
  }
  return steps;
}

void Quantize(const float* x, Block<F::kQ3_K>& out) {
  const SubScales<16> scales(SignedSteps<16>(x, 4.5, 3.5), 31, out.d);
  for (int b = 0; b < 16; ++b) {
    PutSixBits(scales[b] + 32, out.Scale(b), out.scales, out.scales);
    for (int j = 0; j < 16; ++j) {
      const int q = NearestCode(*x++, scales.Step(b), -4, 3) + 4;
      Put(q % 4, out.Codes(b), out.codes + j);
      Put(q / 4, out.High(b), out.high + j);
    }
  }
}

// Scales and minima of Q4_K and Q5_K.
void PutScales(const ScalesAndMins<8>& from, uint8_t* scales) {
  for (int b = 0; b < 8; ++b) {
    const int s = from.scales[b], t = from.mins[b];
    if (b < 4) {
      Put(s, {b, 0}, scales);
      Put(t, {b + 4, 0}, scales);
    } else {
      PutSixBits(s, block_fields::SixBitScale(b), scales, scales);
      PutSixBits(t, block_fields::SixBitMin(b), scales, scales);
    }
  }
}

void Quantize(const float* x, Block<F::kQ4_K>& out) {
  const ScalesAndMins<8> s(x, 63, 15, out);
  PutScales(s, out.scales);
  for (int i = 0; i < 256; ++i) {
    const int b = i / 32;
    Put(s.Code(x[i], b, 15), out.Codes(b), out.codes + i % 32);
  }
}

void Quantize(const float* x, Block<F::kQ5_K>& out) {
  const ScalesAndMins<8> s(x, 63, 31, out);
  PutScales(s, out.scales);
  for (int i = 0; i < 256; ++i) {
    const int b = i / 32;
    const int q = s.Code(x[i], b, 31);
    Put(q % 16, out.Codes(b), out.codes + i % 32);
    Put(q / 16, out.High(b), out.high + i % 32);
  }
}

void Quantize(const float* x, Block<F::kQ6_K>& out) {
  const SubScales<16> scales(SignedSteps<16>(x, 32.5, 31.5), 127, out.d);
  for (int i = 0; i < 256; ++i) {
    const int b = i / 16;
    out.scales[b] = static_cast<int8_t>(scales[b]);
    const int q = NearestCode(x[i], scales.Step(b), -32, 31) + 32;
    Put(q % 16, out.Codes(b), out.codes + i % 16);
    Put(q / 16, out.High(b), out.high + i % 16);
  }
}

void Quantize(const float* x, Block<F::kIQ4_XS>& out) {
  const SubScales<8> scales(SignedSteps<8>(x, 127, 113), 31, out.d);
  for (int b = 0; b < 8; ++b) {
    PutSixBits(scales[b] + 32, out.Scale(b), out.low, out.high);
    for (int j = 0; j < 32; ++j) {
      PutNibble(NearestIQ4(*x++, scales.Step(b)), j, out.codes[b]);
    }
  }
}

void Quantize(const float* x, Block<F::kTQ2_0>& out) {
  const double d = StoreAway(std::abs(SignedStep(x, 256, 1, 1)), out.d);
  for (int b = 0; b < 16; ++b) {
    for (int j = 0; j < 16; ++j) {
      Put(NearestCode(*x++, d, -1, 1) + 1, out.Codes(b), out.codes + j);
    }
  }
}

}  // namespace

absl::Status QuantizeBlocks(BlockFormat format, absl::Span<const float> x,
                            absl::Span<uint8_t> blocks) {
  QUERN_RETURN_IF_ERROR(CheckDecodeBlocks(format, blocks, x));
  for (size_t i = 0; i < x.size(); ++i) {
    if (!(std::abs(x[i]) <= kLargest)) {
      return InvalidArgument(kOp, "x[", i, "]=", x[i],
                             "; need a magnitude of at most ", kLargest);
    }
  }
  std::fill(blocks.begin(), blocks.end(), uint8_t{0});
  block_fields::WithBlockFormat(format, [&](auto f) {
    using B = Block<decltype(f)::value>;
    auto* out = reinterpret_cast<B*>(blocks.data());
    for (size_t i = 0; i < x.size(); i += static_cast<size_t>(B::kValues)) {
      Quantize(x.data() + i, *out++);
    }
  });
  return absl::OkStatus();
}

}  // namespace quern
