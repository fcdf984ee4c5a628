#include "quern/ops/speculation/draft_tree.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/numbers_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Values = std::vector<int64_t>;
constexpr DType kI32 = DType::kI32;
constexpr DType kI64 = DType::kI64;
constexpr DType kU8 = DType::kU8;

int64_t Size(const Values& values) {
  return static_cast<int64_t>(values.size());
}

// ---- Verification.

// A tree of requests with n nodes, and what is written, filled with -1 and 99.
struct Verified {
  Verified(int64_t n, const Values& candidates, const Values& next,
           const Values& siblings, const Values& target, int64_t steps,
           DType dtype = kI64)
      : nodes(n),
        requests(Size(candidates) / n),
        candidates(dtype, candidates, n, /*gap=*/1),
        index(dtype, Iota(Size(candidates)), n, /*gap=*/2),
        next(dtype, next, n),
        siblings(dtype, siblings, n),
        target(dtype, target, n, /*gap=*/3),
        predicts(kI32, Values(candidates.size(), -1)),
        accepted(kI32, Values(static_cast<size_t>(requests * steps), -1), steps,
                 /*gap=*/1),
        count(kI32, Values(static_cast<size_t>(requests), 99)) {}
  static Values Iota(int64_t n) {
    Values all;
    for (int64_t i = 0; i < n; ++i) all.push_back(i);
    return all;
  }
  VerifyTreeArgs Args() const {
    return {predicts.view(),   accepted.view(), count.view(),
            candidates.view(), index.view(),    next.view(),
            siblings.view(),   target.view()};
  }
  int64_t nodes, requests;
  Numbers candidates, index, next, siblings, target;
  Numbers predicts, accepted, count;
};

void Verify(const Verified& v) {
  RunPlan<VerifyTreePlan>(VerifyTreeSpec{}, v.Args());
  EXPECT_TRUE(v.accepted.GapsAreIntact());
}

TEST(VerifyTreeTest, AcceptsAChainUpToTheFirstMismatch) {
  for (const DType dtype : {kI32, kI64}) {
    const Verified v(4, {50, 7, 8, 9}, {1, 2, 3, -1}, {-1, -1, -1, -1},
                     {7, 8, 5, 6}, 4, dtype);
    Verify(v);
    EXPECT_EQ(v.predicts.Read(), (Values{7, 8, 5, -1}));
    EXPECT_EQ(v.accepted.Read(), (Values{0, 1, 2, -1}));
    EXPECT_EQ(v.count.Read(), (Values{2}));
  }
}

// The first request's second child is taken, and the walk ends at a leaf; the
// second request has siblings in descending order.
TEST(VerifyTreeTest, TriesSiblingsInTheirOrder) {
  const Verified v(6, {0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12},
                   {1, 2, -1, 4, 5, -1, 4, 2, 3, -1, 5, -1},
                   {-1, 3, -1, -1, -1, -1, -1, -1, -1, -1, 1, -1},
                   {3, 18, 18, 4, 5, 18, 11, 18, 18, 18, 12, 18}, 4);
  Verify(v);
  EXPECT_EQ(v.predicts.Read(),
            (Values{3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18}));
  EXPECT_EQ(v.accepted.Read(), (Values{0, 3, 4, 5, 6, 10, 11, -1}));
  EXPECT_EQ(v.count.Read(), (Values{3, 2}));
}

TEST(VerifyTreeTest, EndsWhenThereIsNoMoreRoom) {
  const Verified v(4, {50, 7, 8, 9}, {1, 2, 3, -1}, {-1, -1, -1, -1},
                   {7, 8, 9, 6}, 2);
  Verify(v);
  EXPECT_EQ(v.predicts.Read(), (Values{7, 8, -1, -1}));
  EXPECT_EQ(v.accepted.Read(), (Values{0, 1}));
  EXPECT_EQ(v.count.Read(), (Values{1}));
}

