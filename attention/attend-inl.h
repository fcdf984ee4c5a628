// One chunk of keys and values against rows of queries: logits, softmax,
// weighted values. A template of the arithmetic, which says what a line of 16
// words is multiplied by and how.
//
//   kSub        query or weight words for each line: 2 where the halves of a
//               pair are multiplied one after the other
//   kPairs      elements in a word of keys and values
//   kWordBytes  bytes of that where it is stored
//   LoadB<i>    a vector of the line, or of its half i
//   MulAdd      sum + that times a word
//   StorePs     weights of one vector of tokens, as words

// Per-target include guard.
#if defined(QUERN_ATTENTION_ATTEND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_ATTENTION_ATTEND_INL_H_
#undef QUERN_ATTENTION_ATTEND_INL_H_
#else
#define QUERN_ATTENTION_ATTEND_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "attention/paged_attention_kernels.h"
#include "attention/softmax_state-inl.h"
#include "core/dtype.h"
#include "core/exp-inl.h"
#include "hwy/highway.h"
#include "quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Lanes of one line. Where the vector length is not known to the compiler, 128
// bits serve.
#if HWY_HAVE_SCALABLE
using LineF32 = hn::FixedTag<float, 4>;
#else
using LineF32 = hn::CappedTag<float, 16>;
#endif
using LineU32 = hn::RebindToUnsigned<LineF32>;
using VF32 = hn::Vec<LineF32>;

constexpr size_t kVecLanes = HWY_MAX_LANES_D(LineF32);
constexpr size_t kLineVecs = kGroupTokens / kVecLanes;
constexpr size_t kRowWords = kChunkGroups * kGroupTokens;

// A tile of sums in registers: rows x vectors. With AVX-512 24 of 32 registers
// leave room for the lines and a word; before it 8 of 16.
constexpr size_t kTileRows = HWY_TARGET <= HWY_AVX3 ? 6 : 4;
constexpr size_t kTileVecs = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

HWY_INLINE void PrefetchL2(const uint8_t* p) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(p, 0, 2);
#else
  hwy::Prefetch(p);
#endif
}

// Pairs of bf16 or f16 by f32, to which widening is exact. Of bf16 the lower of
// a pair moves up, the upper loses the lower bits.
template <typename T>
struct FmaPairs {
  static constexpr size_t kSub = 2;
  static constexpr size_t kPairs = 2;
  static constexpr size_t kWordBytes = 4;
  using B = VF32;
  template <size_t kI>
  static HWY_INLINE VF32 Half(hn::Vec<LineU32> pairs) {
    const LineU32 du;
    if constexpr (hwy::IsSame<T, BFloat16>()) {
      return hn::BitCast(LineF32(),
                         kI == 0 ? hn::ShiftLeft<16>(pairs)
                                 : hn::And(pairs, hn::Set(du, 0xFFFF0000u)));
    } else {
      const hn::Rebind<uint16_t, LineF32> dh;
      return DecodeCodes<T>(
          LineF32(),
          hn::TruncateTo(dh, kI == 0 ? hn::And(pairs, hn::Set(du, 0xFFFFu))
                                     : hn::ShiftRight<16>(pairs)));
    }
  }
  template <size_t kI>
  static HWY_INLINE VF32 LoadB(const uint8_t* HWY_RESTRICT line) {
    return Half<kI>(
        hn::LoadU(LineU32(), reinterpret_cast<const uint32_t*>(line)));
  }
  template <size_t kI>
  static HWY_INLINE VF32 LoadNB(const uint8_t* HWY_RESTRICT line, size_t n) {
    return Half<kI>(
        hn::LoadN(LineU32(), reinterpret_cast<const uint32_t*>(line), n));
  }
  static HWY_INLINE VF32 MulAdd(VF32 b, uint32_t a, VF32 sum) {
    return hn::MulAdd(hn::BitCast(LineF32(), hn::Set(LineU32(), a)), b, sum);
  }
  static HWY_INLINE VF32 Exp2(VF32 x) { return Exp2OfNegative(LineF32(), x); }
  static HWY_INLINE void StoreWeights(VF32 p, uint32_t* row, size_t token) {
    hn::StoreU(p, LineF32(), reinterpret_cast<float*>(row + token));
  }
};

