#ifndef QUERN_CACHE_WRITE_KV_H_
#define QUERN_CACHE_WRITE_KV_H_

//   cache.K(page, head)[offset][:] = k[token, head, :]
//   cache.V(page, head)[offset][:] = v[token, head, :]
//
//     page = slot / page_size    offset = slot % page_size
//     slot = slots[token]
//
// for every token whose slot is not negative; the others are padding and are
// skipped. Values are rounded to the cache's type, to nearest with ties to
// even.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/kv_cache_view.h"
#include "cache/kv_layout.h"
#include "cache/write_kv_kernels.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"

namespace quern {

struct WriteKvSpec {
  KvLayout kv;                // of the cache
  DType input = DType::kF32;  // of k and v: kF32 or kBF16
};

struct WriteKvArgs {
  AnyTensorView k;                  // [tokens, kv_heads, head_dim]
  AnyTensorView v;                  // [tokens, kv_heads, v_head_dim]
  absl::Span<const int64_t> slots;  // [tokens], see PageTable::SlotMapping
  KvCacheView cache;
};

class WriteKvPlan {
 public:
  // InvalidArgument if the layout is empty; Unimplemented for another input
  // type.
  static absl::StatusOr<WriteKvPlan> Create(const WriteKvSpec& spec);

  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  // For callers that cannot trust their arguments. InvalidArgument names the
  // argument and its value: a shape or type that is not the plan's, negative
  // strides, a null k, v or cache, a cache whose blocks overlap or that k or v
  // overlaps, a slot at or beyond the end of the cache, a slot given twice.
  // Cost: sorts the slots.
  absl::Status CheckArgs(const WriteKvArgs& args) const;

  // args as CheckArgs accepts them. Writes the slots named, nothing else, not
  // even the padding of a block. k and v may have any token and head strides
  // that are not negative, and must not overlap the cache. Allocates nothing.
  // Safe to call concurrently on distinct slots.
  void Execute(const WriteKvArgs& args, Executor& executor) const noexcept;

 private:
  WriteKvPlan(const WriteKvSpec& spec, const WriteKvKernels& kernels)
      : spec_(spec), kernels_(kernels) {}

  WriteKvSpec spec_;
  WriteKvKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_CACHE_WRITE_KV_H_
