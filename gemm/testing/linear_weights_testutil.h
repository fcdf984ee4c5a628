#ifndef QUERN_GEMM_TESTING_LINEAR_WEIGHTS_TESTUTIL_H_
#define QUERN_GEMM_TESTING_LINEAR_WEIGHTS_TESTUTIL_H_

// Random weights in every format and layout of gemm/linear_weights.h.

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights_testutil.h"
#include "quern/gemm/testing/linear_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// One way in which weights come.
struct WeightCase {
  WeightFormat format;
  WeightLayout layout;
  bool zeros = false;
  bool act_order = false;

  // Weights in this layout can be cut into sources at multiples of so many
  // columns.
  int64_t unit() const {
    if (layout == WeightLayout::kAwq) return 8;
    if (zeros && layout != WeightLayout::kNK) return 8;
    return format == WeightFormat::kE4M3Block ? 4 : 1;
  }
};

inline std::ostream& operator<<(std::ostream& out, const WeightCase& c) {
  return out << WeightFormatName(c.format) << " " << WeightLayoutName(c.layout)
             << (c.zeros ? " with zeros" : "")
             << (c.act_order ? " in act-order" : "");
}

inline constexpr WeightCase kWeightCases[] = {
    {WeightFormat::kF32, WeightLayout::kNK},
    {WeightFormat::kF32, WeightLayout::kKN},
    {WeightFormat::kBF16, WeightLayout::kNK},
    {WeightFormat::kBF16, WeightLayout::kKN},
    {WeightFormat::kF16, WeightLayout::kNK},
    {WeightFormat::kF16, WeightLayout::kKN},
    {WeightFormat::kI8Channel, WeightLayout::kNK},
    {WeightFormat::kI8Channel, WeightLayout::kKN},
    {WeightFormat::kE4M3Block, WeightLayout::kNK},
    {WeightFormat::kI4Group, WeightLayout::kNK},
    {WeightFormat::kI4Group, WeightLayout::kNK, true, true},
    {WeightFormat::kI4Group, WeightLayout::kAwq},
    {WeightFormat::kI4Group, WeightLayout::kAwq, true},
    {WeightFormat::kI4Group, WeightLayout::kGptq},
    {WeightFormat::kI4Group, WeightLayout::kGptq, true, true},
    {WeightFormat::kI4Group, WeightLayout::kGptqV2, false, true},
    {WeightFormat::kI4Group, WeightLayout::kGptqV2, true},
    {WeightFormat::kI8Group, WeightLayout::kNK},
};

// One case for each format, the one that needs most of the kernels.
inline constexpr WeightCase kFormatCases[] = {
    {WeightFormat::kF32, WeightLayout::kNK},
    {WeightFormat::kBF16, WeightLayout::kNK},
    {WeightFormat::kF16, WeightLayout::kKN},
    {WeightFormat::kI8Channel, WeightLayout::kNK},
    {WeightFormat::kE4M3Block, WeightLayout::kNK},
    {WeightFormat::kI4Group, WeightLayout::kNK, true, true},
    {WeightFormat::kI8Group, WeightLayout::kNK},
};

// A matrix of random elements that ends at a guard page. Its views show some of
// the rows or columns.
class RandomMatrix {
 public:
  // `fill(rng)` returns one element. Without rows, every view is of rank 0.
  template <typename T, typename Fill>
  static RandomMatrix Of(Rng& rng, int64_t rows, int64_t cols, Fill fill) {
    std::vector<uint8_t> bytes;
    for (int64_t i = 0; i < rows * cols; ++i) {
      const T x = fill(rng);
      const auto* begin = reinterpret_cast<const uint8_t*>(&x);
      bytes.insert(bytes.end(), begin, begin + sizeof(T));
    }
    return RandomMatrix(DTypeOf<T>, rows, cols, bytes);
  }

  AnyTensorView Rows(int64_t begin, int64_t end) const {
    if (rows_ == 0) return {};
    return View(begin * cols_, end - begin, cols_);
  }
  AnyTensorView Cols(int64_t begin, int64_t end) const {
    if (rows_ == 0) return {};
    return View(begin, rows_, end - begin);
  }
  // Elements [begin, end) of the first row.
  AnyTensorView Vector(int64_t begin, int64_t end) const {
    if (rows_ == 0) return {};
    return AnyTensorView(dtype_, At(begin), 1, {end - begin}, {1});
  }

 private:
  RandomMatrix(DType dtype, int64_t rows, int64_t cols,
               const std::vector<uint8_t>& bytes)
      : dtype_(dtype), rows_(rows), cols_(cols), bytes_(bytes) {}

