#include "quern/quant/convert.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "hwy/base.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/quant/bf16_pairs_testutil.h"
#include "quern/quant/float_format.h"
#include "quern/quant/scalar_convert.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

#if HWY_ARCH_X86
#include <xmmintrin.h>
#endif

namespace quern {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16,
                             DType::kF8E4M3, DType::kF8E5M2};
constexpr DType kNarrow[] = {DType::kBF16, DType::kF16, DType::kF8E4M3,
                             DType::kF8E5M2};

uint32_t Bits(float x) { return hwy::BitCastScalar<uint32_t>(x); }
float FromBits(uint32_t bits) { return hwy::BitCastScalar<float>(bits); }

// The formats once more, from their specifications and in double: the oracle.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;

  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  uint32_t sign() const { return 1u << (bits() - 1); }
  uint32_t mantissas() const { return 1u << mantissa_bits; }
  // The first code that is no finite value.
  uint32_t special() const {
    return has_infinity ? sign() - mantissas() : sign() - 1;
  }
  // The value of a code without sign, as if there were no special ones.
  double Value(uint32_t code) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(code >> mantissa_bits);
    const double fraction =
        static_cast<double>(code % mantissas()) / mantissas();
    return exponent == 0 ? std::ldexp(fraction, 1 - bias)
                         : std::ldexp(1 + fraction, exponent - bias);
  }
};

Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return {8, 7, true};
    case DType::kF16:
      return {5, 10, true};
    case DType::kF8E4M3:
      return {4, 3, false};
    default:
      return {5, 2, true};
  }
}

uint32_t OracleDecode(DType dtype, uint32_t code) {
  const Format f = FormatOf(dtype);
  const uint32_t sign = (code & f.sign()) != 0 ? 0x80000000u : 0;
  const uint32_t abs = code & (f.sign() - 1);
  if (abs < f.special()) {
    return sign | Bits(static_cast<float>(f.Value(abs)));
  }
  if (f.has_infinity && abs == f.special()) return sign | 0x7F800000u;
  const uint32_t quiet = dtype == DType::kBF16 ? 0 : 0x00400000u;
  const uint32_t payload =
      f.has_infinity ? abs % f.mantissas() << (23 - f.mantissa_bits) : 0;
  return sign | 0x7F800000u | quiet | payload;
}

uint32_t OracleEncode(DType dtype, float x, OverflowMode overflow) {
  const Format f = FormatOf(dtype);
  const uint32_t sign = std::signbit(x) ? f.sign() : 0;
  if (std::isnan(x)) {
    if (!f.has_infinity) return sign | f.special();
    const uint32_t payload = (Bits(x) & 0x7FFFFF) >> (23 - f.mantissa_bits);
    return sign | f.special() | f.mantissas() / 2 | payload;
  }
  const double abs = std::abs(static_cast<double>(x));
  // The largest code whose value is <= abs; special() counts as the finite
  // value that would follow the largest one.
  uint32_t low = 0, high = f.special();
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (f.Value(middle) <= abs) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  uint32_t code = low;
  if (code < f.special()) {
    const double half = (f.Value(low) + f.Value(low + 1)) / 2;
    if (abs > half || (abs == half && low % 2 == 1)) ++code;
  }
  if (code == f.special() && overflow == OverflowMode::kSaturate) --code;
  return sign | code;
}

// Every code's value, every midpoint of neighbours, the f32 next to each, the
// edges of f32, NaN with every payload bit, and random bits.
std::vector<float> RoundingBoundaries(DType dtype) {
  const Format f = FormatOf(dtype);
  std::vector<float> x;
  const auto add = [&x](float value) {
    x.push_back(value);
    x.push_back(-value);
  };
  for (uint32_t code = 0; code <= f.special(); ++code) {
    const double low = f.Value(code);
    const double half = (low + f.Value(code + 1)) / 2;
    for (const double value : {low, half}) {
      const float middle = static_cast<float>(value);
      add(middle);
      add(std::nextafter(middle, -1.0f));
      add(std::nextafter(middle, std::numeric_limits<float>::infinity()));
    }
  }
  for (uint32_t bits = 1; bits < 0x00800000u; bits = bits * 3 + 1) {
    add(FromBits(bits));  // denormals
  }
  for (uint32_t bits : {0x00800000u, 0x007FFFFFu, 0x7F7FFFFFu, 0x7F800000u}) {
    add(FromBits(bits));
  }
  for (int bit = 0; bit < 23; ++bit) add(FromBits(0x7F800000u | 1u << bit));
  add(FromBits(0x7FFFFFFFu));
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) x.push_back(FromBits(random()));
  return x;
}

