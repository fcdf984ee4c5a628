#include "quern/cache/kv_writer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "quern/cache/group_kv_kernels.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/cache/write_kv.h"
#include "quern/cache/write_kv_kernels.h"
#include "quern/core/dtype.h"
#include "quern/core/prefetch.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

// The exponent of a block with this largest magnitude; see the header.
uint8_t ExponentOf(float max_abs) {
  if (!(max_abs <= std::numeric_limits<float>::max())) {
    return KvLayout::kNanExponent;
  }
  uint32_t bits = 0;
  std::memcpy(&bits, &max_abs, sizeof(bits));
  // 448 is 1.75 * 2^8.
  const int above = (bits & 0x7FFFFFu) > 0x600000u ? 1 : 0;
  const int exponent = static_cast<int>(bits >> 23) - 8 + above;
  return static_cast<uint8_t>(std::clamp(exponent, int{KvLayout::kMinExponent},
                                         int{KvLayout::kMaxExponent}));
}

// 2^(127 - exponent).
float InverseOf(uint8_t exponent) {
  const uint32_t bits = (254u - exponent) << 23;
  float inverse = 0;
  std::memcpy(&inverse, &bits, sizeof(inverse));
  return inverse;
}

// row[i], i < bytes, to to[i / cell * stride + i % cell], and zeros to what the
// last cell has beyond.
template <size_t kCell>
void ScatterCells(const uint8_t* row, size_t bytes, size_t stride,
                  uint8_t* to) {
  for (; bytes >= kCell; bytes -= kCell, row += kCell, to += stride) {
    std::memcpy(to, row, kCell);
  }
  if (bytes == 0) return;
  uint8_t cell[kCell] = {};
  std::memcpy(cell, row, bytes);
  std::memcpy(to, cell, kCell);
}

void Scatter(const uint8_t* row, size_t bytes, size_t cell, size_t stride,
             uint8_t* to) {
  switch (cell) {
    case 1:
      return ScatterCells<1>(row, bytes, stride, to);
    case 2:
      return ScatterCells<2>(row, bytes, stride, to);
    default:
      return ScatterCells<4>(row, bytes, stride, to);
  }
}

}  // namespace

int64_t WriteKvRowDim(const KvLayout& layout, bool value) {
  if (layout.form() != KvForm::kLatent) {
    return value ? layout.v_head_dim() : layout.head_dim();
  }
  return value ? layout.head_dim() - layout.v_head_dim() : layout.v_head_dim();
}

KvWriter::KvWriter(const WriteKvSpec& spec, const KvWriteKernels& kernels,
                   const WriteKvArgs& args, bool stream)
    : spec_(spec),
      layout_(spec.kv),
      kernels_(kernels.rows),
      pack_(kernels.pack),
      group_(kernels.group),
      bf16_kernels_(kernels.bf16_rows),
      bf16_pack_(kernels.bf16_pack),
      args_(args),
      stream_(stream),
      element_(static_cast<int64_t>(SizeOf(spec.kv.dtype()))) {}

void KvWriter::FindRows(const Run& run, int64_t head, const AnyTensorView& from,
                        const uint8_t** rows, const uint8_t** ahead) const {
  const auto tokens = static_cast<int64_t>(args_.slots.size());
  // The stride of a single token is meaningless and may be any number.
  const int64_t step = tokens > 1 ? HeadRowOffsetBytes(from, 1, 0) : 0;
  const int64_t left = tokens - (run.token + kGroup);
  const uint8_t* const first = static_cast<const uint8_t*>(from.data()) +
                               HeadRowOffsetBytes(from, run.token, head);
  for (int64_t i = 0; i < run.count; ++i) {
    rows[i] = first + i * step;
    ahead[i] = i < left ? rows[i] + kGroup * step : rows[i];
  }
}