TEST(VerifyTreeTest, ALoopOfSiblingsOrOfChildrenEnds) {
  // 1 and 2 are each other's siblings; neither is predicted.
  const Verified siblings(3, {50, 7, 8}, {1, -1, -1}, {-1, 2, 1}, {9, 9, 9}, 4);
  Verify(siblings);
  EXPECT_EQ(siblings.accepted.Read(), (Values{0, -1, -1, -1}));
  // Node 1 is its own child.
  const Verified children(2, {7, 7}, {1, 1}, {-1, -1}, {7, 7}, 4);
  Verify(children);
  EXPECT_EQ(children.accepted.Read(), (Values{0, 1, 1, 1}));
  EXPECT_EQ(children.count.Read(), (Values{3}));
}

TEST(VerifyTreeTest, Refuses) {
  const auto refuse = [](const char* words, Values next, Values sibling,
                         Values target, Values index, int64_t steps = 2) {
    Verified v(2, {7, 8, 9, 10}, next, sibling, target, steps);
    const Numbers other(kI64, index, 2);
    VerifyTreeArgs args = v.Args();
    args.retrive_index = other.view();
    ExpectRefusal(StatusOf<VerifyTreePlan>(VerifyTreeSpec{}, args), words);
  };
  const Values none(4, -1), zero(4, 0), all = {0, 1, 2, 3};
  refuse("retrive_next_token[1]=2; need -1 <=", {1, 2, 1, -1}, none, zero, all);
  refuse("retrive_next_token[0]=-2; need -1 <=", {-2, 1, 1, 1}, none, zero,
         all);
  refuse("retrive_next_sibling[3]=2; need -1 <=", none, {0, 0, 0, 2}, zero,
         all);
  refuse("retrive_index[2]=4; need 0 <=", none, none, zero, {0, 1, 4, 3});
  refuse("retrive_index[0]=-1; need 0 <=", none, none, zero, {-1, 1, 2, 3});
  refuse("target_predict[0]=2147483648; need", none, none,
         {int64_t{1} << 31, 0, 0, 0}, all);
  Verified v(2, {7, 8, 9, 10}, none, none, zero, 2);
  VerifyTreeArgs args = v.Args();
  args.accept_index =
      AnyTensorView(kI32, args.accept_index.mutable_data(), 2, {2, 0}, {2, 1});
  ExpectRefusal(StatusOf<VerifyTreePlan>(VerifyTreeSpec{}, args),
                "columns of accept_index=0; need");
}

// ---- Building.

// A random tree with the numbers that a draft of `depth` steps gives, and its
// parents.
struct RandomTree {
  RandomTree(Rng& rng, int64_t topk, int64_t depth, int64_t nodes) {
    // Parents of scores: of node 0, of all of the first step, and of topk of
    // each later one.
    parent_list = {-1};
    Values beams;
    for (int64_t c = 0; c < topk; ++c) beams.push_back(c);
    int64_t scores = topk;
    std::vector<int64_t> parent_of(static_cast<size_t>(topk), -1);
    for (int64_t step = 1; step < depth; ++step) {
      for (const int64_t beam : beams) {
        parent_list.push_back(beam);
        for (int64_t c = 0; c < topk; ++c) parent_of.push_back(beam);
      }
      Values of_step = Verified::Iota(topk * topk);
      rng.Shuffle(of_step);
      beams.assign(of_step.begin(), of_step.begin() + topk);
      for (int64_t& beam : beams) beam += scores;
      scores += topk * topk;
    }
    while (Size(selected) < nodes - 1) {
      const int64_t number = rng.Integer(0, scores - 1);
      const int64_t parent = parent_of[static_cast<size_t>(number)];
      if (Has(number) || (parent >= 0 && !Has(parent))) continue;
      selected.push_back(number);
    }
    std::sort(selected.begin(), selected.end());
    parents = {-1};
    for (const int64_t number : selected) {
      const int64_t parent = parent_of[static_cast<size_t>(number)];
      parents.push_back(
          parent < 0 ? 0
                     : std::find(selected.begin(), selected.end(), parent) -
                           selected.begin() + 1);
    }
  }
  bool Has(int64_t number) const {
    return std::find(selected.begin(), selected.end(), number) !=
           selected.end();
  }
  Values parent_list, selected, parents;
};

