#ifndef QUERN_GEMM_ONEDNN_LINEAR_H_
#define QUERN_GEMM_ONEDNN_LINEAR_H_

// A linear layer: weights packed once, many products with them.
//
//   c[m, n] = round_c(bias[n] + sum over k of a[m, k] * b[k, n])
//
// a[m, k], b[k, n] and c[m, n] are f32, bf16 or f16, each on its own.
// Products and sums are f32: operands are never rounded to a narrower type, and
// the result is rounded once, to nearest even. bf16 by bf16 uses the CPU's bf16
// dot product where there is one; it adds two products at a time and treats
// subnormal numbers as zero.
//
// The same bits come for any number of threads: columns are divided at Create,
// rows in blocks, and each piece is a oneDNN primitive for one thread. With
// AVX-512 a row also has the same bits alone and in a batch, so that many
// threads take smaller blocks of rows. oneDNN does not promise that its sums
// over k do not depend on the number of rows; linear_test.cc holds it to it.
// With AVX2 alone (Explain: gemm:jit:f32) they do depend on it; with AMX nobody
// has looked yet. There the blocks depend on the shape alone.
//
// Where oneDNN has no kernel for the types, operands are widened: weights to
// f32 at Create (twice the memory), rows of `a` to f32 scratch. That is the
// case for bf16 by bf16 with AVX2 alone, for f16 by f16 without AVX512-FP16,
// and for mixed types everywhere. A narrow c that oneDNN does not write goes
// through f32 scratch. Explain() tells the types.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/onednn/cache_stats.h"
#include "quern/gemm/onednn/scratch.h"
#include "quern/packing/vnni_pack.h"

namespace quern {

struct OneDnnLinearSpec {
  int64_t n = 0;  // columns of c
  int64_t k = 0;  // columns of a
  DType a = DType::kBF16;
  DType c = DType::kBF16;
  // kNK: weights[n, k], as models store them; kKN: weights[k, n].
  WeightOrder order = WeightOrder::kNK;
};

using OneDnnLinearScratch = OneDnnScratch;

class OneDnnLinearPlan {
 public:
  // oneDNN's kernels hold strides as 32-bit numbers of bytes.
  static constexpr int64_t kMaxExtent = (int64_t{1} << 29) - 1;

  // `weights` has two dimensions and any row stride; `bias` is empty (rank 0)
  // or f32[n]. Both are copied. Uses `executor` to pack.
  //
  // InvalidArgument: n or k outside [1, kMaxExtent]; a dtype that is not f32,
  // bf16 or f16; weights or bias of another shape, rank or dtype, without data
  // or misaligned; a row stride outside [columns, kMaxExtent], another stride
  // than 1 within rows.
  // ResourceExhausted: no memory for the packed weights.
  // Unimplemented: oneDNN has no kernel on this CPU, even for f32.
  static absl::StatusOr<OneDnnLinearPlan> Create(const OneDnnLinearSpec& spec,
                                                 const AnyTensorView& weights,
                                                 const AnyTensorView& bias,
                                                 Executor& executor);

  OneDnnLinearPlan(OneDnnLinearPlan&&) noexcept;
  OneDnnLinearPlan& operator=(OneDnnLinearPlan&&) noexcept;
  ~OneDnnLinearPlan();

  // Whether Execute may be called with these: `a` is [m, k] and `c` is [m, n]
  // of the spec's dtypes, row strides in [columns, kMaxExtent], c writable and
  // apart from a. InvalidArgument otherwise.
  absl::Status CheckArgs(const AnyTensorView& a, const AnyTensorView& c) const;

  // Scratch of Execute for any number of rows up to max_m >= 0. Asks oneDNN for
  // the kernels of all those row counts: milliseconds. Internal if it fails.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_m, int workers) const;

  // Writes c[0, m) x [0, n) and nothing else; reads nothing outside a's rows.
  // m = 0 does nothing. `a`, `c` and the weights do not overlap.
  //
  // Any number of threads may call it at once, each with its own `scratch` and
  // an `executor` that allows it. Scratch that borrows WorkspaceBytes(m,
  // executor.num_workers()) does not grow.
  //
  // Rows are padded into 45 sizes (gemm/onednn/partition.h), so that a new m is
  // seldom a new kernel; the first call with a new size or new strides takes
  // 0.2 ms to generate code, unless another plan of this shape has. The plan
  // keeps the last 128 such kernels. oneDNN's own bookkeeping allocates a few
  // small blocks per call. Everything else was proved at Create: what still
  // fails is a QUERN_CHECK.
  void Execute(const AnyTensorView& a, const AnyTensorView& c,
               OneDnnScratch& scratch, Executor& executor) const noexcept;

  const OneDnnLinearSpec& spec() const;
  // Bytes of the packed weights, and how many of them lie in huge pages.
  size_t packed_bytes() const;
  size_t HugePageBytes() const;
  // Counts of the generated kernels. Any thread, at any time.
  OneDnnCacheStats cache_stats() const;

  // oneDNN's name of the kernel for `m` rows, and the types it works on:
  // "brg_matmul:avx512_core_bf16 a=bf16 b=bf16 c=f32". Not for a loop.
  std::string Explain(int64_t m) const;

 private:
  struct State;
  explicit OneDnnLinearPlan(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_LINEAR_H_