// A view of raw bytes as [rows, cols].
AnyTensorView View(DType dtype, void* data, int64_t rows, int64_t cols,
                   int64_t stride) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {stride, 1});
}

uint32_t CodeAt(DType dtype, const uint8_t* data, int64_t i) {
  uint32_t code = 0;
  std::memcpy(&code, data + static_cast<size_t>(i) * SizeOf(dtype),
              SizeOf(dtype));
  return code;
}

uint32_t ScalarEncode(DType dtype, float x, OverflowMode overflow) {
  switch (dtype) {
    case DType::kF32:
      return Bits(x);
    case DType::kBF16:
      return hwy::BitCastScalar<uint16_t>(FromF32<BFloat16>(x, overflow));
    case DType::kF16:
      return hwy::BitCastScalar<uint16_t>(FromF32<Float16>(x, overflow));
    case DType::kF8E4M3:
      return FromF32<Float8E4M3>(x, overflow).bits;
    default:
      return FromF32<Float8E5M2>(x, overflow).bits;
  }
}

uint32_t ScalarDecode(DType dtype, uint32_t code) {
  switch (dtype) {
    case DType::kF32:
      return code;
    case DType::kBF16:
      return Bits(ToF32(BFloat16::FromBits(static_cast<uint16_t>(code))));
    case DType::kF16:
      return Bits(ToF32(Float16::FromBits(static_cast<uint16_t>(code))));
    case DType::kF8E4M3:
      return Bits(ToF32(Float8E4M3{static_cast<uint8_t>(code)}));
    default:
      return Bits(ToF32(Float8E5M2{static_cast<uint8_t>(code)}));
  }
}

// A narrow dtype's every code, in memory.
std::vector<uint8_t> AllCodes(DType dtype) {
  const size_t count = size_t{1} << FormatOf(dtype).bits();
  std::vector<uint8_t> codes(count * SizeOf(dtype));
  for (size_t code = 0; code < count; ++code) {
    std::memcpy(&codes[code * SizeOf(dtype)], &code, SizeOf(dtype));
  }
  return codes;
}

TEST(ScalarConvertTest, DecodesEveryCode) {
  for (const DType dtype : kNarrow) {
    for (uint32_t code = 0; code < 1u << FormatOf(dtype).bits(); ++code) {
      ASSERT_EQ(ScalarDecode(dtype, code), OracleDecode(dtype, code))
          << DTypeName(dtype) << " code " << code;
    }
  }
}

TEST(ScalarConvertTest, RoundsEveryBoundary) {
  for (const DType dtype : kNarrow) {
    for (const auto overflow : {OverflowMode::kIeee, OverflowMode::kSaturate}) {
      for (const float x : RoundingBoundaries(dtype)) {
        ASSERT_EQ(ScalarEncode(dtype, x, overflow),
                  OracleEncode(dtype, x, overflow))
            << DTypeName(dtype) << " " << std::hexfloat << x;
      }
    }
  }
}

// What the specifications of the formats print, so that oracle and code cannot
// be wrong together.
TEST(ScalarConvertTest, AgreesWithTheSpecifications) {
  EXPECT_EQ(ToF32(Float8E4M3{0x7E}), 448.0f);
  EXPECT_EQ(ToF32(Float8E4M3{0x08}), 0x1p-6f);
  EXPECT_EQ(ToF32(Float8E4M3{0x01}), 0x1p-9f);
  EXPECT_EQ(ToF32(Float8E5M2{0x7B}), 57344.0f);
  EXPECT_EQ(ToF32(Float8E5M2{0x01}), 0x1p-16f);
  EXPECT_EQ(ToF32(Float16::FromBits(0x7BFF)), 65504.0f);
  EXPECT_EQ(ToF32(Float16::FromBits(0x0001)), 0x1p-24f);
  EXPECT_EQ(ToF32(BFloat16::FromBits(0x3F80)), 1.0f);
  EXPECT_EQ(FromF32<Float8E4M3>(464.0f).bits, 0x7E);  // a tie, to even
  EXPECT_EQ(FromF32<Float8E4M3>(465.0f).bits, 0x7F);  // NaN
  EXPECT_EQ(FromF32<Float8E4M3>(465.0f, OverflowMode::kSaturate).bits, 0x7E);
  EXPECT_EQ(FromF32<Float8E5M2>(-61440.0f).bits,
            0xFC);  // a tie: -infinity is even
  EXPECT_EQ(FromF32<Float8E5M2>(-61440.0f, OverflowMode::kSaturate).bits, 0xFB);
}

