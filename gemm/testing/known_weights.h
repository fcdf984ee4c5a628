#ifndef QUERN_GEMM_TESTING_KNOWN_WEIGHTS_H_
#define QUERN_GEMM_TESTING_KNOWN_WEIGHTS_H_

// Weights of linear layers, in every format and layout, that are known in
// double, and the sources that LinearWeights::Pack reads them from.
// gemm/testing/weights.h makes them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"

namespace quern {

inline const BlockFormatInfo& InfoOf(BlockFormat format) {
  return *FindBlockFormat(static_cast<uint32_t>(format));
}

// Weights of any format, in double: b[k, n] = scale * (code - zero).
struct KnownWeights {
  LinearWeightsSpec spec;
  WeightLayout layout = WeightLayout::kNK;
  int64_t padding = 0;
  int64_t block_n = 0;            // columns of a scale of kE4M3Block
  DType scales_as = DType::kF32;  // kI4Group and kI8Group alone; or kF16
  std::vector<double> codes;      // [n, k]
  std::vector<double> scales;  // [groups, n]; empty for 1; kI8Channel: [n], [1]
  std::vector<double> zeros;   // [groups, n], or empty
  std::vector<float> bias;     // [n], or empty
  // [k], kI4Group alone: the group of each k; empty: in order.
  std::vector<int32_t> g_idx;
  // kBlocks alone, which has none of the above but bias: n rows of a file.
  std::vector<uint8_t> blocks;

  // A code that the kernels take for 0.
  double middle() const {
    return spec.format == WeightFormat::kI4Group ? 8 : 0;
  }
  bool grouped() const {
    return spec.format >= WeightFormat::kE4M3Block &&
           spec.format <= WeightFormat::kI8Group;
  }
  int64_t groups() const {
    return grouped() ? DivCeil(spec.k, spec.group_size) : 1;
  }
  int64_t group_of(int64_t i) const {
    if (!g_idx.empty()) return g_idx[static_cast<size_t>(i)];
    return grouped() ? i / spec.group_size : 0;
  }
  double code(int64_t col, int64_t i) const {
    return codes[static_cast<size_t>(col * spec.k + i)];
  }
  double scale(int64_t group, int64_t col) const {
    if (scales.size() < 2) return scales.empty() ? 1.0 : scales[0];
    return scales[static_cast<size_t>(group * spec.n + col)];
  }
  double zero(int64_t group, int64_t col) const {
    return zeros.empty() ? middle()
                         : zeros[static_cast<size_t>(group * spec.n + col)];
  }
  int64_t row_bytes() const {
    const BlockFormatInfo& info = InfoOf(spec.block_format);
    return spec.k / info.values * info.bytes;
  }

  // scale, code and zero of every weight, to f, as [n, k].
  template <typename F>
  std::vector<double> Each(const F& f) const {
    std::vector<double> all;
    all.reserve(codes.size());
    for (int64_t col = 0; col < spec.n; ++col) {
      for (int64_t i = 0; i < spec.k; ++i) {
        const int64_t g = group_of(i);
        all.push_back(f(scale(g, col), code(col, i), zero(g, col)));
      }
    }
    return all;
  }
  // What the weights are, as [n, k].
  std::vector<double> Values() const {
    if (spec.format == WeightFormat::kBlocks) return ValuesOf(blocks);
    return Each(
        [](double s, double code, double zero) { return s * (code - zero); });
  }
  // What other blocks of this format and shape are.
  std::vector<double> ValuesOf(const std::vector<uint8_t>& other) const {
    const BlockFormatInfo& info = InfoOf(spec.block_format);
    std::vector<double> values;
    for (int64_t i = 0; i < spec.n * spec.k; ++i) {
      values.push_back(
          ReferenceValue(spec.block_format,
                         other.data() + i / info.values * info.bytes,
                         i % info.values)
              .value);
    }
    return values;
  }

  // Each group has group_size of k, or what is left of it, in any order.
  void ShuffleGroups(Rng& rng) {
    g_idx.clear();
    for (int64_t i = 0; i < spec.k; ++i) {
      g_idx.push_back(static_cast<int32_t>(i / spec.group_size));
    }
    rng.Shuffle(g_idx);
  }

