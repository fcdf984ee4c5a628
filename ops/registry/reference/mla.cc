#include "quern/ops/registry/reference/mla.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/write_kv.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/reference/activation.h"
#include "quern/ops/registry/reference/attention.h"
#include "quern/ops/registry/reference/rope.h"

namespace quern {
namespace {

absl::StatusOr<NativeLinear> Linear(const LinearWeights& weights) {
  return NativeLinear::Create(weights, LinearActivation::kNone);
}

// [1, heads, dim] of dense rows.
TensorView<float, 3> Heads(float* x, int64_t heads, int64_t dim) {
  return {x, {1, heads, dim}, {heads * dim, dim, 1}};
}

}  // namespace

NativeMla::NativeMla(const MlaSpec& spec, const RotaryEmbeddingSpec& rope,
                     NativeLinear q, NativeLinear kv_a, NativeLinear out)
    : spec_(spec),
      rope_(rope),
      q_(std::move(q)),
      kv_a_(std::move(kv_a)),
      out_(std::move(out)) {}

absl::StatusOr<NativeMla> NativeMla::Create(const MlaSpec& spec,
                                            const MlaWeights& weights,
                                            const RotaryEmbeddingSpec& rope) {
  QUERN_ASSIGN_OR_RETURN(NativeLinear q, Linear(weights.q));
  QUERN_ASSIGN_OR_RETURN(NativeLinear kv_a, Linear(weights.kv_a));
  QUERN_ASSIGN_OR_RETURN(NativeLinear out, Linear(weights.out));
  NativeMla mla(spec, rope, std::move(q), std::move(kv_a), std::move(out));
  QUERN_ASSIGN_OR_RETURN(
      mla.frequencies_,
      ComputeRotaryFrequencies(rope.rot_dim, rope.base, rope.scaling));
  if (weights.q_a.has_value()) {
    QUERN_ASSIGN_OR_RETURN(mla.q_a_, Linear(*weights.q_a));
  }
  for (const LinearWeights& w : weights.q_absorb) {
    QUERN_ASSIGN_OR_RETURN(NativeLinear linear, Linear(w));
    mla.q_absorb_.push_back(std::move(linear));
  }
  for (const LinearWeights& w : weights.v_up) {
    QUERN_ASSIGN_OR_RETURN(NativeLinear linear, Linear(w));
    mla.v_up_.push_back(std::move(linear));
  }
  return mla;
}

template <typename Allocator>
NativeMla::Scratch NativeMla::LayOut(Allocator& a) const {
  const MlaSpec& s = spec_;
  return {
      a.template Allocate<float>("q_a", s.q_lora),
      a.template Allocate<float>("q", s.heads * s.head_dim()),
      a.template Allocate<float>("latent", s.latent_row()),
      a.template Allocate<float>("queries", s.heads * s.latent_row()),
      a.template Allocate<float>("latents", s.heads * s.kv_lora),
      a.template Allocate<float>("values", s.heads * s.v_head_dim),
      a.template Allocate<double>("sums", s.kv_lora),
  };
}

int64_t NativeMla::WorkspaceBytes() const {
  WorkspaceLayout layout;
  LayOut(layout);
  return layout.bytes();
}

void NativeMla::Multiply(const NativeLinear& product, const AnyTensorView& x,
                         float* to, int64_t n) const {
  product.Multiply(x, {}, DenseMatrix(to, 1, n));
  const NativeRound rd(spec_.dtype);
  for (int64_t i = 0; i < n; ++i) to[i] = rd(to[i]);
}

void NativeMla::Normalise(float* x, int64_t n,
                          const AnyTensorView& weight) const {
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += double{x[i]} * double{x[i]};
  const double rms =
      std::sqrt(squares / static_cast<double>(n) + double{spec_.eps});
  const ScalarRow w(weight, 0);
  const NativeRound rd(spec_.dtype);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = rd(rd(static_cast<float>(double{x[i]} / rms)) * w[i]);
  }
}