  const void* At(int64_t element) const {
    return bytes_.data() + element * static_cast<int64_t>(SizeOf(dtype_));
  }
  AnyTensorView View(int64_t first, int64_t rows, int64_t cols) const {
    return AnyTensorView(dtype_, At(first), 2, {rows, cols}, {cols_, 1});
  }

  DType dtype_;
  int64_t rows_, cols_;
  GuardBuffer<uint8_t> bytes_;
};

// n columns of random weights with a bias. Products are finite.
class RandomWeights {
 public:
  static constexpr int64_t kBlockN = 4;

  RandomWeights(Rng& rng, const WeightCase& c, int64_t n, int64_t k,
                int64_t group_size = 32)
      : case_(c),
        n_(n),
        k_(k),
        group_size_(group_size),
        codes_(Codes(rng)),
        scales_(Scales(rng)),
        zeros_(Zeros(rng)),
        g_idx_(Groups(rng)),
        bias_(RandomMatrix::Of<float>(rng, 1, n, Real)) {}

  LinearWeightsSpec Spec(bool gated = false) const {
    LinearWeightsSpec spec;
    spec.n = n_;
    spec.k = k_;
    spec.format = case_.format;
    spec.group_size = group_size_;
    spec.gated = gated;
    return spec;
  }

  // Columns [begin, end) of b as one source.
  LinearSource Columns(int64_t begin, int64_t end) const {
    LinearSource source;
    source.layout = case_.layout;
    source.block_n = kBlockN;
    source.bias = bias_.Vector(begin, end);
    source.g_idx = g_idx_.Vector(0, k_);
    switch (case_.layout) {
      case WeightLayout::kNK:
        source.codes = codes_.Rows(begin, end);
        break;
      case WeightLayout::kAwq:
        source.codes = codes_.Cols(begin / 8, end / 8);
        break;
      default:
        source.codes = codes_.Cols(begin, end);
    }
    switch (case_.format) {
      case WeightFormat::kI8Channel:
        source.scales = scales_.Vector(begin, end);
        break;
      case WeightFormat::kE4M3Block:
        source.scales = scales_.Rows(begin / kBlockN, DivCeil(end, kBlockN));
        break;
      default:
        source.scales = scales_.Cols(begin, end);
    }
    source.zeros = case_.layout == WeightLayout::kNK
                       ? zeros_.Cols(begin, end)
                       : zeros_.Cols(begin / 8, end / 8);
    return source;
  }
  LinearSource All() const { return Columns(0, n_); }

  // All columns of b, as sources that end at `cuts`, which are rounded up to
  // multiples of unit().
  std::vector<LinearSource> CutAt(std::vector<int64_t> cuts) const {
    cuts.push_back(n_);
    std::vector<LinearSource> sources;
    int64_t begin = 0;
    for (const int64_t cut : cuts) {
      const int64_t end = std::min(n_, RoundUp(cut, case_.unit()));
      if (begin < end) sources.push_back(Columns(begin, end));
      begin = end;
    }
    return sources;
  }

  LinearWeights Pack(const std::vector<LinearSource>& sources,
                     Executor& executor, bool gated = false) const {
    auto weights = LinearWeights::Pack(Spec(gated), sources, executor);
    EXPECT_TRUE(weights.ok()) << weights.status();
    return weights.ok() ? *std::move(weights) : LinearWeights();
  }
  LinearWeights Pack(bool gated = false) const {
    InlineExecutor executor;
    return Pack({All()}, executor, gated);
  }

 private:
  int64_t groups() const { return DivCeil(k_, group_size_); }

  static float Real(Rng& rng) { return static_cast<float>(rng.Uniform(-1, 1)); }
  static float Positive(Rng& rng) {
    return static_cast<float>(rng.Uniform(0.1, 1));
  }
  static uint8_t Below16(Rng& rng) {
    return static_cast<uint8_t>(rng.Integer(0, 15));
  }
  static int32_t Word(Rng& rng) { return static_cast<int32_t>(rng.Next()); }

