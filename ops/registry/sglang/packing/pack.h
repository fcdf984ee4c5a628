#ifndef QUERN_OPS_REGISTRY_SGLANG_PACKING_PACK_H_
#define QUERN_OPS_REGISTRY_SGLANG_PACKING_PACK_H_

// Writes SglangLayout (see there for the formula) from w[n, k], row n
// contiguous in k; for u8, w[n, k / 2] bytes of two codes.
//
// The compensation behind each int8 block is arithmetic, so it is an argument
// here; ops/registry/sglang/packing/int8_pack.h computes it and calls this.
//
// Refuses: CheckArgs, a view of another dtype, rank or shape, of a negative
// stride or of rows that overlap, compensation of another length than n (i8) or
// 0, and packed memory that overlaps either.
// Writes: every byte of layout().bytes(), at any alignment. Reads the elements
// and nothing beyond.
// Aliasing: none of the three may overlap another.
// Allocates: nothing outside Create. Threads: one task for each block; the
// bytes do not depend on their number. Cost: moves memory.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/sglang/packing/layout.h"
#include "quern/ops/registry/sglang/packing/pack_kernels.h"

namespace quern {

class SglangPackPlan {
 public:
  // InvalidArgument if the layout is empty.
  static absl::StatusOr<SglangPackPlan> Create(const SglangLayout& layout);

  const SglangLayout& layout() const { return layout_; }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  absl::Status CheckArgs(const AnyTensorView& w,
                         VectorView<const int32_t> compensation,
                         const void* packed) const;

  // `compensation` is empty unless layout().has_compensation(). A plan is
  // immutable: concurrent calls are safe.
  void Pack(const AnyTensorView& w, VectorView<const int32_t> compensation,
            void* packed, Executor& executor) const noexcept;

 private:
  SglangPackPlan(const SglangLayout& layout, const SglangPackKernels& kernels)
      : layout_(layout), kernels_(kernels) {}

  SglangLayout layout_;
  SglangPackKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PACKING_PACK_H_