void NativeMla::Turn(float* x, int64_t position) const {
  const ScalarRow row(DenseMatrix(x, 1, spec_.rope), 0);
  for (int64_t j = 0; j < spec_.rope / 2; ++j) {
    const double angle = static_cast<double>(position) *
                         frequencies_.frequencies[static_cast<size_t>(j)];
    NativeTurn(
        rope_, j, static_cast<float>(frequencies_.magnitude * std::cos(angle)),
        static_cast<float>(frequencies_.magnitude * std::sin(angle)), row, row);
  }
}

void NativeMla::Write(const MlaArgs& args, int64_t token,
                      const Scratch& s) const {
  Multiply(kv_a_, RowSlice(args.x, token, 1), s.latent, spec_.latent_row());
  Normalise(s.latent, spec_.kv_lora, args.kv_norm);
  Turn(s.latent + spec_.kv_lora, args.positions[token]);
  WriteKvArgs write;
  write.k = Heads(s.latent, 1, spec_.kv_lora);
  write.v = Heads(s.latent + spec_.kv_lora, 1, spec_.rope);
  write.slots = args.schedule.slots().subspan(static_cast<size_t>(token), 1);
  write.cache = args.cache;
  NativeWriteKv(write);
}

void NativeMla::Token(const MlaArgs& args, int64_t token, int64_t index,
                      int64_t kv_len, const Scratch& s) const {
  const int64_t head = spec_.head_dim(), row = spec_.latent_row();
  AnyTensorView x = RowSlice(args.x, token, 1);
  if (q_a_.has_value()) {
    Multiply(*q_a_, x, s.q_a, spec_.q_lora);
    Normalise(s.q_a, spec_.q_lora, args.q_norm);
    x = DenseMatrix(s.q_a, 1, spec_.q_lora);
  }
  Multiply(q_, x, s.q, spec_.heads * head);
  for (int64_t h = 0; h < spec_.heads; ++h) {
    float* const q = s.q + h * head;
    Turn(q + spec_.nope, args.positions[token]);
    Multiply(q_absorb_[static_cast<size_t>(h)], DenseMatrix(q, 1, spec_.nope),
             s.queries + h * row, spec_.kv_lora);
    std::copy_n(q + spec_.nope, spec_.rope,
                s.queries + h * row + spec_.kv_lora);
  }
  PagedAttentionArgs attend;
  attend.q = Heads(s.queries, spec_.heads, row);
  attend.kv = args.cache;
  attend.pages = args.schedule.pages();
  attend.out = Heads(s.latents, spec_.heads, spec_.kv_lora);
  const AttentionSequence alone = {0, 1, kv_len, AttentionSchedule::kMaxTokens,
                                   0};
  NativeAttendSequence(AbsorbedAttention(spec_), attend, index, alone, s.sums);
  const NativeRound rd(spec_.dtype);
  for (int64_t h = 0; h < spec_.heads; ++h) {
    float* const latent = s.latents + h * spec_.kv_lora;
    for (int64_t i = 0; i < spec_.kv_lora; ++i) latent[i] = rd(latent[i]);
    Multiply(v_up_[static_cast<size_t>(h)],
             DenseMatrix(latent, 1, spec_.kv_lora),
             s.values + h * spec_.v_head_dim, spec_.v_head_dim);
  }
  out_.Multiply(DenseMatrix(s.values, 1, spec_.heads * spec_.v_head_dim),
                args.residual.rank() == 0 ? AnyTensorView()
                                          : RowSlice(args.residual, token, 1),
                RowSlice(args.out, token, 1));
}

void NativeMla::Run(const MlaArgs& args, Workspace workspace) const noexcept {
  const Scratch s = LayOut(workspace);
  const int64_t tokens = args.schedule.num_tokens();
  for (int64_t t = 0; t < tokens; ++t) Write(args, t, s);
  int64_t token = 0;
  const absl::Span<const int64_t> q_lens = args.schedule.q_lens();
  for (size_t i = 0; i < q_lens.size(); ++i) {
    const int64_t earlier = args.schedule.kv_lens()[i] - q_lens[i];
    for (int64_t q = 0; q < q_lens[i]; ++q) {
      Token(args, token++, static_cast<int64_t>(i), earlier + q + 1, s);
    }
  }
}

}  // namespace quern