// f32 by f32.
struct FmaF32 {
  static constexpr size_t kSub = 1;
  static constexpr size_t kPairs = 1;
  static constexpr size_t kWordBytes = 4;
  using B = VF32;
  template <size_t>
  static HWY_INLINE VF32 LoadB(const uint8_t* HWY_RESTRICT line) {
    return hn::LoadU(LineF32(), reinterpret_cast<const float*>(line));
  }
  template <size_t>
  static HWY_INLINE VF32 LoadNB(const uint8_t* HWY_RESTRICT line, size_t n) {
    return hn::LoadN(LineF32(), reinterpret_cast<const float*>(line), n);
  }
  static HWY_INLINE VF32 MulAdd(VF32 b, uint32_t a, VF32 sum) {
    return hn::MulAdd(hn::BitCast(LineF32(), hn::Set(LineU32(), a)), b, sum);
  }
  static HWY_INLINE VF32 Exp2(VF32 x) { return Exp2OfNegative(LineF32(), x); }
  static HWY_INLINE void StoreWeights(VF32 p, uint32_t* row, size_t token) {
    hn::StoreU(p, LineF32(), reinterpret_cast<float*>(row + token));
  }
};

#if HWY_NATIVE_DOT_BF16 && HWY_ARCH_X86
// Pairs of bf16 by pairs of bf16, summed in f32. Weights are rounded to bf16.
struct DotPairs {
  using DB = hn::Repartition<hwy::bfloat16_t, LineF32>;
  using B = hn::Vec<DB>;
  static constexpr size_t kSub = 1;
  static constexpr size_t kPairs = 2;
  static constexpr size_t kWordBytes = 4;
  template <size_t>
  static HWY_INLINE B LoadB(const uint8_t* HWY_RESTRICT line) {
    return hn::LoadU(DB(), reinterpret_cast<const hwy::bfloat16_t*>(line));
  }
  template <size_t>
  static HWY_INLINE B LoadNB(const uint8_t* HWY_RESTRICT line, size_t n) {
    return hn::BitCast(
        DB(), hn::LoadN(LineU32(), reinterpret_cast<const uint32_t*>(line), n));
  }
  static HWY_INLINE VF32 MulAdd(B b, uint32_t a, VF32 sum) {
    auto unused = hn::Zero(LineF32());  // native: all goes to the first sum
    return hn::ReorderWidenMulAccumulate(
        LineF32(), hn::BitCast(DB(), hn::Set(LineU32(), a)), b, sum, unused);
  }
  // 2^x for x <= 0 within 2^-18 of it, relatively: a weight is rounded to 2^-9.
  // Exactly 1 for 0; NaN for NaN. 2^x = 2^floor(x) * 2^f, and on [0, 1) the
  // second factor is a polynomial (minimax, the constant term fixed at 1).
  static HWY_INLINE VF32 Exp2(VF32 x) {
    const LineF32 df;
    const VF32 f{
        _mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
    VF32 p = hn::Set(df, 0.013426684f);
    p = hn::MulAdd(p, f, hn::Set(df, 0.0522424743f));
    p = hn::MulAdd(p, f, hn::Set(df, 0.241280205f));
    p = hn::MulAdd(p, f, hn::Set(df, 0.693044845f));
    p = hn::MulAdd(p, f, hn::Set(df, 1.0f));
    return VF32{_mm512_scalef_ps(p.raw, x.raw)};
  }
  static HWY_INLINE void StoreWeights(VF32 p, uint32_t* row, size_t token) {
    const hn::Rebind<hwy::bfloat16_t, LineF32> dh;
    hn::StoreU(hn::DemoteTo(dh, p), dh,
               reinterpret_cast<hwy::bfloat16_t*>(row) + token);
  }
};

// Pairs of int8, which become the same pairs of bf16 on their way.
struct DotI8 : DotPairs {
  static constexpr size_t kWordBytes = 2;
  using DW = hn::Rebind<uint16_t, LineF32>;
  template <size_t>
  static HWY_INLINE B LoadB(const uint8_t* HWY_RESTRICT line) {
    return Widen(hn::LoadU(DW(), reinterpret_cast<const uint16_t*>(line)));
  }
  template <size_t>
  static HWY_INLINE B LoadNB(const uint8_t* HWY_RESTRICT line, size_t n) {
    return Widen(hn::LoadN(DW(), reinterpret_cast<const uint16_t*>(line), n));
  }

