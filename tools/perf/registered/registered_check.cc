#include "quern/tools/perf/registered/registered_check.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_fp8_quantize.h"
#include "quern/testing/reference_int8_quantize.h"
#include "quern/testing/reference_logits.h"
#include "quern/testing/reference_norm.h"
#include "quern/testing/reference_rope.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/registered/registered_row.h"

namespace quern {
namespace {

using Doubles = RowCheck::Doubles;

constexpr double kUnit = RowCheck::kUnit;
constexpr ReferenceRopeStyle kStyle = ReferenceRopeStyle::kNeox;
constexpr double kBase = 10000.0;

// The error of rms_norm in f32, in units of 2^-24, relative. ops/norm/rms_norm
// adds squares in four vectors of at least four lanes, then their tails and the
// total; the root halves that error. Mean, eps, root, reciprocal and two
// products round once each. A weight of 1 + w rounds once more.
double NormUnits(int64_t hidden) {
  return (static_cast<double>(hidden) / 16 + 12) / 2 + 6;
}
// The error of the gated norms, in the same units. ops/norm/rms_norm_gated adds
// at most 64 squares in a lane of a block of 256, the block's total, and one
// number for each block. The gate has 10 units and its product one: twice in
// the sum of squares, of which the root leaves half, and once in the result.
double GatedNormUnits(int64_t hidden) {
  return (64 + 4 + 1 + static_cast<double>(hidden) / 256 + 2 * 11) / 2 + 11 + 6;
}

constexpr double kEps = static_cast<double>(1e-6f);

// The sums of two rows of a dtype, rounded to it once: exact, as ops/norm
// promises.
Doubles RoundedSum(DType dtype, Doubles x, const Doubles& y) {
  WithType(dtype, [&](auto type) {
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = ToDouble(FromDouble<decltype(type)>(x[i] + y[i]));
    }
  });
  return x;
}

Doubles NormedRow(const Doubles& h, const Doubles& weight) {
  return ReferenceRmsNorm(1, static_cast<int64_t>(h.size()), h, weight, kEps);
}

// The tensors are x, residual and weight; the first two are written in place.
void FusedAddRmsNorm(RowCheck& c) {
  const Doubles h = RoundedSum(c.dtype(1), c.Before(0), c.Before(1));
  c.ExpectEqual(1, h);
  c.ExpectRelative(0, NormedRow(h, c.Vector(2)), NormUnits(c.Width(0)));
}

// The tensors are x, weight and out.
void GemmaRmsNorm(RowCheck& c) {
  Doubles weight = c.Vector(1);
  for (double& w : weight) w += 1.0;
  c.ExpectRelative(2, NormedRow(c.Before(0), weight),
                   NormUnits(c.Width(0)) + 1);
}

// The tensors are x and out. Less is rounded than in rms_norm.
void L2Norm(RowCheck& c) {
  Doubles y = c.Before(0);
  double sum = kEps;
  for (const double v : y) sum += v * v;
  for (double& v : y) v /= std::sqrt(sum);
  c.ExpectRelative(1, y, NormUnits(c.Width(0)));
}

// The tensors are x, weight, bias and out. The error of ops/norm/layer_norm is,
// relative to the result without its bias, that of at most 68 additions of
// squares, of which the root leaves half, and eight roundings; that of the mean
// is as much of the deviation as 68 additions have. The sum with the bias
// rounds once.
void LayerNorm(RowCheck& c) {
  const double eps = static_cast<double>(1e-5f);
  Doubles y = c.Before(0);
  const Doubles weight = c.Vector(1), bias = c.Vector(2);
  const auto n = static_cast<double>(y.size());
  double mean = 0, squares = 0;
  for (const double v : y) mean += v / n;
  for (double& v : y) v -= mean;
  for (const double v : y) squares += v * v;
  const double deviation = std::sqrt(squares / n + eps);
  double most = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double scaled = y[i] / deviation * weight[i];
    most = std::max({most, std::abs(scaled), std::abs(weight[i])});
    y[i] = scaled + bias[i];
  }
  c.Expect(3, y, [&](size_t i) {
    return ((42 + 68) * most + 2 * std::abs(y[i])) * kUnit;
  });
}

// The tensors are x, gate, weight and out.
template <bool kMixer2>
void GatedRmsNorm(RowCheck& c) {
  const double eps = kMixer2 ? kEps : static_cast<double>(1e-5f);
  c.ExpectRelative(3,
                   ReferenceGatedRmsNorm(1, c.Width(0), c.Before(0),
                                         c.Before(1), c.Vector(2), eps),
                   GatedNormUnits(c.Width(0)));
}

// Expects the codes q of y, whose error is `units`, by a scale that is exact.
// Its reciprocal and the product are rounded, which is two units more.
void ExpectFp8(RowCheck& c, size_t q, const Doubles& y, double scale,
               double units) {
  Doubles want;
  for (const double v : y) want.push_back(ReferenceFp8Value(v, scale));
  c.ExpectRelative(q, want, units + 2);
}

