#include "quern/cache/write_kv.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/cache/distinct.h"
#include "quern/cache/head_rows.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/pack_kv_kernels.h"
#include "quern/cache/write_kv_division.h"
#include "quern/cache/write_kv_kernels.h"
#include "quern/core/check_args.h"
#include "quern/core/cpu_info.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/prefetch.h"
#include "quern/core/status_macros.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "write_kv";

constexpr int64_t kGroup = KvLayout::kGroupTokens;
// Elements of a row that are encoded at once; even. Scratch of a group stays in
// the L1 cache.
constexpr int64_t kChunk = 256;

// The largest magnitude that a scaled type has.
float MostOf(DType dtype) {
  if (dtype == DType::kI8) return 127.0f;
  return dtype == DType::kF8E4M3 ? 448.0f : 57344.0f;
}

// A row of these is stored with this scale; see the header.
float ScaleOf(float max_abs, DType dtype) {
  if (!(max_abs <= std::numeric_limits<float>::max())) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  if (max_abs == 0.0f) return 1.0f;
  return std::max(max_abs / MostOf(dtype), KvScales::kMin);
}

// The consecutive slots from `slot` on, of the tokens from `token` on.
struct Run {
  int64_t token;
  int64_t count;
  int64_t slot;
};

// Whether `token` lies in the same group as the one before, next to it: no task
// begins there, and so no group of 16 is divided.
bool Continues(absl::Span<const int64_t> slots, int64_t token) {
  const auto t = static_cast<size_t>(token);
  return t > 0 && t < slots.size() && slots[t] >= 0 && slots[t] % kGroup != 0 &&
         slots[t] == slots[t - 1] + 1;
}

