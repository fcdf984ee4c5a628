#ifndef QUERN_GEMM_TESTING_WEIGHTS_H_
#define QUERN_GEMM_TESTING_WEIGHTS_H_

// Weights of linear layers, in every format and layout, whose values tests know
// in double.
//
//   const auto w = ExactWeights(rng, {WeightFormat::kI4Group}, shape);
//   const LinearWeights packed = w.Pack(executor);      // from guarded memory
//   const auto want = ProductOf(w, m, ToDoubles(a));    //
//   gemm/testing/oracle.h

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>

#include "quern/core/dtype.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/reference_convert.h"

namespace quern {

enum class Residual { kNone, kApart, kInPlace };

struct Shape {
  int64_t m = 0, n = 0, k = 0;
  int64_t padding = 0;  // after each row of a, b and c
  int64_t shift = 0;    // of a and c, from the guarded page
  bool bias = false;
  LinearActivation act = LinearActivation::kNone;
  Residual residual = Residual::kNone;
  int64_t group_size = 32;
  int64_t block_n = 40;

  int64_t cols() const { return ColumnsOfC(act, n); }
};

inline std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "m=" << s.m << " n=" << s.n << " k=" << s.k
             << " padding=" << s.padding << " shift=" << s.shift
             << " bias=" << s.bias << " " << LinearActivationName(s.act)
             << " residual " << static_cast<int>(s.residual)
             << " group_size=" << s.group_size << " block_n=" << s.block_n;
}

// One way in which weights come.
struct WeightCase {
  WeightFormat format;
  WeightLayout layout = WeightLayout::kNK;
  bool zeros = false;
  bool act_order = false;

  // A word holds eight columns, so n must be a multiple of 8.
  bool words_of_columns() const {
    return layout == WeightLayout::kAwq ||
           (zeros && layout != WeightLayout::kNK);
  }
};

inline std::ostream& operator<<(std::ostream& out, const WeightCase& c) {
  return out << WeightFormatName(c.format) << " " << WeightLayoutName(c.layout)
             << (c.zeros ? " with zeros" : "")
             << (c.act_order ? " in act-order" : "");
}

inline constexpr WeightCase kWeightCases[] = {
    {WeightFormat::kF32},
    {WeightFormat::kF32, WeightLayout::kKN},
    {WeightFormat::kBF16},
    {WeightFormat::kBF16, WeightLayout::kKN},
    {WeightFormat::kF16},
    {WeightFormat::kF16, WeightLayout::kKN},
    {WeightFormat::kI8Channel},
    {WeightFormat::kI8Channel, WeightLayout::kKN},
    {WeightFormat::kE4M3Block},
    {WeightFormat::kI4Group},
    {WeightFormat::kI4Group, WeightLayout::kNK, true, true},
    {WeightFormat::kI4Group, WeightLayout::kAwq},
    {WeightFormat::kI4Group, WeightLayout::kAwq, true},
    {WeightFormat::kI4Group, WeightLayout::kGptq},
    {WeightFormat::kI4Group, WeightLayout::kGptq, true, true},
    {WeightFormat::kI4Group, WeightLayout::kGptqV2, false, true},
    {WeightFormat::kI4Group, WeightLayout::kGptqV2, true},
    {WeightFormat::kI8Group},
};

// One case for each format, the one that needs most of the kernels.
inline constexpr WeightCase kFormatCases[] = {
    {WeightFormat::kF32},
    {WeightFormat::kBF16},
    {WeightFormat::kF16, WeightLayout::kKN},
    {WeightFormat::kI8Channel},
    {WeightFormat::kE4M3Block},
    {WeightFormat::kI4Group, WeightLayout::kNK, true, true},
    {WeightFormat::kI8Group},
};

// Every format in kNK, with its k in order.
inline constexpr WeightCase kEveryFormat[] = {
    {WeightFormat::kF32},
    {WeightFormat::kBF16},
    {WeightFormat::kF16},
    {WeightFormat::kI8Channel},
    {WeightFormat::kE4M3Block},
    {WeightFormat::kI4Group},
    {WeightFormat::kI4Group, WeightLayout::kNK, true},
    {WeightFormat::kI8Group},
};

// Weights of the n, k, padding, groups and activation of s, to be filled.
inline KnownWeights EmptyWeights(const WeightCase& c, const Shape& s) {
  KnownWeights w;
  w.spec.format = c.format;
  w.spec.n = s.n;
  w.spec.k = s.k;
  w.spec.group_size = s.group_size;
  w.spec.gated = IsGated(s.act);
  w.layout = c.layout;
  w.padding = s.padding;
  w.block_n = s.block_n;
  return w;
}

