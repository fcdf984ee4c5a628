#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/ops/speculation/draft_slots.h"
#include "quern/ops/speculation/draft_tree.h"

namespace quern {
namespace {

constexpr DType kI32 = DType::kI32;
constexpr DType kI64 = DType::kI64;

TensorMeta I32(const std::vector<int64_t>& extents) { return {kI32, extents}; }
TensorMeta I64(const std::vector<int64_t>& extents) { return {kI64, extents}; }
TensorMeta Flags(const std::vector<int64_t>& extents) {
  return {DType::kU8, extents};
}

absl::Status AddVerifyTree(OpRegistry& registry) {
  using Spec = VerifyTreeSpec;
  using Args = VerifyTreeArgs;
  return OpDeclaration<VerifyTreePlan, Spec, Args>("verify_tree_greedy_cpu")
      .InOut("predicts", &Args::predicts, nullptr, {kAny}, kI32)
      .InOut("accept_index", &Args::accept_index, nullptr, {kAny, kAny}, kI32)
      .InOut("accept_token_num", &Args::accept_token_num, nullptr, {kAny}, kI32)
      .In("candidates", &Args::candidates, {kAny, kAny}, IndexDType<Spec>())
      .In("retrive_index", &Args::retrive_index, {kAny, kAny},
          IndexDType<Spec>())
      .In("retrive_next_token", &Args::retrive_next_token, {kAny, kAny},
          IndexDType<Spec>())
      .In("retrive_next_sibling", &Args::retrive_next_sibling, {kAny, kAny},
          IndexDType<Spec>())
      .In("target_predict", &Args::target_predict, {kAny, kAny},
          IndexDType<Spec>())
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"predicts", I32({8})},
                         {"accept_index", I32({1, 4})},
                         {"accept_token_num", I32({1})},
                         {"candidates", I64({1, 8})},
                         {"retrive_index", I64({1, 8})},
                         {"retrive_next_token", I64({1, 8})},
                         {"retrive_next_sibling", I64({1, 8})},
                         {"target_predict", I64({1, 8})}};
      })
      .AddTo(registry);
}

// The tree that an operator writes, and the positions of its nodes.
template <class Spec, class Args, class Op>
void AddTree(Op& op) {
  op.InOut("positions", &Args::positions, nullptr, {kAny}, IndexDType<Spec>())
      .InOut("retrive_index", &Args::retrive_index, nullptr, {kAny, kAny},
             IndexDType<Spec>())
      .InOut("retrive_next_token", &Args::retrive_next_token, nullptr,
             {kAny, kAny}, IndexDType<Spec>())
      .InOut("retrive_next_sibling", &Args::retrive_next_sibling, nullptr,
             {kAny, kAny}, IndexDType<Spec>());
}

absl::Status FillMask(BuildTreeSpec& spec, const OpCall& call) {
  const int64_t mode = call.Int("tree_mask_mode");
  if (mode != 0 && mode != 1) {
    return InvalidArgument(call.op(), "tree_mask_mode=", mode,
                           "; need 0 (full) or 1 (draft tokens alone)");
  }
  spec.mask = mode == 0 ? TreeMask::kFull : TreeMask::kQueryOnly;
  return absl::OkStatus();
}

absl::Status AddBuildTree(OpRegistry& registry) {
  using Spec = BuildTreeSpec;
  using Args = BuildTreeArgs;
  OpDeclaration<BuildTreePlan, Spec, Args> op(
      "build_tree_kernel_efficient_cpu");
  op.In("parent_list", &Args::parent_list, {kAny, kAny}, IndexDType<Spec>())
      .In("selected_index", &Args::selected_index, {kAny, kAny},
          IndexDType<Spec>())
      .In("verified_seq_len", &Args::verified_seq_len, {kAny},
          IndexDType<Spec>())
      .InOut("tree_mask", &Args::tree_mask, nullptr, {kAny}, DType::kU8);
  AddTree<Spec, Args>(op);
  return op.Need("topk", &Spec::topk)
      .Need("depth", &Spec::depth)
      .Need("draft_token_num", &Spec::draft_tokens)
      .Need<int64_t>("tree_mask_mode")
      .Then(&FillMask)
      .Word("draft_tokens", "draft_token_num")
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"parent_list", I64({1, 3})},
                         {"selected_index", I64({1, 2})},
                         {"verified_seq_len", I64({1})},
                         {"tree_mask", Flags({9})},
                         {"positions", I64({3})},
                         {"retrive_index", I64({1, 3})},
                         {"retrive_next_token", I64({1, 3})},
                         {"retrive_next_sibling", I64({1, 3})},
                         {"topk", int64_t{2}},
                         {"depth", int64_t{2}},
                         {"draft_token_num", int64_t{3}},
                         {"tree_mask_mode", int64_t{1}}};
      })
      .AddTo(registry);
}

