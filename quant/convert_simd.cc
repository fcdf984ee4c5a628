#include "quern/core/sets/avx3_dl.h"
#include "quern/quant/convert_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/convert_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Elements to write before `out` is a multiple of `bytes`, so that a streaming
// store may follow. `n` if no number of elements gets there.
size_t HeadBeforeAligned(const void* out, size_t element_bytes, size_t bytes,
                         size_t n) {
  const size_t past = reinterpret_cast<uintptr_t>(out) % bytes;
  if (past == 0) return 0;
  if ((bytes - past) % element_bytes != 0) return n;
  return HWY_MIN(n, (bytes - past) / element_bytes);
}

// out[i] = op(i) for f32 results: op(i) gives a vector from element i on,
// op_n(i, n) one of n valid lanes.
template <class Op, class OpN>
HWY_INLINE void MapToF32(size_t n, float* out, bool stream, Op op, OpN op_n) {
  const hn::ScalableTag<float> df;
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  if (stream) {
    const size_t head = HeadBeforeAligned(out, sizeof(float), 64, n);
    for (; i < head; i += lanes) {
      const size_t part = HWY_MIN(lanes, head - i);
      hn::StoreN(op_n(i, part), df, out + i, part);
    }
    i = head;
    // Whole cache lines only: a line written in parts would be read first.
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      const auto v0 = op(i);
      const auto v1 = op(i + lanes);
      const auto v2 = op(i + 2 * lanes);
      const auto v3 = op(i + 3 * lanes);
      hn::Stream(v0, df, out + i);
      hn::Stream(v1, df, out + i + lanes);
      hn::Stream(v2, df, out + i + 2 * lanes);
      hn::Stream(v3, df, out + i + 3 * lanes);
    }
    hwy::FlushStream();
  }
  for (; i + lanes <= n; i += lanes) hn::StoreU(op(i), df, out + i);
  if (i < n) hn::StoreN(op_n(i, n - i), df, out + i, n - i);
}

template <typename T>
void Decode(const void* in, size_t n, float* out, bool stream) {
  const hn::ScalableTag<float> df;
  const T* from = static_cast<const T*>(in);
  MapToF32(
      n, out, stream, [&](size_t i) HWY_ATTR { return LoadF32(df, from + i); },
      [&](size_t i, size_t part)
          HWY_ATTR { return LoadNF32(df, from + i, part); });
}

void Scale(const float* in, float scale, size_t n, float* out, bool stream) {
  const hn::ScalableTag<float> df;
  const auto factor = hn::Set(df, scale);
  MapToF32(
      n, out, stream,
      [&](size_t i) HWY_ATTR { return hn::Mul(hn::LoadU(df, in + i), factor); },
      [&](size_t i, size_t part)
          HWY_ATTR { return hn::Mul(hn::LoadN(df, in + i, part), factor); });
}

void AddBias(const float* in, const float* bias, size_t n, float* out,
             bool stream) {
  const hn::ScalableTag<float> df;
  MapToF32(
      n, out, stream,
      [&](size_t i) HWY_ATTR {
        return hn::Add(hn::LoadU(df, in + i), hn::LoadU(df, bias + i));
      },
      [&](size_t i, size_t part) HWY_ATTR {
        return hn::Add(hn::LoadN(df, in + i, part),
                       hn::LoadN(df, bias + i, part));
      });
}

// How Encode forms codes: Lanes(v) one in each 32-bit lane; Pair(a, b) those of
// two vectors in one of 16-bit lanes.
template <typename T>
struct Encoder {
  using DF = hn::ScalableTag<float>;
  using VF = hn::Vec<DF>;
  using VU32 = hn::Vec<hn::ScalableTag<uint32_t>>;
  using VU16 = hn::Vec<hn::ScalableTag<uint16_t>>;
  hn::Vec<hn::ScalableTag<int32_t>> clamp;

  HWY_INLINE VU32 Lanes(VF v) const {
    const DF df;
    const hn::ScalableTag<uint32_t> du;
#if QUERN_NATIVE_F16
    if constexpr (hwy::IsSame<T, Float16>()) {
      // A minimum of integers, because a minimum of floats would lose NaN.
      const hn::ScalableTag<int32_t> di;
      const auto bits = hn::BitCast(di, v);
      const auto abs = hn::And(bits, hn::Set(di, 0x7FFFFFFF));
      const auto inf =
          hn::Set(di, static_cast<int>(quant_internal::kF32Infinity));
      const auto x = hn::IfThenElse(hn::Gt(abs, inf), abs, hn::Min(abs, clamp));
      const auto limited = hn::Or(x, hn::Xor(bits, abs));
      const hn::Rebind<hwy::float16_t, DF> dh;
      const hn::Rebind<uint16_t, DF> dh16;
      return hn::PromoteTo(
          du, hn::BitCast(dh16, hn::DemoteTo(dh, hn::BitCast(df, limited))));
    }
#endif
    return hn::BitCast(du, EncodeLanes<T>(df, v, clamp));
  }
  HWY_INLINE VU16 Pair(VF a, VF b) const {
    return hn::OrderedTruncate2To(hn::ScalableTag<uint16_t>(), Lanes(a),
                                  Lanes(b));
  }
};