 private:
  static HWY_INLINE B Widen(hn::Vec<DW> words) {
    const hn::Repartition<int8_t, DW> d8;
    const hn::RebindToSigned<LineF32> di;
    const auto bytes = hn::BitCast(d8, words);
    const auto to_f32 = [&](auto half) HWY_ATTR {
      return hn::ConvertTo(LineF32(), hn::PromoteTo(di, half));
    };
    const hn::Half<decltype(d8)> dh;
    return hn::OrderedDemote2To(DB(), to_f32(hn::LowerHalf(dh, bytes)),
                                to_f32(hn::UpperHalf(dh, bytes)));
  }
};

// The bf16 of an fp8 code without its sign, by halves: what 7 bits choose.
struct Fp8Table {
  alignas(64) uint8_t lower[128];
  alignas(64) uint8_t upper[128];
  // Byte i of the lower halves, then of the upper: 0 64 1 65 ...
  alignas(64) uint8_t order[64];
};
template <typename T>
constexpr Fp8Table MakeFp8Table() {
  constexpr bool kE4M3 = hwy::IsSame<T, Float8E4M3>();
  constexpr unsigned kMantissa = kE4M3 ? 3 : 2;
  constexpr unsigned kBias = kE4M3 ? 7 : 15;
  constexpr unsigned kFirstNaN = kE4M3 ? 0x7F : 0x7D;
  constexpr unsigned kInfinity = kE4M3 ? 0x80 : 0x7C;
  Fp8Table table = {};
  for (unsigned code = 0; code < 128; ++code) {
    const unsigned exponent = code >> kMantissa;
    const unsigned mantissa = code & ((1u << kMantissa) - 1);
    unsigned bf16 = (exponent + 127 - kBias) << 7 | mantissa << (7 - kMantissa);
    if (exponent == 0) {  // mantissa * 2^(1 - bias - bits of it)
      unsigned top = kMantissa;
      while (top > 0 && mantissa >> top == 0) --top;
      bf16 = mantissa == 0 ? 0
                           : (128 - kBias - kMantissa + top) << 7 |
                                 (mantissa << (7 - top) & 0x7F);
    } else if (code >= kFirstNaN) {
      bf16 = 0x7FC0;
    } else if (code == kInfinity) {
      bf16 = 0x7F80;
    }
    table.lower[code] = static_cast<uint8_t>(bf16 & 0xFF);
    table.upper[code] = static_cast<uint8_t>(bf16 >> 8);
    table.order[code / 2] = static_cast<uint8_t>(code / 4 + code / 2 % 2 * 64);
  }
  return table;
}

template <typename T>
struct DotFp8 : DotPairs {
  static constexpr size_t kWordBytes = 2;
  template <size_t>
  static HWY_INLINE B LoadB(const uint8_t* HWY_RESTRICT line) {
    return Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line)));
  }
  template <size_t>
  static HWY_INLINE B LoadNB(const uint8_t* HWY_RESTRICT line, size_t n) {
    const hn::Rebind<uint16_t, LineF32> d;
    return Widen(hn::LoadN(d, reinterpret_cast<const uint16_t*>(line), n).raw);
  }

 private:
  // By the lower 7 bits of each byte.
  static HWY_INLINE __m512i Lookup(const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index,
                                    _mm512_load_si512(table + 64));
  }
  static HWY_INLINE B Widen(__m256i codes) {
    static constexpr Fp8Table kTable = MakeFp8Table<T>();
    const __m512i index = _mm512_castsi256_si512(codes);
    const __m512i lower = Lookup(kTable.lower, index);
    // a | (b & c)
    const __m512i upper = _mm512_ternarylogic_epi32(
        Lookup(kTable.upper, index), index, _mm512_set1_epi8(-128), 0xF8);
    const __m512i order = _mm512_load_si512(kTable.order);
    return B{_mm512_permutex2var_epi8(lower, order, upper)};
  }
};
#endif

// Fetches the keys and values of the next chunk into the L2 cache, from the
// first byte to the last, a few lines at each of `steps` steps of this one:
// DRAM is never idle, nor are there ever more requests than it takes.
class Fetcher {
 public:
  Fetcher(const ChunkArgs& c, size_t k_bytes, size_t v_bytes, size_t steps)
      : c_(c), k_bytes_(k_bytes), v_bytes_(v_bytes) {
    const size_t lines = kChunkGroups * (Lines(k_bytes) + Lines(v_bytes));
    stride_ = (lines + steps - 1) / HWY_MAX(steps, size_t{1}) * kLine;
    NextGroup();
  }
  HWY_INLINE void Step() {
    if (HWY_UNLIKELY(at_ == nullptr)) return;
    for (size_t i = 0; i < stride_; i += kLine) PrefetchL2(at_ + i);
    if (left_ <= stride_) {
      NextGroup();
    } else {
      at_ += stride_;
      left_ -= stride_;
    }
  }

 private:
  static constexpr size_t kLine = 64;
  static size_t Lines(size_t bytes) { return (bytes + kLine - 1) / kLine; }