// Codes that are integers in [lo, hi] above their zero, with scale(rng) for
// each column or each group and column. Where [lo, hi] has 16 integers, a code
// of kI4Group is any, and so is its zero.
template <typename Scale>
KnownWeights CodedWeights(Rng& rng, const WeightCase& c, const Shape& s,
                          int64_t lo, int64_t hi, const Scale& scale) {
  KnownWeights w = EmptyWeights(c, s);
  w.codes = SmallIntegers<double>(rng, s.n * s.k, lo, hi);
  if (c.act_order) w.ShuffleGroups(rng);
  const bool scaled = w.grouped() || c.format == WeightFormat::kI8Channel;
  const bool any = hi - lo == 15;
  const int64_t stored_less = c.layout == WeightLayout::kGptq ? 1 : 0;
  for (int64_t i = 0; scaled && i < w.groups() * s.n; ++i) {
    const bool shared =
        c.format == WeightFormat::kE4M3Block && i % s.n % s.block_n != 0;
    w.scales.push_back(shared ? w.scales.back() : scale(rng));
    if (!c.zeros) continue;
    w.zeros.push_back(static_cast<double>(any ? rng.Integer(0, 15) + stored_less
                                              : rng.Integer(-lo, 15 - hi)));
  }
  for (size_t i = 0; i < w.codes.size() && w.middle() != 0; ++i) {
    const auto at = static_cast<int64_t>(i);
    w.codes[i] += any ? w.middle() : w.zero(w.group_of(at % s.k), at / s.k);
  }
  return w;
}

// 2^e, lo <= e <= hi, as a scale.
inline auto PowersOfTwo(int64_t lo, int64_t hi) {
  return [lo, hi](Rng& rng) {
    return std::ldexp(1.0, static_cast<int>(rng.Integer(lo, hi)));
  };
}

// Integers in [-most, most], where most <= 7 of 4-bit codes, times scales that
// are 2^-e, 0 <= e <= halvings: sums are exact.
inline KnownWeights ExactWeights(Rng& rng, const WeightCase& c, const Shape& s,
                                 int64_t most = 7, int halvings = 0) {
  KnownWeights w =
      CodedWeights(rng, c, s, -most, most, PowersOfTwo(-halvings, 0));
  w.bias = SmallIntegers<float>(rng, s.bias ? s.n : 0, -99, 99);
  return w;
}

// Reals, or any codes times scales that are reals.
inline KnownWeights RealWeights(Rng& rng, const WeightCase& c, const Shape& s) {
  const bool bytes = c.format == WeightFormat::kI8Channel ||
                     c.format == WeightFormat::kI8Group;
  KnownWeights w =
      CodedWeights(rng, c, s, bytes ? -128 : -8, bytes ? 127 : 7, [&](Rng& r) {
        const double scale = r.Uniform(0.001, bytes ? 0.02 : 0.1);
        return ToDouble(FromDouble<Float16>(scale));
      });
  w.scales_as = DType::kF16;
  switch (c.format) {
    case WeightFormat::kF32:
      w.codes = ToDoubles(UniformReals<float>(rng, s.n * s.k));
      break;
    case WeightFormat::kBF16:
      w.codes = ToDoubles(UniformReals<BFloat16>(rng, s.n * s.k));
      break;
    case WeightFormat::kF16:
      w.codes = ToDoubles(UniformReals<Float16>(rng, s.n * s.k));
      break;
    case WeightFormat::kE4M3Block:
      w.codes = ToDoubles(UniformReals<Float8E4M3>(rng, s.n * s.k, -8, 8));
      break;
    default:
      break;
  }
  w.bias = UniformReals<float>(rng, s.bias ? s.n : 0, -5, 5);
  return w;
}

// n columns of RealWeights with a bias, as sources without gaps that may be cut
// at few columns.
inline WeightSources RealSources(Rng& rng, const WeightCase& c, int64_t n,
                                 int64_t k, int64_t group_size = 32) {
  Shape s{0, n, k};
  s.bias = true;
  s.group_size = group_size;
  s.block_n = 4;
  return WeightSources(RealWeights(rng, c, s));
}

// Weights in blocks whose values lie in about [-reach, reach]. Without a bias
// the panels end where the packed bytes do.
inline KnownWeights BlockWeights(Rng& rng, BlockFormat format, int64_t n,
                                 int64_t k, double reach) {
  KnownWeights w = EmptyWeights({WeightFormat::kBlocks, WeightLayout::kBlocks},
                                {0, n, k, 5});
  w.spec.block_format = format;
  w.blocks = RandomBlocks(rng, format, n * k / InfoOf(format).values, reach);
  w.bias = SmallIntegers<float>(rng, n % 2 == 0 ? n : 0, -99, 99);
  return w;
}

// Makes the scales of blocks 1, 2 and 4 by turns, but for those within K
// blocks.
inline void SetScales(KnownWeights& w) {
  const BlockFormatInfo& info = InfoOf(w.spec.block_format);
  int log = 0;
  for (size_t at = 0; at < w.blocks.size();
       at += static_cast<size_t>(info.bytes)) {
    for (const BlockHalf& half : HalvesOf(info.format)) {
      PutHalf(FromDouble<Float16>(1 << log), half.byte, w.blocks.data() + at);
    }
    if (info.format == BlockFormat::kMXFP4) {
      w.blocks[at] = static_cast<uint8_t>(127 + log);
    }
    log = (log + 1) % 3;
  }
}

// Weights in blocks that are integers, or halves.
inline KnownWeights IntegerBlockWeights(Rng& rng, BlockFormat format, int64_t n,
                                        int64_t k) {
  KnownWeights w = BlockWeights(rng, format, n, k, 6.0);
  SetScales(w);
  return w;
}

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_WEIGHTS_H_