// bf16 where nothing has to be limited.
struct BF16Encoder : Encoder<BFloat16> {
  HWY_INLINE VU32 Lanes(VF v) const {
    return hn::ShiftRight<16>(EncodeBF16UpperHalf(DF(), v));
  }
  HWY_INLINE VU16 Pair(VF a, VF b) const {
    const hn::ScalableTag<uint16_t> du16;
    return hn::ConcatOdd(du16, hn::BitCast(du16, EncodeBF16UpperHalf(DF(), b)),
                         hn::BitCast(du16, EncodeBF16UpperHalf(DF(), a)));
  }
};

template <typename Code, class Encoder>
HWY_INLINE void EncodeWith(const Encoder& encoder, const float* in, size_t n,
                           void* out, bool stream) {
  const hn::ScalableTag<float> df;
  const hn::ScalableTag<Code> dc;           // a whole vector of codes
  const hn::Rebind<Code, decltype(df)> dp;  // the codes of one f32 vector
  const size_t lanes = hn::Lanes(df);
  const size_t step = hn::Lanes(dc);
  Code* to = static_cast<Code*>(out);

  const auto encode_part = [&](size_t i, size_t part) HWY_ATTR {
    const auto codes = encoder.Lanes(hn::LoadN(df, in + i, part));
    hn::StoreN(hn::TruncateTo(dp, codes), dp, to + i, part);
  };
  const auto encode_step = [&](size_t i) HWY_ATTR {
    const auto pair = [&](size_t j) HWY_ATTR {
      return encoder.Pair(hn::LoadU(df, in + j), hn::LoadU(df, in + j + lanes));
    };
    if constexpr (sizeof(Code) == 2) {
      return pair(i);
    } else {
      return hn::OrderedTruncate2To(dc, pair(i), pair(i + 2 * lanes));
    }
  };

  size_t i = 0;
  if (stream) {
    const size_t head = HeadBeforeAligned(out, sizeof(Code), 64, n);
    for (; i < head; i += lanes) encode_part(i, HWY_MIN(lanes, head - i));
    i = head;
    // Consecutive stores fill whole lines at any vector width. Not unrolled:
    // four at once, f8e5m2 took 26 ms instead of 13 for 64 Mi (Zen 4, 2026).
    for (; i + step <= n; i += step) hn::Stream(encode_step(i), dc, to + i);
    hwy::FlushStream();
  }
  for (; i + step <= n; i += step) hn::StoreU(encode_step(i), dc, to + i);
  for (; i < n; i += lanes) encode_part(i, HWY_MIN(lanes, n - i));
}

template <typename T>
void Encode(const float* in, size_t n, uint32_t clamp_bits, void* out,
            bool stream) {
  if constexpr (hwy::IsSame<T, BFloat16>()) {
    if (clamp_bits == quant_internal::kF32Infinity) {
      EncodeWith<CodeOf<T>>(BF16Encoder(), in, n, out, stream);
      return;
    }
  }
  Encoder<T> encoder;
  encoder.clamp =
      hn::Set(hn::ScalableTag<int32_t>(), static_cast<int>(clamp_bits));
  EncodeWith<CodeOf<T>>(encoder, in, n, out, stream);
}

ConvertKernels GetKernels() {
  ConvertKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.decode[kNarrowBF16] = &Decode<BFloat16>;
  kernels.decode[kNarrowF16] = &Decode<Float16>;
  kernels.decode[kNarrowE4M3] = &Decode<Float8E4M3>;
  kernels.decode[kNarrowE5M2] = &Decode<Float8E5M2>;
  kernels.encode[kNarrowBF16] = &Encode<BFloat16>;
  kernels.encode[kNarrowF16] = &Encode<Float16>;
  kernels.encode[kNarrowE4M3] = &Encode<Float8E4M3>;
  kernels.encode[kNarrowE5M2] = &Encode<Float8E5M2>;
  kernels.scale = &Scale;
  kernels.add = &AddBias;
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
ConvertKernels GetConvertKernels() {
  return HWY_DYNAMIC_DISPATCH(GetKernels)();
}
}  // namespace quern
#endif  // HWY_ONCE