void KvWriter::WriteBlocks(const Run& run, int64_t head) const {
  constexpr int64_t kBlock = KvLayout::kScaleBlock;
  const int64_t offset = run.slot % layout_.page_size();
  uint8_t* const keys = args_.cache.K(run.slot / layout_.page_size(), head);
  const auto count = static_cast<size_t>(run.count);
  const auto input = static_cast<int64_t>(SizeOf(spec_.input));
  const uint8_t* rows[kGroup];
  const uint8_t* ahead[kGroup];
  FindRows(run, head, args_.k, rows, ahead);
  for (int64_t d = 0; d < layout_.v_head_dim(); d += kBlock) {
    const auto dims =
        static_cast<size_t>(std::min(kBlock, layout_.v_head_dim() - d));
    const void* sources[kGroup];
    const void* next[kGroup];
    for (int64_t i = 0; i < run.count; ++i) {
      sources[i] = rows[i] + d * input;
      next[i] = ahead[i] + d * input;
    }
    float most[kGroup];
    float inverse[kGroup];
    kernels_.max_abs(sources, count, dims, most);
    uint8_t* exponents = keys + layout_.ExponentOffset(offset, d / kBlock);
    for (int64_t i = 0; i < run.count; ++i) {
      exponents[i] = ExponentOf(most[i]);
      inverse[i] = exponents[i] == KvLayout::kNanExponent
                       ? 0.0f
                       : InverseOf(exponents[i]);
    }
    alignas(64) uint8_t scratch[kGroup * kBlock];
    kernels_.encode(sources, next, count, dims, inverse, scratch, kBlock);
    const uint8_t* codes[kGroup];
    for (int64_t i = 0; i < run.count; ++i) {
      uint8_t* const row = scratch + i * kBlock;
      if (exponents[i] == KvLayout::kNanExponent) std::memset(row, 0x7F, dims);
      codes[i] = row;
    }
    PlaceKeys(codes, run.count, dims, pack_, 2,
              keys + layout_.KOffset(offset, d));
  }
}

void KvWriter::WriteRest(const Run& run, int64_t head) const {
  const int64_t offset = run.slot % layout_.page_size();
  const int64_t latent = layout_.v_head_dim();
  const int64_t dims = layout_.head_dim() - latent;
  uint8_t* const keys = args_.cache.K(run.slot / layout_.page_size(), head);
  const auto input = static_cast<int64_t>(SizeOf(spec_.input));
  constexpr auto kBytes = static_cast<int64_t>(sizeof(BFloat16));
  const uint8_t* rows[kGroup];
  const uint8_t* ahead[kGroup];
  FindRows(run, head, args_.v, rows, ahead);
  const float unused[kGroup] = {};  // bf16 has no scale
  for (int64_t d = 0; d < dims; d += kChunk) {
    const auto count = static_cast<size_t>(std::min(kChunk, dims - d));
    const void* sources[kGroup];
    const void* next[kGroup];
    for (int64_t i = 0; i < run.count; ++i) {
      sources[i] = rows[i] + d * input;
      next[i] = ahead[i] + d * input;
    }
    alignas(64) uint8_t scratch[kGroup * kChunk * kBytes];
    bf16_kernels_.encode(sources, next, static_cast<size_t>(run.count), count,
                         unused, scratch, kChunk * kBytes);
    const uint8_t* codes[kGroup];
    for (int64_t i = 0; i < run.count; ++i) {
      codes[i] = scratch + i * kChunk * kBytes;
    }
    PlaceKeys(codes, run.count, count * kBytes, bf16_pack_, 2 * kBytes,
              keys + layout_.KOffset(offset, latent + d));
  }
}

