#include "quern/ops/registry/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "quern/attention/schedule.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/reference/rope.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Load(const uint8_t* block, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBF16:
      return double{ToF32(reinterpret_cast<const BFloat16*>(block)[i])};
    case DType::kF16:
      return double{ToF32(reinterpret_cast<const Float16*>(block)[i])};
    case DType::kI8:
      return static_cast<double>(reinterpret_cast<const int8_t*>(block)[i]);
    case DType::kF8E4M3:
      return double{ToF32(Float8E4M3{block[i]})};
    case DType::kF8E5M2:
      return double{ToF32(Float8E5M2{block[i]})};
    default:
      return double{reinterpret_cast<const float*>(block)[i]};
  }
}

void Store(uint8_t* block, DType dtype, int64_t i, float v) {
  switch (dtype) {
    case DType::kBF16:
      reinterpret_cast<BFloat16*>(block)[i] = FromF32<BFloat16>(v);
      break;
    case DType::kF16:
      reinterpret_cast<Float16*>(block)[i] = FromF32<Float16>(v);
      break;
    case DType::kI8:
      reinterpret_cast<int8_t*>(block)[i] =
          std::isnan(v) ? int8_t{0}
                        : static_cast<int8_t>(std::nearbyint(
                              std::min(127.0f, std::max(-127.0f, v))));
      break;
    case DType::kF8E4M3:
      block[i] = FromF32<Float8E4M3>(v, OverflowMode::kSaturate).bits;
      break;
    case DType::kF8E5M2:
      block[i] = FromF32<Float8E5M2>(v, OverflowMode::kSaturate).bits;
      break;
    default:
      reinterpret_cast<float*>(block)[i] = v;
  }
}

// The scale of a row in caches that have a scale for each token and head.
template <typename Row>
float ScaleOfRow(const Row& row, int64_t n, float most) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(row(i))) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::abs(row(i)));
  }
  return largest == 0 ? 1.0f : std::max(largest / most, KvScales::kMin);
}

// What a row of n elements is multiplied with before it is stored for token
// `token` of a block. Sets the token's scale where each token has one. `scales`
// are the block's, or null.
template <typename Row>
float InverseScale(const Row& row, int64_t n, const KvLayout& layout,
                   int64_t token, float* scales) {
  if (scales == nullptr) return 1;
  if (layout.scaling() != KvScaling::kPerTokenHead) return 1.0f / *scales;
  scales[token] = ScaleOfRow(row, n, MaxCodeOf(layout.dtype()));
  return 1.0f / scales[token];
}

// Writes element i of a row to element at(i) of a block, for i < n.
template <typename Row, typename At>
void WriteRow(const Row& row, int64_t n, const At& at, DType dtype,
              float inverse, uint8_t* block) {
  for (int64_t i = 0; i < n; ++i) Store(block, dtype, at(i), row(i) * inverse);
}

// Writes a key of `layout`, whose scaling is kPerBlock, as token `token` of a
// block. key(i) is element i.
template <typename Key>
void WriteKeyInBlocks(const Key& key, const KvLayout& layout, int64_t token,
                      uint8_t* block) {
  for (int64_t b = 0; b < layout.scale_blocks(); ++b) {
    const int64_t begin = b * KvLayout::kScaleBlock;
    const int64_t end =
        std::min(begin + KvLayout::kScaleBlock, layout.v_head_dim());
    double largest = 0;
    for (int64_t d = begin; d < end; ++d) {
      largest = std::isfinite(key(d))
                    ? std::max(largest, std::abs(double{key(d)}))
                    : kInfinity;
    }
    int exponent = KvLayout::kMinExponent;
    while (exponent < KvLayout::kMaxExponent &&
           largest > std::ldexp(448.0, exponent - 127)) {
      ++exponent;
    }
    const bool nan = largest == kInfinity;
    block[layout.ExponentOffset(token, b)] =
        nan ? KvLayout::kNanExponent : static_cast<uint8_t>(exponent);
    for (int64_t d = begin; d < end; ++d) {
      const auto scaled =
          static_cast<float>(std::ldexp(double{key(d)}, 127 - exponent));
      Store(block, layout.dtype(), layout.KOffset(token, d),
            nan ? std::numeric_limits<float>::quiet_NaN() : scaled);
    }
  }
  for (int64_t d = layout.v_head_dim(); d < layout.head_dim(); ++d) {
    Store(block + layout.KOffset(token, d), DType::kBF16, 0, key(d));
  }
  if (layout.k_row() > layout.head_dim()) {
    const int64_t at = layout.KOffset(token, layout.head_dim());
    Store(block + at, DType::kBF16, 0, 0);
  }
}

