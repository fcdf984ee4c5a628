#ifndef QUERN_GEMM_TESTING_LINEAR_BLOCKS_TESTUTIL_H_
#define QUERN_GEMM_TESTING_LINEAR_BLOCKS_TESTUTIL_H_

// Weights in block formats and rows for them, whose products tests know in
// double.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/grouped_linear.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights_testutil.h"
#include "quern/gemm/testing/linear_testutil.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"

namespace quern {

inline const BlockFormatInfo& InfoOf(BlockFormat format) {
  return *FindBlockFormat(static_cast<uint32_t>(format));
}

// Weights in blocks, and what each is in double.
struct BlockWeights {
  BlockFormat format = BlockFormat::kQ4_0;
  int64_t n = 0, k = 0;
  std::vector<uint8_t> blocks;
  std::vector<float> bias;

  int64_t row_bytes() const {
    return k / InfoOf(format).values * InfoOf(format).bytes;
  }

  // [n, k]
  std::vector<double> Values() const { return Each(blocks); }
  // The values where all codes are 0: -t, and nothing that is a code.
  std::vector<double> Minima() const {
    const BlockFormatInfo& info = InfoOf(format);
    size_t begin = 0, end = static_cast<size_t>(info.bytes);
    switch (format) {
      case BlockFormat::kQ4_1:
      case BlockFormat::kQ5_1:
        begin = 4;
        break;
      case BlockFormat::kQ4_K:
      case BlockFormat::kQ5_K:
        begin = 16;
        break;
      case BlockFormat::kQ2_K:
        begin = 16;
        end = 80;
        break;
      default:
        return std::vector<double>(static_cast<size_t>(n * k));
    }
    auto zeroed = blocks;
    for (size_t i = 0; i < zeroed.size(); ++i) {
      const size_t byte = i % static_cast<size_t>(info.bytes);
      if (byte >= begin && byte < end) zeroed[i] = 0;
    }
    return Each(zeroed);
  }
  std::vector<double> Each(const std::vector<uint8_t>& from) const {
    const BlockFormatInfo& info = InfoOf(format);
    std::vector<double> values;
    for (int64_t i = 0; i < n * k; ++i) {
      values.push_back(
          ReferenceValue(format, from.data() + i / info.values * info.bytes,
                         i % info.values)
              .value);
    }
    return values;
  }