// One instance per instruction set that this CPU has.
class ConvertTest : public IsaTest {
 protected:
  ConvertPlan Plan(DType from, DType to,
                   OverflowMode overflow = OverflowMode::kIeee,
                   Stores stores = Stores::kCached) {
    ConvertSpec spec;
    spec.from = from;
    spec.to = to;
    spec.overflow = overflow;
    spec.stores = stores;
    auto plan = ConvertPlan::Create(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    return *plan;
  }

  InlineExecutor inline_executor_;
};
QUERN_INSTANTIATE_ISA_TEST(ConvertTest);

TEST_P(ConvertTest, DecodesEveryCode) {
  for (const DType dtype : kNarrow) {
    std::vector<uint8_t> codes = AllCodes(dtype);
    const int64_t count = static_cast<int64_t>(codes.size() / SizeOf(dtype));
    std::vector<float> out(static_cast<size_t>(count));
    Plan(dtype, DType::kF32)
        .Execute(View(dtype, codes.data(), 1, count, count),
                 DenseMatrix(out.data(), 1, count), inline_executor_);
    for (int64_t code = 0; code < count; ++code) {
      ASSERT_EQ(Bits(out[static_cast<size_t>(code)]),
                OracleDecode(dtype, static_cast<uint32_t>(code)))
          << DTypeName(dtype) << " code " << code;
    }
  }
}

TEST_P(ConvertTest, RoundsEveryBoundary) {
  for (const DType dtype : kNarrow) {
    const std::vector<float> x = RoundingBoundaries(dtype);
    const int64_t count = static_cast<int64_t>(x.size());
    std::vector<uint8_t> out(x.size() * SizeOf(dtype));
    for (const auto overflow : {OverflowMode::kIeee, OverflowMode::kSaturate}) {
      Plan(DType::kF32, dtype, overflow)
          .Execute(DenseMatrix(x.data(), 1, count),
                   View(dtype, out.data(), 1, count, count), inline_executor_);
      for (int64_t i = 0; i < count; ++i) {
        const float value = x[static_cast<size_t>(i)];
        ASSERT_EQ(CodeAt(dtype, out.data(), i),
                  OracleEncode(dtype, value, overflow))
            << DTypeName(dtype) << " " << std::hexfloat << value;
      }
    }
  }
}

// The encoders of pairs, which norms, rotations and activations use in place of
// ConvertPlan: ties, infinities, denormals and every payload of NaN, as the
// even element and as the odd one.
TEST_P(ConvertTest, PairsOfBF16RoundEveryBoundary) {
  const BF16PairEncoders encoders = GetBF16PairEncoders();
  EXPECT_RAN_ON(encoders);
  const auto expect_rounded = [](BF16PairEncoders::Encode encode,
                                 std::vector<float> even) {
    while (even.size() % BF16PairEncoders::kMultiple != 0) even.push_back(1);
    std::vector<float> odd(even.rbegin(), even.rend());
    std::vector<uint16_t> codes(2 * even.size());
    encode(even.data(), odd.data(), even.size(), codes.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      const float value = (i % 2 == 0 ? even : odd)[i / 2];
      ASSERT_EQ(codes[i],
                OracleEncode(DType::kBF16, value, OverflowMode::kIeee))
          << std::hexfloat << value << ", " << (i % 2 == 0 ? "even" : "odd");
    }
  };
  const std::vector<float> x = RoundingBoundaries(DType::kBF16);
  expect_rounded(encoders.any, x);
  // A single NaN takes all lanes of its vector another way, so vectors without
  // one are tested by themselves.
  std::vector<float> numbers;
  for (const float value : x) {
    if (!std::isnan(value)) numbers.push_back(value);
  }
  expect_rounded(encoders.any, numbers);
  // The other encoder also takes NaN that have been codes.
  for (uint32_t code = 0x7FC0; code < 0x8000; ++code) {
    numbers.push_back(FromBits(code << 16));
    numbers.push_back(FromBits((code | 0x8000) << 16));
  }
  expect_rounded(encoders.numbers, numbers);
}

TEST_P(ConvertTest, ConvertsEveryPairOfTypes) {
  for (const DType from : kNarrow) {
    std::vector<uint8_t> codes = AllCodes(from);
    const int64_t count = static_cast<int64_t>(codes.size() / SizeOf(from));
    for (const DType to : kNarrow) {
      std::vector<uint8_t> out(static_cast<size_t>(count) * SizeOf(to));
      Plan(from, to).Execute(View(from, codes.data(), 1, count, count),
                             View(to, out.data(), 1, count, count),
                             inline_executor_);
      for (int64_t i = 0; i < count; ++i) {
        const float value =
            FromBits(ScalarDecode(from, static_cast<uint32_t>(i)));
        ASSERT_EQ(CodeAt(to, out.data(), i),
                  ScalarEncode(to, value, OverflowMode::kIeee))
            << DTypeName(from) << " to " << DTypeName(to) << " code " << i;
      }
    }
  }
}

// Every size, stride, alignment, pair and kind of store; the bytes around the
// rows stay as they were, and the product and sum are rounded one by one.
TEST_P(ConvertTest, WritesExactlyTheRowsAtAnySizeStrideAndAlignment) {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(-3.0f, 3.0f);
  constexpr int64_t kRows = 3;
  int variant = 0;
  for (const int64_t cols :
       {1,  2,  3,  4,  5,   7,   8,   9,   15,  16,   17,   31,   32,  33,
        63, 64, 65, 97, 127, 128, 129, 255, 257, 1023, 1024, 1025, 2051}) {
    for (const DType from : kFloats) {
      for (const DType to : kFloats) {
        const int64_t in_stride = cols + variant % 4;
        const int64_t out_stride = cols + variant % 3;
        const size_t in_offset = static_cast<size_t>(variant % 5);
        const size_t out_offset = static_cast<size_t>(variant % 7);
        const auto stores =
            variant % 2 == 0 ? Stores::kCached : Stores::kStream;
        ConvertTerms terms;
        std::vector<float> bias(static_cast<size_t>(cols));
        for (float& b : bias) b = uniform(random);
        if (variant % 3 == 1) terms.scale = 0.37f;
        if (variant % 4 == 1) {
          terms.bias = DenseVector<const float>(bias.data(), cols);
        }
        ++variant;

        const size_t in_size =
            static_cast<size_t>(in_stride * (kRows - 1) + cols);
        std::vector<uint8_t> in((in_size + in_offset) * SizeOf(from), 0xFF);
        std::vector<float> values(in_size);
        uint8_t* const in_data = in.data() + in_offset * SizeOf(from);
        for (size_t i = 0; i < in_size; ++i) {
          const uint32_t code =
              ScalarEncode(from, uniform(random), OverflowMode::kIeee);
          std::memcpy(in_data + i * SizeOf(from), &code, SizeOf(from));
          values[i] = FromBits(ScalarDecode(from, code));
        }
        constexpr size_t kCanary = 64;
        const size_t out_size = static_cast<size_t>(out_stride * kRows);
        std::vector<uint8_t> out((out_size + out_offset) * SizeOf(to) + kCanary,
                                 0x55);
        std::vector<uint8_t> want = out;
        const size_t out_begin = out_offset * SizeOf(to);
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            float value = values[static_cast<size_t>(r * in_stride + c)];
            if (terms.scale != 1.0f) value *= terms.scale;
            if (!terms.bias.empty()) value += bias[static_cast<size_t>(c)];
            const uint32_t code = ScalarEncode(to, value, OverflowMode::kIeee);
            std::memcpy(
                &want[out_begin +
                      static_cast<size_t>(r * out_stride + c) * SizeOf(to)],
                &code, SizeOf(to));
          }
        }
        const ConvertPlan plan = Plan(from, to, OverflowMode::kIeee, stores);
        const AnyTensorView in_view =
            View(from, in_data, kRows, cols, in_stride);
        const AnyTensorView out_view =
            View(to, out.data() + out_begin, kRows, cols, out_stride);
        ASSERT_TRUE(plan.CheckArgs(in_view, out_view, terms).ok())
            << plan.CheckArgs(in_view, out_view, terms);
        plan.Execute(in_view, out_view, inline_executor_, terms);
        ASSERT_EQ(out, want) << DTypeName(from) << " to " << DTypeName(to)
                             << " cols=" << cols << " variant=" << variant;
      }
    }
  }
}