// Element d of the key of a token.
double LoadKey(const KvLayout& layout, const uint8_t* block, int64_t token,
               int64_t d) {
  const int64_t at = layout.KOffset(token, d);
  if (layout.scaling() != KvScaling::kPerBlock) {
    return Load(block, layout.dtype(), at);
  }
  if (d >= layout.v_head_dim()) return Load(block + at, DType::kBF16, 0);
  const int64_t scale = layout.ExponentOffset(token, d / KvLayout::kScaleBlock);
  if (block[scale] == KvLayout::kNanExponent) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return std::ldexp(Load(block, layout.dtype(), at), block[scale] - 127);
}

}  // namespace

void NativeWriteKv(const WriteKvArgs& args) noexcept {
  const KvLayout& layout = args.cache.layout();
  const int64_t keys = args.k.extent(2), page_size = layout.page_size();
  for (int64_t t = 0; t < args.k.extent(0); ++t) {
    const int64_t slot = args.slots[static_cast<size_t>(t)];
    if (slot < 0) continue;
    const int64_t page = slot / page_size, token = slot % page_size;
    for (int64_t h = 0; h < layout.kv_heads(); ++h) {
      const ScalarRow k = NativeHead(args.k, 0, t, h);
      const ScalarRow v = NativeHead(args.v, 0, t, h);
      uint8_t* const to = args.cache.K(page, h);
      // In the latent form, a key is k followed by v.
      const auto key = [&](int64_t i) { return i < keys ? k[i] : v[i - keys]; };
      if (layout.scaling() == KvScaling::kPerBlock) {
        WriteKeyInBlocks(key, layout, token, to);
        continue;
      }
      WriteRow(
          key, layout.head_dim(),
          [&](int64_t i) { return layout.KOffset(token, i); }, layout.dtype(),
          InverseScale(key, layout.head_dim(), layout, token,
                       args.cache.KScales(page, h)),
          to);
      if (layout.k_row() > layout.head_dim()) {
        Store(to, layout.dtype(), layout.KOffset(token, layout.head_dim()), 0);
      }
      if (layout.form() == KvForm::kLatent) continue;
      const auto value = [&](int64_t i) { return v[i]; };
      WriteRow(
          value, layout.v_head_dim(),
          [&](int64_t i) { return layout.VOffset(token, i); }, layout.dtype(),
          InverseScale(value, layout.v_head_dim(), layout, token,
                       args.cache.VScales(page, h)),
          args.cache.V(page, h));
    }
  }
}

namespace {

// One head's query and the keys and values that it attends to.
class Query {
 public:
  Query(const AttentionSpec& spec, const PagedAttentionArgs& args, int64_t s,
        int64_t head)
      : spec_(spec),
        args_(args),
        layout_(spec.kv),
        sequence_(s),
        kv_head_(head / spec.group()),
        slope_(args.alibi_slopes.empty()
                   ? 0.0
                   : double{args.alibi_slopes[static_cast<size_t>(head)]}),
        scale_(spec.scale != 0
                   ? double{spec.scale}
                   : 1.0 / std::sqrt(static_cast<double>(layout_.head_dim()))) {
  }

  double Logit(const ScalarRow& q, int64_t t, int64_t position) const {
    const int64_t page = PageOf(t), token = t % layout_.page_size();
    const uint8_t* const block = args_.kv.K(page, kv_head_);
    double sum = 0;
    for (int64_t d = 0; d < layout_.head_dim(); ++d) {
      sum += double{q[d]} * LoadKey(layout_, block, token, d);
    }
    double logit =
        scale_ * sum * ScaleAt(args_.kv.KScales(page, kv_head_), token);
    if (spec_.soft_cap > 0) {
      const auto cap = double{spec_.soft_cap};
      logit = cap * std::tanh(logit / cap);
    }
    return logit + slope_ * static_cast<double>(t - position);
  }