// Expects a scale that is the row's, and the codes q by the very scale that was
// written, because that is what a reader multiplies them with.
void ExpectDynamicFp8(RowCheck& c, size_t q, const Doubles& y, double units) {
  const size_t scales = q + 1;
  c.ExpectRelative(scales, {ReferenceFp8Scale(y)}, units);
  ExpectFp8(c, q, y, c.After(scales)[0], units);
}

// The tensors are x, with kAdd the residual in place, weight, q, and without
// kStatic the scales.
template <bool kAdd, bool kStatic>
void RmsNormQuant(RowCheck& c) {
  constexpr size_t kWeight = kAdd ? 2 : 1, kQ = kWeight + 1;
  Doubles h = c.Before(0);
  if (kAdd) {
    h = RoundedSum(c.dtype(1), h, c.Before(1));
    c.ExpectEqual(1, h);
  }
  const Doubles y = NormedRow(h, c.Vector(kWeight));
  const double units = NormUnits(c.Width(0));
  if (kStatic) {
    const auto scale = static_cast<float>(kRegisteredScale);
    ExpectFp8(c, kQ, y, static_cast<double>(scale), units);
  } else {
    ExpectDynamicFp8(c, kQ, y, units);
  }
}

// The tensors are x, q and scales.
void QuantFp8(RowCheck& c) { ExpectDynamicFp8(c, 1, c.Before(0), 0); }

// The tensors are x, scale[1, 1] and q.
void StaticQuantFp8(RowCheck& c) {
  ExpectFp8(c, 2, c.Before(0), c.Before(1, 0)[0], 0);
}

// The tensors are x, q and scales. The reciprocal of the scale is rounded, the
// product with it is not rounded before q is: one unit.
void QuantInt8(RowCheck& c) {
  Doubles x = c.Before(0);
  c.ExpectRelative(2, {ReferenceInt8Symmetric(x).scale}, 0);
  const double scale = c.After(2)[0];
  for (double& v : x) v /= scale;
  c.ExpectRelative(1, x, 1);
}

// The error of element i of heads x after they were turned by cosines and sines
// of at most `most`. A cosine, a sine, two products and a sum are rounded: with
// (a, b) the pair, less than 4 units of (|a| + |b|) * most.
double TurnedError(const Doubles& x, size_t i, double most) {
  constexpr size_t kDim = kRegisteredHeadDim;
  const size_t other = i % kDim < kDim / 2 ? i + kDim / 2 : i - kDim / 2;
  return 4 * kUnit * (std::abs(x[i]) + std::abs(x[other])) * most;
}

// Expects in `out` the heads of x, turned by cosine(pair) and sine(pair).
template <typename Cosine, typename Sine>
void ExpectTurned(RowCheck& c, const Doubles& x, size_t out,
                  const Cosine& cosine, const Sine& sine, double most = 1.0) {
  constexpr int64_t kDim = kRegisteredHeadDim;
  const int64_t heads = static_cast<int64_t>(x.size()) / kDim;
  const Doubles want = ReferenceTurned(
      x, 1, heads, kDim, kDim, kStyle,
      [&](int64_t, int64_t i) { return cosine(i); },
      [&](int64_t, int64_t i) { return sine(i); });
  c.Expect(out, want, [&](size_t i) { return TurnedError(x, i, most); });
}

// Expects in `out` the heads of x, turned by the angle of position(pair).
template <typename Position>
void ExpectAtPosition(RowCheck& c, const Doubles& x, size_t out,
                      const Position& position) {
  const auto angle = [&](int64_t i) {
    return ReferenceRopeAngle(position(i), i, kRegisteredHeadDim, kBase);
  };
  ExpectTurned(
      c, x, out, [&](int64_t i) { return std::cos(angle(i)); },
      [&](int64_t i) { return std::sin(angle(i)); });
}

// The tensors are positions, query and key; the last two are written in place.
void RotaryEmbedding(RowCheck& c) {
  for (const size_t x : {size_t{1}, size_t{2}}) {
    ExpectAtPosition(c, c.Before(x), x,
                     [&](int64_t) { return c.Integer(0, c.row()); });
  }
}

// The tensors are positions[3, tokens], query and key; the last two are written
// in place.
void Mrope(RowCheck& c) {
  const int64_t tokens = c.Width(0);
  const auto stream = [](int64_t i) {
    const auto& s = kRegisteredSections;
    return i < s[0] ? 0 : i < s[0] + s[1] ? 1 : 2;
  };
  for (const size_t x : {size_t{1}, size_t{2}}) {
    ExpectAtPosition(c, c.Before(x), x, [&](int64_t i) {
      return c.Integer(0, stream(i) * tokens + c.row());
    });
  }
}

