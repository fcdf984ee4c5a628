// What LinearWeights::Pack refuses, and LinearPlan on weights that are codes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Spec = LinearWeightsSpec;
using Sources = std::vector<LinearSource>;
using View = AnyTensorView;
using Change = std::function<void(Spec&, Sources&)>;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

constexpr WeightCase kBF16NK{WeightFormat::kBF16, WeightLayout::kNK};
constexpr WeightCase kI8NK{WeightFormat::kI8Channel, WeightLayout::kNK};
constexpr WeightCase kE4M3{WeightFormat::kE4M3Block, WeightLayout::kNK};
constexpr WeightCase kI4NK{WeightFormat::kI4Group, WeightLayout::kNK, true,
                           true};
constexpr WeightCase kAwq{WeightFormat::kI4Group, WeightLayout::kAwq, true};
constexpr WeightCase kGptq{WeightFormat::kI4Group, WeightLayout::kGptq, true,
                           true};
constexpr WeightCase kI8Group{WeightFormat::kI8Group, WeightLayout::kNK};

struct Field {
  const char* name;
  View LinearSource::*view;
};
constexpr Field kFields[] = {{"codes", &LinearSource::codes},
                             {"scales", &LinearSource::scales},
                             {"zeros", &LinearSource::zeros},
                             {"g_idx", &LinearSource::g_idx},
                             {"bias", &LinearSource::bias}};

// The parts of a view, so that a test can alter one of them.
struct ViewParts {
  explicit ViewParts(const View& v) : data(v.data()), dtype(v.dtype()) {
    rank = v.rank();
    for (int d = 0; d < rank; ++d) {
      extents[static_cast<size_t>(d)] = v.extent(d);
      strides[static_cast<size_t>(d)] = v.stride(d);
    }
  }
  View Make() const { return View(dtype, data, rank, extents, strides); }

  const void* data;
  DType dtype;
  int rank;
  View::Dims extents{}, strides{};
};

// Two sources of 16 columns each, 64 k, groups of 32, in every layout.
class LinearWeightsRefusalTest : public testing::Test {
 protected:
  void Refuse(const WeightCase& c, const std::string& words,
              const Change& change, absl::StatusCode code = kInvalid) {
    SCOPED_TRACE(testing::Message() << c << ": " << words);
    const WeightSources random = RealSources(rng_, c, 32, 64);
    Spec spec = random.Spec();
    Sources sources = random.CutAt({16});
    EXPECT_EQ(Pack(spec, sources), absl::OkStatus());
    change(spec, sources);
    const absl::Status status = Pack(spec, sources);
    ExpectRefusal(status, code, words);
    EXPECT_EQ(status.message().find("linear_weights: "),
              code == kExhausted ? std::string::npos : 0);
  }
  // Refuses one source for n and k, before any of its views is looked at.
  void RefuseShape(const WeightCase& c, int64_t n, int64_t k,
                   const std::string& words) {
    Refuse(c, words, [&](Spec& spec, Sources& sources) {
      spec.n = n;
      spec.k = k;
      sources.resize(1);
    });
  }
  // Refuses a view of the second source after `change`.
  void RefuseView(const WeightCase& c, const Field& field,
                  const std::string& words,
                  const std::function<void(ViewParts&)>& change,
                  absl::StatusCode code = kInvalid) {
    Refuse(
        c, absl::StrCat("sources[1].", field.name, words),
        [&](Spec&, Sources& sources) {
          ViewParts parts(sources[1].*field.view);
          change(parts);
          sources[1].*field.view = parts.Make();
        },
        code);
  }
  absl::Status Pack(const Spec& spec, const Sources& sources) {
    return LinearWeights::Pack(spec, sources, executor_).status();
  }

  TestRng rng_;
  InlineExecutor executor_;
};

TEST_F(LinearWeightsRefusalTest, ABadSpec) {
  const auto refuse = [&](const WeightCase& c, const std::string& words,
                          const std::function<void(Spec&)>& change) {
    Refuse(c, words, [&](Spec& spec, Sources&) {
      change(spec);
      ExpectRefusal(LinearWeights::MaxPackedBytes(spec).status(), words);
    });
  };
  for (const WeightCase& c : kFormatCases) {
    refuse(c, "n=0; need 1 <= n <= 2147483647", [](Spec& s) { s.n = 0; });
    refuse(c, "n=2147483648; need 1 <= n",
           [](Spec& s) { s.n = int64_t{1} << 31; });
    refuse(c, "k=-1; need 1 <= k <= ", [](Spec& s) { s.k = -1; });
    refuse(c, "k=2147483648; need 1 <= k",
           [](Spec& s) { s.k = int64_t{1} << 31; });
    refuse(c, "n=31 is odd", [](Spec& s) {
      s.n = 31;
      s.gated = true;
    });
  }
  refuse(kI8NK, "k=131072; need 1 <= k <= 131071",
         [](Spec& s) { s.k = 131072; });
  refuse(kBF16NK, "format=8; need 0 <= format <= 7",
         [](Spec& s) { s.format = static_cast<WeightFormat>(8); });
  for (const int64_t size : {0, 8, 24, -2}) {
    for (const WeightCase& c : {kE4M3, kI4NK, kGptq, kI8Group}) {
      refuse(c,
             absl::StrCat("group_size=", size,
                          "; need a multiple of 16, k=64 or more, or -1"),
             [&](Spec& s) { s.group_size = size; });
    }
  }
}

