#ifndef QUERN_OPS_REGISTRY_SGLANG_TOKEN_WRITES_H_
#define QUERN_OPS_REGISTRY_SGLANG_TOKEN_WRITES_H_

// Private: writes new keys and values to a cache of single tokens.

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"

namespace quern {

// What a call writes, all [tokens or slots, heads, dim]. slots has one for each
// token, negative where a token is not written.
struct TokenWriteArgs {
  AnyTensorView key, value, k_buffer, v_buffer;
  absl::Span<const int64_t> slots;
};

// Writes keys and values. Where each row of v_buffer is the beginning of a row
// of k_buffer, as in MLA, keys alone are written, in two parts, and value is
// not read.
class TokenWrites {
 public:
  // The dtypes are those of the buffers' layout and of the new keys and values.
  static absl::StatusOr<TokenWrites> Create(const KvLayout& layout,
                                            DType input);

  // InvalidArgument as WriteKvPlan::CheckArgs has it.
  absl::Status CheckArgs(const TokenWriteArgs& args) const;
  void Execute(const TokenWriteArgs& args, Executor& executor) const noexcept;
  // Execute on the calling thread, element by element.
  void ExecuteNative(const TokenWriteArgs& args) const noexcept;

 private:
  TokenWrites(const WriteKvPlan& both, const std::optional<WriteKvPlan>& keys)
      : both_(both), keys_(keys) {}
  bool KeysAlone(const TokenWriteArgs& args) const;
  WriteKvArgs ArgsOf(const TokenWriteArgs& args) const;

  WriteKvPlan both_;
  std::optional<WriteKvPlan> keys_;  // the two parts of a key
};

// The slots of a step's new tokens: those of `loc`, or one after the other.
class NewSlots {
 public:
  void Clear();
  void Add(int64_t slot) { slots_.push_back(slot); }
  // Takes the slots of loc, a dense i64 vector. Of several tokens with one slot
  // the last is written, as if all were written in their order.
  void Read(const AnyTensorView& loc);
  // InvalidArgument unless loc holds what Read was given.
  absl::Status CheckSame(absl::string_view op, const AnyTensorView& loc) const;
  absl::Span<const int64_t> slots() const { return slots_; }

 private:
  std::vector<int64_t> slots_;  // negative: not written
  std::vector<int64_t> loc_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_TOKEN_WRITES_H_
