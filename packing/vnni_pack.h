#ifndef QUERN_PACKING_VNNI_PACK_H_
#define QUERN_PACKING_VNNI_PACK_H_

// Between plain weights and VnniLayout, both ways:
//
//   Pack:    packed[p][l][c][i] = b[l * v + i, p * 16 + c], 0 beyond k or n
//   Unpack:  b[k, n] = packed[n / 16][k / v][n % 16][k % v]
//
// The plain side is a matrix view w of the layout's dtype, in either order:
//
//   WeightOrder::kNK   w[n, k]: row n is contiguous in k, as models store a
//                      linear layer ([out, in])
//   WeightOrder::kKN   w[k, n]: row k is contiguous in n
//
// k, n >= 1 are any; rows may lie at any stride of their length or more and
// start at any address that an element may have.
//
// Refuses: Create, an empty layout; CheckArgs, a view of another dtype, rank or
// shape, of a negative stride or of rows that overlap, packed memory that is
// not aligned, and any that overlaps w.
// Writes: Pack every byte of layout().bytes(), padding included; Unpack the k *
// n elements and nothing between the rows. Reads the elements and nothing
// beyond. Aliasing: the two sides must not overlap. Allocates: nothing outside
// Create. Threads: tasks of about 128 KiB over the Executor; the bytes do not
// depend on their number. Cost: moves memory. Packing 4096 x 14336 reaches the
// speed of a copy; see vnni_pack_bench.cc.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack_kernels.h"

namespace quern {

enum class WeightOrder : uint8_t { kNK, kKN };

struct VnniPackSpec {
  VnniLayout layout;
  WeightOrder order = WeightOrder::kNK;
  // Packed data of at least this size is written past the caches: it would not
  // stay in them, and a plain store first reads the line that it overwrites.
  int64_t stream_from_bytes = int64_t{8} << 20;
};

class VnniPackPlan {
 public:
  // InvalidArgument if spec.layout is empty or stream_from_bytes < 0.
  static absl::StatusOr<VnniPackPlan> Create(const VnniPackSpec& spec);

  const VnniPackSpec& spec() const { return spec_; }
  const VnniLayout& layout() const { return spec_.layout; }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  // For callers that did not make `w` and `packed` themselves: InvalidArgument
  // where Pack, or Unpack if `w` is to be written, would be wrong.
  absl::Status CheckArgs(const AnyTensorView& w, const void* packed) const;

  // Reads w, writes `packed`. A plan is immutable: concurrent calls are safe.
  PackedView Pack(const AnyTensorView& w, void* packed,
                  Executor& executor) const noexcept;

  // Reads `packed`, writes w. Bit-exact inverse of Pack.
  void Unpack(const PackedView& packed, const AnyTensorView& w,
              Executor& executor) const noexcept;

 private:
  VnniPackPlan(const VnniPackSpec& spec, const VnniPackKernels& kernels)
      : spec_(spec), kernels_(kernels) {}

  VnniPackSpec spec_;
  VnniPackKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_PACKING_VNNI_PACK_H_