  // sums += weight * value of token t.
  void AddValue(int64_t t, double weight, double* sums) const {
    const int64_t page = PageOf(t), token = t % layout_.page_size();
    const uint8_t* const block = args_.kv.V(page, kv_head_);
    const double factor =
        weight * ScaleAt(args_.kv.VScales(page, kv_head_), token);
    const bool latent = layout_.form() == KvForm::kLatent;
    for (int64_t d = 0; d < layout_.v_head_dim(); ++d) {
      sums[d] += factor * (latent ? LoadKey(layout_, block, token, d)
                                  : Load(block, layout_.dtype(),
                                         layout_.VOffset(token, d)));
    }
  }

 private:
  int64_t PageOf(int64_t t) const {
    return args_.pages.Pages(
        sequence_)[static_cast<size_t>(t / layout_.page_size())];
  }
  double ScaleAt(const float* scales, int64_t token) const {
    if (scales == nullptr) return 1;
    const bool each = layout_.scaling() == KvScaling::kPerTokenHead;
    return double{scales[each ? token : 0]};
  }

  const AttentionSpec& spec_;
  const PagedAttentionArgs& args_;
  const KvLayout& layout_;
  int64_t sequence_;
  int64_t kv_head_;
  double slope_;
  double scale_;
};

}  // namespace

void NativeAttendSequence(const AttentionSpec& spec,
                          const PagedAttentionArgs& args, int64_t index,
                          const AttentionSequence& s, double* sums) noexcept {
  const int64_t columns = spec.kv.v_head_dim();
  for (int64_t i = 0; i < s.q_len; ++i) {
    const int64_t token = s.kv_len - s.q_len + i;
    const int64_t first_draft = s.kv_len - s.draft_len;
    const AttentionDraft* draft = args.schedule.Draft(s, i);
    const auto sees = [&](int64_t t) {
      return draft == nullptr || t < first_draft ||
             (draft->seen >> (t - first_draft)) % 2 != 0;
    };
    const int64_t position =
        draft == nullptr ? token : first_draft + draft->before;
    const int64_t begin = std::max(int64_t{0}, position - s.left);
    const int64_t end = std::min(s.kv_len, token + s.right + 1);
    for (int64_t h = 0; h < spec.q_heads; ++h) {
      const Query query(spec, args, index, h);
      const ScalarRow q = NativeHead(args.q, 0, s.q_offset + i, h);
      const ScalarRow out = NativeHead(args.out, 0, s.q_offset + i, h);
      // Weights are relative to the largest logit so far.
      double largest = -kInfinity, total = 0;
      if (!args.sinks.empty()) {
        largest = double{args.sinks[static_cast<size_t>(h)]};
        total = 1;
      }
      std::fill_n(sums, columns, 0.0);
      for (int64_t t = begin; t < end; ++t) {
        if (!sees(t)) continue;
        const double logit = query.Logit(q, t, position);
        if (logit == -kInfinity) continue;
        if (!(logit <= largest)) {
          const double shrink = std::exp(largest - logit);
          largest = logit;
          total *= shrink;
          for (int64_t d = 0; d < columns; ++d) sums[d] *= shrink;
        }
        const double weight = std::exp(logit - largest);
        total += weight;
        query.AddValue(t, weight, sums);
      }
      for (int64_t d = 0; d < columns; ++d) {
        out.Set(d, static_cast<float>(total == 0 ? 0.0 : sums[d] / total));
      }
      if (args.lse.data() == nullptr) continue;
      *args.lse.At(s.q_offset + i, h) = static_cast<float>(
          total == 0 ? -kInfinity : largest + std::log(total));
    }
  }
}

void NativePagedAttention(const AttentionSpec& spec,
                          const PagedAttentionArgs& args,
                          double* sums) noexcept {
  int64_t index = 0;
  for (const AttentionSequence& s : args.schedule.sequences()) {
    NativeAttendSequence(spec, args, index++, s, sums);
  }
}

}  // namespace quern
