#include "quern/cache/write_kv_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cache/write_kv_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// After foreach_target.
#include "quern/core/prefetch.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;

// The bytes of codes that saturate: v / scale is in v already.
template <typename To, class D8 = hn::Rebind<uint8_t, DF>>
HWY_INLINE hn::Vec<D8> ScaledCodes(hn::Vec<DF> v) {
  const DF df;
  const hn::RebindToUnsigned<DF> du;
  if constexpr (hwy::IsSame<To, int8_t>()) {
    v = hn::IfThenElseZero(hn::Eq(v, v), v);  // NaN
    v = hn::Max(hn::Min(v, hn::Set(df, 127.0f)), hn::Set(df, -127.0f));
    // The unit in the last place of the sum is 1: it rounds as asked.
    const auto steps = hn::Add(v, hn::Set(df, 0x1.8p23f));
    return hn::TruncateTo(D8(), hn::BitCast(du, steps));
  } else {
    const hn::RebindToSigned<DF> di;
    const auto clamp = hn::Set(
        di, static_cast<int>(
                quant_internal::ClampF32Bits<To>(OverflowMode::kSaturate)));
    return hn::TruncateTo(D8(), hn::BitCast(du, EncodeLanes<To>(df, v, clamp)));
  }
}

// The last elements of a row go through whole vectors on the stack: their loop
// is the same one, which is compiled once.
template <typename From, typename To>
HWY_INLINE void EncodeRow(const From* HWY_RESTRICT from, const From* ahead,
                          size_t count, float inverse, To* HWY_RESTRICT to) {
  if constexpr (hwy::IsSame<From, To>()) {
    (void)ahead;
    hwy::CopyBytes(from, to, count * sizeof(To));
  } else {
    const DF df;
    const size_t lanes = hn::Lanes(df);
    const auto factor = hn::Set(df, inverse);
    HWY_ALIGN From rest_from[hn::MaxLanes(df)];
    HWY_ALIGN To rest_to[hn::MaxLanes(df)];
    const size_t whole = count / lanes * lanes;
    const From* source = from;
    To* target = to;
    for (size_t n = whole;; n = lanes) {
      for (size_t i = 0; i < n; i += lanes) {
        // One at a time, between the vectors: many at once wait for one
        // another, and what comes after waits for them.
        PrefetchL2(ahead + i);
        const auto v = LoadF32(df, source + i);
        if constexpr (sizeof(To) == 1) {
          const hn::Rebind<uint8_t, DF> d8;
          hn::StoreU(ScaledCodes<To>(hn::Mul(v, factor)), d8,
                     reinterpret_cast<uint8_t*>(target + i));
        } else {
          StoreF32(v, df, target + i);
        }
      }
      const size_t rest = (count - whole) * sizeof(From);
      if (rest == 0) return;
      if (source == rest_from) break;
      hwy::ZeroBytes(rest_from, sizeof(rest_from));
      hwy::CopyBytes(from + whole, rest_from, rest);
      source = rest_from;
      target = rest_to;
    }
    hwy::CopyBytes(rest_to, to + whole, (count - whole) * sizeof(To));
  }
}

template <typename From, typename To>
void Encode(const void* const* from, const void* const* ahead, size_t rows,
            size_t count, const float* inverse, uint8_t* to, size_t to_stride) {
  for (size_t r = 0; r < rows; ++r) {
    EncodeRow(static_cast<const From*>(from[r]),
              static_cast<const From*>(ahead[r]), count, inverse[r],
              reinterpret_cast<To*>(to + r * to_stride));
  }
}

// The largest code of each lane: without its sign bit, the code of a
// floating-point type grows with the value, and NaN is above all.
template <class D, typename Code = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> LargestCodes(D d, const Code* HWY_RESTRICT codes,
                                   size_t count) {
  const size_t lanes = hn::Lanes(d);
  const auto magnitude = hn::Set(d, hwy::HighestValue<Code>());
  auto max0 = hn::Zero(d), max1 = max0, max2 = max0, max3 = max0;
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    max0 = hn::Max(max0, hn::And(hn::LoadU(d, codes + i), magnitude));
    max1 = hn::Max(max1, hn::And(hn::LoadU(d, codes + i + lanes), magnitude));
    max2 =
        hn::Max(max2, hn::And(hn::LoadU(d, codes + i + 2 * lanes), magnitude));
    max3 =
        hn::Max(max3, hn::And(hn::LoadU(d, codes + i + 3 * lanes), magnitude));
  }
  for (; i < count; i += lanes) {
    const auto v = hn::LoadN(d, codes + i, HWY_MIN(lanes, count - i));
    max0 = hn::Max(max0, hn::And(v, magnitude));
  }
  return hn::Max(hn::Max(max0, max1), hn::Max(max2, max3));
}

// The largest of each pair of lanes, one of a and one of b in turn.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V MaxOfPairs(D d, V a, V b) {
  return hn::Max(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
}