  HWY_INLINE void NextGroup() {
    const size_t groups = v_bytes_ == 0 ? kChunkGroups : 2 * kChunkGroups;
    const size_t i = next_++;
    const bool keys = i < kChunkGroups;
    at_ = i >= groups ? nullptr
          : keys      ? c_.next_k[i]
                      : c_.next_v[i - kChunkGroups];
    left_ = keys ? k_bytes_ : v_bytes_;
  }

  const ChunkArgs& c_;
  size_t k_bytes_;  // of a group
  size_t v_bytes_;
  size_t stride_;
  size_t next_ = 0;
  const uint8_t* at_;  // null: all is fetched
  size_t left_;
};

// sums[r][v] += line[v] * word[r], for each of the words of a line.
template <class A, size_t kRows, size_t kVecs, size_t kI, bool kTail>
HWY_INLINE void HalfStep(const uint32_t* HWY_RESTRICT words, size_t stride,
                         const uint8_t* const HWY_RESTRICT (&lines)[kVecs],
                         size_t offset, size_t valid,
                         VF32 (&sums)[kRows][kVecs]) {
  typename A::B b[kVecs];
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVecs; ++v) {
    b[v] = kTail ? A::template LoadNB<kI>(lines[v] + offset, valid)
                 : A::template LoadB<kI>(lines[v] + offset);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      sums[r][v] = A::MulAdd(b[v], words[r * stride], sums[r][v]);
    }
  }
}
template <class A, size_t kRows, size_t kVecs, bool kTail>
HWY_INLINE void Step(const uint32_t* HWY_RESTRICT words, size_t stride,
                     const uint8_t* const HWY_RESTRICT (&lines)[kVecs],
                     size_t offset, size_t valid, VF32 (&sums)[kRows][kVecs]) {
  HalfStep<A, kRows, kVecs, 0, kTail>(words, stride, lines, offset, valid,
                                      sums);
  if constexpr (A::kSub == 2) {
    HalfStep<A, kRows, kVecs, 1, kTail>(words + 1, stride, lines, offset, valid,
                                        sums);
  }
}

// logits[row + r][vec * kVecLanes ...] for kRows rows and kVecs vectors.
template <class A, size_t kRows, size_t kVecs>
void QkTile(const ChunkArgs& c, Fetcher& fetcher, size_t row, size_t vec) {
  const LineF32 df;
  constexpr size_t kVecBytes = kVecLanes * A::kWordBytes;
  constexpr size_t kLineBytes = kLineVecs * kVecBytes;
  const size_t steps = (c.head_dim + A::kPairs - 1) / A::kPairs;
  const uint32_t* HWY_RESTRICT q = c.q + row * c.q_stride;
  const uint8_t* lines[kVecs];
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVecs; ++v) {
    lines[v] = c.k[(vec + v) / kLineVecs] + (vec + v) % kLineVecs * kVecBytes;
  }
  VF32 sums[kRows][kVecs];
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) sums[r][v] = hn::Zero(df);
  }
  for (size_t s = 0; s < steps; ++s) {
    fetcher.Step();
    Step<A, kRows, kVecs, false>(q + s * A::kSub, c.q_stride, lines,
                                 s * kLineBytes, 0, sums);
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    float* HWY_RESTRICT to = c.logits + (row + r) * kRowWords + vec * kVecLanes;
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      hn::StoreU(sums[r][v], df, to + v * kVecLanes);
    }
  }
}

// Dims of a tile of sums, and those that are left for the one which d is in.
constexpr size_t kTileDims = kTileVecs * kVecLanes;
HWY_INLINE size_t LatentDims(const ChunkArgs& c, size_t d) {
  return HWY_MIN(kTileDims, c.v_head_dim - d / kTileDims * kTileDims);
}

