// Per-target include: one pass over a block of columns of a state of the delta
// rule, from a token to the next. See DeltaRulePass.

// clang-format off
#if defined(QUERN_OPS_RECURRENT_DELTA_PASS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_OPS_RECURRENT_DELTA_PASS_INL_H_
#undef QUERN_OPS_RECURRENT_DELTA_PASS_INL_H_
#else
#define QUERN_OPS_RECURRENT_DELTA_PASS_INL_H_
#endif
// clang-format on

#include <cstddef>

#include "hwy/highway.h"
#include "quern/core/prefetch.h"
#include "quern/ops/recurrent/delta_rule_kernels.h"
#include "quern/quant/convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 64>;
using VF = hn::Vec<DF>;

template <bool kTail, typename S>
HWY_INLINE VF LoadState(const S* s, size_t n) {
  if constexpr (kTail) {
    return LoadNF32(DF(), s, n);
  } else {
    (void)n;
    return LoadF32(DF(), s);
  }
}

// Asks for the lines that are due in the next kAskRows rows of a pass.
constexpr size_t kAskRows = 8;
HWY_NOINLINE void AskAhead(StateAhead& ahead) {
  ahead.share += kAskRows * ahead.lines;
  while (ahead.share >= ahead.steps) {
    ahead.share -= ahead.steps;
    if (ahead.rows == 0) return;
    PrefetchL2(ahead.row + ahead.at);
    ahead.at += 64;
    if (ahead.at >= ahead.row_bytes) {
      ahead.at = 0;
      ahead.row += ahead.stride;
      --ahead.rows;
    }
  }
}

// x as a state of S holds it.
template <typename S>
HWY_INLINE VF Rounded(VF x) {
  const DF d;
  if constexpr (hwy::IsSame<S, float>()) {
    return x;
  } else {
    return DecodeCodes<S>(d, EncodeCodes<S>(d, x));
  }
}

// The first pass on the columns from c on: kVectors whole vectors, or n columns
// of a vector that is not whole.
template <typename S, size_t kVectors, bool kTail>
HWY_INLINE void CopyColumns(const DeltaRulePass& pass, size_t c, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  VF a[kVectors], b[kVectors];
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVectors; ++v) a[v] = b[v] = hn::Zero(d);
  const S* from = static_cast<const S*>(pass.from) + c;
  float* HWY_RESTRICT state = pass.state + c;
  const float* HWY_RESTRICT ak = pass.next->ak;
  const float* HWY_RESTRICT aq = pass.next->aq;
  const size_t rows = pass.rows;
  const size_t from_stride = pass.from_stride;
  const size_t state_stride = pass.state_stride;
  for (size_t i = 0; i < rows; ++i) {
    if (i % kAskRows == 0) AskAhead(*pass.ahead);
    const auto vak = hn::Set(d, ak[i]), vaq = hn::Set(d, aq[i]);
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVectors; ++v) {
      const auto s = LoadState<kTail>(from + v * lanes, n);
      hn::Store(s, d, state + v * lanes);
      a[v] = hn::MulAdd(s, vak, a[v]);
      b[v] = hn::MulAdd(s, vaq, b[v]);
    }
    from += from_stride;
    state += state_stride;
  }
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVectors; ++v) {
    hn::Store(a[v], d, pass.a + c + v * lanes);
    hn::Store(b[v], d, pass.b + c + v * lanes);
  }
}

// Where the state after a token goes beside DeltaRulePass::state.
enum class Keep { kNowhere, kCached, kStreamed };