// Calls fn(run) for all tokens in [begin, end) that are not padding, in runs of
// at most 16 tokens that do not pass a multiple of `unit` slots.
template <typename Fn>
void ForEachRun(absl::Span<const int64_t> slots, int64_t begin, int64_t end,
                int64_t unit, const Fn& fn) {
  for (int64_t token = begin; token < end;) {
    const int64_t slot = slots[static_cast<size_t>(token)];
    if (slot < 0) {
      ++token;
      continue;
    }
    const int64_t most =
        std::min({end - token, unit - slot % unit, int64_t{kGroup}});
    int64_t count = 1;
    while (count < most &&
           slots[static_cast<size_t>(token + count)] == slot + count) {
      ++count;
    }
    fn(Run{token, count, slot});
    token += count;
  }
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

// Elements of a row of k, or of v: see WriteKvArgs.
int64_t RowDim(const KvLayout& layout, bool value) {
  if (layout.form() != KvForm::kLatent) {
    return value ? layout.v_head_dim() : layout.head_dim();
  }
  return value ? layout.head_dim() - layout.v_head_dim() : layout.v_head_dim();
}

// The work of one call.
class Writer {
 public:
  Writer(const WriteKvSpec& spec, const WriteKvKernels& kernels,
         const PackKvKernels& pack, const WriteKvArgs& args, bool stream)
      : spec_(spec),
        layout_(spec.kv),
        kernels_(kernels),
        pack_(pack),
        args_(args),
        stream_(stream),
        element_(static_cast<int64_t>(SizeOf(spec.kv.dtype()))) {}

  void Write(const Run& run, int64_t head_begin, int64_t head_end) const {
    for (int64_t head = head_begin; head < head_end; ++head) {
      WriteSide(run, head, /*value=*/false);
      WriteSide(run, head, /*value=*/true);
    }
  }

 private:
  // One head's keys, or values, of a run.
  void WriteSide(const Run& run, int64_t head, bool value) const {
    const AnyTensorView& from = value ? args_.v : args_.k;
    const bool rotated = !value && spec_.rotation != KvRotation::kNone;
    const int64_t dim = RowDim(layout_, value);
    const auto input = static_cast<int64_t>(SizeOf(spec_.input));
    const uint8_t* rows[kGroup];
    for (int64_t i = 0; i < run.count; ++i) {
      rows[i] = static_cast<const uint8_t*>(from.data()) +
                HeadRowOffsetBytes(from, run.token + i, head);
    }
    // The same head of the tokens that are likely to come next.
    const auto tokens = static_cast<int64_t>(args_.slots.size());
    const uint8_t* ahead[kGroup];
    for (int64_t i = 0; i < run.count; ++i) {
      const int64_t token = run.token + kGroup + i;
      ahead[i] = token < tokens ? static_cast<const uint8_t*>(from.data()) +
                                      HeadRowOffsetBytes(from, token, head)
                                : rows[i];
    }
    float inverse[kGroup] = {};
    if (element_ == 1) FindInverses(run, head, value, rows, inverse);

    const int64_t page = run.slot / layout_.page_size();
    const int64_t offset = run.slot % layout_.page_size();
    // In the latent form both are parts of the key.
    const bool latent = layout_.form() == KvForm::kLatent;
    const int64_t first = latent && value ? layout_.v_head_dim() : 0;
    const bool to_values = value && !latent;
    uint8_t* block =
        to_values ? args_.cache.V(page, head) : args_.cache.K(page, head);
    const bool plain = layout_.form() == KvForm::kPlain;
    const bool copied = !rotated && spec_.input == layout_.dtype();
    for (int64_t d = 0; d < dim; d += kChunk) {
      const int64_t count = std::min(kChunk, dim - d);
      uint8_t* to =
          block + element_ * (to_values ? layout_.VOffset(offset, d)
                                        : layout_.KOffset(offset, first + d));
      const void* sources[kGroup];
      const void* next[kGroup];
      alignas(64) float turned[kGroup * kChunk];
      for (int64_t i = 0; i < run.count; ++i) {
        sources[i] = rows[i] + d * input;
        next[i] = rotated ? static_cast<const void*>(turned + i * kChunk)
                          : ahead[i] + d * input;
        // Into L2: what is being packed stays in L1. The rows of a head are
        // too far apart for the hardware to follow 16 of them (Zen 4, 2026).
        if (rotated || copied) {
          PrefetchL2(ahead[i] + d * input, static_cast<size_t>(count * input));
        }
        if (!rotated) continue;
        float* row = turned + i * kChunk;
        Rotate(run.token + i, rows[i], d, count, row);
        sources[i] = row;
      }
      alignas(64) uint8_t scratch[kGroup * kChunk * sizeof(float)];
      const int64_t stride = (plain ? dim : kChunk) * element_;
      if (plain || !copied) {
        (rotated ? kernels_.encode_f32 : kernels_.encode)(
            sources, next, static_cast<size_t>(run.count),
            static_cast<size_t>(count), inverse, plain ? to : scratch,
            static_cast<size_t>(stride));
      }
      if (plain) continue;
      const uint8_t* codes[kGroup];
      for (int64_t i = 0; i < run.count; ++i) {
        codes[i] = copied ? static_cast<const uint8_t*>(sources[i])
                          : scratch + i * stride;
      }
      const auto bytes = static_cast<size_t>(count * element_);
      if (to_values) {
        PlaceValues(codes, run.count, bytes, offset, to);
      } else {
        PlaceKeys(codes, run.count, bytes, to);
      }
    }
  }

  // 1 / scale of each row, and the scales, if they are the rows' own.
  void FindInverses(const Run& run, int64_t head, bool value,
                    const uint8_t* const* rows, float* inverse) const {
    const int64_t page = run.slot / layout_.page_size();
    if (layout_.scaling() == KvScaling::kNone) {
      std::fill_n(inverse, run.count, 1.0f);
      return;
    }
    float* scales = value ? args_.cache.VScales(page, head)
                          : args_.cache.KScales(page, head);
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
                       static_cast<size_t>(RowDim(layout_, value)), most);
    }
    scales += run.slot % layout_.page_size();
    for (int64_t i = 0; i < run.count; ++i) {
      const float scale = ScaleOf(most[i], layout_.dtype());
      scales[i] = scale;
      // Any number: the codes of such a row are unspecified.
      inverse[i] = std::isnan(scale) ? 0.0f : 1.0f / scale;
    }
  }

  void MaxAbsRotated(const Run& run, const uint8_t* const* rows,
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

  void Rotate(int64_t token, const uint8_t* row, int64_t begin, int64_t count,
              float* to) const {
    const int64_t position = args_.positions[static_cast<size_t>(token)];
    const RotatedRow rotated = {row,
                                args_.cos.At(position, 0),
                                args_.sin.At(position, 0),
                                static_cast<size_t>(spec_.rot_dim),
                                static_cast<size_t>(begin),
                                static_cast<size_t>(count)};
    (spec_.rotation == KvRotation::kHalves
         ? kernels_.rotate_halves
         : kernels_.rotate_pairs)(rotated, to);
  }

  // `to` is the cell of the first row's first element.
  void PlaceKeys(const uint8_t* const* codes, int64_t count, size_t bytes,
                 uint8_t* to) const {
    if (count == kGroup) {
      return (stream_ ? pack_.pack_k_stream : pack_.pack_k)(codes, bytes, to);
    }
    const auto cell = static_cast<size_t>(layout_.pair() * element_);
    for (int64_t i = 0; i < count; ++i) {
      Scatter(codes[i], bytes, cell, cell * kGroup,
              to + static_cast<size_t>(i) * cell);
    }
  }

  // `to` is the first element of the first row, at `offset` in its page.
  void PlaceValues(const uint8_t* const* codes, int64_t count, size_t bytes,
                   int64_t offset, uint8_t* to) const {
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

  const WriteKvSpec& spec_;
  const KvLayout& layout_;
  const WriteKvKernels& kernels_;
  const PackKvKernels& pack_;
  const WriteKvArgs& args_;
  bool stream_;
  int64_t element_;
};

// The bytes of a call from which on it streams.
int64_t StreamAboveBytes(Stores stores) {
  if (stores == Stores::kStream) return -1;
  return stores == Stores::kCached ? std::numeric_limits<int64_t>::max()
                                   : LastLevelBytes() / 2;
}

absl::Status CheckSlots(absl::Span<const int64_t> slots, int64_t end) {
  for (size_t token = 0; token < slots.size(); ++token) {
    if (slots[token] >= end) {
      return InvalidArgument(kOp, "slots[", token, "]=", slots[token],
                             "; need slot < ", end, ", or negative to skip");
    }
  }
  const int64_t twice = FindTwice(
      slots.size(), [&](size_t token) { return slots[token]; },
      [](const NumberWindow&) {});
  if (twice != kNoNumber) {
    return InvalidArgument(kOp, "slot ", twice,
                           " is given twice; need distinct slots");
  }
  return absl::OkStatus();
}

absl::Status CheckRotation(const WriteKvSpec& spec, const WriteKvArgs& args) {
  const int64_t positions = args.cos.extent(0);
  const int64_t want[] = {positions, spec.rot_dim / 2};
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "cos", args.cos, DType::kF32, want));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "sin", args.sin, DType::kF32, want));
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kOp, "positions.size()", static_cast<int64_t>(args.positions.size()),
      static_cast<int64_t>(args.slots.size()), "the slots"));
  for (size_t token = 0; token < args.positions.size(); ++token) {
    const int64_t position = args.positions[token];
    if (args.slots[token] < 0) continue;
    if (position < 0 || position >= positions) {
      return InvalidArgument(kOp, "positions[", token, "]=", position,
                             "; need 0 <= position < ", positions,
                             ", the rows of cos");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<WriteKvPlan> WriteKvPlan::Create(const WriteKvSpec& spec) {
  if (spec.kv == KvLayout()) return InvalidArgument(kOp, "kv layout is empty");
  constexpr DType kInputs[] = {DType::kF32, DType::kBF16, DType::kF16};
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "input", spec.input, kInputs));
  if (spec.rotation != KvRotation::kNone) {
    QUERN_RETURN_IF_ERROR(
        CheckRange(kOp, "rot_dim", spec.rot_dim, 2, spec.kv.head_dim()));
    if (spec.kv.form() == KvForm::kLatent) {
      return Unimplemented(kOp,
                           "the layout is latent; need keys that are rotated "
                           "already");
    }
    if (spec.rot_dim % 2 != 0) {
      return InvalidArgument(kOp, "rot_dim=", spec.rot_dim,
                             "; need an even number");
    }
  }
  return WriteKvPlan(spec, GetWriteKvKernels(spec.input, spec.kv.dtype()),
                     GetPackKvKernels(SizeOf(spec.kv.dtype())),
                     StreamAboveBytes(spec.stores));
}