// What is written for requests of n nodes, with a mask of so many elements.
struct Tree {
  Tree(DType dtype, int64_t requests, int64_t n, int64_t mask_size)
      : mask(kU8, Values(static_cast<size_t>(mask_size), 7)),
        positions(dtype, Values(static_cast<size_t>(requests * n), 77)),
        index(dtype, Values(static_cast<size_t>(requests * n), 77), n,
              /*gap=*/1),
        next(dtype, Values(static_cast<size_t>(requests * n), 77), n),
        sibling(dtype, Values(static_cast<size_t>(requests * n), 77), n) {}
  Numbers mask, positions, index, next, sibling;
};

BuildTreeArgs ArgsOf(const Numbers& parents, const Numbers& selected,
                     const Numbers& lengths, const Tree& tree) {
  return {parents.view(),   selected.view(),       lengths.view(),
          tree.mask.view(), tree.positions.view(), tree.index.view(),
          tree.next.view(), tree.sibling.view()};
}
BuildTreeSpec SpecOf(int64_t topk, int64_t depth, int64_t nodes,
                     TreeMask mask = TreeMask::kQueryOnly) {
  BuildTreeSpec spec;
  spec.topk = topk;
  spec.depth = depth;
  spec.draft_tokens = nodes;
  spec.mask = mask;
  return spec;
}

// Nodes 1 and 2 are children of the root, and 3 one of 1.
TEST(BuildTreeTest, ASmallTree) {
  const Numbers parents(kI64, {-1, 0, 1}, 3), selected(kI64, {0, 1, 2}, 3),
      lengths(kI64, {5});
  const Tree tree(kI64, 1, 4, 16);
  RunPlan<BuildTreePlan>(SpecOf(2, 2, 4),
                         ArgsOf(parents, selected, lengths, tree));
  EXPECT_EQ(tree.index.Read(), (Values{0, 1, 2, 3}));
  EXPECT_EQ(tree.next.Read(), (Values{1, 3, -1, -1}));
  EXPECT_EQ(tree.sibling.Read(), (Values{-1, 2, -1, -1}));
  EXPECT_EQ(tree.positions.Read(), (Values{5, 6, 6, 7}));
  EXPECT_EQ(tree.mask.Read(), (Values{1, 0, 0, 0, 1, 1, 0, 0,  //
                                      1, 0, 1, 0, 1, 1, 0, 1}));
}

// One step has no parents, and so no list of them.
TEST(BuildTreeTest, OneStepReadsNoParents) {
  const Numbers selected(kI64, {0, 0}, 1), lengths(kI64, {7, 12});
  const Tree tree(kI64, 2, 2, 8);
  BuildTreeArgs args = ArgsOf(selected, selected, lengths, tree);
  args.parent_list =
      AnyTensorView(kI64, args.parent_list.data(), 2, {2, 0}, {0, 1});
  RunPlan<BuildTreePlan>(SpecOf(1, 1, 2), args);
  EXPECT_EQ(tree.index.Read(), (Values{0, 1, 2, 3}));
  EXPECT_EQ(tree.next.Read(), (Values{1, -1, 1, -1}));
  EXPECT_EQ(tree.positions.Read(), (Values{7, 8, 12, 13}));
  EXPECT_EQ(tree.mask.Read(), (Values{1, 0, 1, 1, 1, 0, 1, 1}));
}

