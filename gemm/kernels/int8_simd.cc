#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/core/isa.h"
#include "quern/core/kernel_set.h"
#include "quern/core/sets/avx3_dl.h"
#include "quern/gemm/kernels/int8_kernels.h"

// Compiled once per instruction set: foreach_target.h re-includes this file.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gemm/kernels/int8_simd.cc"
// foreach_target.h comes first, whatever the alphabet says.
// clang-format off
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "quern/quant/convert-inl.h"
#include "quern/core/quad_dot-inl.h"
#include "quern/gemm/kernels/register_tile-inl.h"
#include "quern/gemm/kernels/tile-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Whether quads are one instruction: vpdpbusd or its like, or vpdpbssd.
#undef QUERN_INT8_QUADS
#if !HWY_ARCH_X86 || QUERN_HAS_VPDPBUSD || QUERN_AVX_VNNI_INT8_PASS
#define QUERN_INT8_QUADS 1
#else
#define QUERN_INT8_QUADS 0
#endif

#if QUERN_INT8_QUADS

// A word of a row is a quad of u8; of s8 with AVX-VNNI-INT8, which needs no
// shift of rows.
struct DotInt8 {
  using D = LineTag<int32_t>;
  using DB = hn::Repartition<int8_t, D>;
  static constexpr size_t kSub = 1;
  static constexpr uint8_t kShift = QUERN_AVX_VNNI_INT8_PASS ? 0 : 128;
  static constexpr const char* kName =
      kShift == 0 ? "s8 x s8 quads" : "u8 x s8 quads";
  template <size_t kI>
  static HWY_INLINE hn::Vec<DB> LoadB(const uint8_t* HWY_RESTRICT line) {
    return hn::LoadU(DB(), reinterpret_cast<const int8_t*>(line));
  }
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<DB> b, uint32_t a,
                                      hn::Vec<D> sum) {
    const hn::RebindToUnsigned<D> du;
#if QUERN_AVX_VNNI_INT8_PASS
    return DotSignedQuads(D(), hn::BitCast(DB(), hn::Set(du, a)), b, sum);
#else
    const hn::RebindToUnsigned<DB> du8;
    return DotQuads(D(), hn::BitCast(du8, hn::Set(du, a)), b, sum);
#endif
  }
};

void StoreRow(const uint8_t* HWY_RESTRICT q, size_t k,
              uint32_t* HWY_RESTRICT to) {
  // Zeros for what of the last quad is beyond k.
  to[(k - 1) / 4] = 0;
  std::memcpy(to, q, k);
}

#else

// vpmaddubsw saturates, so bytes are widened to 16 bits first, which vpmaddwd
// multiplies exactly: the even bytes of a quad, then the odd. A row has two
// words for each quad, widened when it is packed; a line is widened here, once
// for all rows of a tile.
struct DotInt8 {
  using D = LineTag<int32_t>;
  using DW = hn::Repartition<int16_t, D>;
  static constexpr size_t kSub = 2;
  static constexpr uint8_t kShift = 128;
  static constexpr const char* kName = "16-bit pairs";
  template <size_t kI>
  static HWY_INLINE hn::Vec<DW> LoadB(const uint8_t* HWY_RESTRICT line) {
    const auto quads = hn::LoadU(DW(), reinterpret_cast<const int16_t*>(line));
    return hn::ShiftRight<8>(kI == 0 ? hn::ShiftLeft<8>(quads) : quads);
  }
  static HWY_INLINE hn::Vec<D> MulAdd(hn::Vec<DW> b, uint32_t a,
                                      hn::Vec<D> sum) {
    const hn::RebindToUnsigned<D> du;
    auto next = hn::Add(sum, hn::WidenMulPairwiseAdd(
                                 D(), hn::BitCast(DW(), hn::Set(du, a)), b));
#if HWY_COMPILER_GCC_ACTUAL && HWY_TARGET != HWY_EMU128
    // An empty statement that the sum passes through: without it GCC 12
    // multiplies by all words of a line before it adds the first product, and
    // keeps the sums in memory.
    asm("" : "+v"(next.raw));
#endif
    return next;
  }
};