absl::Status AddTreeOfMask(OpRegistry& registry) {
  using Spec = TreeOfMaskSpec;
  using Args = TreeOfMaskArgs;
  OpDeclaration<TreeOfMaskPlan, Spec, Args> op(
      "reconstruct_indices_from_tree_mask_cpu");
  op.In("tree_mask", &Args::tree_mask, {kAny}, DType::kU8)
      .In("verified_seq_len", &Args::verified_seq_len, {kAny},
          IndexDType<Spec>());
  AddTree<Spec, Args>(op);
  return op.Need("batch_size", &Spec::requests)
      .Need("draft_token_num", &Spec::draft_tokens)
      .Word("requests", "batch_size")
      .Word("draft_tokens", "draft_token_num")
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"tree_mask", Flags({32})},
                         {"verified_seq_len", I64({2})},
                         {"positions", I64({8})},
                         {"retrive_index", I64({2, 4})},
                         {"retrive_next_token", I64({2, 4})},
                         {"retrive_next_sibling", I64({2, 4})},
                         {"batch_size", int64_t{2}},
                         {"draft_token_num", int64_t{4}}};
      })
      .AddTo(registry);
}

absl::Status AddCopySlots(const char* name, SlotCopy to, OpRegistry& registry) {
  using Spec = CopySlotsSpec;
  using Args = CopySlotsArgs;
  OpDeclaration<CopySlotsPlan, Spec, Args> op(name);
  op.Given(&Spec::to, to)
      .In("req_pool_indices", &Args::req_pool_indices, {kAny},
          IndexDType<Spec>());
  if (to == SlotCopy::kToRows) {
    op.InOut("req_to_token", &Args::req_to_token, nullptr, {kAny, kAny}, kI32);
  } else {
    op.In("req_to_token", &Args::req_to_token, {kAny, kAny}, kI32);
  }
  op.In("start_offset", &Args::start_offset, {kAny}, IndexDType<Spec>())
      .In("end_offset", &Args::end_offset, {kAny}, IndexDType<Spec>());
  if (to == SlotCopy::kToRows) {
    op.In("out_cache_loc", &Args::out_cache_loc, {kAny}, kI64);
  } else {
    op.InOut("out_cache_loc", &Args::out_cache_loc, nullptr, {kAny}, kI64);
  }
  return op.Need("pool_len", &Spec::pool_len)
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{
            {"req_pool_indices", I64({2})}, {"req_to_token", I32({4, 8})},
            {"start_offset", I64({2})},     {"end_offset", I64({2})},
            {"out_cache_loc", I64({4})},    {"pool_len", int64_t{8}}};
      })
      .AddTo(registry);
}

absl::Status AddDraftSlots(OpRegistry& registry) {
  using Spec = DraftSlotsSpec;
  using Args = DraftSlotsArgs;
  return OpDeclaration<DraftSlotsPlan, Spec, Args>(
             "assign_draft_cache_locs_contiguous_cpu")
      .In("req_pool_indices", &Args::req_pool_indices, {kAny},
          IndexDType<Spec>())
      .In("req_to_token", &Args::req_to_token, {kAny, kAny}, kI32)
      .In("seq_lens", &Args::seq_lens, {kAny}, IndexDType<Spec>())
      .InOut("out_cache_loc", &Args::out_cache_loc, nullptr, {kAny}, kI64)
      .Need("pool_len", &Spec::pool_len)
      .Need("topk", &Spec::topk)
      .Need("num_steps", &Spec::num_steps)
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{
            {"req_pool_indices", I64({2})}, {"req_to_token", I32({4, 8})},
            {"seq_lens", I64({2})},         {"out_cache_loc", I64({8})},
            {"pool_len", int64_t{8}},       {"topk", int64_t{2}},
            {"num_steps", int64_t{2}}};
      })
      .AddTo(registry);
}

// A row for each of topk candidates of each request.
std::vector<int64_t> DraftRowsShape(const DraftRowsSpec& spec,
                                    const OpCall& call, int64_t) {
  const int64_t requests = call.Tensor("req_pool_indices")->extents[0];
  return {requests * spec.topk, spec.pool_len};
}

absl::Status CheckDraftRows(DraftRowsSpec& spec, const OpCall& call) {
  // The shape of the result is asked for before the plan is made.
  QUERN_RETURN_IF_ERROR(Check(spec));
  return CheckRange(call.op(), "requests",
                    call.Tensor("req_pool_indices")->extents[0], 0,
                    std::numeric_limits<int32_t>::max());
}