// Random trees in both kinds of masks have the parents that they were made
// with, are found again in the mask, and are verified as a search of all paths
// says.
TEST(BuildTreeTest, RandomTreesAreBuiltFoundAndVerified) {
  TestRng rng;
  for (const int64_t topk : {1, 2, 4}) {
    for (const int64_t depth : {1, 2, 3, 5}) {
      const int64_t all = topk + (depth - 1) * topk * topk;
      for (const int64_t n : {int64_t{2}, std::min<int64_t>(all + 1, 16)}) {
        for (const DType dtype : {kI32, kI64}) {
          SCOPED_TRACE(testing::Message() << topk << " " << depth << " " << n);
          const int64_t requests = 3;
          const Values lengths = {9, 0, 21};
          Values parent_list, selected, parents;
          for (int64_t b = 0; b < requests; ++b) {
            const RandomTree one(rng, topk, depth, n);
            parent_list.insert(parent_list.end(), one.parent_list.begin(),
                               one.parent_list.end());
            selected.insert(selected.end(), one.selected.begin(),
                            one.selected.end());
            parents.insert(parents.end(), one.parents.begin(),
                           one.parents.end());
          }
          const Numbers p(dtype, parent_list, topk * (depth - 1) + 1, 1),
              s(dtype, selected, n - 1, 1), l(dtype, lengths);
          const Tree tree(dtype, requests, n, requests * n * n);
          const Tree full(dtype, requests, n, (30 + requests * n) * n);
          RunPlan<BuildTreePlan>(SpecOf(topk, depth, n), ArgsOf(p, s, l, tree));
          RunPlan<BuildTreePlan>(SpecOf(topk, depth, n, TreeMask::kFull),
                                 ArgsOf(p, s, l, full));
          Values next, sibling, positions, mask, full_mask;
          for (int64_t b = 0; b < requests; ++b) {
            const int64_t* const of = &parents[static_cast<size_t>(b * n)];
            for (int64_t i = 0; i < n; ++i) {
              int64_t first = -1, after = -1, deep = 0;
              for (int64_t j = n - 1; j > 0; --j) {
                if (of[j] == i) first = j;
                if (i > 0 && j > i && of[j] == of[i]) after = j;
              }
              Values row(static_cast<size_t>(n), 0);
              row[0] = 1;
              for (int64_t j = i; j > 0; j = of[j], ++deep) {
                row[static_cast<size_t>(j)] = 1;
              }
              const int64_t length = lengths[static_cast<size_t>(b)];
              next.push_back(first);
              sibling.push_back(after);
              positions.push_back(length + deep);
              mask.insert(mask.end(), row.begin(), row.end());
              full_mask.insert(full_mask.end(), static_cast<size_t>(length), 7);
              full_mask.insert(full_mask.end(), row.begin(), row.end());
            }
          }
          EXPECT_EQ(tree.mask.Read(), mask);
          EXPECT_EQ(full.mask.Read(), full_mask);
          const Tree found(dtype, requests, n, 0);
          TreeOfMaskSpec spec;
          spec.requests = requests;
          spec.draft_tokens = n;
          RunPlan<TreeOfMaskPlan>(
              spec, TreeOfMaskArgs{tree.mask.view(), l.view(),
                                   found.positions.view(), found.index.view(),
                                   found.next.view(), found.sibling.view()});
          for (const Tree* const t : {&tree, &full, &found}) {
            EXPECT_EQ(t->index.Read(), Verified::Iota(requests * n));
            EXPECT_EQ(t->next.Read(), next);
            EXPECT_EQ(t->sibling.Read(), sibling);
            EXPECT_EQ(t->positions.Read(), positions);
            EXPECT_TRUE(t->index.GapsAreIntact());
          }
          // Few words, so that some nodes are accepted and some not.
          Values candidates, target;
          for (int64_t i = 0; i < requests * n; ++i) {
            candidates.push_back(rng.Integer(0, 2));
            target.push_back(rng.Integer(0, 2));
          }
          const Verified v(n, candidates, next, sibling, target, depth + 1,
                           dtype);
          Verify(v);
          Values accepted, count;
          for (int64_t b = 0; b < requests; ++b) {
            int64_t node = 0, taken = 0;
            accepted.push_back(b * n);
            for (bool more = true; more;) {
              more = false;
              for (int64_t i = 1; i < n && !more; ++i) {
                const auto at = static_cast<size_t>(b * n + i);
                if (parents[at] != node ||
                    candidates[at] != target[static_cast<size_t>(b * n + node)])
                  continue;
                node = i;
                accepted.push_back(b * n + i);
                ++taken;
                more = true;
              }
            }
            count.push_back(taken);
            accepted.resize(static_cast<size_t>((b + 1) * (depth + 1)), -1);
          }
          EXPECT_EQ(v.accepted.Read(), accepted);
          EXPECT_EQ(v.count.Read(), count);
        }
      }
    }
  }
}

