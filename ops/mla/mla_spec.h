#ifndef QUERN_OPS_MLA_MLA_SPEC_H_
#define QUERN_OPS_MLA_MLA_SPEC_H_

// The sizes of a layer of multi-head latent attention, and the choice between
// its two forms (ops/mla/mla.h has the equations).

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/varlen_attention.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/gemm/linear.h"
#include "quern/ops/rope/rotary_scaling.h"

namespace quern {

// Which form computes a sequence. A form is chosen for each sequence by its own
// lengths, so the other sequences of a batch change no bit of it.
enum class MlaForm : uint8_t {
  kAutomatic,  // see UsesDirectForm
  kAbsorbed,   // the absorbed form for all sequences
  kDirect,     // the direct form for every sequence without earlier keys
};

struct MlaSpec {
  int64_t hidden = 0;         // columns of x and out
  int64_t heads = 0;          // query heads of this rank
  int64_t q_lora = 0;         // columns of W_qa; 0: queries have one projection
  int64_t kv_lora = 0;        // elements of a latent, a multiple of 4
  int64_t nope = 0;           // elements of a query and key without rotation
  int64_t rope = 0;           // elements that are rotated, even
  int64_t v_head_dim = 0;     // elements of a value
  float scale = 0;            // factor of the logits; 0: 1 / sqrt(nope + rope)
  float eps = 1e-6f;          // added to the mean square in both norms
  DType dtype = DType::kF32;  // the dtype of x and of every step before out
  DType norm_dtype = DType::kF32;  // the dtype of the norms' weights
  // The dtype of out and of a residual: f32, bf16 or f16. Without: `dtype`.
  std::optional<DType> out_dtype = {};
  bool residual = false;  // whether Execute may be given a residual
  // The cache has the latent form with one head. Its keys have kv_lora + rope
  // elements, and its values kv_lora.
  KvLayout cache;
  MlaForm form = MlaForm::kAutomatic;
  std::string kernels = {};  // LinearSpec::kernels of the linear layers
  // LinearSpec::activations where weights allow it (TakesInt8Blocks).
  LinearActivations activations = LinearActivations::kExact;

  // Elements of a query, and of a key of the direct form.
  int64_t head_dim() const { return nope + rope; }
  // Elements of a row of the cache.
  int64_t latent_row() const { return kv_lora + rope; }
  DType dtype_of_out() const { return out_dtype.value_or(dtype); }
};

// InvalidArgument names the field, its value and what it must be. Unimplemented
// for other dtypes.
absl::Status CheckMlaSpec(const MlaSpec& spec);

// Whether the direct form computes a sequence of q_len new tokens among kv_len.
// It needs a sequence without earlier keys, because it reads none from the
// cache. Both forms expand as many latents then, or absorb as many queries, and
// differ in two counts for each head:
//
//   multiply-adds of attention, for q_len (q_len + 1) / 2 pairs
//     absorbed   (kv_lora + rope) + kv_lora  a pair
//     direct     (nope + rope) + v_head_dim  a pair
//   elements moved: the direct form writes nope + rope + v_head_dim elements of
//     key and value for each token and brings them into attention's form
//
// kAutomatic takes the direct form where it saves more multiply-adds than it
// moves elements, each counted as kMlaMovedElement multiply-adds. For DeepSeek
// (512, 128, 64, 128) that is from 10 tokens on.
bool UsesDirectForm(const MlaSpec& spec, int64_t q_len, int64_t kv_len);
inline constexpr int64_t kMlaMovedElement = 12;

// The scale of DeepSeek's logits: 1 / sqrt(head_dim), times the square of
// 0.1 mscale_all_dim ln(factor) + 1 where `scaling` is kYarn, has a factor
// above 1 and gives mscale_all_dim.
float MlaScale(int64_t head_dim, const RotaryScaling& scaling);

// What attends over the latents in the absorbed form: one key/value head, whose
// group are all query heads.
AttentionSpec AbsorbedAttention(const MlaSpec& spec);

// What attends over expanded keys and values in the direct form: every query
// head has its own.
VarlenAttentionSpec DirectAttention(const MlaSpec& spec);

}  // namespace quern

#endif  // QUERN_OPS_MLA_MLA_SPEC_H_