// Several tasks, several workers, streamed or not: the same bytes.
TEST_P(ConvertTest, DoesNotDependOnTheWorkersOrTheStores) {
  const auto executor = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(executor.ok()) << executor.status();
  std::mt19937 random(3);
  for (const int64_t rows : {1, 7, 3000}) {
    const int64_t cols = 300007 / rows;
    std::vector<uint32_t> in(static_cast<size_t>(rows * cols));
    for (uint32_t& x : in) x = random();
    for (const DType to : kNarrow) {
      const size_t bytes = in.size() * SizeOf(to);
      std::vector<uint8_t> alone(bytes), together(bytes + 3);
      const auto in_view = View(DType::kF32, in.data(), rows, cols, cols);
      Plan(DType::kF32, to)
          .Execute(in_view, View(to, alone.data(), rows, cols, cols),
                   inline_executor_);
      Plan(DType::kF32, to, OverflowMode::kIeee, Stores::kStream)
          .Execute(in_view, View(to, together.data(), rows, cols, cols),
                   **executor);
      together.resize(bytes);
      ASSERT_EQ(alone, together) << DTypeName(to) << " rows=" << rows;
    }
  }
}

// Rows that are cut into tasks, and tasks of many rows, with and without gaps
// and bias: each element from its own row and column. Exact: small integers.
TEST_P(ConvertTest, CutsAndGroupsRowsOfAnyLength) {
  const auto executor = HwyExecutor::Create(2, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(executor.ok()) << executor.status();
  const ConvertPlan plan = Plan(DType::kBF16, DType::kF32);
  constexpr int64_t kTask = 64 << 10;
  const std::array<int64_t, 2> shapes[] = {
      {1, kTask + 5},  // cut once
      {3, 2 * kTask},  // every row cut
      {5, kTask},      // one row a task
      {67, 1030},      // groups of 63 rows
      {3, 7},          // one group
  };
  for (const auto& [rows, cols] : shapes) {
    for (const int64_t gap : {0, 3}) {
      for (const bool biased : {false, true}) {
        const int64_t stride = cols + gap;
        std::vector<BFloat16> in(static_cast<size_t>(rows * stride));
        std::vector<float> bias(static_cast<size_t>(cols));
        const auto value = [](int64_t row, int64_t col) {
          return static_cast<float>((row * 31 + col * 7) % 251);
        };
        for (int64_t c = 0; c < cols; ++c) {
          bias[static_cast<size_t>(c)] = static_cast<float>(c);
          for (int64_t r = 0; r < rows; ++r) {
            in[static_cast<size_t>(r * stride + c)] =
                FromF32<BFloat16>(value(r, c));
          }
        }
        ConvertTerms terms;
        if (biased) terms.bias = DenseVector<const float>(bias.data(), cols);
        const AnyTensorView in_view =
            View(DType::kBF16, in.data(), rows, cols, stride);
        std::vector<float> out(static_cast<size_t>(rows * stride), -1.0f);
        const AnyTensorView out_view =
            View(DType::kF32, out.data(), rows, cols, stride);
        ASSERT_TRUE(plan.CheckArgs(in_view, out_view, terms).ok());
        plan.Execute(in_view, out_view, **executor, terms);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < stride; ++c) {
            const float want = c >= cols ? -1.0f
                               : biased  ? value(r, c) + static_cast<float>(c)
                                         : value(r, c);
            ASSERT_EQ(out[static_cast<size_t>(r * stride + c)], want)
                << "rows=" << rows << " cols=" << cols << " gap=" << gap
                << " biased=" << biased << " at " << r << ", " << c;
          }
        }
      }
    }
  }
}

