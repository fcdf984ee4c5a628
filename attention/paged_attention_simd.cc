#include "attention/paged_attention_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/paged_attention_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target.
#include "attention/softmax_state-inl.h"
#include "quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Rows that share each load of a key or value. Where fewer are left, the last
// one stands in for the missing: it is computed again and stores the same
// bits, so that a row's bits do not depend on its neighbours.
constexpr size_t kRows = 4;

// Row `row + i` of `rows`, or the last.
HWY_INLINE size_t RowOrLast(size_t row, size_t i, size_t rows) {
  return HWY_MIN(row + i, rows - 1);
}

template <typename T>
void LoadQuery(const void* q, size_t count, float scale,
               float* HWY_RESTRICT to) {
  const hn::ScalableTag<float> df;
  const T* HWY_RESTRICT from = static_cast<const T*>(q);
  const auto factor = hn::Set(df, scale);
  for (size_t d = 0; d < count; d += hn::Lanes(df)) {
    const auto x = LoadNF32(df, from + d, HWY_MIN(hn::Lanes(df), count - d));
    hn::Store(hn::Mul(x, factor), df, to + d);
  }
}

template <typename T>
void Logits(const float* HWY_RESTRICT q, size_t q_stride, size_t rows,
            const void* keys, size_t head_dim, size_t tokens,
            float* HWY_RESTRICT logits, size_t logits_stride) {
  const hn::ScalableTag<float> df;
  const size_t lanes = hn::Lanes(df);
  const size_t whole = head_dim - head_dim % lanes;
  for (size_t row = 0; row < rows; row += kRows) {
    const size_t r1 = RowOrLast(row, 1, rows);
    const size_t r2 = RowOrLast(row, 2, rows);
    const size_t r3 = RowOrLast(row, 3, rows);
    const float* HWY_RESTRICT q0 = q + row * q_stride;
    const float* HWY_RESTRICT q1 = q + r1 * q_stride;
    const float* HWY_RESTRICT q2 = q + r2 * q_stride;
    const float* HWY_RESTRICT q3 = q + r3 * q_stride;
    const T* HWY_RESTRICT k = static_cast<const T*>(keys);
    for (size_t t = 0; t < tokens; ++t, k += head_dim) {
      auto s0 = hn::Zero(df);
      auto s1 = hn::Zero(df);
      auto s2 = hn::Zero(df);
      auto s3 = hn::Zero(df);
      // The tail apart: a masked load of each vector would double the work on
      // targets without masks.
      size_t d = 0;
      for (; d < whole; d += lanes) {
        const auto x = LoadF32(df, k + d);
        s0 = hn::MulAdd(x, hn::Load(df, q0 + d), s0);
        s1 = hn::MulAdd(x, hn::Load(df, q1 + d), s1);
        s2 = hn::MulAdd(x, hn::Load(df, q2 + d), s2);
        s3 = hn::MulAdd(x, hn::Load(df, q3 + d), s3);
      }
      if (d < head_dim) {
        const auto x = LoadNF32(df, k + d, head_dim - d);
        s0 = hn::MulAdd(x, hn::Load(df, q0 + d), s0);
        s1 = hn::MulAdd(x, hn::Load(df, q1 + d), s1);
        s2 = hn::MulAdd(x, hn::Load(df, q2 + d), s2);
        s3 = hn::MulAdd(x, hn::Load(df, q3 + d), s3);
      }
      logits[row * logits_stride + t] = hn::ReduceSum(df, s0);
      logits[r1 * logits_stride + t] = hn::ReduceSum(df, s1);
      logits[r2 * logits_stride + t] = hn::ReduceSum(df, s2);
      logits[r3 * logits_stride + t] = hn::ReduceSum(df, s3);
    }
  }
}

void Softmax(float* logits, size_t tokens, SoftmaxState* state) {
  *state = SoftmaxOf(hn::ScalableTag<float>(), logits, tokens);
}