// The tensors are positions, query, key, query_out and key_out. Each of the
// five copies of a query has a position of its own.
void DualChunkRotaryEmbedding(RowCheck& c) {
  constexpr int64_t kLength = kRegisteredChunk - kRegisteredLocal;
  const int64_t m = c.Integer(0, c.row()) % kLength;
  ExpectAtPosition(c, c.Before(2), 4, [&](int64_t) { return m; });
  const int64_t positions[] = {m, std::min(m + kLength, kRegisteredChunk),
                               std::min(2 * kLength - 1, kRegisteredChunk),
                               m + kLength, m + kRegisteredChunk};
  const Doubles query = c.Before(1);
  Doubles copies;
  for (size_t copy = 0; copy < std::size(positions); ++copy) {
    copies.insert(copies.end(), query.begin(), query.end());
  }
  Doubles want;
  for (const int64_t position : positions) {
    const Doubles turned =
        ReferenceRope(query, {position}, c.Width(1) / kRegisteredHeadDim,
                      kRegisteredHeadDim, kRegisteredHeadDim, kBase, kStyle);
    want.insert(want.end(), turned.begin(), turned.end());
  }
  c.Expect(3, want, [&](size_t i) { return TurnedError(copies, i, 1.0); });
}

// The tensors are x, cos, sin and out. Cosines and sines are given, and so
// exact.
void ApplyRotaryEmb(RowCheck& c) {
  const Doubles cosines = c.Before(1), sines = c.Before(2);
  double most = 0;
  for (const double v : cosines) most = std::max(most, std::abs(v));
  for (const double v : sines) most = std::max(most, std::abs(v));
  ExpectTurned(
      c, c.Before(0), 3,
      [&](int64_t i) { return cosines[static_cast<size_t>(i)]; },
      [&](int64_t i) { return sines[static_cast<size_t>(i)]; }, most);
}

// kTable and kIndices are the places of the table and of the indices; tensor 2
// has the rows that they name.
template <size_t kTable, size_t kIndices>
void CopiedRows(RowCheck& c) {
  c.ExpectEqual(2, c.Before(kTable, c.Integer(kIndices, c.row())));
}

// The tensors are x, gate and out. ops/activation/sigmoid_mul promises 10 units
// for the sigmoid; the product is rounded.
void SigmoidMul(RowCheck& c) {
  Doubles want = c.Before(0);
  const Doubles gate = c.Before(1);
  for (size_t i = 0; i < want.size(); ++i) want[i] /= 1 + std::exp(-gate[i]);
  c.ExpectRelative(2, want, 11);
}

// The tensor is the logits, written in place. ops/logits promises 16-bit
// results to the bit. Its tanh in f32 is within 12 units; a quotient and two
// products are rounded.
void LogitsProcessor(RowCheck& c) {
  const DType dtype = c.dtype(0);
  Doubles logits = c.Before(0);
  WithType(dtype, [&](auto type) {
    using T = decltype(type);
    for (double& l : logits) {
      l = std::is_same_v<T, float>
              ? ReferenceSoftCap(l, kRegisteredSoftCap)
              : ReferenceSteppedSoftCap<T>(l, kRegisteredSoftCap);
    }
  });
  if (dtype == DType::kF32) {
    c.ExpectRelative(0, logits, 15);
  } else {
    c.ExpectEqual(0, logits);
  }
}

struct Reference {
  absl::string_view op;
  void (*check)(RowCheck& row);
};

constexpr Reference kReferences[] = {
    {"fused_add_rms_norm", &FusedAddRmsNorm},
    {"gemma_rms_norm", &GemmaRmsNorm},
    {"l2_norm", &L2Norm},
    {"layer_norm", &LayerNorm},
    {"rms_norm_gated", &GatedRmsNorm<false>},
    {"mixer2_gated_rms_norm", &GatedRmsNorm<true>},
    {"rms_norm_quant", &RmsNormQuant<false, false>},
    {"fused_add_rms_norm_quant", &RmsNormQuant<true, false>},
    {"rms_norm_static_quant", &RmsNormQuant<false, true>},
    {"fused_add_rms_norm_static_quant", &RmsNormQuant<true, true>},
    {"quant_fp8", &QuantFp8},
    {"static_quant_fp8", &StaticQuantFp8},
    {"quant_int8", &QuantInt8},
    {"rotary_embedding", &RotaryEmbedding},
    {"mrope", &Mrope},
    {"dual_chunk_rotary_embedding", &DualChunkRotaryEmbedding},
    {"apply_rotary_emb", &ApplyRotaryEmb},
    {"vocab_parallel_embedding", &CopiedRows<1, 0>},
    {"gather_rows", &CopiedRows<0, 1>},
    {"logits_processor", &LogitsProcessor},
    {"sigmoid_mul", &SigmoidMul},
};

}  // namespace

absl::StatusOr<double> CheckRegistered(absl::string_view op, int64_t rows,
                                       absl::Span<const CheckedTensor> tensors,
                                       Executor& executor) {
  const auto* reference =
      std::find_if(std::begin(kReferences), std::end(kReferences),
                   [op](const Reference& r) { return r.op == op; });
  if (reference == std::end(kReferences)) {
    return absl::InternalError(
        absl::StrCat(op, ": registered_check.cc has no reference for it"));
  }
  Verdict all;
  executor.ParallelFor(rows, [&](int64_t row, int) {
    Verdict mine;
    RowCheck check(tensors, row, mine);
    reference->check(check);
    all.Merge(mine);
  });
  return all.Result(op);
}

}  // namespace quern