// A row that is alone has no next one: its stride is not used, not even in a
// product that would overflow.
TEST_P(ConvertTest, IgnoresTheRowStrideOfOneRow) {
  const ConvertPlan plan = Plan(DType::kF32, DType::kBF16);
  std::vector<float> in(40, 2.0f);
  std::vector<BFloat16> out(40);
  for (const int64_t stride :
       {std::numeric_limits<int64_t>::max(),
        std::numeric_limits<int64_t>::min(), int64_t{0}, int64_t{40}}) {
    const AnyTensorView in_view = View(DType::kF32, in.data(), 1, 40, stride);
    const AnyTensorView out_view =
        View(DType::kBF16, out.data(), 1, 40, stride);
    out.assign(40, BFloat16::FromBits(0));
    ASSERT_TRUE(plan.CheckArgs(in_view, out_view).ok());
    plan.Execute(in_view, out_view, inline_executor_);
    for (const BFloat16 x : out) ASSERT_EQ(ToF32(x), 2.0f);
  }
}

// Every input and output ends at, or begins after, a page that may not be
// touched. Canaries and the padding of rows are checked by the buffers.
TEST_P(ConvertTest, TouchesNothingElseAndAllocatesNothing) {
  const auto executor = HwyExecutor::Create(2, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(executor.ok()) << executor.status();
  // Threads allocate while they start, which must not count as Execute's.
  (*executor)->ParallelFor(2, [](int64_t, int) {});
  for (const Edge edge : {Edge::kBegin, Edge::kEnd}) {
    for (const auto stores : {Stores::kCached, Stores::kStream}) {
      for (const int64_t cols : {1, 2, 3, 5, 7, 13, 31, 47, 63, 65, 127, 300}) {
        const int64_t shift = cols % 3;
        const std::vector<float> values(static_cast<size_t>(2 * cols), 1.5f);
        const StridedMatrix<float> in(values, 2, cols, cols + 3, edge, shift);
        const GuardBuffer<float> bias(
            std::vector<float>(static_cast<size_t>(cols), 0.5f));
        ConvertTerms terms;
        terms.bias = bias.view();

        StridedMatrix<BFloat16> bf16(2, cols, cols + 1, edge, shift);
        StridedMatrix<float> back(2, cols, cols + 2, edge, shift);
        StridedMatrix<Float8E4M3> f8(2, cols, cols + 5, edge, shift);
        const ConvertPlan narrow =
            Plan(DType::kF32, DType::kBF16, OverflowMode::kIeee, stores);
        const ConvertPlan widen =
            Plan(DType::kBF16, DType::kF32, OverflowMode::kIeee, stores);
        const ConvertPlan narrower =
            Plan(DType::kBF16, DType::kF8E4M3, OverflowMode::kIeee, stores);
        EXPECT_NO_ALLOCATION(
            narrow.Execute(in.view(), bf16.view(), **executor, terms));
        EXPECT_NO_ALLOCATION(
            widen.Execute(bf16.view(), back.view(), **executor));
        EXPECT_NO_ALLOCATION(
            narrower.Execute(bf16.view(), f8.view(), **executor, terms));
        for (const float x : back.ToDense()) ASSERT_EQ(x, 2.0f);
        for (const Float8E4M3 x : f8.ToDense()) ASSERT_EQ(ToF32(x), 2.5f);
      }
    }
  }
}

#if HWY_ARCH_X86
TEST_P(ConvertTest, DoesNotDependOnFlushToZero) {
  constexpr unsigned kFlush = 0x8040;  // MXCSR.FTZ and DAZ
  for (const DType dtype : kNarrow) {
    std::vector<uint8_t> codes = AllCodes(dtype);
    const int64_t count = static_cast<int64_t>(codes.size() / SizeOf(dtype));
    std::vector<float> decoded(static_cast<size_t>(count));
    const std::vector<float> x = RoundingBoundaries(dtype);
    const int64_t size = static_cast<int64_t>(x.size());
    std::vector<uint8_t> encoded(x.size() * SizeOf(dtype));
    const ConvertPlan widen = Plan(dtype, DType::kF32);
    const ConvertPlan narrow = Plan(DType::kF32, dtype);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | kFlush);
    widen.Execute(View(dtype, codes.data(), 1, count, count),
                  DenseMatrix(decoded.data(), 1, count), inline_executor_);
    narrow.Execute(DenseMatrix(x.data(), 1, size),
                   View(dtype, encoded.data(), 1, size, size),
                   inline_executor_);
    _mm_setcsr(before);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(Bits(decoded[static_cast<size_t>(i)]),
                OracleDecode(dtype, static_cast<uint32_t>(i)))
          << DTypeName(dtype) << " code " << i;
    }
    for (int64_t i = 0; i < size; ++i) {
      const float value = x[static_cast<size_t>(i)];
      ASSERT_EQ(CodeAt(dtype, encoded.data(), i),
                OracleEncode(dtype, value, OverflowMode::kIeee))
          << DTypeName(dtype) << " " << std::hexfloat << value;
    }
  }
}
#endif  // HWY_ARCH_X86