TEST(BuildTreeTest, Refuses) {
  const auto refuse = [](const char* words, const BuildTreeSpec& spec,
                         const Values& parents, const Values& selected,
                         const Values& lengths, int64_t mask) {
    const Numbers p(kI32, parents, Size(parents)),
        s(kI32, selected, Size(selected)), l(kI32, lengths);
    const Tree tree(kI32, 1, spec.draft_tokens, mask);
    ExpectRefusal(StatusOf<BuildTreePlan>(spec, ArgsOf(p, s, l, tree)), words);
  };
  const BuildTreeSpec spec = SpecOf(2, 2, 4);
  const Values parents = {-1, 0, 1};
  refuse("selected_index[2]=6; need 0 <= selected_index[i] <= 5", spec, parents,
         {0, 1, 6}, {5}, 16);
  refuse("selected_index[0]=-1; need 0 <=", spec, parents, {-1, 1, 2}, {5}, 16);
  refuse("the parent of node 1 of request 0 is missing", spec, parents,
         {2, 1, 3}, {5}, 16);
  // Node 1 has the parent 2, whose parent is 1.
  refuse("node 1 of request 0 is deeper than depth=2", spec, {-1, 4, 2},
         {2, 4, 0}, {5}, 16);
  // A chain of three nodes.
  refuse("node 3 of request 0 is deeper than depth=2", spec, {-1, 0, 2},
         {0, 2, 4}, {5}, 16);
  refuse("verified_seq_len[0]=-1; need 0 <=", spec, parents, {0, 1, 2}, {-1},
         16);
  refuse("verified_seq_len[0]=2147483647; need 0 <=", spec, parents, {0, 1, 2},
         {2147483647}, 16);
  refuse("tree_mask is [15]; need [16]", spec, parents, {0, 1, 2}, {5}, 15);
  refuse("tree_mask is [16]; need [36]", SpecOf(2, 2, 4, TreeMask::kFull),
         parents, {0, 1, 2}, {5}, 16);
  refuse("parent_list is [1, 2]; need", spec, {-1, 0}, {0, 1, 2}, {5}, 16);
  for (const BuildTreeSpec& bad :
       {SpecOf(0, 2, 4), SpecOf(2, 0, 4), SpecOf(2, 2, 0),
        SpecOf(int64_t{1} << 40, 2, 4)}) {
    ExpectRefusal(BuildTreePlan::Create(bad).status(), "need 1 <=");
  }
}

// The largest number of nodes is 4096.
TEST(BuildTreeTest, RefusesMoreNodesThanItsCostAllows) {
  EXPECT_TRUE(BuildTreePlan::Create(SpecOf(2, 2, 4096)).ok());
  ExpectRefusal(BuildTreePlan::Create(SpecOf(2, 2, 4097)).status(),
                "draft_tokens=4097; need 1 <= draft_tokens <= 4096");
}

TEST(BuildTreeTest, RefusesMasksThatI64DoesNotCount) {
  const auto refuse = [](const Values& lengths) {
    const int64_t requests = Size(lengths);
    const Numbers p(kI64, Values(lengths.size() * 3, 0), 3),
        s(kI64, Values(lengths.size(), 0), 1), l(kI64, lengths);
    const Tree tree(kI64, requests, 2, 4 * requests);
    ExpectRefusal(StatusOf<BuildTreePlan>(SpecOf(2, 2, 2, TreeMask::kFull),
                                          ArgsOf(p, s, l, tree)),
                  "tree_mask has 2^63 elements or more");
  };
  // The product with the nodes, the sum of two lengths, and a sum with nodes.
  refuse({int64_t{1} << 62});
  refuse({int64_t{1} << 62, int64_t{1} << 62});
  refuse({int64_t{1} << 62, (int64_t{1} << 62) - 3});
}

