#include "quern/ops/speculation/draft_tree.h"

#include <limits>

#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/ops/speculation/index_table.h"

namespace quern {
namespace {

constexpr char kVerify[] = "verify_tree";
constexpr char kBuild[] = "build_tree";
constexpr char kMask[] = "tree_of_mask";
constexpr int64_t kMaxI32 = std::numeric_limits<int32_t>::max();
// The most nodes of one request, and the largest topk and depth. It bounds the
// costs that draft_tree.h states, and its square times the number of requests
// fits in i64.
constexpr int64_t kMaxNodes = int64_t{1} << 12;

// The node of a request whose score has this number, or -1. Node 0 has none.
int64_t NodeOf(const IndexTable& selected, int64_t b, int64_t number) {
  for (int64_t i = 0; i < selected.cols(); ++i) {
    if (selected.At(b, i) == number) return i + 1;
  }
  return -1;
}

// The parent of node i > 0; -1 if it was not selected.
int64_t ParentOf(const BuildTreeSpec& spec, const IndexTable& parents,
                 const IndexTable& selected, int64_t b, int64_t i) {
  const int64_t from = selected.At(b, i - 1) / spec.topk;
  return from == 0 ? 0 : NodeOf(selected, b, parents.At(b, from));
}

struct TreeOutputs {
  const AnyTensorView &positions, &index, &next_token, &next_sibling;
};
absl::Status CheckTree(const char* op, const TreeOutputs& out, int64_t requests,
                       int64_t nodes) {
  QUERN_RETURN_IF_ERROR(
      CheckIndexOutput(op, "positions", out.positions, {requests * nodes}));
  QUERN_RETURN_IF_ERROR(
      CheckIndexOutput(op, "retrive_index", out.index, {requests, nodes}));
  QUERN_RETURN_IF_ERROR(CheckIndexOutput(op, "retrive_next_token",
                                         out.next_token, {requests, nodes}));
  QUERN_RETURN_IF_ERROR(CheckIndexOutput(op, "retrive_next_sibling",
                                         out.next_sibling, {requests, nodes}));
  return CheckRange(op, "nodes of all requests", requests * nodes, 0, kMaxI32);
}
// Lengths to which a depth is added.
absl::Status CheckLengths(const char* op, const AnyTensorView& lengths,
                          const AnyTensorView& positions, int64_t nodes) {
  return CheckElements(op, "verified_seq_len", IndexTable(lengths), 0,
                       MostOf(positions) - nodes);
}

// The elements of a dense vector of flags.
uint8_t* Flags(const AnyTensorView& mask) {
  return static_cast<uint8_t*>(mask.mutable_data());
}

}  // namespace

absl::Status Check(const VerifyTreeSpec&) { return absl::OkStatus(); }

absl::Status Check(const VerifyTreeSpec&, const VerifyTreeArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckIndexInput(kVerify, "candidates", args.candidates,
                                        {kAnyExtent, kAnyExtent}));
  const int64_t requests = args.candidates.extent(0);
  const int64_t nodes = args.candidates.extent(1);
  QUERN_RETURN_IF_ERROR(
      CheckRange(kVerify, "columns of candidates", nodes, 1, kMaxNodes));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kVerify, "rows of candidates", requests, 0, kMaxI32 / nodes));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(kVerify, "retrive_index",
                                        args.retrive_index, {requests, nodes}));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(kVerify, "retrive_next_token",
                                        args.retrive_next_token,
                                        {requests, nodes}));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(kVerify, "retrive_next_sibling",
                                        args.retrive_next_sibling,
                                        {requests, nodes}));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(
      kVerify, "target_predict", args.target_predict, {requests, nodes}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kVerify, "predicts", args.predicts,
                                    DType::kI32, {requests * nodes}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kVerify, "accept_index", args.accept_index,
                                    DType::kI32, {requests, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kVerify, "columns of accept_index",
                                     args.accept_index.extent(1), 1));
  QUERN_RETURN_IF_ERROR(CheckOutput(kVerify, "accept_token_num",
                                    args.accept_token_num, DType::kI32,
                                    {requests}));
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kVerify,
                    {{"predicts", args.predicts},
                     {"accept_index", args.accept_index},
                     {"accept_token_num", args.accept_token_num}},
                    {{"candidates", args.candidates},
                     {"retrive_index", args.retrive_index},
                     {"retrive_next_token", args.retrive_next_token},
                     {"retrive_next_sibling", args.retrive_next_sibling},
                     {"target_predict", args.target_predict}}));
  QUERN_RETURN_IF_ERROR(CheckElements(kVerify, "retrive_index",
                                      IndexTable(args.retrive_index), 0,
                                      requests * nodes - 1));
  QUERN_RETURN_IF_ERROR(CheckElements(kVerify, "retrive_next_token",
                                      IndexTable(args.retrive_next_token), -1,
                                      nodes - 1));
  QUERN_RETURN_IF_ERROR(CheckElements(kVerify, "retrive_next_sibling",
                                      IndexTable(args.retrive_next_sibling), -1,
                                      nodes - 1));
  return CheckElements(kVerify, "target_predict",
                       IndexTable(args.target_predict),
                       std::numeric_limits<int32_t>::min(), kMaxI32);
}