// Stores the largest of the blocks of 16 bytes of v, lane by lane.
template <class D>
HWY_INLINE void StoreMaxOfBlocks(D d, hn::Vec<D> v, hn::TFromD<D>* to) {
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) == 16) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> dh;
    StoreMaxOfBlocks(dh, hn::Max(hn::LowerHalf(dh, v), hn::UpperHalf(dh, v)),
                     to);
  }
}

// largest[r] = the largest code of row r, for as many rows as a block of 16
// bytes has lanes. They are reduced together: a lane is one row in the end.
template <class D, typename Code = hn::TFromD<D>>
HWY_INLINE void LargestOfRows(D d, const void* const* from, size_t count,
                              Code* largest) {
  constexpr size_t kLanes = hn::MaxLanes(D());
  constexpr size_t kRows = 16 / sizeof(Code);
  HWY_ALIGN Code lanes[kRows * kLanes];
  for (size_t r = 0; r < kRows; ++r) {
    hn::Store(LargestCodes(d, static_cast<const Code*>(from[r]), count), d,
              lanes + r * kLanes);
  }
  const auto two = [&](size_t a, size_t b) HWY_ATTR {
    return MaxOfPairs(d, hn::Load(d, lanes + a * kLanes),
                      hn::Load(d, lanes + b * kLanes));
  };
  auto even = two(0, kRows / 2);
  auto odd = two(1, kRows / 2 + 1);
  if constexpr (kRows == 8) {
    // Rows 0 2 4 6, then 0 to 7.
    even = MaxOfPairs(d, even, two(2, 6));
    odd = MaxOfPairs(d, odd, two(3, 7));
  }
  StoreMaxOfBlocks(d, MaxOfPairs(d, even, odd), largest);
}

template <typename T>
void MaxAbs(const void* const* from, size_t rows, size_t count, float* to) {
  using Code = hwy::SignedFromSize<sizeof(T)>;
  const hn::FixedTag<Code,
                     (HWY_HAVE_SCALABLE ? 16 : HWY_MAX_BYTES) / sizeof(Code)>
      d;
  constexpr size_t kRows = 16 / sizeof(Code);
  const hn::CappedTag<float, kRows> df;
  for (size_t first = 0; first < rows; first += kRows) {
    const size_t n = HWY_MIN(kRows, rows - first);
    Code largest[kRows] = {};
    if (n == kRows) {
      LargestOfRows(d, from + first, count, largest);
    } else {
      for (size_t r = 0; r < n; ++r) {
        const auto* codes = static_cast<const Code*>(from[first + r]);
        largest[r] = hn::ReduceMax(d, LargestCodes(d, codes, count));
      }
    }
    float values[kRows];
    for (size_t r = 0; r < kRows; r += hn::Lanes(df)) {
      hn::StoreU(LoadF32(df, reinterpret_cast<const T*>(largest) + r), df,
                 values + r);
    }
    hwy::CopyBytes(values, to + first, n * sizeof(float));
  }
}

// The scales of as many rows as f32 has lanes.
struct Scales {
  hn::Vec<DF> scale, inverse;
};
HWY_INLINE Scales ScalesOf(hn::Vec<DF> most, float divisor, float least) {
  const DF d;
  const auto finite = hn::Le(most, hn::Set(d, hwy::HighestValue<float>()));
  const auto quotient =
      hn::Max(hn::Div(most, hn::Set(d, divisor)), hn::Set(d, least));
  const auto scale =
      hn::IfThenElse(hn::Eq(most, hn::Zero(d)), hn::Set(d, 1.0f), quotient);
  return {hn::IfThenElse(finite, scale, hn::NaN(d)),
          hn::IfThenElseZero(finite, hn::Div(hn::Set(d, 1.0f), scale))};
}

void FindScales(const float* most, size_t rows, float divisor, float least,
                bool stream, float* scales, float* inverse) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const size_t whole = rows / lanes * lanes;
  stream = stream && whole == rows &&
           reinterpret_cast<uintptr_t>(scales) % (lanes * sizeof(float)) == 0;
  for (size_t i = 0; i < whole; i += lanes) {
    const Scales s = ScalesOf(hn::LoadU(d, most + i), divisor, least);
    hn::StoreU(s.inverse, d, inverse + i);
    if (stream) {
      hn::Stream(s.scale, d, scales + i);
    } else {
      hn::StoreU(s.scale, d, scales + i);
    }
  }
  if (whole == rows) return;
  const size_t n = rows - whole;
  const Scales s = ScalesOf(hn::LoadN(d, most + whole, n), divisor, least);
  hn::StoreN(s.inverse, d, inverse + whole, n);
  hn::StoreN(s.scale, d, scales + whole, n);
}