TEST_F(LinearWeightsRefusalTest, AShapeThatTheLayoutDoesNotHave) {
  RefuseShape(kAwq, 12, 64, "n=12; awq needs a multiple of 8");
  RefuseShape(kGptq, 32, 60, "k=60; gptq needs a multiple of 8");
  // Words of eight zero points cannot name these columns.
  for (const auto layout : {WeightLayout::kGptq, WeightLayout::kGptqV2}) {
    Refuse({WeightFormat::kI4Group, layout, true},
           absl::StrCat("n=23; ", WeightLayoutName(layout),
                        " needs a multiple of 8"),
           [](Spec& spec, Sources& sources) {
             spec.n = 23;
             sources.resize(1);
             sources[0].bias = {};
             for (View* view : {&sources[0].codes, &sources[0].scales}) {
               ViewParts parts(*view);
               parts.extents[1] = 23;
               *view = parts.Make();
             }
           });
  }
}

TEST_F(LinearWeightsRefusalTest, SourcesThatAreNotTheWeights) {
  Refuse(kBF16NK, "sources=0; need sources >= 1",
         [](Spec&, Sources& s) { s.clear(); });
  Refuse(kBF16NK, "sources[0].codes is [16, 64]; need [32, 64]",
         [](Spec&, Sources& s) {
           s.pop_back();
           s[0].bias = {};
         });
  Refuse(kBF16NK, "sources[2].codes has 16 columns after 32 of the sources",
         [](Spec&, Sources& s) { s.push_back(s[0]); });
  Refuse(kBF16NK, "columns of all sources=32; need 33",
         [](Spec& spec, Sources&) { spec.n = 33; });
  Refuse(kAwq, "sources[1].codes", [](Spec&, Sources& s) {
    ViewParts parts(s[1].codes);
    parts.extents[1] = int64_t{1} << 61;
    s[1].codes = parts.Make();
  });
  Refuse(kBF16NK, "sources[1].layout is kn; need nk, as sources[0]",
         [](Spec&, Sources& s) { s[1].layout = WeightLayout::kKN; });
  Refuse(kBF16NK, "sources[1].layout=6; need 0 <= sources[1].layout <= 5",
         [](Spec&, Sources& s) { s[1].layout = static_cast<WeightLayout>(6); });
}

TEST_F(LinearWeightsRefusalTest, ALayoutThatTheFormatDoesNotHave) {
  int refused = 0;
  for (const WeightCase& c : kFormatCases) {
    for (int i = 0; i <= static_cast<int>(WeightLayout::kBlocks); ++i) {
      const auto layout = static_cast<WeightLayout>(i);
      bool has = false;
      for (const WeightCase& known : kWeightCases) {
        has = has || (known.format == c.format && known.layout == layout);
      }
      if (has) continue;
      ++refused;
      Refuse(c,
             absl::StrCat("sources[0].layout is ", WeightLayoutName(layout),
                          "; ", WeightFormatName(c.format), " has no"),
             [&](Spec&, Sources& s) {
               for (LinearSource& source : s) source.layout = layout;
             });
    }
  }
  EXPECT_EQ(refused, 7 * 6 - (4 * 2 + 1 + 4 + 1));
}