TEST_P(ConvertTest, ScalesInPlace) {
  std::vector<float> x(1000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  const auto view = DenseVector(x.data(), 1000);
  const ConvertPlan plan = Plan(DType::kF32, DType::kF32);
  ConvertTerms terms;
  terms.scale = 2.0f;
  ASSERT_TRUE(plan.CheckArgs(view, view, terms).ok());
  plan.Execute(view, view, inline_executor_, terms);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(x[i], 2.0f * static_cast<float>(i));
  }
}

TEST_P(ConvertTest, NanStaysNanThroughScaleBiasAndSaturation) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> x(37, nan);
  const std::vector<float> bias(37, 1.0f);
  ConvertTerms terms;
  terms.scale = 3.0f;
  terms.bias = DenseVector(bias.data(), 37);
  for (const DType to : kNarrow) {
    std::vector<uint8_t> out(37 * SizeOf(to));
    Plan(DType::kF32, to, OverflowMode::kSaturate)
        .Execute(DenseMatrix(x.data(), 1, 37), View(to, out.data(), 1, 37, 37),
                 inline_executor_, terms);
    for (int64_t i = 0; i < 37; ++i) {
      ASSERT_TRUE(
          std::isnan(FromBits(ScalarDecode(to, CodeAt(to, out.data(), i)))))
          << DTypeName(to);
    }
  }
}