absl::Status WriteKvPlan::CheckArgs(const WriteKvArgs& args) const {
  const KvLayout& layout = spec_.kv;
  const auto tokens = static_cast<int64_t>(args.slots.size());
  QUERN_RETURN_IF_ERROR(CheckHeadRows(kOp, "k", args.k, spec_.input, tokens,
                                      layout.kv_heads(),
                                      RowDim(layout, /*value=*/false)));
  QUERN_RETURN_IF_ERROR(CheckHeadRows(kOp, "v", args.v, spec_.input, tokens,
                                      layout.kv_heads(),
                                      RowDim(layout, /*value=*/true)));
  if (args.cache.layout() != layout) {
    return InvalidArgument(kOp, "the cache has another layout than the plan");
  }
  QUERN_RETURN_IF_ERROR(CheckCacheOut(kOp, args.cache));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "k", args.k, args.cache));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "v", args.v, args.cache));
  if (spec_.rotation != KvRotation::kNone) {
    QUERN_RETURN_IF_ERROR(CheckRotation(spec_, args));
  }
  // Blocks of at least page_size bytes lie apart: no overflow.
  return CheckSlots(args.slots, args.cache.num_pages() * layout.page_size());
}

void WriteKvPlan::Execute(const WriteKvArgs& args,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const bool paired = spec_.kv.in_groups();
  const int64_t unit = paired ? kGroup : spec_.kv.page_size();
  const auto tokens = static_cast<int64_t>(args.slots.size());
  const int64_t heads = spec_.kv.kv_heads();
  const int64_t row_elements =
      RowDim(spec_.kv, /*value=*/false) + RowDim(spec_.kv, /*value=*/true);
  const int64_t moved =
      tokens * heads * row_elements *
      static_cast<int64_t>(SizeOf(spec_.input) + SizeOf(spec_.kv.dtype()));
  const bool stream = moved > stream_above_bytes_;
  const Writer writer(spec_, kernels_, pack_, args, stream);
  const WriteKvDivision division(tokens, heads, row_elements,
                                 executor.num_workers());
  executor.ParallelFor(division.tasks(), [&](int64_t task, int /*worker*/) {
    int64_t begin = division.TokenBegin(task);
    int64_t end = division.TokenEnd(task);
    while (paired && begin < end && Continues(args.slots, begin)) ++begin;
    while (paired && begin < end && Continues(args.slots, end)) ++end;
    ForEachRun(args.slots, begin, end, unit, [&](const Run& run) {
      writer.Write(run, division.HeadBegin(task), division.HeadEnd(task));
    });
    if (stream) pack_.flush();
  });
}

}  // namespace quern