TEST_F(LinearWeightsRefusalTest, AViewOfAnotherKind) {
  for (const WeightCase& c : kWeightCases) {
    const WeightSources random = RealSources(rng_, c, 32, 64);
    const LinearSource good = random.CutAt({16})[1];
    for (const Field& field : kFields) {
      const View& view = good.*field.view;
      if (view.rank() == 0) continue;
      const bool codes = field.view == &LinearSource::codes;
      const auto last = static_cast<size_t>(view.rank() - 1);
      const bool any_float = field.view == &LinearSource::scales &&
                             (c.format == WeightFormat::kI4Group ||
                              c.format == WeightFormat::kI8Group);
      RefuseView(c, field, " is null; need [",
                 [](ViewParts& v) { v.data = nullptr; });
      RefuseView(
          c, field, " is f8e5m2; need ",
          [](ViewParts& v) { v.dtype = DType::kF8E5M2; },
          any_float ? kUnimplemented : kInvalid);
      if (SizeOf(view.dtype()) > 1) {
        RefuseView(c, field, " is not aligned to its elements",
                   [](ViewParts& v) {
                     v.data = static_cast<const char*>(v.data) + 1;
                   });
      }
      RefuseView(c, field, absl::StrCat(" has stride 2 in dimension ", last),
                 [&](ViewParts& v) { v.strides[last] = 2; });
      RefuseView(
          c, field, codes ? " has rank 3; need 2" : " is [",
          [](ViewParts& v) { v.extents[static_cast<size_t>(v.rank++)] = 1; });
      RefuseView(c, field, " has rank 6; need ",
                 [](ViewParts& v) { v.rank = 6; });
      // Codes are altered along k, because along n the columns do not add up.
      const size_t d = codes && c.layout != WeightLayout::kNK ? 0 : last;
      RefuseView(c, field, " is [", [&](ViewParts& v) { ++v.extents[d]; });
      if (codes || field.view == &LinearSource::scales) {
        RefuseView(c, field, "", [](ViewParts& v) { v.rank = 0; });
      }
    }
  }
}

// Packing ended debug builds where such codes could be written, and summing
// those of int8 did where they could not (2026).
TEST_F(LinearWeightsRefusalTest, CodesWhoseRowsOverlap) {
  for (const WeightCase& c : kWeightCases) {
    const WeightSources random = RealSources(rng_, c, 32, 64);
    const int64_t columns = random.CutAt({16})[1].codes.extent(1);
    for (const int64_t stride : {int64_t{0}, int64_t{1}, columns - 1}) {
      if (stride == columns) continue;
      RefuseView(
          c, kFields[0],
          absl::StrCat(" has stride ", stride, " in dimension 0; need ",
                       columns, " or more, as its elements must not overlap"),
          [&](ViewParts& v) { v.strides[0] = stride; });
    }
  }
}

// The stride of a single row is not used.
TEST_F(LinearWeightsRefusalTest, TakesASingleRowOfAnyStride) {
  const std::vector<BF> row(64);
  Spec spec;
  spec.n = 1;
  spec.k = 64;
  for (const int64_t stride : {int64_t{0}, int64_t{-1}, int64_t{1} << 62}) {
    LinearSource source;
    source.codes = MatrixView<const BF>(row.data(), {1, 64}, {stride, 1});
    EXPECT_EQ(Pack(spec, {source}), absl::OkStatus()) << stride;
  }
}

// One row for all groups, or for all blocks of columns.
TEST_F(LinearWeightsRefusalTest, TakesScalesAndZerosWhoseRowsOverlap) {
  for (const WeightCase& c : {kE4M3, kI4NK, kAwq, kGptq, kI8Group}) {
    SCOPED_TRACE(testing::Message() << c);
    const WeightSources random = RealSources(rng_, c, 32, 64);
    Sources sources = random.CutAt({16});
    for (View* view : {&sources[1].scales, &sources[1].zeros}) {
      if (view->rank() == 0) continue;
      ViewParts parts(*view);
      parts.strides[0] = 0;
      *view = parts.Make();
    }
    EXPECT_EQ(Pack(random.Spec(), sources), absl::OkStatus());
  }
}

TEST_F(LinearWeightsRefusalTest, AViewWhereThereIsNone) {
  const std::vector<float> floats(64);
  for (const WeightCase& c : kWeightCases) {
    const WeightSources random = RealSources(rng_, c, 32, 64);
    for (const Field& field : kFields) {
      if ((random.All().*field.view).rank() != 0) continue;
      const bool i4 = c.format == WeightFormat::kI4Group;
      const bool optional = i4 && (field.view != &LinearSource::g_idx ||
                                   c.layout != WeightLayout::kAwq);
      if (optional) continue;
      Refuse(c, absl::StrCat("sources[1].", field.name, " is given; "),
             [&](Spec&, Sources& s) {
               s[1].*field.view = DenseVector(floats.data(), 64);
             });
    }
  }
}

TEST_F(LinearWeightsRefusalTest, BlocksOfColumnsThatAreNotThose) {
  Refuse(kE4M3, "sources[1].block_n=0; need 1 <= sources[1].block_n",
         [](Spec&, Sources& s) { s[1].block_n = 0; });
  Refuse(kE4M3, "sources[1].scales is [4, 2]; need [1, 2]",
         [](Spec&, Sources& s) { s[1].block_n = 128; });
}