  LinearWeights Pack(bool gated, const std::vector<int64_t>& cuts = {}) const {
    LinearWeightsSpec spec;
    spec.n = n;
    spec.k = k;
    spec.format = WeightFormat::kBlocks;
    spec.block_format = format;
    spec.gated = gated;
    const StridedMatrix<uint8_t> codes(blocks, n, row_bytes(), row_bytes() + 5);
    const GuardBuffer<float> all_bias(bias);
    std::vector<LinearSource> sources;
    for (size_t i = 0; i <= cuts.size(); ++i) {
      const int64_t begin = i == 0 ? 0 : cuts[i - 1];
      const int64_t end = i == cuts.size() ? n : cuts[i];
      LinearSource source;
      source.layout = WeightLayout::kBlocks;
      source.codes =
          AnyTensorView(DType::kU8, codes.view().Row(begin), 2,
                        {end - begin, row_bytes()}, {row_bytes() + 5, 1});
      if (!bias.empty()) {
        source.bias = AnyTensorView(DType::kF32, all_bias.data() + begin, 1,
                                    {end - begin}, {1});
      }
      sources.push_back(source);
    }
    InlineExecutor executor;
    auto weights = LinearWeights::Pack(spec, sources, executor);
    EXPECT_EQ(weights.status(), absl::OkStatus());
    return weights.ok() ? *weights : LinearWeights();
  }
};

inline BlockWeights RandomBlockWeights(Rng& rng, BlockFormat format, int64_t n,
                                       int64_t k, double reach) {
  BlockWeights w;
  w.format = format;
  w.n = n;
  w.k = k;
  w.blocks = RandomBlocks(rng, format, n * k / InfoOf(format).values, reach);
  // Without a bias the panels end where the packed bytes do.
  w.bias = SmallIntegers<float>(rng, n % 2 == 0 ? n : 0, -99, 99);
  return w;
}

// Makes the scales of blocks 1, 2 and 4 by turns, but for those within K
// blocks.
inline void SetScales(BlockWeights& w) {
  const auto bytes = static_cast<size_t>(InfoOf(w.format).bytes);
  int log = 0;
  for (size_t at = 0; at < w.blocks.size(); at += bytes) {
    for (const BlockHalf& half : HalvesOf(w.format)) {
      PutHalf(FromDouble<Float16>(1 << log), half.byte, w.blocks.data() + at);
    }
    if (w.format == BlockFormat::kMXFP4) {
      w.blocks[at] = static_cast<uint8_t>(127 + log);
    }
    log = (log + 1) % 3;
  }
}

// Weights that are integers, or halves.
inline BlockWeights IntegerBlockWeights(Rng& rng, BlockFormat format, int64_t n,
                                        int64_t k) {
  BlockWeights w = RandomBlockWeights(rng, format, n, k, 6.0);
  SetScales(w);
  return w;
}

// What gemm/kernels/block_kernels.h multiplies in place of rows of whole
// blocks: ax * qa.
template <typename A>
std::vector<double> QuantisedInBlocks(const std::vector<A>& a) {
  std::vector<double> rows;
  for (size_t at = 0; at < a.size(); at += 32) {
    float most = 0;
    for (size_t i = 0; i < 32; ++i) {
      most = std::max(most, static_cast<float>(std::abs(ToDouble(a[at + i]))));
    }
    const float scale = most == 0 ? 1.0f : std::max(most / 127.0f, 0x1p-125f);
    const float inverse = 1.0f / scale;
    for (size_t i = 0; i < 32; ++i) {
      rows.push_back(scale *
                     std::nearbyint(ToDouble(a[at + i]) * double{inverse}));
    }
  }
  return rows;
}

// Rows whose blocks have a scale of 1, and few numbers that are not 0.
template <typename A>
std::vector<A> IntegerRows(Rng& rng, int64_t count) {
  std::vector<A> a(static_cast<size_t>(count));
  for (size_t at = 0; at < a.size(); at += 32) {
    const auto place = [&] { return at + rng.Next() % 32; };
    a[place()] = FromDouble<A>(static_cast<double>(rng.Integer(-3, 3)));
    a[place()] = FromDouble<A>(rng.Next() % 2 == 0 ? 127 : -127);
  }
  return a;
}

template <typename A, typename C>
LinearSpec Int8Spec(LinearActivation act = LinearActivation::kNone) {
  LinearSpec spec = SpecOf<A, C>(act);
  spec.activations = LinearActivations::kInt8Blocks;
  return spec;
}

// Makes plans whose packed weights lie before a guard page.
class BlockPlansTest : public IsaTest {
 protected:
  LinearPlan Plan(const BlockWeights& w, const LinearSpec& spec,
                  const std::vector<int64_t>& cuts = {}) {
    return GuardedPlan(w.Pack(IsGated(spec.activation), cuts), spec);
  }
  LinearPlan GuardedPlan(const LinearWeights& packed, const LinearSpec& spec) {
    const std::vector<uint8_t> bytes(packed.bytes().begin(),
                                     packed.bytes().end());
    const auto size = static_cast<int64_t>(bytes.size());
    constexpr int64_t kAlignment = LinearWeights::kAlignment;
    packed_.push_back(std::make_unique<GuardBuffer<uint8_t>>(
        bytes, Edge::kEnd, RoundUp(size, kAlignment) - size));
    const auto adopted = LinearWeights::Adopt(
        {packed_.back()->data(), static_cast<size_t>(packed_.back()->size())});
    EXPECT_EQ(adopted.status(), absl::OkStatus());
    auto plan = LinearPlan::Create(spec, *adopted, inline_);
    EXPECT_EQ(plan.status(), absl::OkStatus());
    EXPECT_RAN_ON(*plan);
    return *std::move(plan);
  }

