#ifndef QUERN_OPS_REGISTRY_SGLANG_TOKEN_ATTENTION_H_
#define QUERN_OPS_REGISTRY_SGLANG_TOKEN_ATTENTION_H_

// Private: attention over a cache of single tokens, for the operators of
// RegisterSglangAttentionOps.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

// What an operator was asked for, and where its tensors are among those of its
// schema.
struct TokenAttention {
  static constexpr size_t kNone = ~size_t{0};

  absl::string_view op;  // points to a literal
  size_t query, k_buffer, v_buffer, output, key, value;
  size_t loc = kNone;  // without it, new keys go to the last slots of a request
  size_t req_to_token, req_pool_indices, seq_lens;
  size_t extend_seq_lens = kNone, extend_start_loc = kNone;
  size_t tree_mask = kNone;
  size_t encoder_lens, sinks, count;

  TensorMeta q, k, v, out;
  const char* k_name = "k_buffer";
  const char* v_name = "v_buffer";
  std::optional<TensorMeta> sinks_meta;
  bool new_keys = false;  // new keys and values are written to the buffers
  // The buffers are the new keys and values themselves, and token i is slot i.
  bool new_keys_alone = false;
  DType new_dtype = DType::kF32;
  bool has_encoder_lens = false, is_cross = false;
  double scale = 0, cap = 0;
  int64_t window = 0;  // what SGLang calls so: 0 or less for none
  int64_t drafts = 0;  // of each request, in tree_mask
};

// InvalidArgument names what does not fit among q, k, v, out and sinks.
absl::Status CheckTokenAttention(const TokenAttention& a);

absl::StatusOr<std::unique_ptr<BoundOp>> BindTokenAttention(
    const TokenAttention& a, bool native);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_TOKEN_ATTENTION_H_