TEST_F(LinearWeightsRefusalTest, CodesAndZeroPointsAbove15) {
  std::vector<uint8_t> codes(16 * 64), zeros(2 * 16);
  codes[7 * 64 + 63] = 16;
  zeros[16 + 7] = 255;
  Refuse(kI4NK, "sources[1].codes[7, 63]=16; need 15 or less",
         [&](Spec&, Sources& s) {
           s[1].codes = DenseMatrix<const uint8_t>(codes.data(), 16, 64);
         });
  Refuse(kI4NK, "sources[1].zeros[1, 7]=255; need 15 or less",
         [&](Spec&, Sources& s) {
           s[1].zeros = DenseMatrix<const uint8_t>(zeros.data(), 2, 16);
         });
}

TEST_F(LinearWeightsRefusalTest, GroupsOfAnotherSizeOrOrder) {
  std::vector<int32_t> g_idx(64);
  const auto refuse = [&](const std::string& words) {
    for (const WeightCase& c : {kGptq, kI4NK}) {
      Refuse(c, words, [&](Spec&, Sources& s) {
        s[1].g_idx = DenseVector<const int32_t>(g_idx.data(), 64);
      });
    }
  };
  refuse("sources[1].g_idx has more than 32 of group 0");
  g_idx[5] = 2;
  refuse("sources[1].g_idx[5]=2; need 0 <= group < 2");
  g_idx[5] = -1;
  refuse("sources[1].g_idx[5]=-1; need 0 <= group < 2");
  for (size_t i = 0; i < 64; ++i) g_idx[i] = static_cast<int32_t>(i % 2);
  refuse("sources[1].g_idx is another order than that of sources[0]");
  Refuse(kGptq, "sources[1].g_idx is another order than that of sources[0]",
         [](Spec&, Sources& s) { s[1].g_idx = {}; });
  Refuse(kGptq, "sources[1].g_idx is another order than that of sources[0]",
         [](Spec&, Sources& s) { s[0].g_idx = {}; });
}

TEST_F(LinearWeightsRefusalTest, MoreThanThereIsMemory) {
  // Refused before any of it is read.
  const auto huge = [](int64_t n, bool gated) {
    return [n, gated](Spec& spec, Sources& sources) {
      spec.n = n;
      spec.k = LinearWeights::kMaxExtent;
      spec.gated = gated;
      sources.resize(1);
      sources[0].bias = {};
      ViewParts codes(sources[0].codes);
      codes.extents = {spec.n, spec.k};
      codes.strides[0] = spec.k;
      sources[0].codes = codes.Make();
    };
  };
  // Gate and up fit 2^63 bytes each, but not together.
  Refuse(kBF16NK, "the packed form has 2^63 bytes or more",
         huge(LinearWeights::kMaxExtent - 1, true));
  Refuse(kBF16NK, "the packed form has 2^63 bytes or more",
         huge(LinearWeights::kMaxExtent, false));
  Refuse(kBF16NK, " cannot be allocated", huge(int64_t{1} << 30, false),
         kExhausted);
}

TEST_F(LinearWeightsRefusalTest, ArgumentsOfALayerOfCodes) {
  std::vector<BF> a(128), c(64);
  const std::vector<BF> constant(64);
  const View in = DenseMatrix(a.data(), 2, 64);
  const View out = DenseMatrix(c.data(), 2, 32);
  for (const WeightCase& w : {kE4M3, kI4NK, kI8Group}) {
    SCOPED_TRACE(testing::Message() << w);
    const auto weights = RealSources(rng_, w, 32, 64).Pack();
    const auto create = [&](DType x, DType y) {
      LinearSpec spec;
      spec.a = x;
      spec.c = y;
      return LinearPlan::Create(spec, weights, executor_).status();
    };
    ExpectRefusal(create(DType::kI8, DType::kF32), kUnimplemented, "a is i8");
    ExpectRefusal(create(DType::kF32, DType::kI32), kUnimplemented, "c is i32");
    ExpectRefusal(create(DType::kF32, DType::kF8E4M3), kUnimplemented,
                  "c is f8e4m3");
    const auto plan = PackedPlan(weights);
    EXPECT_EQ(plan.CheckArgs({in, out}), absl::OkStatus());
    const auto refuse = [&](const View& x, const View& y,
                            const std::string& words) {
      ExpectRefusal(plan.CheckArgs({x, y}), "linear: " + words);
    };
    refuse(DenseMatrix(a.data(), 2, 63), out, "a is [2, 63]; need [any, 64]");
    refuse(MatrixView<BF>(nullptr, {2, 64}, {64, 1}), out, "a is null");
    refuse(in, DenseMatrix(c.data(), 1, 32), "c is [1, 32]; need [2, 32]");
    refuse(in, DenseMatrix(constant.data(), 2, 32), "c is read-only");
    refuse(in, DenseMatrix(a.data(), 2, 32), "c overlaps a");
  }
}

}  // namespace
}  // namespace quern
