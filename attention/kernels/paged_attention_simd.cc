#include <cstring>

#include "quern/attention/kernels/attend_bytes.h"
#include "quern/attention/kernels/paged_attention_kernels.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/prefetch.h"
#include "quern/core/sets/avx3_zen4.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/paged_attention_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target.
#include "quern/attention/kernels/attend-inl.h"
#include "quern/attention/kernels/softmax_state-inl.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Queries that are multiplied as f32. Whole vectors are stored as such: AVX2
// takes dozens of cycles for a part of one.
template <typename T>
void LoadQueryF32(const void* q, size_t head_dim, float sign, uint32_t* to) {
  const hn::ScalableTag<float> df;
  const T* HWY_RESTRICT from = static_cast<const T*>(q);
  auto* HWY_RESTRICT words = reinterpret_cast<float*>(to);
  const auto factor = hn::Set(df, sign);
  size_t d = 0;
  for (; d + hn::Lanes(df) <= head_dim; d += hn::Lanes(df)) {
    hn::StoreU(hn::Mul(LoadF32(df, from + d), factor), df, words + d);
  }
  if (d < head_dim) {
    const size_t n = head_dim - d;
    const auto x = hn::Mul(LoadNF32(df, from + d, n), factor);
    hn::StoreN(x, df, words + d, n);
  }
  if (head_dim % 2 != 0) words[head_dim] = 0.0f;
}

// Pairs of bf16.
HWY_MAYBE_UNUSED void LoadQueryPairs(const void* q, size_t head_dim, float sign,
                                     uint32_t* to) {
  const hn::ScalableTag<uint16_t> d;
  const auto* HWY_RESTRICT from = static_cast<const uint16_t*>(q);
  auto* HWY_RESTRICT words = reinterpret_cast<uint16_t*>(to);
  const auto flip = hn::Set(d, sign < 0 ? 0x8000 : 0);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= head_dim; i += hn::Lanes(d)) {
    hn::StoreU(hn::Xor(hn::LoadU(d, from + i), flip), d, words + i);
  }
  if (i < head_dim) {
    const size_t n = head_dim - i;
    hn::StoreN(hn::Xor(hn::LoadN(d, from + i, n), flip), d, words + i, n);
  }
  if (head_dim % 2 != 0) words[head_dim] = 0;
}

template <typename T>
void MaskV(uint32_t keep, size_t v_head_dim, uint8_t* group) {
  using U = CodeOf<T>;
  constexpr size_t kPairs = sizeof(T) == 4 ? 1 : 2;
  auto* HWY_RESTRICT codes = reinterpret_cast<U*>(group);
  for (size_t t = 0; t < kGroupTokens; ++t) {
    if ((keep >> t) % 2 != 0) continue;
    U* HWY_RESTRICT row = codes + t / kPairs * kPairs * v_head_dim + t % kPairs;
    for (size_t d = 0; d < v_head_dim; ++d) row[d * kPairs] = 0;
  }
}

// All ones in the exponent: what is neither infinite nor NaN has fewer.
template <typename T>
bool FiniteV(const uint8_t* from, size_t v_head_dim) {
  using U = CodeOf<T>;
  const hn::ScalableTag<U> d;
  constexpr U kExponent = hwy::IsSame<T, float>()      ? U(0x7F800000u)
                          : hwy::IsSame<T, BFloat16>() ? U(0x7F80)
                                                       : U(0x7C00);
  const auto exponent = hn::Set(d, kExponent);
  const U* HWY_RESTRICT codes = reinterpret_cast<const U*>(from);
  const size_t count = kGroupTokens * v_head_dim;
  auto most = hn::Zero(d);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    most = hn::Max(most, hn::And(hn::LoadU(d, codes + i), exponent));
  }
  most = hn::Max(most, hn::And(hn::LoadN(d, codes + i, count - i), exponent));
  return hn::AllFalse(d, hn::Eq(most, exponent));
}

void Merge(const SoftmaxState& other, const float* HWY_RESTRICT other_out,
           size_t count, SoftmaxState* state, float* HWY_RESTRICT out) {
  const hn::ScalableTag<float> df;
  const auto weights =
      WeightsOf(df, hn::Set(df, state->max), hn::Set(df, other.max));
  for (size_t d = 0; d < count; d += hn::Lanes(df)) {
    const auto theirs = hn::Mul(weights.b, hn::Load(df, other_out + d));
    hn::Store(hn::MulAdd(weights.a, hn::Load(df, out + d), theirs), df,
              out + d);
  }
  const auto theirs = hn::Mul(weights.b, hn::Set(df, other.sum));
  state->sum =
      hn::GetLane(hn::MulAdd(weights.a, hn::Set(df, state->sum), theirs));
  state->max = hn::GetLane(weights.max);
}