  RandomMatrix Codes(Rng& rng) const {
    const bool nk = case_.layout == WeightLayout::kNK;
    const int64_t rows = nk ? n_ : k_, cols = nk ? k_ : n_;
    switch (case_.layout) {
      case WeightLayout::kAwq:
        return RandomMatrix::Of<int32_t>(rng, k_, n_ / 8, Word);
      case WeightLayout::kGptq:
      case WeightLayout::kGptqV2:
        return RandomMatrix::Of<int32_t>(rng, k_ / 8, n_, Word);
      default:
        break;
    }
    switch (case_.format) {
      case WeightFormat::kBF16:
        return RandomMatrix::Of<BFloat16>(rng, rows, cols, [](Rng& r) {
          return FromDouble<BFloat16>(Real(r));
        });
      case WeightFormat::kF16:
        return RandomMatrix::Of<Float16>(rng, rows, cols, [](Rng& r) {
          return FromDouble<Float16>(Real(r));
        });
      case WeightFormat::kI8Channel:
      case WeightFormat::kI8Group:
        return RandomMatrix::Of<int8_t>(rng, rows, cols, [](Rng& r) {
          return static_cast<int8_t>(r.Next());
        });
      case WeightFormat::kE4M3Block:
        return RandomMatrix::Of<Float8E4M3>(rng, rows, cols, [](Rng& r) {
          return FromDouble<Float8E4M3>(Real(r));
        });
      case WeightFormat::kI4Group:
        return RandomMatrix::Of<uint8_t>(rng, rows, cols, Below16);
      default:
        return RandomMatrix::Of<float>(rng, rows, cols, Real);
    }
  }

  RandomMatrix Scales(Rng& rng) const {
    switch (case_.format) {
      case WeightFormat::kI8Channel:
        return RandomMatrix::Of<float>(rng, 1, n_, Positive);
      case WeightFormat::kE4M3Block:
        return RandomMatrix::Of<float>(rng, DivCeil(n_, kBlockN), groups(),
                                       Positive);
      case WeightFormat::kI4Group:
      case WeightFormat::kI8Group:
        return RandomMatrix::Of<Float16>(rng, groups(), n_, [](Rng& r) {
          return FromDouble<Float16>(Positive(r));
        });
      default:
        return RandomMatrix::Of<float>(rng, 0, 0, Positive);
    }
  }

  RandomMatrix Zeros(Rng& rng) const {
    const int64_t rows = case_.zeros ? groups() : 0;
    return case_.layout == WeightLayout::kNK
               ? RandomMatrix::Of<uint8_t>(rng, rows, n_, Below16)
               : RandomMatrix::Of<int32_t>(rng, rows, n_ / 8, Word);
  }

  RandomMatrix Groups(Rng& rng) const {
    std::vector<int32_t> groups;
    for (int64_t i = 0; i < k_; ++i) {
      groups.push_back(static_cast<int32_t>(i / group_size_));
    }
    rng.Shuffle(groups);
    return RandomMatrix::Of<int32_t>(
        rng, case_.act_order ? 1 : 0, k_,
        [next = groups.begin()](Rng&) mutable { return *next++; });
  }

  WeightCase case_;
  int64_t n_, k_, group_size_;
  RandomMatrix codes_, scales_, zeros_, g_idx_, bias_;
};

// Runs the plan on m rows of a and returns c. The rows of a and of c have
// `padding` elements after them.
template <typename A, typename C>
std::vector<C> RunLinear(const LinearPlan& plan, int64_t m,
                         const std::vector<A>& a, Executor& executor,
                         int64_t padding = 0, const RowTerms& terms = {}) {
  Shape s;
  s.m = m;
  s.padding = padding;
  s.shift = padding % 3;
  return RunLinear<A, C>(plan, s, a, executor, terms);
}

// A plan of the packed implementation on these weights.
inline LinearPlan PlanOf(const LinearWeights& weights, LinearSpec spec = {}) {
  InlineExecutor executor;
  spec.kernels = "packed";
  auto plan = LinearPlan::Create(spec, weights, executor);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

inline LinearSpec SpecOf(DType a, DType c) {
  LinearSpec spec;
  spec.a = a;
  spec.c = c;
  return spec;
}

// Returns c for m rows of a. Gated weights run with silu_and_mul.
inline std::vector<float> Product(const LinearWeights& weights, int64_t m,
                                  const std::vector<BFloat16>& a) {
  InlineExecutor executor;
  LinearSpec spec = SpecOf(DType::kBF16, DType::kF32);
  if (weights.spec().gated) spec.activation = LinearActivation::kSiluAndMul;
  return RunLinear<BFloat16, float>(PlanOf(weights, spec), m, a, executor);
}

inline std::vector<uint8_t> BytesOf(const LinearWeights& weights) {
  return {weights.bytes().begin(), weights.bytes().end()};
}

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_LINEAR_WEIGHTS_TESTUTIL_H_