  LinearWeights Pack(Executor& executor) const;
};

// These values, [n, k], rounded to dtype: f32, bf16 or f16.
inline KnownWeights FloatWeights(DType dtype, int64_t n, int64_t k,
                                 const std::vector<double>& values) {
  KnownWeights w;
  w.spec.n = n;
  w.spec.k = k;
  w.spec.format = FormatOfFloats(dtype);
  w.codes = dtype == DType::kF32    ? ToDoubles(RoundedTo<float>(values))
            : dtype == DType::kBF16 ? ToDoubles(RoundedTo<BFloat16>(values))
                                    : ToDoubles(RoundedTo<Float16>(values));
  return w;
}

// Sources of known weights, in memory that ends at guard pages.
class WeightSources {
 public:
  explicit WeightSources(KnownWeights weights) : w_(std::move(weights)) {
    all_.layout = w_.layout;
    all_.block_n = w_.block_n;
    all_.codes = Codes();
    all_.zeros = Zeros();
    if (!w_.scales.empty()) all_.scales = Scales();
    if (!w_.bias.empty()) all_.bias = KeepVector(w_.bias);
    if (!w_.g_idx.empty()) all_.g_idx = KeepVector(w_.g_idx);
  }

  LinearWeightsSpec Spec(bool gated = false) const {
    LinearWeightsSpec spec = w_.spec;
    spec.gated = gated;
    return spec;
  }
  const LinearSource& All() const { return all_; }
  // Columns [begin, end) of b as one source.
  LinearSource Columns(int64_t begin, int64_t end) const {
    LinearSource source = all_;
    const int64_t of_word = w_.layout == WeightLayout::kAwq ? 8 : 1;
    const bool rows =
        w_.layout == WeightLayout::kNK || w_.layout == WeightLayout::kBlocks;
    source.codes = rows ? RowSlice(all_.codes, begin, end - begin)
                        : Cols(all_.codes, begin, end, of_word);
    if (w_.spec.format == WeightFormat::kE4M3Block) {
      const int64_t first = begin / w_.block_n;
      source.scales =
          RowSlice(all_.scales, first, DivCeil(end, w_.block_n) - first);
    } else if (w_.scales.size() != 1) {
      source.scales = Cols(all_.scales, begin, end);
    }
    source.zeros =
        Cols(all_.zeros, begin, end, w_.layout == WeightLayout::kNK ? 1 : 8);
    source.bias = Cols(all_.bias, begin, end);
    return source;
  }
  // All columns of b, as sources that end at `cuts`, which are rounded up to
  // where a source may end.
  std::vector<LinearSource> CutAt(std::vector<int64_t> cuts) const {
    const bool words = w_.layout == WeightLayout::kAwq ||
                       (!w_.zeros.empty() && w_.layout != WeightLayout::kNK);
    const bool blocks = w_.spec.format == WeightFormat::kE4M3Block;
    const int64_t unit = words ? 8 : blocks ? w_.block_n : 1;
    cuts.push_back(w_.spec.n);
    std::vector<LinearSource> sources;
    int64_t begin = 0;
    for (const int64_t cut : cuts) {
      const int64_t end = std::min(w_.spec.n, RoundUp(cut, unit));
      if (begin < end) sources.push_back(Columns(begin, end));
      begin = end;
    }
    return sources;
  }

  LinearWeights Pack(const std::vector<LinearSource>& sources,
                     Executor& executor, bool gated = false) const {
    auto weights = LinearWeights::Pack(Spec(gated), sources, executor);
    EXPECT_EQ(weights.status(), absl::OkStatus());
    return weights.ok() ? *std::move(weights) : LinearWeights();
  }
  LinearWeights Pack(bool gated = false) const {
    InlineExecutor executor;
    return Pack({all_}, executor, gated);
  }

 private:
  // Columns [begin, end) of a matrix or elements of a vector; nothing of none.
  static AnyTensorView Cols(const AnyTensorView& x, int64_t begin, int64_t end,
                            int64_t of_word = 1) {
    const int64_t first = begin / of_word, count = end / of_word - first;
    if (x.rank() == 2) return ColumnSlice(x, first, count);
    if (x.rank() == 0) return x;
    const auto* data = static_cast<const float*>(x.data());
    return DenseVector(data + first, count);
  }