template <typename T>
void StoreOutput(float state_sum, float scale, const float* HWY_RESTRICT out,
                 size_t count, void* to) {
  const hn::ScalableTag<float> df;
  T* HWY_RESTRICT row = static_cast<T*>(to);
  const auto sum = hn::Set(df, state_sum);
  const auto factor = hn::Set(df, scale);
  const auto nothing_seen = hn::Eq(sum, hn::Zero(df));
  const auto value = [&](size_t d) HWY_ATTR {
    const auto x = hn::Mul(hn::Div(hn::Load(df, out + d), sum), factor);
    return hn::IfThenZeroElse(nothing_seen, x);
  };
  size_t d = 0;
  for (; d + hn::Lanes(df) <= count; d += hn::Lanes(df)) {
    StoreF32(value(d), df, row + d);
  }
  if (d < count) StoreNF32(value(d), df, row + d, count - d);
}

template <typename T, class DF>
HWY_INLINE hn::Vec<DF> LoadByte(DF df, const T* p) {
  return LoadF32(df, p);
}
template <class DF>
HWY_INLINE hn::Vec<DF> LoadByte(DF df, const int8_t* p) {
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<int8_t, DF> d8;
  return hn::ConvertTo(df, hn::PromoteTo(di, hn::LoadU(d8, p)));
}

// Whole groups: `count` is a multiple of 16.
template <typename T>
void Widen(const uint8_t* from, const uint8_t* next, size_t count,
           uint8_t* to) {
  const LineF32 df;
  const LineU32 du;
  const hn::Rebind<uint16_t, LineF32> dh;
  const T* codes = reinterpret_cast<const T*>(from);
  auto* pairs = reinterpret_cast<uint16_t*>(to);
  for (size_t i = 0; i < count; i += kVecLanes) {
    if (i % 64 == 0) PrefetchL2(next + i);
    // Every code is a bf16: the lower half of the f32 is zero.
    const auto x = hn::BitCast(du, LoadByte(df, codes + i));
    hn::StoreU(hn::TruncateTo(dh, hn::ShiftRight<16>(x)), dh, pairs + i);
  }
}

// The codes of 16 tokens and `dims` dims that share the tokens' exponents, to
// bf16. A code of e4m3 with exponent field f and mantissa m means
// 1.m * 2^(f - 7), so bf16 has the field f + exponent - 7 and the mantissa m
// shifted by 4. In units of m, codes below 8, which are denormal, lie below
// that by what the table has: 1.0 * 2^-9 is 0x3B00 and not 0x3C10.
void WidenBlock(const uint8_t* HWY_RESTRICT from, const uint8_t* exponents,
                const uint8_t* next, size_t dims, uint16_t* HWY_RESTRICT to) {
  constexpr size_t kLine = 2 * kGroupTokens;  // pairs of dims
  const hn::CappedTag<uint16_t, kLine> d;
  const hn::Rebind<uint8_t, decltype(d)> d8;
  const hn::Repartition<uint8_t, decltype(d)> db;
  HWY_ALIGN uint16_t bias[kLine];
  HWY_ALIGN uint16_t nan[kLine];
  for (size_t i = 0; i < kLine; ++i) {
    const uint32_t exponent = exponents[i / 2];
    bias[i] = static_cast<uint16_t>((exponent - 7u) << 7);
    nan[i] = exponent == 255 ? 0xFFFF : 0;
  }
  const auto below = hn::Dup128VecFromValues(db, 0, 17, 10, 7, 4, 3, 2, 1, 0, 0,
                                             0, 0, 0, 0, 0, 0);
  const auto magnitude = hn::Set(d, 0x7F);
  for (size_t i = 0; i < kGroupTokens * dims; i += hn::Lanes(d)) {
    if (i % 64 == 0) PrefetchL2(next + i);
    const auto code = hn::PromoteTo(d, hn::LoadU(d8, from + i));
    const auto abs = hn::And(code, magnitude);
    const auto index = hn::BitCast(db, hn::Min(abs, hn::Set(d, 8)));
    const auto units =
        hn::Sub(abs, hn::BitCast(d, hn::TableLookupBytes(below, index)));
    auto bits = hn::Add(hn::ShiftLeft<4>(units), hn::Load(d, bias + i % kLine));
    bits = hn::IfThenZeroElse(hn::Eq(abs, hn::Zero(d)), bits);
    bits = hn::Or(bits, hn::VecFromMask(d, hn::Eq(abs, magnitude)));
    bits = hn::Or(bits, hn::Load(d, nan + i % kLine));
    hn::StoreU(hn::Or(bits, hn::ShiftLeft<8>(hn::Xor(code, abs))), d, to + i);
  }
}

