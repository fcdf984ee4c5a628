#ifndef QUERN_OPS_REGISTRY_REFERENCE_MLA_H_
#define QUERN_OPS_REGISTRY_REFERENCE_MLA_H_

// The layer of ops/mla/mla.h as plain loops over its packed weights, on the
// calling thread, for the provider called "reference". Every token takes the
// absorbed form.

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/registry/reference/linear.h"
#include "quern/ops/rope/rotary_scaling.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

class NativeMla {
 public:
  // `spec` and `weights` are such that MlaPlan::Create accepts them. Run's
  // arguments have a rotation with the spec `rope`.
  static absl::StatusOr<NativeMla> Create(const MlaSpec& spec,
                                          const MlaWeights& weights,
                                          const RotaryEmbeddingSpec& rope);

  int64_t WorkspaceBytes() const;
  // `args` are such that MlaPlan::CheckArgs accepts them.
  void Run(const MlaArgs& args, Workspace workspace) const noexcept;

 private:
  // Arrays of one token.
  struct Scratch {
    float* q_a;      // [q_lora]
    float* q;        // [heads, nope + rope]
    float* latent;   // [kv_lora + rope]
    float* queries;  // [heads, kv_lora + rope]
    float* latents;  // [heads, kv_lora]
    float* values;   // [heads, v_head_dim]
    double* sums;    // [kv_lora]
  };

  NativeMla(const MlaSpec& spec, const RotaryEmbeddingSpec& rope,
            NativeLinear q, NativeLinear kv_a, NativeLinear out);

  template <typename Allocator>
  Scratch LayOut(Allocator& allocator) const;
  // to[n] = rd(product of x[k]), rd rounds to the dtype of the spec.
  void Multiply(const NativeLinear& product, const AnyTensorView& x, float* to,
                int64_t n) const;
  // x = rd(rd(x / rms) * weight)
  void Normalise(float* x, int64_t n, const AnyTensorView& weight) const;
  void Turn(float* x, int64_t position) const;
  void Write(const MlaArgs& args, int64_t token, const Scratch& s) const;
  // The token sees kv_len keys of the sequence with this index in the batch.
  void Token(const MlaArgs& args, int64_t token, int64_t index, int64_t kv_len,
             const Scratch& s) const;

  MlaSpec spec_;
  RotaryEmbeddingSpec rope_;
  RotaryFrequencies frequencies_;
  std::optional<NativeLinear> q_a_;
  NativeLinear q_, kv_a_, out_;
  std::vector<NativeLinear> q_absorb_, v_up_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_MLA_H_