TEST_P(ConvertTest, AScaleOfNanIsNotNeutral) {
  const std::vector<float> x(37, 1.0f);
  ConvertTerms terms;
  terms.scale = std::numeric_limits<float>::quiet_NaN();
  for (const DType to : kFloats) {
    std::vector<uint8_t> out(37 * SizeOf(to));
    Plan(DType::kF32, to)
        .Execute(DenseMatrix(x.data(), 1, 37), View(to, out.data(), 1, 37, 37),
                 inline_executor_, terms);
    for (int64_t i = 0; i < 37; ++i) {
      ASSERT_TRUE(
          std::isnan(FromBits(ScalarDecode(to, CodeAt(to, out.data(), i)))))
          << DTypeName(to);
    }
  }
}

TEST_P(ConvertTest, LeavesTheOutputOfNothingAlone) {
  for (const DType to : kFloats) {
    const ConvertPlan plan = Plan(DType::kF32, to);
    uint8_t canary[16];
    std::memset(canary, 0x55, sizeof(canary));
    for (const int64_t rows : {0, 2}) {
      const int64_t cols = rows == 0 ? 3 : 0;
      const auto in = View(DType::kF32, nullptr, rows, cols, cols);
      const auto out = View(to, canary, rows, cols, cols);
      EXPECT_TRUE(plan.CheckArgs(in, out).ok()) << plan.CheckArgs(in, out);
      plan.Execute(in, out, inline_executor_);
    }
    for (const uint8_t byte : canary) EXPECT_EQ(byte, 0x55);
  }
}

