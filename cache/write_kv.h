#ifndef QUERN_CACHE_WRITE_KV_H_
#define QUERN_CACHE_WRITE_KV_H_

// New keys and values into their slots of a paged cache:
//
//   cache.K(page, head)[KOffset(offset, d)] = Code(k[token, head, d] * r)
//   cache.V(page, head)[VOffset(offset, d)] = Code(v[token, head, d] * r)
//
//     page = slot / page_size    offset = slot % page_size
//     slot = slots[token]        r = fl(1 / scale)
//
// for every token whose slot is not negative; the others are padding and are
// skipped. Code() rounds to the cache's type, to nearest with ties to even.
//
//   f32, bf16, f16   no scale and no product; overflow is infinity, bits of the
//                    same type are copied
//   i8               |code| <= 127; a NaN is 0
//   fp8              saturates, infinity as well; NaN stays NaN
//
//   kNone            r = 1
//   kPerTensor, kPerHead   scales of the caller
//   kPerTokenHead    scale = fl(max over d of |k[token, head, d]| / most), by
//                    Execute; most is 127 (i8), 448 (e4m3) or 57344 (e5m2). Of
//                    a zero row 1; at least 2^-125, as 1 / scale must not
//                    overflow; NaN if the row holds a NaN or an infinity, so
//                    that all of it means NaN (the codes of such a row are
//                    unspecified)
//
//   kPerBlock      scale = the smallest power of two for which the largest |x|
//                  of a block of KvLayout::kScaleBlock elements of the latent
//                  is at most 448 * scale, by Execute; from 2^-117 (of zeros
//                  too) to 2^119, where |x| above 1.75 * 2^127 saturates. A
//                  block with a NaN or an infinity has exponent 255 and codes
//                  0x7f, so that all of it means NaN. x * r is exact unless its
//                  code is 0, so that the code is the one nearest to x / scale
//                  and |x - scale * code| <= max(2^-4 |x|, 2^-10 scale), unless
//                  x saturates.
//
// The product is rounded to f32 before it is rounded to a code. Of i8 with
// kPerTokenHead, |x - scale * code| <= scale * (1/2 + 2^-15).
//
// In the latent form a key is written in two parts: k has its first v_head_dim
// elements, which are the value, and v the rest of it. With kPerBlock that rest
// is rounded to bf16 and has no scale.
//
// With a rotation, k is first turned by the angles of the token's position (see
// ops/rope/rotary_embedding.h, which this spares a pass over k):
//
//   a' = a * cos[p, j] - b * sin[p, j]
//   b' = b * cos[p, j] + a * sin[p, j]
//
//   kHalves    a = x[j], b = x[j + rot_dim / 2]
//   kPairs     a = x[2j], b = x[2j + 1]
//
// in f32, with no rounding to the type of k between. Elements from rot_dim on
// stay. k itself does not change.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv_kernels.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"

namespace quern {

enum class KvRotation : uint8_t { kNone, kHalves, kPairs };

struct WriteKvSpec {
  KvLayout kv;                // of the cache
  DType input = DType::kF32;  // of k and v: kF32, kBF16 or kF16
  KvRotation rotation = KvRotation::kNone;
  int64_t rot_dim = 0;  // with a rotation: even, 2 <= rot_dim <= head_dim
  // kAuto streams whole groups of tokens if what is read and written exceeds
  // half the last-level cache; attention reads them soon.
  Stores stores = Stores::kAuto;
};

// tokens: the new ones of all sequences of a step, one sequence after the
// other; slots say where each goes. A page that several sequences hold is not
// to be written to: PageAllocator::GrowForWrite gives the writer a copy.
struct WriteKvArgs {
  // Latent form: the last extent of k is v_head_dim, that of v the rest of it,
  // head_dim - v_head_dim.
  AnyTensorView k;                  // [tokens, kv_heads, head_dim]
  AnyTensorView v;                  // [tokens, kv_heads, v_head_dim]
  absl::Span<const int64_t> slots;  // [tokens], see PageTable::SlotMapping
  KvCacheView cache;

  // These are read with a rotation only.
  absl::Span<const int64_t> positions;  // [tokens]
  MatrixView<const float> cos;          // [max_positions, rot_dim / 2]
  MatrixView<const float> sin;          // the same
};

class WriteKvPlan {
 public:
  // InvalidArgument if the layout is empty or rot_dim out of range;
  // Unimplemented for another input type, and for a rotation of the latent
  // form.
  static absl::StatusOr<WriteKvPlan> Create(const WriteKvSpec& spec);

  const WriteKvSpec& spec() const { return spec_; }
  // Instruction set chosen at Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.rows.target; }

  // For callers that cannot trust their arguments. InvalidArgument names the
  // argument and its value: a shape or type that is not the plan's, negative
  // strides, a null k, v or cache, one not aligned to its elements, a cache
  // whose blocks overlap, of keys or values or both, or that k or v overlaps,
  // scales that are missing, not aligned, not finite, below 2^-125 or that
  // overlap where they are written, a slot at or beyond the end of the cache, a
  // slot given twice, a position beyond the tables. Allocates nothing where it
  // accepts. Cost: two passes over the slots where they lie within 2^17 of the
  // smallest, one more for each further 2^17 slots that have any.
  absl::Status CheckArgs(const WriteKvArgs& args) const;

  // args as CheckArgs accepts them. Writes the slots named (the zero that
  // completes an odd key with them, and their scales if Execute finds them),
  // nothing else, not even the padding of a block. k and v may have any token
  // and head strides that are not negative, and must not overlap the cache.
  // Allocates nothing. Safe to call concurrently on distinct slots. The bits do
  // not depend on the executor, nor on which tokens share a call. Workers
  // divide the tokens and the heads, so that a decode step of few tokens has
  // tasks for all. Cost: 16 tokens of consecutive slots from a multiple of 16
  // on are transposed in registers; others are scattered, cell by cell.
  void Execute(const WriteKvArgs& args, Executor& executor) const noexcept;

 private:
  WriteKvPlan(const WriteKvSpec& spec, const KvWriteKernels& kernels,
              int64_t stream_above_bytes)
      : spec_(spec),
        kernels_(kernels),
        stream_above_bytes_(stream_above_bytes) {}

  WriteKvSpec spec_;
  KvWriteKernels kernels_;
  int64_t stream_above_bytes_;
};

}  // namespace quern

#endif  // QUERN_CACHE_WRITE_KV_H_