// out[row + r][d ...] for kRows rows and kVecs vectors of dims, from groups
// [begin, end). kTail: `valid` of the dims of the only vector are there.
template <class A, size_t kRows, size_t kVecs, bool kTail>
void PvTile(const ChunkArgs& c, Fetcher& fetcher, size_t row, size_t d,
            size_t begin, size_t end, size_t valid) {
  const bool latent = c.latent_tile != nullptr;
  const LineF32 df;
  constexpr size_t kVecBytes = kVecLanes * A::kWordBytes;
  constexpr size_t kLines = kGroupTokens / A::kPairs;
  const size_t pitch =
      (latent ? LatentDims(c, d) : c.v_head_dim) * A::kWordBytes;
  const auto* HWY_RESTRICT p =
      reinterpret_cast<const uint32_t*>(c.logits) + row * kRowWords;
  VF32 sums[kRows][kVecs];
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) sums[r][v] = hn::Zero(df);
  }
  for (size_t g = begin; g < end; ++g) {
    const uint8_t* lines[kVecs];
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      lines[v] = (latent ? c.latent_tile + g * kLines * pitch +
                               d % kTileDims * A::kWordBytes
                         : c.v[g] + d * A::kWordBytes) +
                 v * kVecBytes;
    }
    const uint32_t* HWY_RESTRICT words = p + g * kLines * A::kSub;
    for (size_t t = 0; t < kLines; ++t) {
      fetcher.Step();
      Step<A, kRows, kVecs, kTail>(words + t * A::kSub, kRowWords, lines,
                                   t * pitch, valid, sums);
    }
  }
  HWY_UNROLL(8)
  for (size_t r = 0; r < kRows; ++r) {
    float* HWY_RESTRICT to = c.out + (row + r) * c.out_stride + d;
    const VF32 ours = hn::Set(df, c.weights[2 * (row + r) + 1]);
    const VF32 old = hn::Set(df, c.weights[2 * (row + r)]);
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVecs; ++v) {
      float* HWY_RESTRICT at = to + v * kVecLanes;
      const VF32 sum = hn::Mul(ours, sums[r][v]);
      hn::StoreU(c.first ? sum : hn::MulAdd(old, hn::LoadU(df, at), sum), df,
                 at);
    }
  }
}

template <size_t kRows>
struct RowsTag {
  static constexpr size_t kValue = kRows;
};

// tile(RowsTag<count>(), row) for all rows, in tiles of the largest sizes.
template <class F>
HWY_INLINE void ForTiles(size_t rows, const F& tile) {
  size_t row = 0;
  // Of eight, 4 + 4 rather than 6 + 2.
  for (; row + kTileRows <= rows && (kTileRows == 4 || row + 8 != rows);
       row += kTileRows) {
    tile(RowsTag<kTileRows>(), row);
  }
  for (; kTileRows > 4 && row + 4 <= rows; row += 4) tile(RowsTag<4>(), row);
  if (row + 2 <= rows) {
    tile(RowsTag<2>(), row);
    row += 2;
  }
  if (row < rows) tile(RowsTag<1>(), row);
}

// The groups that any of `rows` rows sees, [begin, end); begin == end: none.
HWY_INLINE TokenRange GroupsOf(const TokenRange* seen, size_t rows) {
  TokenRange all = {kChunkGroups, 0};
  for (size_t r = 0; r < rows; ++r) {
    if (seen[r].begin >= seen[r].end) continue;
    const uint32_t begin = seen[r].begin / kGroupTokens;
    const uint32_t end = (seen[r].end + kGroupTokens - 1) / kGroupTokens;
    all.begin = HWY_MIN(all.begin, begin);
    all.end = HWY_MAX(all.end, end);
  }
  if (all.begin > all.end) all.begin = all.end;
  return all;
}

template <class A, size_t kRows>
HWY_INLINE void QkRows(const ChunkArgs& c, Fetcher& fetcher, size_t row,
                       size_t vec, size_t end) {
  while (vec + kTileVecs <= end) {
    QkTile<A, kRows, kTileVecs>(c, fetcher, row, vec);
    vec += kTileVecs;
  }
  if (kTileVecs > 2 && vec + 2 <= end) {
    QkTile<A, kRows, 2>(c, fetcher, row, vec);
    vec += 2;
  }
  if (vec < end) QkTile<A, kRows, 1>(c, fetcher, row, vec);
}

// cap * tanh(x / cap); NaN for NaN.
HWY_INLINE VF32 SoftCap(VF32 x, VF32 cap) {
  const LineF32 df;
  const VF32 y = hn::Div(x, cap);
  const VF32 e =
      ExpM1NonPositive(df, hn::Max(hn::Mul(hn::Set(df, -2.0f), hn::Abs(y)),
                                   hn::Set(df, kExpLowest)));
  const VF32 tanh = hn::Div(hn::Neg(e), hn::Add(hn::Set(df, 2.0f), e));
  return hn::IfThenElse(hn::IsNaN(y), y, hn::Mul(cap, hn::CopySign(tanh, y)));
}