TEST(ConvertPlanTest, RefusesIntegers) {
  for (const DType dtype : {DType::kI32, DType::kI8, DType::kU8}) {
    ConvertSpec spec;
    spec.from = dtype;
    const auto from = ConvertPlan::Create(spec).status();
    EXPECT_EQ(from.code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(from.message(),
              "convert: from is " + std::string(DTypeName(dtype)) +
                  "; need f32 or bf16 or f16 or f8e4m3 or f8e5m2");
    spec.from = DType::kF32;
    spec.to = dtype;
    EXPECT_EQ(ConvertPlan::Create(spec).status().code(),
              absl::StatusCode::kUnimplemented);
  }
}

TEST(ConvertPlanTest, RefusesArgumentsThatDoNotFit) {
  const auto plan = ConvertPlan::Create(ConvertSpec());  // f32 -> bf16
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<float> in(64), more(64);
  std::vector<BFloat16> out(64);
  const AnyTensorView f32 = DenseMatrix(in.data(), 4, 8);
  const AnyTensorView bf16 = DenseMatrix(out.data(), 4, 8);
  const BFloat16* read_only = out.data();
  BFloat16* const inside = reinterpret_cast<BFloat16*>(in.data() + 2);
  const VectorView<const float> short_bias =
      DenseVector<const float>(more.data(), 7);
  const VectorView<const float> bias_in_out =
      DenseVector<const float>(reinterpret_cast<const float*>(out.data()), 8);
  constexpr int64_t kHuge = int64_t{1} << 62;

  struct Case {
    AnyTensorView in, out;
    ConvertTerms terms;
    std::string words;
  };
  const Case cases[] = {
      {bf16, bf16, {}, "convert: in is bf16; need f32"},
      {f32, f32, {}, "convert: out is f32; need bf16"},
      {DenseTensor(in.data(), std::array<int64_t, 3>{2, 2, 8}),
       bf16,
       {},
       "convert: rank=3; need 1 <= rank <= 2"},
      {f32, DenseVector(out.data(), 8), {}, "convert: out is [8]; need [4, 8]"},
      {f32,
       DenseMatrix(out.data(), 5, 8),
       {},
       "convert: out is [5, 8]; need [4, 8]"},
      {f32,
       DenseMatrix(out.data(), 4, 9),
       {},
       "convert: out is [4, 9]; need [4, 8]"},
      {View(DType::kF32, in.data(), -1, 8, 8),
       View(DType::kBF16, out.data(), -1, 8, 8),
       {},
       "convert: in is [-1, 8]; need [any, any]"},
      {View(DType::kF32, in.data(), 4, 8, -8),
       bf16,
       {},
       "convert: in has stride -8 in dimension 0; need 0 or more"},
      {f32,
       View(DType::kBF16, out.data(), 4, 8, 7),
       {},
       "convert: out has stride 7 in dimension 0; need 8 or more"},
      {View(DType::kF32, in.data(), 4, 8, kHuge),
       bf16,
       {},
       "convert: in is [4, 8] with stride 4611686018427387904 in dimension 0; "
       "need fewer than 2^63 bytes"},
      {AnyTensorView(DType::kF32, in.data(), 2, {4, 8}, {16, 2}),
       bf16,
       {},
       "convert: in has stride 2 in dimension 1; need 1"},
      {f32,
       AnyTensorView(DType::kBF16, out.data(), 2, {4, 8}, {16, 0}),
       {},
       "convert: out has stride 0 in dimension 1; need 1"},
      {View(DType::kF32, reinterpret_cast<char*>(in.data()) + 2, 4, 8, 8),
       bf16,
       {},
       "convert: in is not aligned to its elements of 4 bytes"},
      {f32,
       View(DType::kBF16, reinterpret_cast<char*>(out.data()) + 1, 4, 8, 8),
       {},
       "convert: out is not aligned to its elements of 2 bytes"},
      {View(DType::kF32, nullptr, 4, 8, 8), bf16, {}, "convert: in is null"},
      {f32, View(DType::kBF16, nullptr, 4, 8, 8), {}, "convert: out is null"},
      {f32,
       DenseMatrix(read_only, 4, 8),
       {},
       "convert: out is read-only; need a writable view"},
      {f32, DenseMatrix(inside, 4, 8), {}, "convert: out overlaps in"},
      {f32, bf16, {1.0f, short_bias}, "convert: bias is [7]; need [8]"},
      {f32, bf16, {1.0f, bias_in_out}, "convert: out overlaps bias"},
  };
  for (const Case& c : cases) {
    const absl::Status status = plan->CheckArgs(c.in, c.out, c.terms);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.words;
    EXPECT_NE(status.message().find(c.words), std::string::npos)
        << status << "\nlacks: " << c.words;
  }
  EXPECT_TRUE(plan->CheckArgs(f32, bf16).ok());
}

TEST(ConvertPlanTest, RefusesOtherRowStridesInPlace) {
  ConvertSpec spec;
  spec.to = DType::kF32;
  const auto plan = ConvertPlan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<float> x(64);
  const AnyTensorView a = View(DType::kF32, x.data(), 4, 8, 8);
  const AnyTensorView b = View(DType::kF32, x.data(), 4, 8, 16);
  EXPECT_TRUE(plan->CheckArgs(a, a).ok());
  EXPECT_TRUE(plan->CheckArgs(b, b).ok());
  for (const absl::Status& status :
       {plan->CheckArgs(a, b), plan->CheckArgs(b, a)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("out overlaps in"), std::string::npos)
        << status;
  }
}

}  // namespace
}  // namespace quern
