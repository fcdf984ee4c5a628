#include "quern/core/sets/avx3_dl.h"
#include "quern/quant/s8s8_compensation_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/s8s8_compensation_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kLog128 = 7;

// acc[lane] + the sum of its four bytes.
template <class DI32>
HWY_INLINE hn::Vec<DI32> AddQuads(DI32 di32,
                                  hn::Vec<hn::Repartition<int8_t, DI32>> b,
                                  hn::Vec<DI32> acc) {
  const hn::Repartition<uint8_t, DI32> du8;
  return hn::SumOfMulQuadAccumulate(di32, hn::Set(du8, uint8_t{1}), b, acc);
}

void Rows(const int8_t* b, size_t stride, size_t rows, size_t k,
          int32_t* comp) {
  const hn::ScalableTag<int8_t> d;
  const hn::Repartition<int32_t, decltype(d)> di32;
  const size_t lanes = hn::Lanes(d);
  for (size_t r = 0; r < rows; ++r) {
    const int8_t* row = b + r * stride;
    // Four accumulators hide the latency of the dot product.
    auto s0 = hn::Zero(di32), s1 = s0, s2 = s0, s3 = s0;
    size_t i = 0;
    for (; i + 4 * lanes <= k; i += 4 * lanes) {
      s0 = AddQuads(di32, hn::LoadU(d, row + i), s0);
      s1 = AddQuads(di32, hn::LoadU(d, row + i + lanes), s1);
      s2 = AddQuads(di32, hn::LoadU(d, row + i + 2 * lanes), s2);
      s3 = AddQuads(di32, hn::LoadU(d, row + i + 3 * lanes), s3);
    }
    for (; i < k; i += lanes) {
      s0 = AddQuads(di32, hn::LoadN(d, row + i, k - i), s0);
    }
    const auto sum = hn::Add(hn::Add(s0, s1), hn::Add(s2, s3));
    comp[r] = hn::ReduceSum(di32, sum) * (1 << kLog128);
  }
}

void Panel(const int8_t* b, size_t line_bytes, size_t quads, size_t cols,
           int32_t* comp) {
  const hn::ScalableTag<int8_t> d;
  const hn::Repartition<int32_t, decltype(d)> di32;
  const size_t lanes = hn::Lanes(di32);
  for (size_t c = 0; c < cols; c += lanes) {
    const int8_t* line = b + c * 4;
    const size_t part = HWY_MIN(lanes, cols - c);
    auto s0 = hn::Zero(di32), s1 = s0, s2 = s0, s3 = s0;
    size_t l = 0;
    if (part == lanes) {
      for (; l + 4 <= quads; l += 4, line += 4 * line_bytes) {
        s0 = AddQuads(di32, hn::LoadU(d, line), s0);
        s1 = AddQuads(di32, hn::LoadU(d, line + line_bytes), s1);
        s2 = AddQuads(di32, hn::LoadU(d, line + 2 * line_bytes), s2);
        s3 = AddQuads(di32, hn::LoadU(d, line + 3 * line_bytes), s3);
      }
    }
    for (; l < quads; ++l, line += line_bytes) {
      s0 = AddQuads(di32, hn::LoadN(d, line, part * 4), s0);
    }
    const auto sum = hn::Add(hn::Add(s0, s1), hn::Add(s2, s3));
    hn::StoreN(hn::ShiftLeft<kLog128>(sum), di32, comp + c, part);
  }
}

// Rows that an int16 can sum: 256 * -128 = -2^15.
constexpr size_t kInt16Rows = 256;

// comp[0, n) += sums of at most kInt16Rows rows; n <= the lanes of two vectors.
// Two, so that a row gives two loads, and four accumulators fit everywhere.
template <class D>
HWY_INLINE void AddColumns(D d, const int8_t* b, size_t stride, size_t k,
                           size_t n, int32_t* comp) {
  const hn::Repartition<int16_t, D> di16;
  const hn::Repartition<int32_t, D> di32;
  const size_t lanes = hn::Lanes(d);
  const size_t n0 = HWY_MIN(n, lanes);
  const size_t n1 = n - n0;
  auto s0 = hn::Zero(di16), s1 = s0, s2 = s0, s3 = s0;
  for (size_t r = 0; r < k; ++r, b += stride) {
    const auto v0 = n0 == lanes ? hn::LoadU(d, b) : hn::LoadN(d, b, n0);
    s0 = hn::Add(s0, hn::PromoteLowerTo(di16, v0));
    s1 = hn::Add(s1, hn::PromoteUpperTo(di16, v0));
    if (n1 != 0) {
      const auto v1 =
          n1 == lanes ? hn::LoadU(d, b + lanes) : hn::LoadN(d, b + lanes, n1);
      s2 = hn::Add(s2, hn::PromoteLowerTo(di16, v1));
      s3 = hn::Add(s3, hn::PromoteUpperTo(di16, v1));
    }
  }
  const size_t step = hn::Lanes(di32);
  const auto add = [&](hn::Vec<decltype(di32)> sum, size_t c) HWY_ATTR {
    if (c >= n) return;
    const size_t part = HWY_MIN(step, n - c);
    const auto total = hn::Add(hn::LoadN(di32, comp + c, part), sum);
    hn::StoreN(total, di32, comp + c, part);
  };
  add(hn::PromoteLowerTo(di32, s0), 0 * step);
  add(hn::PromoteUpperTo(di32, s0), 1 * step);
  add(hn::PromoteLowerTo(di32, s1), 2 * step);
  add(hn::PromoteUpperTo(di32, s1), 3 * step);
  add(hn::PromoteLowerTo(di32, s2), 4 * step);
  add(hn::PromoteUpperTo(di32, s2), 5 * step);
  add(hn::PromoteLowerTo(di32, s3), 6 * step);
  add(hn::PromoteUpperTo(di32, s3), 7 * step);
}

void Columns(const int8_t* b, size_t stride, size_t k, size_t cols,
             int32_t* comp) {
  const hn::ScalableTag<int8_t> d;
  const size_t step = 2 * hn::Lanes(d);
  for (size_t c = 0; c < cols; ++c) comp[c] = 0;
  // The rows of a block stay in the first-level cache's reach while the column
  // steps of this task pass over them.
  for (size_t r = 0; r < k; r += kInt16Rows) {
    const size_t rows = HWY_MIN(kInt16Rows, k - r);
    for (size_t c = 0; c < cols; c += step) {
      AddColumns(d, b + r * stride + c, stride, rows, HWY_MIN(step, cols - c),
                 comp + c);
    }
  }
  for (size_t c = 0; c < cols; ++c) comp[c] *= 1 << kLog128;
}

S8S8CompensationKernels GetKernels() {
  S8S8CompensationKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.columns = &Columns;
  kernels.rows = &Rows;
  kernels.panel = &Panel;
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
namespace {
HWY_EXPORT(GetKernels);
}  // namespace
S8S8CompensationKernels GetS8S8CompensationKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