// The logits [first, last) of a row, scaled and what else the chunk asks for.
HWY_INLINE void TransformRow(const ChunkArgs& c, size_t row, size_t first,
                             size_t last, float* logits) {
  const LineF32 df;
  for (size_t t = first; t < last; t += kVecLanes) {
    VF32 x = hn::Mul(hn::LoadU(df, logits + t), hn::Set(df, c.scale_log2e));
    if (c.k_scales != nullptr) {
      x = hn::Mul(x, hn::LoadU(df, c.k_scales + t));
    }
    if (c.soft_cap_log2e > 0.0f) {
      x = SoftCap(x, hn::Set(df, c.soft_cap_log2e));
    }
    if (c.slopes != nullptr) {
      const VF32 ahead = hn::Add(
          hn::Set(df, c.ahead[row] + static_cast<float>(t)), hn::Iota(df, 0));
      x = hn::MulAdd(hn::Set(df, c.slopes[row]), ahead, x);
    }
    hn::StoreU(x, df, logits + t);
  }
}

// What is left to multiply the logits of a row by, once they are transformed.
HWY_INLINE bool IsTransformed(const ChunkArgs& c) {
  return c.k_scales != nullptr || c.soft_cap_log2e > 0.0f ||
         c.slopes != nullptr;
}
HWY_INLINE float LogitFactor(const ChunkArgs& c) {
  return IsTransformed(c) ? 1.0f : c.scale_log2e;
}

// The softmax of a chunk takes three passes over all rows, so that none waits
// for the latency of the one before in the same row.
//
// The first: logits masked, and weights[2 * row] becomes their maximum.
HWY_INLINE void MaxOfRow(const ChunkArgs& c, size_t row, TokenRange groups) {
  const LineF32 df;
  float* logits = c.logits + row * kRowWords;
  const size_t begin = c.seen[row].begin;
  const size_t end = HWY_MAX(c.seen[row].end, c.seen[row].begin);
  const size_t first = groups.begin * kGroupTokens;
  const size_t last = groups.end * kGroupTokens;
  // Whole vectors that the row sees, all of each.
  const size_t inner_begin = (begin + kVecLanes - 1) / kVecLanes * kVecLanes;
  const size_t inner_end = end / kVecLanes * kVecLanes;

  if (IsTransformed(c)) TransformRow(c, row, first, last, logits);

  // Where a vector is seen in part, -inf for the rest.
  const VF32 nothing = hn::Set(df, SoftmaxState().max);
  const auto mask = [&](size_t t) HWY_ATTR {
    const hn::RebindToSigned<LineF32> di;
    const auto token =
        hn::Add(hn::Iota(di, 0), hn::Set(di, static_cast<int>(t)));
    const auto seen =
        hn::And(hn::Ge(token, hn::Set(di, static_cast<int>(begin))),
                hn::Lt(token, hn::Set(di, static_cast<int>(end))));
    hn::StoreU(hn::IfThenElse(hn::RebindMask(df, seen),
                              hn::LoadU(df, logits + t), nothing),
               df, logits + t);
  };
  for (size_t t = first; t < last; t += kVecLanes) {
    if (t >= inner_begin && t < inner_end) {
      t = inner_end - kVecLanes;
      continue;
    }
    mask(t);
  }

  VF32 most = nothing;
  VF32 most1 = nothing;
  size_t t = first;
  for (; t + 2 * kVecLanes <= last; t += 2 * kVecLanes) {
    most = hn::Max(most, hn::LoadU(df, logits + t));
    most1 = hn::Max(most1, hn::LoadU(df, logits + t + kVecLanes));
  }
  if (t < last) most = hn::Max(most, hn::LoadU(df, logits + t));
  c.weights[2 * row] = hn::ReduceMax(df, hn::Max(most, most1)) * LogitFactor(c);
}

// The second: logits in place to weights, zeros in the groups that the row's
// tile has beyond its own; weights[2 * row + 1] becomes their sum.
template <class A>
HWY_INLINE void ExpOfRow(const ChunkArgs& c, Fetcher& fetcher, size_t row,
                         TokenRange groups) {
  const LineF32 df;
  // One memory: the weights of a vector lie at or before its logits.
  float* logits = c.logits + row * kRowWords;
  auto* words = reinterpret_cast<uint32_t*>(logits);
  const VF32 max = hn::Set(df, FiniteMax(c.weights[2 * row]));
  const VF32 scale = hn::Set(df, LogitFactor(c));
  VF32 sum = hn::Zero(df);
  const size_t last = groups.end * kGroupTokens;
  for (size_t t = groups.begin * kGroupTokens; t < last; t += kVecLanes) {
    fetcher.Step();
    const VF32 p = A::Exp2(hn::MulSub(hn::LoadU(df, logits + t), scale, max));
    sum = hn::Add(sum, p);
    if (c.v_scales != nullptr) {
      // A scale of NaN is for those who see the token.
      A::StoreWeights(
          hn::IfThenZeroElse(hn::Eq(p, hn::Zero(df)),
                             hn::Mul(p, hn::LoadU(df, c.v_scales + t))),
          words, t);
    } else {
      A::StoreWeights(p, words, t);
    }
  }
  c.weights[2 * row + 1] = hn::ReduceSum(df, sum);
}

