#ifndef QUERN_PACKING_CODE_PACK_H_
#define QUERN_PACKING_CODE_PACK_H_

// Packs rows of codes of 8 or 4 bits into the lines of packing/code_layout.h.
// Row n has the codes of column n in one of these forms:
//
//   CodeRows::kBytes    a byte for each code
//   CodeRows::kNibbles  16 bytes for each 32 codes: byte j has code j in its
//                       lower half, and code j + 16 in its upper half
//
// Each 32 codes may have head_bytes before them, which packing skips.
//
// Refuses: Create, an empty layout, nibbles for codes of 8 bits, a negative
// head_bytes, a fill that is no code, and k that is no multiple of 32 with
// nibbles or with heads; CheckArgs, rows that are not n or null, and packed
// memory that is null or not aligned to 64. Codes of 4 bits in bytes must be at
// most 15. Writes: every byte of layout.bytes(), `fill` beyond k and n
// included. Reads the rows and nothing beyond. Aliasing: rows must not overlap
// the packed memory. Allocates: nothing outside Create. Threads: a task for
// each panel; the bytes depend neither on their number nor on the instruction
// set.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/executor.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/code_pack_kernels.h"

namespace quern {

enum class CodeRows : uint8_t { kBytes, kNibbles };

struct CodePackSpec {
  CodeLayout layout;
  CodeRows rows = CodeRows::kBytes;
  int64_t head_bytes = 0;
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
