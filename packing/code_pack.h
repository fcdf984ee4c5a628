#ifndef QUERN_PACKING_CODE_PACK_H_
#define QUERN_PACKING_CODE_PACK_H_

// Packs rows of codes of 8 or 4 bits into the lines of packing/code_layout.h.
// Row n has the codes of column n, a byte for each.
//
// Refuses: Create, an empty layout and a fill that is no code; CheckArgs, rows
// that are not n or null, and packed memory that is null or not aligned to 64.
// Codes of 4 bits must be at most 15. Writes: every byte of layout.bytes(),
// `fill` beyond k and n included. Reads the rows and nothing beyond. Aliasing:
// rows must not overlap the packed memory. Allocates: nothing outside Create.
// Threads: a task for each panel; the bytes depend neither on their number nor
// on the instruction set.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/code_pack_kernels.h"

namespace quern {

struct CodePackSpec {
  CodeLayout layout;
  uint8_t fill = 0;  // a code
};

class CodePackPlan {
 public:
  static absl::StatusOr<CodePackPlan> Create(const CodePackSpec& spec);

  const CodePackSpec& spec() const { return spec_; }
  // The instruction set chosen by Create, e.g. "AVX3_ZEN4".
  const char* target() const { return target_; }

  // For callers that did not make `rows` and `packed` themselves:
  // InvalidArgument where Pack would be wrong.
  absl::Status CheckArgs(absl::Span<const uint8_t* const> rows,
                         const uint8_t* packed) const;

  // Reads rows, writes `packed`. A plan is immutable: concurrent calls are
  // safe.
  void Pack(absl::Span<const uint8_t* const> rows, uint8_t* packed,
            Executor& executor) const noexcept;

 private:
  explicit CodePackPlan(const CodePackSpec& spec);

  CodePackSpec spec_;
  const char* target_;
  CodePackKernels::Pack pack_;
};

}  // namespace quern

#endif  // QUERN_PACKING_CODE_PACK_H_