// The third, rows in lanes: the chunk's (max, sum) go into the state, and
// `weights` become what to multiply the old output and the chunk's by.
HWY_INLINE void UpdateStates(const ChunkArgs& c) {
  const LineF32 df;
  for (size_t row = 0; row < c.rows; row += kVecLanes) {
    const size_t n = HWY_MIN(kVecLanes, c.rows - row);
    HWY_ALIGN float old_max[kVecLanes] = {}, old_sum[kVecLanes] = {};
    HWY_ALIGN float new_max[kVecLanes] = {}, new_sum[kVecLanes] = {};
    for (size_t i = 0; i < n; ++i) {
      const SoftmaxState old = c.first ? SoftmaxState() : c.state[row + i];
      old_max[i] = old.max;
      old_sum[i] = old.sum;
      new_max[i] = c.weights[2 * (row + i)];
      new_sum[i] = c.weights[2 * (row + i) + 1];
    }
    const auto weights =
        WeightsOf(df, hn::Load(df, old_max), hn::Load(df, new_max));
    const VF32 theirs = hn::Mul(weights.b, hn::Load(df, new_sum));
    hn::Store(hn::MulAdd(weights.a, hn::Load(df, old_sum), theirs), df,
              new_sum);
    hn::Store(weights.max, df, new_max);
    hn::Store(weights.a, df, old_max);
    hn::Store(weights.b, df, old_sum);
    for (size_t i = 0; i < n; ++i) {
      c.state[row + i] = {new_max[i], new_sum[i]};
      c.weights[2 * (row + i)] = old_max[i];
      c.weights[2 * (row + i) + 1] = old_sum[i];
    }
  }
}

// The dims [d, d + kTileDims), or as many of them as there are.
template <class A, size_t kRows>
HWY_INLINE void PvDims(const ChunkArgs& c, Fetcher& fetcher, size_t row,
                       TokenRange groups, size_t d) {
  const size_t end = HWY_MIN(d + kTileDims, c.v_head_dim);
  if (d + kTileDims <= end) {
    PvTile<A, kRows, kTileVecs, false>(c, fetcher, row, d, groups.begin,
                                       groups.end, 0);
    return;
  }
  if (kTileVecs > 2 && d + 2 * kVecLanes <= end) {
    PvTile<A, kRows, 2, false>(c, fetcher, row, d, groups.begin, groups.end, 0);
    d += 2 * kVecLanes;
  }
  if (d + kVecLanes <= end) {
    PvTile<A, kRows, 1, false>(c, fetcher, row, d, groups.begin, groups.end, 0);
    d += kVecLanes;
  }
  if (d < end) {
    PvTile<A, kRows, 1, true>(c, fetcher, row, d, groups.begin, groups.end,
                              end - d);
  }
}

// Words of 16 tokens by dims to words of dims by tokens, in blocks of 128 bits
// on every target: with 512 it takes as many instructions, for the blocks have
// to change places.
template <size_t kPairs>
void StageLatentV(const uint8_t* k, size_t v_head_dim, uint8_t* to) {
  const hn::FixedTag<uint32_t, 4> d;
  const hn::Repartition<uint64_t, decltype(d)> dq;
  const auto load = [&](size_t step, size_t token) HWY_ATTR {
    return hn::LoadU(
        d, reinterpret_cast<const uint32_t*>(k) + step * kGroupTokens + token);
  };
  const auto store = [&](hn::Vec<decltype(dq)> v, size_t row,
                         size_t dim) HWY_ATTR {
    hn::StoreU(hn::BitCast(d, v), d,
               reinterpret_cast<uint32_t*>(to) + row * v_head_dim + dim);
  };
  if constexpr (kPairs == 1) {
    for (size_t dim = 0; dim < v_head_dim; dim += 4) {
      for (size_t t = 0; t < kGroupTokens; t += 4) {
        const auto v0 = load(dim, t), v1 = load(dim + 1, t);
        const auto v2 = load(dim + 2, t), v3 = load(dim + 3, t);
        const auto lower01 = hn::BitCast(dq, hn::InterleaveLower(d, v0, v1));
        const auto upper01 = hn::BitCast(dq, hn::InterleaveUpper(d, v0, v1));
        const auto lower23 = hn::BitCast(dq, hn::InterleaveLower(d, v2, v3));
        const auto upper23 = hn::BitCast(dq, hn::InterleaveUpper(d, v2, v3));
        store(hn::InterleaveLower(dq, lower01, lower23), t, dim);
        store(hn::InterleaveUpper(dq, lower01, lower23), t + 1, dim);
        store(hn::InterleaveLower(dq, upper01, upper23), t + 2, dim);
        store(hn::InterleaveUpper(dq, upper01, upper23), t + 3, dim);
      }
    }
  } else {
    // Two tokens by two dims: (t d)(t d+1) (t+1 d)(t+1 d+1) becomes
    // (t d)(t+1 d) (t d+1)(t+1 d+1).
    const hn::Repartition<uint8_t, decltype(d)> d8;
    const auto order = hn::Dup128VecFromValues(d8, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9,
                                               12, 13, 10, 11, 14, 15);
    const auto turn = [&](size_t step, size_t token) HWY_ATTR {
      const auto words = hn::BitCast(d8, load(step, token));
      return hn::BitCast(dq, hn::TableLookupBytes(words, order));
    };
    for (size_t dim = 0; dim < v_head_dim; dim += 4) {
      for (size_t t = 0; t < kGroupTokens; t += 4) {
        const auto a = turn(dim / 2, t), b = turn(dim / 2 + 1, t);
        store(hn::InterleaveLower(dq, a, b), t / 2, dim);
        store(hn::InterleaveUpper(dq, a, b), t / 2 + 1, dim);
      }
    }
  }
}