// out[i] = x[i] * c[i] + y[i] * s[i], the last factor negated if kNegate.
template <bool kNegate, typename T>
HWY_INLINE void Turn(const T* x, const T* y, const float* c, const float* s,
                     size_t count, float* out) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < count; i += lanes) {
    const size_t n = HWY_MIN(lanes, count - i);
    const auto straight =
        hn::Mul(LoadNF32(d, x + i, n), hn::LoadN(d, c + i, n));
    const auto across = LoadNF32(d, y + i, n);
    const auto sine = hn::LoadN(d, s + i, n);
    hn::StoreN(kNegate ? hn::NegMulAdd(across, sine, straight)
                       : hn::MulAdd(across, sine, straight),
               d, out + i, n);
  }
}

// Calls fn(first, count) with what of [begin, begin + count) is in [from, to).
template <class Fn>
HWY_INLINE void ForPart(const RotatedRow& args, size_t from, size_t to,
                        const Fn& fn) {
  const size_t first = HWY_MAX(args.begin, from);
  const size_t end = HWY_MIN(args.begin + args.count, to);
  if (first < end) fn(first, end - first);
}

template <typename T>
void RotateHalves(const RotatedRow& args, float* to) {
  const T* x = static_cast<const T*>(args.row);
  const size_t half = args.rot_dim / 2;
  const auto at = [&](size_t d) HWY_ATTR { return to + (d - args.begin); };
  ForPart(args, 0, half, [&](size_t d, size_t n) HWY_ATTR {
    Turn<true>(x + d, x + half + d, args.cos + d, args.sin + d, n, at(d));
  });
  ForPart(args, half, 2 * half, [&](size_t d, size_t n) HWY_ATTR {
    const size_t j = d - half;
    Turn<false>(x + d, x + j, args.cos + j, args.sin + j, n, at(d));
  });
  ForPart(args, 2 * half, args.begin + args.count,
          [&](size_t d, size_t n)
              HWY_ATTR { EncodeRow<T, float>(x + d, x + d, n, 1.0f, at(d)); });
}

template <typename T>
void RotatePairs(const RotatedRow& args, float* to) {
  const T* x = static_cast<const T*>(args.row) + args.begin;
  EncodeRow<T, float>(x, x, args.count, 1.0f, to);
  const DF d;
  const size_t lanes = hn::Lanes(d);
  ForPart(args, 0, args.rot_dim, [&](size_t begin, size_t n) HWY_ATTR {
    const float* c = args.cos + begin / 2;
    const float* s = args.sin + begin / 2;
    size_t i = 0;
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      hn::Vec<DF> a, b;
      hn::LoadInterleaved2(d, to + i, a, b);
      const auto cosine = hn::LoadU(d, c + i / 2);
      const auto sine = hn::LoadU(d, s + i / 2);
      hn::StoreInterleaved2(hn::NegMulAdd(b, sine, hn::Mul(a, cosine)),
                            hn::MulAdd(a, sine, hn::Mul(b, cosine)), d, to + i);
    }
    const hn::CappedTag<float, 1> d1;
    for (; i < n; i += 2) {
      const auto a = hn::LoadU(d1, to + i), b = hn::LoadU(d1, to + i + 1);
      const auto cosine = hn::LoadU(d1, c + i / 2);
      const auto sine = hn::LoadU(d1, s + i / 2);
      hn::StoreU(hn::NegMulAdd(b, sine, hn::Mul(a, cosine)), d1, to + i);
      hn::StoreU(hn::MulAdd(a, sine, hn::Mul(b, cosine)), d1, to + i + 1);
    }
  });
}

using EncodeFn = decltype(WriteKvKernels::encode);

template <typename From>
EncodeFn EncodeTo(DType cache) {
  switch (cache) {
    case DType::kF32:
      return &Encode<From, float>;
    case DType::kBF16:
      return &Encode<From, BFloat16>;
    case DType::kF16:
      return &Encode<From, Float16>;
    case DType::kI8:
      return &Encode<From, int8_t>;
    case DType::kF8E4M3:
      return &Encode<From, Float8E4M3>;
    default:
      return &Encode<From, Float8E5M2>;
  }
}

template <typename From>
WriteKvKernels KernelsFrom(DType cache) {
  WriteKvKernels kernels = {};
  kernels.target = hwy::TargetName(HWY_TARGET);
  kernels.encode = EncodeTo<From>(cache);
  kernels.encode_f32 = EncodeTo<float>(cache);
  kernels.max_abs = &MaxAbs<From>;
  kernels.max_abs_f32 = &MaxAbs<float>;
  kernels.find_scales = &FindScales;
  kernels.rotate_halves = &RotateHalves<From>;
  kernels.rotate_pairs = &RotatePairs<From>;
  return kernels;
}

WriteKvKernels GetKernels(DType input, DType cache) {
  if (input == DType::kF32) return KernelsFrom<float>(cache);
  if (input == DType::kF16) return KernelsFrom<Float16>(cache);
  return KernelsFrom<BFloat16>(cache);
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
WriteKvKernels GetWriteKvKernels(DType input, DType cache) {
  return HWY_DYNAMIC_DISPATCH(GetKernels)(input, cache);
}
}  // namespace quern
#endif  // HWY_ONCE