void KvWriter::WriteSide(const Run& run, int64_t head, bool value) const {
  const AnyTensorView& from = value ? args_.v : args_.k;
  // In the latent form k and v are two parts of the key.
  const bool latent = layout_.form() == KvForm::kLatent;
  Side side;
  side.rotated = !value && spec_.rotation != KvRotation::kNone;
  side.copied = !side.rotated && spec_.input == layout_.dtype();
  side.to_values = value && !latent;
  side.dim = WriteKvRowDim(layout_, value);
  side.first = latent && value ? layout_.v_head_dim() : 0;
  side.offset = run.slot % layout_.page_size();
  const int64_t page = run.slot / layout_.page_size();
  side.block =
      side.to_values ? args_.cache.V(page, head) : args_.cache.K(page, head);
  FindRows(run, head, from, side.rows, side.ahead);
  std::fill_n(side.inverse, kGroup, 0.0f);
  if (element_ == 1) FindInverses(run, head, value, side.rows, side.inverse);
  const GroupKvKernels::Fn group = value ? group_.values : group_.keys;
  if (group != nullptr && run.count == kGroup && !side.rotated &&
      layout_.form() == KvForm::kPaired &&
      side.dim % int64_t{GroupKvKernels::kMultiple} == 0) {
    uint8_t* const to = side.block + (value ? layout_.VOffset(side.offset, 0)
                                            : layout_.KOffset(side.offset, 0));
    group(side.rows, side.ahead, static_cast<size_t>(side.dim), side.inverse,
          stream_, to);
    return;
  }
  for (int64_t d = 0; d < side.dim; d += kChunk) WriteChunk(run, side, d);
}

void KvWriter::WriteChunk(const Run& run, const Side& side, int64_t d) const {
  const bool plain = layout_.form() == KvForm::kPlain;
  const auto input = static_cast<int64_t>(SizeOf(spec_.input));
  const int64_t count = std::min(kChunk, side.dim - d);
  uint8_t* to = side.block +
                element_ * (side.to_values
                                ? layout_.VOffset(side.offset, d)
                                : layout_.KOffset(side.offset, side.first + d));
  const void* sources[kGroup];
  const void* next[kGroup];
  alignas(64) float turned[kGroup * kChunk];
  for (int64_t i = 0; i < run.count; ++i) {
    sources[i] = side.rows[i] + d * input;
    next[i] = side.rotated ? static_cast<const void*>(turned + i * kChunk)
                           : side.ahead[i] + d * input;
    // Into L2, because what is being packed stays in L1. The rows of a head are
    // too far apart for the hardware to follow 16 of them (Zen 4, 2026).
    if (side.rotated || side.copied) {
      PrefetchL2(side.ahead[i] + d * input, static_cast<size_t>(count * input));
    }
    if (!side.rotated) continue;
    float* row = turned + i * kChunk;
    Rotate(run.token + i, side.rows[i], d, count, row);
    sources[i] = row;
  }
  alignas(64) uint8_t scratch[kGroup * kChunk * sizeof(float)];
  const int64_t stride = (plain ? side.dim : kChunk) * element_;
  if (plain || !side.copied) {
    (side.rotated ? kernels_.encode_f32 : kernels_.encode)(
        sources, next, static_cast<size_t>(run.count),
        static_cast<size_t>(count), side.inverse, plain ? to : scratch,
        static_cast<size_t>(stride));
  }
  if (plain) return;
  const uint8_t* codes[kGroup];
  for (int64_t i = 0; i < run.count; ++i) {
    codes[i] = side.copied ? static_cast<const uint8_t*>(sources[i])
                           : scratch + i * stride;
  }
  const auto bytes = static_cast<size_t>(count * element_);
  if (side.to_values) {
    PlaceValues(codes, run.count, bytes, side.offset, to);
  } else {
    PlaceKeys(codes, run.count, bytes, pack_,
              static_cast<size_t>(layout_.pair() * element_), to);
  }
}

