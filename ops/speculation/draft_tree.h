#ifndef QUERN_OPS_SPECULATION_DRAFT_TREE_H_
#define QUERN_OPS_SPECULATION_DRAFT_TREE_H_

// Trees of draft tokens, with the tensors that SGLang keeps them in. Request b
// has n = draft_tokens nodes, of which node 0 is the token that was verified
// last. Node i of request b is number b * n + i of all nodes. A tree is
//
//   retrive_index[b, i]         the number of node i
//   retrive_next_token[b, i]    the first child of node i, or -1
//   retrive_next_sibling[b, i]  the next child of node i's parent, or -1
//   positions[b * n + i]        seq_len[b] + the depth of node i
//   tree_mask                   whether node i sees node j: j is i, an ancestor
//                               of i or node 0
//
// Numbers are i32 or i64; masks are u8, where another value than 0 is true.
// n, topk and depth are at most 4096.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/loop_plan.h"

namespace quern {

// Walks from node 0 to children whose token the target model predicts. At each
// node the first child with candidates[b, child] = target_predict[node] is
// accepted, until there is none or accept_index is full.
//
//   accept_index[b, 0 ..]   the numbers of node 0 and of the accepted nodes
//   accept_token_num[b]     how many were accepted, without node 0
//   predicts[number]        target_predict of node 0 and of the accepted nodes
//
// accept_index is i32 [requests, steps], steps > 0; predicts i32 [requests * n]
// and accept_token_num i32 [requests]; elements that are not named above are
// left as they are. candidates, the tree and target_predict are [requests, n].
// A chain of siblings longer than n is a loop, and ends after n nodes. Refused:
// numbers of nodes, children or siblings out of range, predictions that i32
// does not hold.
//
// CheckArgs costs O(requests * n); Execute costs O(requests * steps * n).
struct VerifyTreeSpec {};
struct VerifyTreeArgs {
  AnyTensorView predicts, accept_index, accept_token_num;  // written
  AnyTensorView candidates, retrive_index, retrive_next_token,
      retrive_next_sibling, target_predict;
};
using VerifyTreePlan = LoopPlan<VerifyTreeSpec, VerifyTreeArgs>;

absl::Status Check(const VerifyTreeSpec& spec);
absl::Status Check(const VerifyTreeSpec& spec, const VerifyTreeArgs& args);
void Run(const VerifyTreeSpec& spec, const VerifyTreeArgs& args);

// Builds the trees that a draft model's beams make. Step s of the draft scores
// topk children of each of topk nodes; a child's score number counts through
// all steps. selected_index[b, i - 1] is the number that became node i, and
// parent_list[b, number / topk] is the number of its parent: of node 0 where
// number / topk is 0.
//
// Children of a node are linked in ascending order. kQueryOnly: tree_mask is
// [requests * n * n], all written. kFull: row i of request b has seq_len[b]
// elements before its n, which are left as they are; tree_mask is [sum over b
// of n * (seq_len[b] + n)]. All elements of the other results are written.
//
// parent_list is [requests, topk * (depth - 1) + 1], and of any width with
// depth 1, where it is not read; selected_index [requests, n - 1], seq_len
// [requests], positions [requests * n], the tree [requests, n]. Refused:
// numbers that no step has, a node whose parent was not selected or that is
// deeper than depth, positions that their type does not hold.
//
// CheckArgs and Execute cost O(requests * n^2 * depth), because each step from
// a node to its parent searches selected_index.
enum class TreeMask : uint8_t { kFull, kQueryOnly };
struct BuildTreeSpec {
  int64_t topk = 0, depth = 0;
  int64_t draft_tokens = 0;  // n
  TreeMask mask = TreeMask::kQueryOnly;
};
struct BuildTreeArgs {
  AnyTensorView parent_list, selected_index, verified_seq_len;
  AnyTensorView tree_mask, positions;  // written, and the tree
  AnyTensorView retrive_index, retrive_next_token, retrive_next_sibling;
};
using BuildTreePlan = LoopPlan<BuildTreeSpec, BuildTreeArgs>;

absl::Status Check(const BuildTreeSpec& spec);
absl::Status Check(const BuildTreeSpec& spec, const BuildTreeArgs& args);
void Run(const BuildTreeSpec& spec, const BuildTreeArgs& args);

// Finds the trees of a mask as kQueryOnly has it, [requests * n * n]. Elements
// j >= i of row i are not read. The parent of node i is the last j < i that it
// sees, and its depth how many it sees. The first child of node i is the first
// later node that sees it; the next sibling of node i is the first later node
// that sees i's parent and nothing between that and itself. Any mask has a
// result. Refused: positions that their type does not hold.
//
// CheckArgs costs O(requests); Execute costs O(requests * n^3), because it
// searches for the parents of all later nodes at each node.
struct TreeOfMaskSpec {
  int64_t requests = 0, draft_tokens = 0;
};
struct TreeOfMaskArgs {
  AnyTensorView tree_mask, verified_seq_len;
  AnyTensorView positions;  // written, and the tree
  AnyTensorView retrive_index, retrive_next_token, retrive_next_sibling;
};
using TreeOfMaskPlan = LoopPlan<TreeOfMaskSpec, TreeOfMaskArgs>;

absl::Status Check(const TreeOfMaskSpec& spec);
absl::Status Check(const TreeOfMaskSpec& spec, const TreeOfMaskArgs& args);
void Run(const TreeOfMaskSpec& spec, const TreeOfMaskArgs& args);

}  // namespace quern

#endif  // QUERN_OPS_SPECULATION_DRAFT_TREE_H_
