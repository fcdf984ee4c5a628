#ifndef QUERN_OPS_MOE_EXPERT_ORDER_H_
#define QUERN_OPS_MOE_EXPERT_ORDER_H_

// Sorts the routes of a batch by expert. A route is a token and one of its
// slots; its number is token * top_k + slot.
//
//   expert(route) = map[ids[token, slot]]             without a map: the id
//   offsets[e]    = number of routes whose expert is in [0, e)
//   order[offsets[e] .. offsets[e + 1]) = the routes of expert e, ascending
//
// A route whose id or expert is -1 is in no list: an expert that another rank
// has. Two slots of a token may name one expert, which then has both routes. An
// expert without routes has an empty list.

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"

namespace quern {

struct ExpertOrderSpec {
  int64_t experts = 0;  // 1 <= experts <= 65536: those of this rank
};

struct ExpertOrderArgs {
  // [tokens, top_k], with any row stride: -1, or in [0, experts), or with a map
  // in [0, size of the map).
  MatrixView<const int32_t> ids;
  // [all experts]: -1, or in [0, experts). Null: there is no map.
  VectorView<const int32_t> map;
  VectorView<int32_t> offsets;  // [experts + 1]
  VectorView<int32_t> order;    // [tokens * top_k]
};

class ExpertOrderPlan {
 public:
  static constexpr int64_t kMaxExperts = 65536;

  // InvalidArgument if experts is out of range.
  static absl::StatusOr<ExpertOrderPlan> Create(const ExpertOrderSpec& spec);

  // Bytes of workspace that Execute needs for up to max_tokens tokens on up to
  // max_workers workers: 4 for each expert and worker, and padding, whatever
  // the number of tokens. InvalidArgument if max_tokens < 0 or max_workers < 1.
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const;

  // Whether ids and map are what ExpertOrderArgs says: the part of CheckArgs
  // that concerns what is read.
  absl::Status CheckIds(const MatrixView<const int32_t>& ids,
                        const VectorView<const int32_t>& map) const;

  // Whether Execute may be called with these: shapes, strides, memory,
  // aliasing, each id and each expert of the map, and fewer than 2^31 routes.
  // O(tokens * top_k). InvalidArgument names the argument.
  absl::Status CheckArgs(const ExpertOrderArgs& args) const;

  // Writes all of offsets, and order[0, offsets[experts]); what is behind stays
  // as it is. No tokens make every list empty. An id out of range, which
  // CheckArgs refuses, is skipped like -1: nothing is read or written outside.
  // Allocates nothing; safe to call concurrently with different workspaces. The
  // result does not depend on the number of workers, which divide tokens.
  void Execute(const ExpertOrderArgs& args, Workspace workspace,
               Executor& executor) const noexcept;

 private:
  explicit ExpertOrderPlan(const ExpertOrderSpec& spec) : spec_(spec) {}

  ExpertOrderSpec spec_;
};

}  // namespace quern

#endif  // QUERN_OPS_MOE_EXPERT_ORDER_H_