// latent_tile of the dims from d on: of all dims at once, a chunk of values
// would not fit into the L2 cache beside its keys and those of the next.
template <class A>
void StageLatentTile(const ChunkArgs& c, size_t d) {
  if constexpr (A::kWordBytes == 4) {
    const TokenRange groups = GroupsOf(c.seen, c.rows);
    const size_t dims = LatentDims(c, d);
    for (size_t g = groups.begin; g < groups.end; ++g) {
      StageLatentV<A::kPairs>(
          c.k[g] + d / A::kPairs * kGroupTokens * 4, dims,
          c.latent_tile + g * kGroupTokens / A::kPairs * dims * 4);
    }
  }
}

template <class A>
void Attend(const ChunkArgs& c) {
  constexpr size_t kLines = kGroupTokens / A::kPairs;
  // Four groups of keys stay in the L1 cache for all rows.
  constexpr size_t kGroups = 4;
  const size_t k_steps = (c.head_dim + A::kPairs - 1) / A::kPairs;
  const size_t d_tiles = (c.v_head_dim + kTileDims - 1) / kTileDims;
  size_t tiles = 0;
  ForTiles(c.rows, [&](auto, size_t) { ++tiles; });
  const size_t vecs = kChunkGroups * kLineVecs;
  Fetcher fetcher(
      c, k_steps * kGroupTokens * A::kWordBytes,
      c.latent_tile != nullptr ? 0 : kLines * c.v_head_dim * A::kWordBytes,
      tiles * (vecs / kTileVecs * k_steps + d_tiles * kChunkGroups * kLines) +
          c.rows * vecs);
  for (size_t g = 0; g < kChunkGroups; g += kGroups) {
    ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
      constexpr size_t kRows = decltype(tag)::kValue;
      const TokenRange groups = GroupsOf(c.seen + row, kRows);
      const size_t begin = HWY_MAX(g, groups.begin) * kLineVecs;
      const size_t end = HWY_MIN(g + kGroups, groups.end) * kLineVecs;
      QkRows<A, kRows>(c, fetcher, row, begin, end);
    });
  }
  ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
    constexpr size_t kRows = decltype(tag)::kValue;
    const TokenRange groups = GroupsOf(c.seen + row, kRows);
    for (size_t r = row; r < row + kRows; ++r) MaxOfRow(c, r, groups);
  });
  ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
    constexpr size_t kRows = decltype(tag)::kValue;
    const TokenRange groups = GroupsOf(c.seen + row, kRows);
    for (size_t r = row; r < row + kRows; ++r)
      ExpOfRow<A>(c, fetcher, r, groups);
  });
  UpdateStates(c);
  for (size_t d = 0; d < c.v_head_dim; d += kTileDims) {
    if (c.latent_tile != nullptr) StageLatentTile<A>(c, d);
    ForTiles(c.rows, [&](auto tag, size_t row) HWY_ATTR {
      constexpr size_t kRows = decltype(tag)::kValue;
      const TokenRange groups = GroupsOf(c.seen + row, kRows);
      PvDims<A, kRows>(c, fetcher, row, groups, d);
    });
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