void Run(const VerifyTreeSpec&, const VerifyTreeArgs& args) {
  const IndexTable candidates(args.candidates), number(args.retrive_index),
      child(args.retrive_next_token), sibling(args.retrive_next_sibling),
      target(args.target_predict), predicts(args.predicts),
      accepted(args.accept_index), count(args.accept_token_num);
  for (int64_t b = 0; b < candidates.rows(); ++b) {
    int64_t last = number.At(b, 0);  // the number of the last accepted node
    accepted.Set(last, b, 0);
    int64_t steps = 0;
    int64_t node = 0;
    while (steps + 1 < accepted.cols()) {
      node = child.At(b, node);
      int64_t tried = 0;
      while (node != -1 && candidates.At(b, node) != target.Flat(last)) {
        node = ++tried < candidates.cols() ? sibling.At(b, node) : -1;
      }
      if (node == -1) break;
      predicts.Set(target.Flat(last), last);
      last = number.At(b, node);
      accepted.Set(last, b, ++steps);
    }
    count.Set(steps, b);
    predicts.Set(target.Flat(last), last);
  }
}

absl::Status Check(const BuildTreeSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kBuild, "topk", spec.topk, 1, kMaxNodes));
  QUERN_RETURN_IF_ERROR(CheckRange(kBuild, "depth", spec.depth, 1, kMaxNodes));
  return CheckRange(kBuild, "draft_tokens", spec.draft_tokens, 1, kMaxNodes);
}

absl::Status Check(const BuildTreeSpec& spec, const BuildTreeArgs& args) {
  const int64_t nodes = spec.draft_tokens;
  const int64_t wide = spec.topk * (spec.depth - 1) + 1;
  QUERN_RETURN_IF_ERROR(
      CheckIndexInput(kBuild, "parent_list", args.parent_list,
                      {kAnyExtent, spec.depth > 1 ? wide : kAnyExtent}));
  const int64_t requests = args.parent_list.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckRange(kBuild, "rows of parent_list", requests, 0, kMaxI32 / nodes));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(
      kBuild, "selected_index", args.selected_index, {requests, nodes - 1}));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(kBuild, "verified_seq_len",
                                        args.verified_seq_len, {requests}));
  QUERN_RETURN_IF_ERROR(
      CheckTree(kBuild,
                {args.positions, args.retrive_index, args.retrive_next_token,
                 args.retrive_next_sibling},
                requests, nodes));
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kBuild,
                    {{"tree_mask", args.tree_mask},
                     {"positions", args.positions},
                     {"retrive_index", args.retrive_index},
                     {"retrive_next_token", args.retrive_next_token},
                     {"retrive_next_sibling", args.retrive_next_sibling}},
                    {{"parent_list", args.parent_list},
                     {"selected_index", args.selected_index},
                     {"verified_seq_len", args.verified_seq_len}}));
  QUERN_RETURN_IF_ERROR(
      CheckLengths(kBuild, args.verified_seq_len, args.positions, nodes));
  const IndexTable parents(args.parent_list), selected(args.selected_index),
      lengths(args.verified_seq_len);
  int64_t columns = 0;  // of all requests' masks
  bool fits = true;
  for (int64_t b = 0; b < requests; ++b) {
    const bool full = spec.mask == TreeMask::kFull;
    fits = fits && CheckedAdd(columns, full ? lengths.At(b) : 0, &columns) &&
           CheckedAdd(columns, nodes, &columns);
  }
  if (!fits || !CheckedMul(columns, nodes, &columns)) {
    return InvalidArgument(kBuild, "tree_mask has 2^63 elements or more");
  }
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kBuild, "tree_mask", args.tree_mask, DType::kU8, {columns}));
  const int64_t scores = spec.depth > 1 ? spec.topk * wide : spec.topk;
  QUERN_RETURN_IF_ERROR(
      CheckElements(kBuild, "selected_index", selected, 0, scores - 1));
  for (int64_t b = 0; b < requests; ++b) {
    for (int64_t i = 1; i < nodes; ++i) {
      int64_t node = i;
      for (int64_t steps = 0; node != 0; ++steps) {
        if (steps == spec.depth) {
          return InvalidArgument(kBuild, "node ", i, " of request ", b,
                                 " is deeper than depth=", spec.depth);
        }
        const int64_t parent = ParentOf(spec, parents, selected, b, node);
        if (parent < 0) {
          return InvalidArgument(kBuild, "the parent of node ", node,
                                 " of request ", b,
                                 " is missing in selected_index");
        }
        node = parent;
      }
    }
  }
  return absl::OkStatus();
}