TEST(BuildTreeTest, TheMaskLiesApart) {
  const Numbers p(kI64, {-1, 0, 1}, 3), s(kI64, {0, 1, 2}, 3), l(kI64, {5});
  const Tree tree(kI64, 1, 4, 16);
  const BuildTreeArgs good = ArgsOf(p, s, l, tree);
  const auto refuse = [&](const char* words, const AnyTensorView& other) {
    BuildTreeArgs args = good;
    args.tree_mask = Alias(other, kU8, 16);
    ExpectRefusal(StatusOf<BuildTreePlan>(SpecOf(2, 2, 4), args), words);
  };
  refuse("tree_mask overlaps parent_list", good.parent_list);
  refuse("tree_mask overlaps selected_index", good.selected_index);
  refuse("tree_mask overlaps verified_seq_len", good.verified_seq_len);
  refuse("positions overlaps tree_mask", good.positions);
  refuse("retrive_index overlaps tree_mask", good.retrive_index);
  refuse("retrive_next_token overlaps tree_mask", good.retrive_next_token);
  refuse("retrive_next_sibling overlaps tree_mask", good.retrive_next_sibling);
}

// ---- Trees of masks.

TEST(TreeOfMaskTest, FindsATreeAndAChain) {
  const Numbers mask(kU8, {1, 0, 0, 0, 1, 1, 0, 0,  // 0 has 1 and 2, 2 has 3
                           1, 0, 1, 0, 1, 0, 1, 1,  //
                           1, 0, 0, 0, 1, 1, 0, 0,  // a chain
                           1, 1, 1, 0, 1, 1, 1, 1}),
      lengths(kI64, {12, 5});
  const Tree tree(kI64, 2, 4, 0);
  TreeOfMaskSpec spec;
  spec.requests = 2;
  spec.draft_tokens = 4;
  const TreeOfMaskArgs args = {mask.view(),           lengths.view(),
                               tree.positions.view(), tree.index.view(),
                               tree.next.view(),      tree.sibling.view()};
  RunPlan<TreeOfMaskPlan>(spec, args);
  EXPECT_EQ(tree.index.Read(), (Values{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(tree.next.Read(), (Values{1, -1, 3, -1, 1, 2, 3, -1}));
  EXPECT_EQ(tree.sibling.Read(), (Values{-1, 2, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(tree.positions.Read(), (Values{12, 13, 13, 14, 5, 6, 7, 8}));

  spec.requests = 3;
  ExpectRefusal(StatusOf<TreeOfMaskPlan>(spec, args),
                "tree_mask is [32]; need [48]");
  spec.requests = 2;
  spec.draft_tokens = 0;
  ExpectRefusal(StatusOf<TreeOfMaskPlan>(spec, args), "draft_tokens=0; need");
}

TEST(TreeOfMaskTest, RefusesLengthsAndAMaskThatIsWritten) {
  const Numbers mask(kU8, {1, 0, 1, 1});
  TreeOfMaskSpec spec;
  spec.requests = 1;
  spec.draft_tokens = 2;
  for (const DType dtype : {kI32, kI64}) {
    const Tree tree(dtype, 1, 2, 0);
    const auto args = [&](const Numbers& lengths) {
      return TreeOfMaskArgs{mask.view(),           lengths.view(),
                            tree.positions.view(), tree.index.view(),
                            tree.next.view(),      tree.sibling.view()};
    };
    const auto refuse = [&](int64_t length) {
      const Numbers lengths(kI64, {length});
      ExpectRefusal(
          StatusOf<TreeOfMaskPlan>(spec, args(lengths)),
          "verified_seq_len[0]=" + std::to_string(length) + "; need 0 <=");
    };
    refuse(-1);
    refuse(dtype == kI32 ? INT32_MAX : INT64_MAX);
    const Numbers lengths(kI64, {5});
    TreeOfMaskArgs bad = args(lengths);
    bad.tree_mask = Alias(bad.positions, kU8, 4);
    ExpectRefusal(StatusOf<TreeOfMaskPlan>(spec, bad),
                  "positions overlaps tree_mask");
    bad.tree_mask = Alias(bad.retrive_next_sibling, kU8, 4);
    ExpectRefusal(StatusOf<TreeOfMaskPlan>(spec, bad),
                  "retrive_next_sibling overlaps tree_mask");
  }
}

}  // namespace
}  // namespace quern