// Any other pass on the columns from c on. kNext: there is a token behind this
// one.
template <typename S, size_t kVectors, bool kTail, bool kNext, Keep kKeep>
HWY_INLINE void UpdateColumns(const DeltaRulePass& pass, size_t c, size_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const DeltaRuleToken& token = *pass.token;
  VF delta[kVectors], a[kVectors], b[kVectors];
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVectors; ++v) {
    const size_t at = c + v * lanes;
    delta[v] =
        hn::Mul(hn::Set(d, token.beta),
                hn::Sub(hn::Load(d, pass.v + at), hn::Load(d, pass.a + at)));
    hn::Store(
        hn::MulAdd(hn::Set(d, token.kq), delta[v], hn::Load(d, pass.b + at)), d,
        pass.out + at);
    a[v] = b[v] = hn::Zero(d);
  }
  if (!kNext && kKeep == Keep::kNowhere) return;
  float* HWY_RESTRICT state = pass.state + c;
  S* HWY_RESTRICT to =
      static_cast<S*>(pass.to) + (kKeep == Keep::kNowhere ? 0 : c);
  const float* HWY_RESTRICT decay = token.a;
  const float* HWY_RESTRICT k = token.k;
  const float* HWY_RESTRICT ak = kNext ? pass.next->ak : nullptr;
  const float* HWY_RESTRICT aq = kNext ? pass.next->aq : nullptr;
  const size_t rows = pass.rows;
  const size_t to_stride = pass.to_stride;
  const size_t state_stride = pass.state_stride;
  for (size_t i = 0; i < rows; ++i) {
    if (i % kAskRows == 0) AskAhead(*pass.ahead);
    const auto va = hn::Set(d, decay[i]), vk = hn::Set(d, k[i]);
    const auto vak = kNext ? hn::Set(d, ak[i]) : hn::Zero(d);
    const auto vaq = kNext ? hn::Set(d, aq[i]) : hn::Zero(d);
    HWY_UNROLL(4)
    for (size_t v = 0; v < kVectors; ++v) {
      const auto old = hn::Load(d, state + v * lanes);
      auto s = hn::MulAdd(va, old, hn::Mul(vk, delta[v]));
      if constexpr (kKeep == Keep::kNowhere) {
        // Only `state` has it.
      } else if constexpr (kTail) {
        StoreNF32(s, d, to + v * lanes, n);
      } else if constexpr (kKeep == Keep::kStreamed) {
        hn::Stream(s, d, to + v * lanes);
      } else {
        StoreF32(s, d, to + v * lanes);
      }
      if (kNext) {
        s = Rounded<S>(s);
        hn::Store(s, d, state + v * lanes);
        a[v] = hn::MulAdd(s, vak, a[v]);
        b[v] = hn::MulAdd(s, vaq, b[v]);
      }
    }
    state += state_stride;
    if (kKeep != Keep::kNowhere) to += to_stride;
  }
  if (!kNext) return;
  HWY_UNROLL(4)
  for (size_t v = 0; v < kVectors; ++v) {
    hn::Store(a[v], d, pass.a + c + v * lanes);
    hn::Store(b[v], d, pass.b + c + v * lanes);
  }
}

// Two vectors of 16 floats, or four of 8, are a block of kPassColumns. Four
// sums in flight or more hide the latency of a multiply-add behind the four
// multiplications that each vector takes.
template <typename S, bool kNext, Keep kKeep>
void UpdateAll(const DeltaRulePass& pass) {
  const size_t lanes = hn::Lanes(DF());
  size_t c = 0;
  for (; c + 4 * lanes <= pass.columns; c += 4 * lanes) {
    UpdateColumns<S, 4, false, kNext, kKeep>(pass, c, lanes);
  }
  for (; c + 2 * lanes <= pass.columns; c += 2 * lanes) {
    UpdateColumns<S, 2, false, kNext, kKeep>(pass, c, lanes);
  }
  for (; c + lanes <= pass.columns; c += lanes) {
    UpdateColumns<S, 1, false, kNext, kKeep>(pass, c, lanes);
  }
  if (c < pass.columns) {
    UpdateColumns<S, 1, true, kNext, kKeep>(pass, c, pass.columns - c);
  }
}

template <typename S>
void CopyAll(const DeltaRulePass& pass) {
  const size_t lanes = hn::Lanes(DF());
  size_t c = 0;
  for (; c + 4 * lanes <= pass.columns; c += 4 * lanes) {
    CopyColumns<S, 4, false>(pass, c, lanes);
  }
  for (; c + 2 * lanes <= pass.columns; c += 2 * lanes) {
    CopyColumns<S, 2, false>(pass, c, lanes);
  }
  for (; c + lanes <= pass.columns; c += lanes) {
    CopyColumns<S, 1, false>(pass, c, lanes);
  }
  if (c < pass.columns) {
    CopyColumns<S, 1, true>(pass, c, pass.columns - c);
  }
}

template <typename S>
void Pass(const DeltaRulePass& pass) {
  if (pass.token == nullptr) return CopyAll<S>(pass);
  const bool next = pass.next != nullptr;
  if (pass.to == nullptr) {
    next ? UpdateAll<S, true, Keep::kNowhere>(pass)
         : UpdateAll<S, false, Keep::kNowhere>(pass);
    return;
  }
  if constexpr (hwy::IsSame<S, float>()) {
    if (pass.stream) {
      next ? UpdateAll<S, true, Keep::kStreamed>(pass)
           : UpdateAll<S, false, Keep::kStreamed>(pass);
      return;
    }
  }
  next ? UpdateAll<S, true, Keep::kCached>(pass)
       : UpdateAll<S, false, Keep::kCached>(pass);
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace quern
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