HWY_MAYBE_UNUSED void WidenLatent(const uint8_t* from, const uint8_t* next,
                                  size_t v_head_dim, size_t rest, uint8_t* to) {
  constexpr size_t kBlock = kLatentScaleDims;
  const size_t rest_at = kGroupTokens * v_head_dim;
  const size_t rest_bytes = kGroupTokens * rest * 4;
  const uint8_t* exponents = from + rest_at + rest_bytes;
  auto* codes = reinterpret_cast<uint16_t*>(to);
  for (size_t d = 0; d < v_head_dim; d += kBlock) {
    WidenBlock(from + kGroupTokens * d, exponents, next + kGroupTokens * d,
               HWY_MIN(kBlock, v_head_dim - d), codes + kGroupTokens * d);
    exponents += kGroupTokens;
  }
  hwy::CopyBytes(from + rest_at, to + 2 * rest_at, rest_bytes);
  PrefetchL2(next + rest_at, static_cast<size_t>(exponents - from) - rest_at);
}

// T as it is stored, Wide as it is multiplied.
template <typename T, typename Wide = T>
void SetGeometry(PagedAttentionKernels& kernels) {
  if constexpr (sizeof(T) == 1) kernels.widen = &Widen<T>;
  kernels.stage_latent_v = &StageLatentV < sizeof(Wide) == 4 ? 1 : 2 > ;
  kernels.mask_v = &MaskV<Wide>;
  kernels.finite_v = &FiniteV<Wide>;
}

PagedAttentionKernels GetKernels(DType q, DType kv, DType out) {
  PagedAttentionKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.arithmetic = "f32 fma";
  kernels.load_query = q == DType::kF32    ? &LoadQueryF32<float>
                       : q == DType::kBF16 ? &LoadQueryF32<BFloat16>
                                           : &LoadQueryF32<Float16>;
  switch (kv) {
    case DType::kF32:
      kernels.attend = &Attend<FmaF32>;
      SetGeometry<float>(kernels);
      break;
    case DType::kF16:
      kernels.attend = &Attend<FmaPairs<Float16>>;
      SetGeometry<Float16>(kernels);
      break;
    default:
      kernels.attend = &Attend<FmaPairs<BFloat16>>;
      if (kv == DType::kBF16) SetGeometry<BFloat16>(kernels);
      if (kv == DType::kI8) SetGeometry<int8_t, BFloat16>(kernels);
      if (kv == DType::kF8E4M3) {
        SetGeometry<Float8E4M3, BFloat16>(kernels);
        kernels.widen_latent = &WidenLatent;
      }
      if (kv == DType::kF8E5M2) SetGeometry<Float8E5M2, BFloat16>(kernels);
#if HWY_NATIVE_DOT_BF16 && HWY_ARCH_X86
      if (q == DType::kBF16) {
        kernels.arithmetic = "bf16 dot";
        kernels.load_query = &LoadQueryPairs;
        kernels.attend = &Attend<DotPairs>;
      }
#endif
  }
  kernels.merge = &Merge;
  kernels.store = out == DType::kF32    ? &StoreOutput<float>
                  : out == DType::kBF16 ? &StoreOutput<BFloat16>
                                        : &StoreOutput<Float16>;
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
  PagedAttentionKernels kernels = HWY_DYNAMIC_DISPATCH(GetKernels)(q, kv, out);
  if (kernels.widen != nullptr) {
    const AttendBytes bytes = GetAttendBytes(q, kv);
    QUERN_CHECK(std::strcmp(bytes.target, kernels.target) == 0);
    kernels.attend_bytes = bytes.attend;
    kernels.serves_bytes = bytes.serves;
  }
  return kernels;
}
}  // namespace quern
#endif  // HWY_ONCE