absl::Status AddDraftRows(OpRegistry& registry) {
  using Spec = DraftRowsSpec;
  using Args = DraftRowsArgs;
  return OpDeclaration<DraftRowsPlan, Spec, Args>(
             "build_draft_decode_metadata_cpu")
      .In("req_to_token", &Args::req_to_token, {kAny, kAny}, kI32)
      .In("req_pool_indices", &Args::req_pool_indices, {kAny},
          IndexDType<Spec>())
      .In("seq_lens", &Args::seq_lens, {kAny}, IndexDType<Spec>())
      .Need("topk", &Spec::topk)
      .Need("num_steps", &Spec::num_steps)
      .Need("pool_len", &Spec::pool_len)
      .Then(&CheckDraftRows)
      .Out("out", &Args::out, &DraftRowsShape, kI32)
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{
            {"req_to_token", I32({4, 8})}, {"req_pool_indices", I64({2})},
            {"seq_lens", I64({2})},        {"topk", int64_t{2}},
            {"num_steps", int64_t{2}},     {"pool_len", int64_t{8}}};
      })
      .AddTo(registry);
}

absl::Status AddBonusTokens(OpRegistry& registry) {
  using Spec = BonusTokensSpec;
  using Args = BonusTokensArgs;
  return OpDeclaration<BonusTokensPlan, Spec, Args>("fill_bonus_tokens_cpu")
      .In("accept_tokens", &Args::accept_tokens, {kAny, kAny},
          IndexDType<Spec>())
      .In("accept_lens", &Args::accept_lens, {kAny}, IndexDType<Spec>())
      .InOut("bonus_tokens", &Args::bonus_tokens, nullptr, {kAny},
             OpDType<Spec>(Like("accept_tokens")))
      .Need("accept_stride", &Spec::stride)
      .Word("stride", "accept_stride")
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"accept_tokens", I32({3, 4})},
                         {"accept_lens", I64({3})},
                         {"bonus_tokens", I32({3})},
                         {"accept_stride", int64_t{4}}};
      })
      .AddTo(registry);
}

absl::Status AddAcceptedSlots(OpRegistry& registry) {
  using Spec = AcceptedSlotsSpec;
  using Args = AcceptedSlotsArgs;
  return OpDeclaration<AcceptedSlotsPlan, Spec, Args>(
             "fill_accept_out_cache_loc_cpu")
      .In("accept_index", &Args::accept_index, {}, IndexDType<Spec>())
      .In("out_cache_loc", &Args::out_cache_loc, {kAny}, kI64)
      .InOut("accept_out_cache_loc", &Args::accept_out_cache_loc, nullptr,
             {kAny}, kI64)
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"accept_index", I32({2, 2})},
                         {"out_cache_loc", I64({5})},
                         {"accept_out_cache_loc", I64({5})}};
      })
      .AddTo(registry);
}

absl::Status AddRotateTokens(OpRegistry& registry) {
  using Spec = RotateTokensSpec;
  using Args = RotateTokensArgs;
  return OpDeclaration<RotateTokensPlan, Spec, Args>("rotate_input_ids_cpu")
      .InOut("input_ids", &Args::input_ids, nullptr, {kAny}, kI64)
      .In("extend_start_loc", &Args::extend_start_loc, {kAny},
          IndexDType<Spec>())
      .In("extend_seq_lens", &Args::extend_seq_lens, {kAny}, IndexDType<Spec>())
      .In("topk_index", &Args::topk_index, {}, kI64)
      .Maybe("select_index", &Args::select_index, {kAny}, kI64)
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"input_ids", I64({8})},
                         {"extend_start_loc", I64({3})},
                         {"extend_seq_lens", I64({3})},
                         {"topk_index", I64({3})},
                         {"select_index", I64({3})}};
      })
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterSglangSpeculationOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddVerifyTree(registry));
  QUERN_RETURN_IF_ERROR(AddBuildTree(registry));
  QUERN_RETURN_IF_ERROR(AddTreeOfMask(registry));
  QUERN_RETURN_IF_ERROR(AddCopySlots("assign_req_to_token_pool_cpu",
                                     SlotCopy::kToRows, registry));
  QUERN_RETURN_IF_ERROR(AddCopySlots("assign_extend_cache_locs_cpu",
                                     SlotCopy::kFromRows, registry));
  QUERN_RETURN_IF_ERROR(AddDraftSlots(registry));
  QUERN_RETURN_IF_ERROR(AddDraftRows(registry));
  QUERN_RETURN_IF_ERROR(AddBonusTokens(registry));
  QUERN_RETURN_IF_ERROR(AddAcceptedSlots(registry));
  return AddRotateTokens(registry);
}

}  // namespace quern