void StoreRow(const uint8_t* HWY_RESTRICT q, size_t k,
              uint32_t* HWY_RESTRICT to) {
  const LineTag<uint32_t> du;
  constexpr size_t kLanes = HWY_MAX_LANES_D(LineTag<uint32_t>);
  constexpr uint32_t kEven = 0x00FF00FF;
  const auto even = hn::Set(du, kEven);
  size_t i = 0;
  for (; i + 4 * kLanes <= k; i += 4 * kLanes) {
    const auto quads = hn::LoadU(du, reinterpret_cast<const uint32_t*>(q + i));
    hn::StoreInterleaved2(hn::And(quads, even),
                          hn::And(hn::ShiftRight<8>(quads), even), du,
                          to + i / 2);
  }
  for (; i < k; i += 4) {
    // Zeros for what is beyond k.
    uint32_t quad = 0;
    std::memcpy(&quad, q + i, HWY_MIN(k - i, size_t{4}));
    to[i / 2] = quad & kEven;
    to[i / 2 + 1] = quad >> 8 & kEven;
  }
}

#endif  // QUERN_INT8_QUADS

template <typename T>
void Finish(const Int8FinishArgs& args) {
  const LineTag<int32_t> di;
  const LineTag<float> df;
  constexpr size_t kLanes = HWY_MAX_LANES_D(LineTag<float>);
  for (size_t r = 0; r < args.rows; ++r) {
    const int32_t* HWY_RESTRICT sums = args.sums + r * args.sums_stride;
    T* HWY_RESTRICT c =
        reinterpret_cast<T*>(static_cast<uint8_t*>(args.c) +
                             static_cast<ptrdiff_t>(r) * args.c_row_bytes);
    const auto offset = hn::Set(di, args.a_offset[r]);
    const auto a_scale = hn::Set(df, args.a_scale[r]);
    for (size_t i = 0; i < args.cols; i += kLanes) {
      const size_t left = HWY_MIN(args.cols - i, kLanes);
      const auto dot =
          hn::Sub(hn::LoadU(di, sums + i),
                  hn::Mul(offset, hn::LoadN(di, args.col_sums + i, left)));
      const auto scaled = hn::Mul(hn::ConvertTo(df, dot),
                                  hn::LoadN(df, args.b_scale + i, left));
      const auto bias = args.bias == nullptr
                            ? hn::Zero(df)
                            : hn::LoadN(df, args.bias + i, left);
      const auto v = hn::MulAdd(a_scale, scaled, bias);
      if (HWY_LIKELY(left == kLanes)) {
        StoreF32(v, df, c + i);
      } else {
        StoreNF32(v, df, c + i, left);
      }
    }
  }
}

Int8Kernels GetKernels(DType c) {
  Int8Kernels kernels = {};
  kernels.target = KernelTarget();
  kernels.arithmetic = DotInt8::kName;
  kernels.sums = TileSums::kExact;
  kernels.table = MakeTileTable<DotInt8>();
  kernels.row_words = DotInt8::kSub;
  kernels.row_shift = DotInt8::kShift;
  kernels.store_row = &StoreRow;
  kernels.finish_f32 = &Finish<float>;
  kernels.finish =
      WithFloatType(c, [](auto t) { return &Finish<decltype(t)>; });
  return kernels;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern {
#if QUERN_AVX_VNNI_INT8_PASS
Int8Kernels GetInt8AvxVnniInt8Kernels(DType c) {
  return HWY_STATIC_DISPATCH(GetKernels)(c);
}
#elif QUERN_AVX_VNNI_PASS
Int8Kernels GetInt8AvxVnniKernels(DType c) {
  return HWY_STATIC_DISPATCH(GetKernels)(c);
}
#else
absl::Span<const Int8KernelSet> Int8KernelSets() {
  static constexpr Int8KernelSet kSets[] = {
    QUERN_HWY_SETS_ABOVE_AVX2(GetKernels),
#if QUERN_AVX_VNNI
    {kAvx2VnniInt8, &GetInt8AvxVnniInt8Kernels},
    {kAvx2Vnni, &GetInt8AvxVnniKernels},
#endif
    QUERN_HWY_SETS_FROM_AVX2(GetKernels),
  };
  return kSets;
}
Int8Kernels GetInt8Kernels(DType c) {
  return FirstThatRuns(Int8KernelSets()).get(c);
}
#endif
}  // namespace quern
#endif  // HWY_ONCE