  // Against products in double of the values that the tests know.
  template <typename A, typename C>
  void ExpectExact(const LinearSpec& spec, BlockFormat format, const Shape& s,
                   Executor& executor) {
    SCOPED_TRACE(testing::Message() << InfoOf(format).name << " " << s);
    TestRng rng(static_cast<uint64_t>(s.m * 1000003 + s.n * 1009 + s.k));
    const BlockWeights w = IntegerBlockWeights(rng, format, s.n, s.k);
    const auto plan = Plan(w, spec);
    const auto a = IntegerRows<A>(rng, s.m * s.k);
    auto want = ReferenceLinear(s.m, s.n, s.k, ToDoubles(a), w.Values());
    for (size_t i = 0; !w.bias.empty() && i < want.size(); ++i) {
      want[i] += w.bias[i % w.bias.size()];
    }
    EXPECT_TRUE(
        AllEqual(RunLinear<A, C>(plan, s, a, executor), RoundedTo<C>(want)))
        << plan.Explain(s.m);
  }

  // Expects the bits of this CPU's best instruction set. Integers are exact and
  // every sum in f32 is one chain, so that all with a fused multiply-add agree.
  void ExpectBitsOfTheBest(const LinearWeights& packed, Rng& rng) {
    const LinearSpec spec = Int8Spec<BFloat16, float>();
    const auto best =
        OnTheBestIsa([&] { return LinearPlan::Create(spec, packed, inline_); });
    ASSERT_EQ(best.status(), absl::OkStatus());
    const auto plan = GuardedPlan(packed, spec);
    if (std::string(isa()).rfind("AVX", 0) != 0) return;
    for (const int64_t m : {1, 4, 21}) {
      const Shape s{m, plan.n(), plan.k()};
      const auto a = UniformReals<BFloat16>(rng, m * s.k);
      EXPECT_TRUE(
          AllBitsEqual(RunLinear<BFloat16, float>(plan, s, a, inline_),
                       RunLinear<BFloat16, float>(*best, s, a, inline_)))
          << plan.Explain(m) << "; " << best->Explain(m);
    }
  }

  // Expects that GroupedLinearPlan has the bits of layers of f32 rows, on
  // weights that make() returns, anew for each group.
  template <typename Make>
  void ExpectGroupsHaveTheBitsOfLayers(const LinearSpec& spec, Rng& rng,
                                       const Make& make) {
    ManyWorkers many(3);
    std::vector<LinearWeights> weights;
    std::vector<float> a, want;
    std::vector<int32_t> offsets = {0};
    for (const int64_t count : {2, 0, 9, 1, 3, 70, 5}) {
      weights.push_back(make());
      const auto plan = GuardedPlan(weights.back(), spec);
      const auto rows = UniformReals<float>(rng, count * plan.k());
      a.insert(a.end(), rows.begin(), rows.end());
      Shape s;
      s.m = count;
      const auto alone = RunLinear<float, float>(plan, s, rows, inline_);
      want.insert(want.end(), alone.begin(), alone.end());
      offsets.push_back(offsets.back() + static_cast<int32_t>(count));
    }
    GroupedLinearSpec grouped;
    grouped.a = grouped.c = DType::kF32;
    grouped.activations = spec.activations;
    const auto plan = GroupedLinearPlan::Create(grouped, weights);
    ASSERT_EQ(plan.status(), absl::OkStatus());
    EXPECT_EQ(plan->WorkspaceBytes(0, 1).status(), absl::OkStatus());
    const int64_t rows = offsets.back();
    std::vector<float> c(want.size());
    GroupedLinearArgs args;
    args.a = DenseMatrix(a.data(), rows, plan->k());
    args.c = DenseMatrix(c.data(), rows, plan->n());
    args.offsets = DenseVector<const int32_t>(
        offsets.data(), static_cast<int64_t>(offsets.size()));
    const auto bytes = plan->WorkspaceBytes(rows, many.num_workers());
    ASSERT_EQ(bytes.status(), absl::OkStatus());
    GuardBuffer<float> memory(RoundUp(*bytes, AlignedBuffer::kAlignment) / 4);
    plan->Execute(args, Workspace(memory.data(), static_cast<size_t>(*bytes)),
                  many);
    EXPECT_TRUE(AllBitsEqual(c, want));
  }

  InlineExecutor inline_;
  std::vector<std::unique_ptr<GuardBuffer<uint8_t>>> packed_;
};

}  // namespace quern

#endif  // QUERN_GEMM_TESTING_LINEAR_BLOCKS_TESTUTIL_H_