template <typename T>
void Values(const float* HWY_RESTRICT p, size_t p_stride, size_t rows,
            const void* values, size_t v_head_dim, size_t tokens,
            float* HWY_RESTRICT out, size_t out_stride) {
  const hn::ScalableTag<float> df;
  const size_t lanes = hn::Lanes(df);
  for (size_t row = 0; row < rows; row += kRows) {
    const size_t r1 = RowOrLast(row, 1, rows);
    const size_t r2 = RowOrLast(row, 2, rows);
    const size_t r3 = RowOrLast(row, 3, rows);
    const float* HWY_RESTRICT p0 = p + row * p_stride;
    const float* HWY_RESTRICT p1 = p + r1 * p_stride;
    const float* HWY_RESTRICT p2 = p + r2 * p_stride;
    const float* HWY_RESTRICT p3 = p + r3 * p_stride;
    size_t d = 0;
    // Two vectors at a time: eight sums in flight hide the latency of MulAdd.
    for (; d + 2 * lanes <= v_head_dim; d += 2 * lanes) {
      float* o0 = out + row * out_stride + d;
      float* o1 = out + r1 * out_stride + d;
      float* o2 = out + r2 * out_stride + d;
      float* o3 = out + r3 * out_stride + d;
      auto s00 = hn::Load(df, o0), s01 = hn::Load(df, o0 + lanes);
      auto s10 = hn::Load(df, o1), s11 = hn::Load(df, o1 + lanes);
      auto s20 = hn::Load(df, o2), s21 = hn::Load(df, o2 + lanes);
      auto s30 = hn::Load(df, o3), s31 = hn::Load(df, o3 + lanes);
      const T* HWY_RESTRICT v = static_cast<const T*>(values) + d;
      for (size_t t = 0; t < tokens; ++t, v += v_head_dim) {
        const auto x0 = LoadF32(df, v);
        const auto x1 = LoadF32(df, v + lanes);
        const auto w0 = hn::Set(df, p0[t]);
        const auto w1 = hn::Set(df, p1[t]);
        const auto w2 = hn::Set(df, p2[t]);
        const auto w3 = hn::Set(df, p3[t]);
        s00 = hn::MulAdd(w0, x0, s00), s01 = hn::MulAdd(w0, x1, s01);
        s10 = hn::MulAdd(w1, x0, s10), s11 = hn::MulAdd(w1, x1, s11);
        s20 = hn::MulAdd(w2, x0, s20), s21 = hn::MulAdd(w2, x1, s21);
        s30 = hn::MulAdd(w3, x0, s30), s31 = hn::MulAdd(w3, x1, s31);
      }
      hn::Store(s00, df, o0), hn::Store(s01, df, o0 + lanes);
      hn::Store(s10, df, o1), hn::Store(s11, df, o1 + lanes);
      hn::Store(s20, df, o2), hn::Store(s21, df, o2 + lanes);
      hn::Store(s30, df, o3), hn::Store(s31, df, o3 + lanes);
    }
    for (; d < v_head_dim; d += lanes) {
      const size_t valid = HWY_MIN(lanes, v_head_dim - d);
      float* o0 = out + row * out_stride + d;
      float* o1 = out + r1 * out_stride + d;
      float* o2 = out + r2 * out_stride + d;
      float* o3 = out + r3 * out_stride + d;
      auto s0 = hn::Load(df, o0);
      auto s1 = hn::Load(df, o1);
      auto s2 = hn::Load(df, o2);
      auto s3 = hn::Load(df, o3);
      const T* HWY_RESTRICT v = static_cast<const T*>(values) + d;
      for (size_t t = 0; t < tokens; ++t, v += v_head_dim) {
        const auto x = LoadNF32(df, v, valid);
        s0 = hn::MulAdd(hn::Set(df, p0[t]), x, s0);
        s1 = hn::MulAdd(hn::Set(df, p1[t]), x, s1);
        s2 = hn::MulAdd(hn::Set(df, p2[t]), x, s2);
        s3 = hn::MulAdd(hn::Set(df, p3[t]), x, s3);
      }
      hn::Store(s0, df, o0);
      hn::Store(s1, df, o1);
      hn::Store(s2, df, o2);
      hn::Store(s3, df, o3);
    }
  }
}

void Merge(const SoftmaxState& other, const float* HWY_RESTRICT other_out,
           size_t count, SoftmaxState* state, float* HWY_RESTRICT out) {
  const hn::ScalableTag<float> df;
  const auto weights = WeightsOf(df, *state, other);
  for (size_t d = 0; d < count; d += hn::Lanes(df)) {
    const auto theirs = hn::Mul(weights.b, hn::Load(df, other_out + d));
    hn::Store(hn::MulAdd(weights.a, hn::Load(df, out + d), theirs), df,
              out + d);
  }
  const auto theirs = hn::Mul(weights.b, hn::Set(df, other.sum));
  state->sum =
      hn::GetLane(hn::MulAdd(weights.a, hn::Set(df, state->sum), theirs));
  state->max = weights.max;
}

template <typename T>
void StoreOutput(const SoftmaxState& state, const float* HWY_RESTRICT out,
                 size_t count, void* to) {
  const hn::ScalableTag<float> df;
  T* HWY_RESTRICT row = static_cast<T*>(to);
  const auto sum = hn::Set(df, state.sum);
  const auto nothing_seen = hn::Eq(sum, hn::Zero(df));
  for (size_t d = 0; d < count; d += hn::Lanes(df)) {
    const auto value = hn::Div(hn::Load(df, out + d), sum);
    StoreNF32(hn::IfThenZeroElse(nothing_seen, value), df, row + d,
              HWY_MIN(hn::Lanes(df), count - d));
  }
}

PagedAttentionKernels GetKernels(DType q, DType kv, DType out) {
  PagedAttentionKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.load_query =
      q == DType::kF32 ? &LoadQuery<float> : &LoadQuery<BFloat16>;
  kernels.logits = kv == DType::kF32    ? &Logits<float>
                   : kv == DType::kBF16 ? &Logits<BFloat16>
                                        : &Logits<Float16>;
  kernels.softmax = &Softmax;
  kernels.values = kv == DType::kF32    ? &Values<float>
                   : kv == DType::kBF16 ? &Values<BFloat16>
                                        : &Values<Float16>;
  kernels.merge = &Merge;
  kernels.store =
      out == DType::kF32 ? &StoreOutput<float> : &StoreOutput<BFloat16>;
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
PagedAttentionKernels GetPagedAttentionKernels(DType q, DType kv, DType out) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(q, kv, out);
}
}  // namespace quern
#endif  // HWY_ONCE
