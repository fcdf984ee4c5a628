#include "quern/core/sets/avx3.h"
#include "quern/ops/recurrent/chunk_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrent/chunk_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "quern/ops/recurrent/chunk_product-inl.h"
#include "quern/ops/recurrent/decay-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = ChunkTag;

void Product(const ChunkProduct& p) { DoColumns<ChunkTile::kProduct>(p); }

template <ChunkTile kTile>
void Triangle(const ChunkTriangle& t) {
  ChunkProduct p = {};
  p.a = t.a;
  p.a_row = t.a_stride;
  p.a_k = 1;
  p.b = t.b;
  p.b_stride = t.b_stride;
  p.c = t.c;
  p.c_stride = t.c_stride;
  p.rows = t.n;
  p.columns = t.columns;
  DoColumns<kTile>(p);
}

void Transpose(const float* x, size_t x_stride, size_t rows, size_t columns,
               float* t, size_t t_stride) {
  TransposeChunk(x, x_stride, rows, columns, t, t_stride);
}

void DecayAll(const float* g, size_t n, float* a) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < n; i += lanes) {
    const auto x =
        i + lanes <= n ? hn::LoadU(d, g + i) : hn::LoadN(d, g + i, n - i);
    hn::Store(Decay(d, x), d, a + i);
  }
}

HWY_INLINE float InverseNorm(const float* x, size_t n, float eps) {
  const DF d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto v = hn::Load(d, x + i);
    sum = hn::MulAdd(v, v, sum);
  }
  const hn::CappedTag<float, 1> d1;
  const auto root = hn::Sqrt(hn::Set(d1, hn::ReduceSum(d, sum) + eps));
  return 1.0f / hn::GetLane(root);
}

void Normalize(float* x, size_t stride, size_t rows, size_t n, bool l2,
               float eps, float scale) {
  const DF d;
  for (size_t r = 0; r < rows; ++r, x += stride) {
    const auto factor = hn::Set(d, l2 ? InverseNorm(x, n, eps) * scale : scale);
    for (size_t i = 0; i < n; i += hn::Lanes(d)) {
      hn::Store(hn::Mul(hn::Load(d, x + i), factor), d, x + i);
    }
  }
}

// to_end holds P(j, i) for the row i at hand, which is P(j, i - 1) times a[i].
void Weigh(const ChunkDecays& c) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const size_t lanes = hn::Lanes(d);
  float from_start = 1.0f;
  for (size_t i = 0; i < c.n; ++i) {
    from_start *= c.a[i];
    c.from_start[i] = from_start;
    const auto a = hn::Set(d, c.a[i]);
    for (size_t j = 0; j <= i; j += lanes) {
      // 1 where j = i. Later j are not used, whatever they hold.
      const auto here = hn::Eq(hn::Iota(di, static_cast<int32_t>(j)),
                               hn::Set(di, static_cast<int32_t>(i)));
      const auto weight =
          hn::IfThenElse(hn::RebindMask(d, here), hn::Set(d, 1.0f),
                         hn::Mul(a, hn::Load(d, c.to_end + j)));
      hn::Store(weight, d, c.to_end + j);
      float* const query = c.query_scores + i * c.stride + j;
      hn::Store(hn::Mul(weight, hn::Load(d, query)), d, query);
      if (c.key_scores == nullptr) continue;
      float* const key = c.key_scores + i * c.stride + j;
      hn::Store(
          hn::Mul(hn::Mul(weight, hn::Set(d, -c.beta[i])), hn::Load(d, key)), d,
          key);
    }
  }
}

void ScaleRows(const float* x, size_t stride, size_t rows, size_t n,
               const float* s, float* to) {
  const DF d;
  for (size_t r = 0; r < rows; ++r) {
    const auto factor = hn::Set(d, s[r]);
    for (size_t i = r * stride; i < r * stride + n; i += hn::Lanes(d)) {
      hn::Store(hn::Mul(factor, hn::Load(d, x + i)), d, to + i);
    }
  }
}

ChunkKernels GetKernels() {
  ChunkKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.product = &Product;
  kernels.solve = &Triangle<ChunkTile::kSolve>;
  kernels.add_lower = &Triangle<ChunkTile::kLower>;
  kernels.transpose = &Transpose;
  kernels.decay = &DecayAll;
  kernels.normalize = &Normalize;
  kernels.weigh = &Weigh;
  kernels.scale_rows = &ScaleRows;
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
ChunkKernels GetChunkKernels() {
  ChunkKernels kernels = HWY_DYNAMIC_DISPATCH(GetKernels)();
  kernels.channel_scores = GetChannelChunkKernel();
  return kernels;
}
}  // namespace quern
#endif  // HWY_ONCE
