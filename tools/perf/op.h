#ifndef QUERN_TOOLS_PERF_OP_H_
#define QUERN_TOOLS_PERF_OP_H_

// What the driver asks of an operator. To add one: a file ops_<family>.cc with
// a class and a function that returns its OpEntry, and a line in op_list.cc.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/executor.h"
#include "quern/core/isa.h"
#include "quern/core/limits/limit_kinds.h"
#include "quern/tools/perf/args.h"

namespace quern {

// The instruction set of an operator without kernels of its own, such as
// `schedule`.
inline constexpr absl::string_view kNoIsa = "none";

// Whether `isa` as --isa names it has kernels for `target`. Operators that do
// not multiply int8 run on AVX2 where AVX2_VNNI or AVX2_VNNI_INT8 is asked for.
inline bool IsaHas(absl::string_view isa, absl::string_view target) {
  return StandsFor(target, isa) ||
         (target == "AVX2" &&
          (isa == kAvxVnniTarget || isa == kAvxVnniInt8Target));
}

struct OpInfo {
  std::string shape;  // "m=1 n=4096 k=4096": what a reader needs to repeat it
  std::string dtype;  // "bf16", "f32->bf16"
  std::string isa;    // target() of the plan, or kNoIsa
  double bytes = 0;   // the least traffic of one call: each byte in or out once
  double flops = 0;   // useful operations of one call: a multiply-add is two
  DramKind dram_kind = DramKind::kRead;
  PeakKind peak_kind = PeakKind::kF32;

  // Sets bytes and dram_kind. What is updated in place is neither in `read`
  // nor in `written`.
  void SetTraffic(double read, double written, double updated = 0) {
    bytes = read + written + 2 * updated;
    dram_kind = DramKindOf(read, written, updated);
  }
};

class Op {
 public:
  virtual ~Op() = default;

  virtual OpInfo Info() const = 0;
  // Memory of one working set: what one Run touches, and what Check needs.
  virtual int64_t set_bytes() const = 0;
  // Working sets at most, where each costs more than its memory.
  virtual int64_t max_sets() const { return int64_t{1} << 20; }
  // Allocates and fills `sets` working sets. Once, before Run and Check.
  virtual absl::Status Setup(int64_t sets, Executor& executor) = 0;
  // The call that is timed, on working set 0 <= set < sets.
  virtual void Run(int64_t set, Executor& executor) = 0;
  // Around many calls of Run that are timed, and not timed: for an op that has
  // threads of its own, which sleep while the limits are measured.
  virtual void BeginTimed() {}
  virtual void EndTimed(Executor& /*executor*/) {}
  // Runs on set 0 and compares with the reference in double: the largest
  // absolute difference, or Internal if one is beyond the op's bound.
  virtual absl::StatusOr<double> Check(Executor& executor) = 0;
};

// One of the shapes of a command line.
struct OpCase {
  Args args;
  std::string layer;  // "llama3_8b down"; empty: of no model
};

struct OpEntry {
  absl::string_view name;
  absl::string_view summary;  // one line of --help
  std::vector<Key> keys;
  // Refuses values with InvalidArgument or Unimplemented. Allocates no data.
  absl::StatusOr<std::unique_ptr<Op>> (*create)(const Args& args);
  // What create is called with, for a command line that means several shapes.
  // Null: the command line itself.
  absl::StatusOr<std::vector<OpCase>> (*cases)(const Args& args) = nullptr;
};

// Every operator but `limits`, in the order of --help.
std::vector<OpEntry> AllOps();

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_OP_H_
