#ifndef QUERN_GEMM_WEIGHTS_BLOCK_PACK_H_
#define QUERN_GEMM_WEIGHTS_BLOCK_PACK_H_

// Packs rows of GGUF blocks (quant/block_format.h), as model files have them,
// into the panels of packing/block_panels.h:
//
//   rows[n]   k values in blocks of the format, for each column n
//   packed    layout().bytes() bytes; BlockTraitsOf(format) says what the
//             fields mean
//
// Nothing is rounded: every bit of a code, scale or minimum is kept.
//
// Refuses: Create, a format that does not exist, n < 1 and k that is no
// positive multiple of the values of a block; CheckArgs, rows that are not n or
// null, and packed memory that is null or not aligned to 64.
// Writes: every byte of layout().bytes(), padding included. Reads the blocks
// and nothing beyond. Rows need no alignment. Aliasing: rows must not overlap
// the packed memory. Allocates: nothing outside Create. Threads: tasks of about
// 128 KiB over the Executor; the bytes depend neither on their number nor on
// the instruction set. Cost: moves memory, at 0.35 to 0.69 of the speed
// of a copy, by format (docs/performance_notes.md, "packing").

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/gemm/weights/block_pack_kernels.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"

namespace quern {

struct BlockPackSpec {
  BlockFormat format = BlockFormat::kQ4_0;
  int64_t n = 0;
  int64_t k = 0;
  // Packed data of at least this size is written past the caches: it would not
  // stay in them, and a plain store first reads the line that it overwrites.
  int64_t stream_from_bytes = int64_t{8} << 20;
};

class BlockPackPlan {
 public:
  static absl::StatusOr<BlockPackPlan> Create(const BlockPackSpec& spec);

  const BlockPackSpec& spec() const { return spec_; }
  const BlockPanels& layout() const { return layout_; }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return kernels_.target; }

  // For callers that did not make `rows` and `packed` themselves:
  // InvalidArgument where Pack would be wrong.
  absl::Status CheckArgs(absl::Span<const uint8_t* const> rows,
                         const uint8_t* packed) const;

  // Reads rows, writes `packed`. A plan is immutable: concurrent calls are
  // safe.
  void Pack(absl::Span<const uint8_t* const> rows, uint8_t* packed,
            Executor& executor) const noexcept;

 private:
  BlockPackPlan(const BlockPackSpec& spec, const BlockPanels& layout,
                int64_t record_bytes)
      : spec_(spec),
        layout_(layout),
        record_bytes_(record_bytes),
        kernels_(GetBlockPackKernels(spec.format)) {}

  BlockPackSpec spec_;
  BlockPanels layout_;
  int64_t record_bytes_;  // size of one column's record in a file
  BlockPackKernels kernels_;
};

}  // namespace quern

#endif  // QUERN_GEMM_WEIGHTS_BLOCK_PACK_H_