void Run(const BuildTreeSpec& spec, const BuildTreeArgs& args) {
  const int64_t nodes = spec.draft_tokens;
  const IndexTable parents(args.parent_list), selected(args.selected_index),
      lengths(args.verified_seq_len), positions(args.positions),
      number(args.retrive_index), child(args.retrive_next_token),
      sibling(args.retrive_next_sibling);
  uint8_t* mask = Flags(args.tree_mask);
  for (int64_t b = 0; b < lengths.rows(); ++b) {
    const int64_t before =
        spec.mask == TreeMask::kFull ? lengths.At(b) : 0;  // of a row's nodes
    for (int64_t i = 0; i < nodes; ++i) {
      number.Set(b * nodes + i, b, i);
      child.Set(-1, b, i);
      sibling.Set(-1, b, i);
      mask += before;
      for (int64_t j = 0; j < nodes; ++j) mask[j] = j == 0 ? 1 : 0;
      int64_t depth = 0;
      for (int64_t node = i; node != 0; ++depth) {
        mask[node] = 1;
        node = ParentOf(spec, parents, selected, b, node);
      }
      positions.Set(lengths.At(b) + depth, b * nodes + i);
      mask += nodes;
    }
    // From the last node on, so that each becomes its parent's first child.
    for (int64_t i = nodes - 1; i > 0; --i) {
      const int64_t parent = ParentOf(spec, parents, selected, b, i);
      sibling.Set(child.At(b, parent), b, i);
      child.Set(i, b, parent);
    }
  }
}

absl::Status Check(const TreeOfMaskSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kMask, "draft_tokens", spec.draft_tokens, 1, kMaxNodes));
  return CheckRange(kMask, "requests", spec.requests, 0,
                    kMaxI32 / spec.draft_tokens);
}

absl::Status Check(const TreeOfMaskSpec& spec, const TreeOfMaskArgs& args) {
  const int64_t nodes = spec.draft_tokens;
  QUERN_RETURN_IF_ERROR(CheckInput(kMask, "tree_mask", args.tree_mask,
                                   DType::kU8,
                                   {spec.requests * nodes * nodes}));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(
      kMask, "verified_seq_len", args.verified_seq_len, {spec.requests}));
  QUERN_RETURN_IF_ERROR(
      CheckTree(kMask,
                {args.positions, args.retrive_index, args.retrive_next_token,
                 args.retrive_next_sibling},
                spec.requests, nodes));
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kMask,
                    {{"positions", args.positions},
                     {"retrive_index", args.retrive_index},
                     {"retrive_next_token", args.retrive_next_token},
                     {"retrive_next_sibling", args.retrive_next_sibling}},
                    {{"tree_mask", args.tree_mask},
                     {"verified_seq_len", args.verified_seq_len}}));
  return CheckLengths(kMask, args.verified_seq_len, args.positions, nodes);
}

void Run(const TreeOfMaskSpec& spec, const TreeOfMaskArgs& args) {
  const int64_t nodes = spec.draft_tokens;
  const IndexTable lengths(args.verified_seq_len), positions(args.positions),
      number(args.retrive_index), child(args.retrive_next_token),
      sibling(args.retrive_next_sibling);
  for (int64_t b = 0; b < spec.requests; ++b) {
    const auto* const mask =
        static_cast<const uint8_t*>(args.tree_mask.data()) + b * nodes * nodes;
    const auto sees = [&](int64_t i, int64_t j) {
      return mask[i * nodes + j] != 0;
    };
    // The last node before i that it sees, or -1.
    const auto parent_of = [&](int64_t i) {
      int64_t j = i - 1;
      while (j >= 0 && !sees(i, j)) --j;
      return j;
    };
    for (int64_t i = 0; i < nodes; ++i) {
      int64_t depth = 0;
      for (int64_t j = 0; j < i; ++j) depth += sees(i, j) ? 1 : 0;
      const int64_t parent = parent_of(i);
      int64_t first = -1, next = -1;
      for (int64_t j = nodes - 1; j > i; --j) {
        if (sees(j, i)) first = j;
        if (parent >= 0 && parent_of(j) == parent) next = j;
      }
      number.Set(b * nodes + i, b, i);
      positions.Set(lengths.At(b) + depth, b * nodes + i);
      child.Set(first, b, i);
      sibling.Set(next, b, i);
    }
  }
}

}  // namespace quern