  template <typename T>
  AnyTensorView Keep(const std::vector<T>& values, int64_t rows, int64_t cols) {
    const auto matrix = std::make_shared<const StridedMatrix<T>>(
        values, rows, cols, cols + w_.padding);
    memory_.push_back(matrix);
    return matrix->view();
  }
  template <typename T>
  AnyTensorView KeepVector(const std::vector<T>& values) {
    const auto vector = std::make_shared<const GuardBuffer<T>>(values);
    memory_.push_back(vector);
    return vector->view();
  }
  // Words of eight codes; at(row, col, i) is code i of a word.
  template <typename At>
  AnyTensorView KeepWords(int64_t rows, int64_t cols, const At& at) {
    std::vector<int32_t> words;
    for (int64_t word = 0; word < rows * cols; ++word) {
      uint32_t bits = 0;
      for (int64_t i = 0; i < 8; ++i) {
        const auto code = static_cast<int>(at(word / cols, word % cols, i));
        bits |= static_cast<uint32_t>(code) << (4 * i);
      }
      words.push_back(static_cast<int32_t>(bits));
    }
    return Keep(words, rows, cols);
  }

  template <typename T>
  AnyTensorView CodesAs() {
    const int64_t n = w_.spec.n, k = w_.spec.k;
    if (w_.layout == WeightLayout::kNK)
      return Keep(RoundedTo<T>(w_.codes), n, k);
    std::vector<double> transposed;
    for (int64_t i = 0; i < n * k; ++i) {
      transposed.push_back(w_.code(i % n, i / n));
    }
    return Keep(RoundedTo<T>(transposed), k, n);
  }
  AnyTensorView Codes() {
    const int64_t n = w_.spec.n, k = w_.spec.k;
    switch (w_.layout) {
      case WeightLayout::kAwq:
        return KeepWords(k, n / 8, [&](int64_t row, int64_t col, int64_t i) {
          return w_.code(8 * col + kAwqColumns[i], row);
        });
      case WeightLayout::kGptq:
      case WeightLayout::kGptqV2:
        return KeepWords(k / 8, n, [&](int64_t row, int64_t col, int64_t i) {
          return w_.code(col, 8 * row + i);
        });
      case WeightLayout::kBlocks:
        return Keep(w_.blocks, n, w_.row_bytes());
      default:
        break;
    }
    switch (w_.spec.format) {
      case WeightFormat::kF32:
        return CodesAs<float>();
      case WeightFormat::kBF16:
        return CodesAs<BFloat16>();
      case WeightFormat::kF16:
        return CodesAs<Float16>();
      case WeightFormat::kE4M3Block:
        return CodesAs<Float8E4M3>();
      case WeightFormat::kI4Group:
        return CodesAs<uint8_t>();
      default:
        return CodesAs<int8_t>();
    }
  }
  AnyTensorView Scales() {
    if (!w_.grouped()) return KeepVector(RoundedTo<float>(w_.scales));
    const int64_t n = w_.spec.n, groups = w_.groups();
    if (w_.spec.format != WeightFormat::kE4M3Block) {
      return w_.scales_as == DType::kF16
                 ? Keep(RoundedTo<Float16>(w_.scales), groups, n)
                 : Keep(RoundedTo<float>(w_.scales), groups, n);
    }
    std::vector<double> of_blocks;
    for (int64_t col = 0; col < n; col += w_.block_n) {
      for (int64_t g = 0; g < groups; ++g) {
        of_blocks.push_back(w_.scale(g, col));
      }
    }
    return Keep(RoundedTo<float>(of_blocks), DivCeil(n, w_.block_n), groups);
  }
  AnyTensorView Zeros() {
    if (w_.zeros.empty()) return {};
    const int64_t n = w_.spec.n, groups = w_.groups();
    if (w_.layout == WeightLayout::kNK) {
      return Keep(RoundedTo<uint8_t>(w_.zeros), groups, n);
    }
    return KeepWords(groups, n / 8, [&](int64_t g, int64_t col, int64_t i) {
      const bool awq = w_.layout == WeightLayout::kAwq;
      const double zero = w_.zero(g, 8 * col + (awq ? kAwqColumns[i] : i));
      return zero - (w_.layout == WeightLayout::kGptq ? 1 : 0);
    });
  }

  // The column at each code of AWQ's words.
  static constexpr int64_t kAwqColumns[] = {0, 2, 4, 6, 1, 3, 5, 7};

  KnownWeights w_;
  LinearSource all_;
  std::vector<std::shared_ptr<const void>> memory_;
};

inline LinearWeights KnownWeights::Pack(Executor& executor) const {
  const WeightSources sources(*this);
  return sources.Pack({sources.All()}, executor, spec.gated);
}

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_KNOWN_WEIGHTS_H_