void KvWriter::FindInverses(const Run& run, int64_t head, bool value,
                            const uint8_t* const* rows, float* inverse) const {
  const int64_t page = run.slot / layout_.page_size();
  if (layout_.scaling() == KvScaling::kNone) {
    std::fill_n(inverse, run.count, 1.0f);
    return;
  }
  float* scales =
      value ? args_.cache.VScales(page, head) : args_.cache.KScales(page, head);
  if (layout_.scaling() != KvScaling::kPerTokenHead) {
    std::fill_n(inverse, run.count, 1.0f / *scales);
    return;
  }
  float most[kGroup];
  if (!value && spec_.rotation != KvRotation::kNone) {
    MaxAbsRotated(run, rows, most);
  } else {
    const void* sources[kGroup];
    std::copy_n(rows, run.count, sources);
    kernels_.max_abs(sources, static_cast<size_t>(run.count),
                     static_cast<size_t>(WriteKvRowDim(layout_, value)), most);
  }
  kernels_.find_scales(most, static_cast<size_t>(run.count),
                       MaxCodeOf(layout_.dtype()), KvScales::kMin, stream_,
                       scales + run.slot % layout_.page_size(), inverse);
}

void KvWriter::MaxAbsRotated(const Run& run, const uint8_t* const* rows,
                             float* most) const {
  const int64_t dim = layout_.head_dim();
  for (int64_t i = 0; i < run.count; ++i) {
    most[i] = 0.0f;
    for (int64_t d = 0; d < dim && !std::isnan(most[i]); d += kChunk) {
      const int64_t count = std::min(kChunk, dim - d);
      alignas(64) float turned[kChunk];
      Rotate(run.token + i, rows[i], d, count, turned);
      const void* source = turned;
      float chunk = 0.0f;
      kernels_.max_abs_f32(&source, 1, static_cast<size_t>(count), &chunk);
      if (!(chunk <= most[i])) most[i] = chunk;
    }
  }
}

void KvWriter::Rotate(int64_t token, const uint8_t* row, int64_t begin,
                      int64_t count, float* to) const {
  const int64_t position = args_.positions[static_cast<size_t>(token)];
  const RotatedRow rotated = {row,
                              args_.cos.At(position, 0),
                              args_.sin.At(position, 0),
                              static_cast<size_t>(spec_.rot_dim),
                              static_cast<size_t>(begin),
                              static_cast<size_t>(count)};
  (spec_.rotation == KvRotation::kHalves ? kernels_.rotate_halves
                                         : kernels_.rotate_pairs)(rotated, to);
}

void KvWriter::PlaceKeys(const uint8_t* const* codes, int64_t count,
                         size_t bytes, const PackKvKernels& pack, size_t cell,
                         uint8_t* to) const {
  if (count == kGroup) {
    return (stream_ ? pack.pack_k_stream : pack.pack_k)(codes, bytes, to);
  }
  for (int64_t i = 0; i < count; ++i) {
    Scatter(codes[i], bytes, cell, cell * kGroup,
            to + static_cast<size_t>(i) * cell);
  }
}

void KvWriter::PlaceValues(const uint8_t* const* codes, int64_t count,
                           size_t bytes, int64_t offset, uint8_t* to) const {
  const int64_t row = layout_.v_head_dim() * element_;
  if (layout_.pair() == 1) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * row, codes[i], bytes);
    }
    return;
  }
  const auto cell = static_cast<size_t>(element_);
  for (int64_t i = 0; i < count;) {
    // The pair that this row is in; odd rows begin one element later.
    uint8_t* pair = to + ((offset + i) / 2 - offset / 2) * 2 * row;
    if (offset % 2 != 0) pair -= element_;
    if ((offset + i) % 2 == 0 && i + 1 < count) {
      (stream_ ? pack_.pack_v_stream : pack_.pack_v)(codes[i], codes[i + 1],
                                                     bytes, pair);
      i += 2;
    } else {
      Scatter(codes[i], bytes, cell, 2 * cell,
              pair + (offset + i) % 2 * element_);
      ++i;
    }
  }
}

}  // namespace quern
