#include "quern/ops/registry/vllm/speculation_ops.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/rows/speculation_ops.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/speculation/draft_inputs.h"

namespace quern {
namespace {

constexpr DType kI64 = DType::kI64;

TensorMeta I32(const std::vector<int64_t>& extents) {
  return {DType::kI32, extents};
}
TensorMeta I64(const std::vector<int64_t>& extents) { return {kI64, extents}; }
TensorMeta Flags(const std::vector<int64_t>& extents) {
  return {DType::kU8, extents};
}

absl::Status AddSlotMapping(OpRegistry& registry) {
  using Spec = SlotMappingSpec;
  using Args = SlotMappingArgs;
  return OpDeclaration<SlotMappingPlan, Spec, Args>(
             "compute_slot_mapping_kernel_impl")
      .In("query_start_loc", &Args::query_start_loc, {kAny}, IndexDType<Spec>())
      .In("positions", &Args::positions, {kAny}, IndexDType<Spec>())
      .In("block_table", &Args::block_table, {kAny, kAny}, IndexDType<Spec>())
      .InOut("slot_mapping", &Args::slot_mapping, nullptr, {kAny}, kI64)
      .Need("block_size", &Spec::block_size)
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"query_start_loc", I32({3})},
                         {"positions", I64({4})},
                         {"block_table", I32({2, 4})},
                         {"slot_mapping", I64({4})},
                         {"block_size", int64_t{2}}};
      })
      .AddTo(registry);
}

absl::Status AddPaddedInputs(OpRegistry& registry) {
  using Spec = PaddedInputsSpec;
  using Args = PaddedInputsArgs;
  return OpDeclaration<PaddedInputsPlan, Spec, Args>(
             "eagle_prepare_inputs_padded_kernel_impl")
      .In("cu_num_draft_tokens", &Args::cu_num_draft_tokens, {kAny},
          IndexDType<Spec>())
      .In("valid_sampled_tokens_count", &Args::valid_sampled_tokens_count,
          {kAny}, IndexDType<Spec>())
      .In("query_start_loc_gpu", &Args::query_start_loc, {kAny},
          IndexDType<Spec>())
      .InOut("token_indices_to_sample", &Args::token_indices_to_sample, nullptr,
             {kAny}, IndexDType<Spec>())
      .InOut("num_rejected_tokens_gpu", &Args::num_rejected_tokens, nullptr,
             {kAny}, IndexDType<Spec>())
      .Need("num_reqs", &Spec::requests)
      .Word("requests", "num_reqs")
      .Word("query_start_loc", "query_start_loc_gpu")
      .Word("num_rejected_tokens", "num_rejected_tokens_gpu")
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"cu_num_draft_tokens", I64({3})},
                         {"valid_sampled_tokens_count", I64({3})},
                         {"query_start_loc_gpu", I32({4})},
                         {"token_indices_to_sample", I32({3})},
                         {"num_rejected_tokens_gpu", I64({3})},
                         {"num_reqs", int64_t{3}}};
      })
      .AddTo(registry);
}

absl::Status AddNextTokens(OpRegistry& registry) {
  using Spec = NextTokensSpec;
  using Args = NextTokensArgs;
  return OpDeclaration<NextTokensPlan, Spec, Args>(
             "eagle_prepare_next_token_padded_kernel_impl")
      .In("sampled_token_ids", &Args::sampled_token_ids, {kAny, kAny},
          IndexDType<Spec>())
      .In("discard_request_mask", &Args::discard_request_mask, {kAny},
          DType::kU8)
      .In("backup_next_token_ids", &Args::backup_next_token_ids, {kAny},
          OpDType<Spec>(Like("sampled_token_ids")))
      .InOut("next_token_ids", &Args::next_token_ids, nullptr, {kAny},
             OpDType<Spec>(Like("sampled_token_ids")))
      .InOut("valid_sampled_tokens_count", &Args::valid_sampled_tokens_count,
             nullptr, {kAny}, IndexDType<Spec>())
      .Need("vocab_size", &Spec::vocab)
      .Need("num_sampled_tokens_per_req", &Spec::sampled)
      .Need("num_reqs", &Spec::requests)
      .Word("vocab", "vocab_size")
      .Word("sampled", "num_sampled_tokens_per_req")
      .Word("requests", "num_reqs")
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"sampled_token_ids", I64({3, 4})},
                         {"discard_request_mask", Flags({3})},
                         {"backup_next_token_ids", I64({3})},
                         {"next_token_ids", I64({3})},
                         {"valid_sampled_tokens_count", I64({3})},
                         {"vocab_size", int64_t{6}},
                         {"num_sampled_tokens_per_req", int64_t{4}},
                         {"num_reqs", int64_t{3}}};
      })
      .AddTo(registry);
}

absl::Status AddNextSlots(OpRegistry& registry) {
  using Spec = NextSlotsSpec;
  using Args = NextSlotsArgs;
  return OpDeclaration<NextSlotsPlan, Spec, Args>(
             "eagle_step_slot_mapping_metadata_kernel_impl")
      .In("positions", &Args::positions, {kAny}, IndexDType<Spec>())
      .In("block_table", &Args::block_table, {kAny, kAny}, IndexDType<Spec>())
      .InOut("seq_lens", &Args::seq_lens, nullptr, {kAny}, IndexDType<Spec>())
      .InOut("out_clamped_positions", &Args::out_clamped_positions, nullptr,
             {kAny}, kI64)
      .InOut("out_slot_mapping", &Args::out_slot_mapping, nullptr, {kAny}, kI64)
      .Need("block_size", &Spec::block_size)
      .Need("max_model_len", &Spec::max_model_len)
      .Need("pad_id", &Spec::pad_id)
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{
            {"positions", I64({2})},        {"block_table", I32({2, 4})},
            {"seq_lens", I32({2})},         {"out_clamped_positions", I64({2})},
            {"out_slot_mapping", I64({3})}, {"block_size", int64_t{2}},
            {"max_model_len", int64_t{8}},  {"pad_id", int64_t{-1}}};
      })
      .AddTo(registry);
}

absl::Status AddExpandInputs(OpRegistry& registry) {
  using Spec = ExpandInputsSpec;
  using Args = ExpandInputsArgs;
  return OpDeclaration<ExpandInputsPlan, Spec, Args>(
             "copy_and_expand_eagle_inputs_kernel_impl")
      .In("target_token_ids", &Args::target_token_ids, {kAny},
          IndexDType<Spec>())
      .In("target_positions", &Args::target_positions, {kAny},
          IndexDType<Spec>())
      .In("next_token_ids", &Args::next_token_ids, {kAny},
          OpDType<Spec>(Like("target_token_ids")))
      .InOut("out_input_ids", &Args::out_input_ids, nullptr, {kAny},
             OpDType<Spec>(Like("target_token_ids")))
      .InOut("out_positions", &Args::out_positions, nullptr, {kAny},
             OpDType<Spec>(Like("target_positions")))
      .InOut("out_is_rejected_token_mask", &Args::out_is_rejected_token_mask,
             nullptr, {kAny}, DType::kU8)
      .InOut("out_is_masked_token_mask", &Args::out_is_masked_token_mask,
             nullptr, {kAny}, DType::kU8)
      .InOut("out_new_token_indices", &Args::out_new_token_indices, nullptr,
             {kAny}, IndexDType<Spec>())
      .InOut("out_hidden_state_mapping", &Args::out_hidden_state_mapping,
             nullptr, {kAny}, IndexDType<Spec>())
      .In("query_start_loc", &Args::query_start_loc, {kAny}, IndexDType<Spec>())
      .In("query_end_loc", &Args::query_end_loc, {kAny}, IndexDType<Spec>())
      .Need("padding_token_id", &Spec::padding_token)
      .Need("parallel_drafting_token_id", &Spec::drafting_token)
      .Need("total_input_tokens", &Spec::input_tokens)
      .Need("num_padding_slots_per_request", &Spec::slots)
      .Need("shift_input_ids", &Spec::shift)
      .Word("padding_token", "padding_token_id")
      .Word("drafting_token", "parallel_drafting_token_id")
      .Word("input_tokens", "total_input_tokens")
      .Word("slots", "num_padding_slots_per_request")
      .Layer()
      .Providers({"reference"})
      .ExampleOf([](DType) {
        return NamedArgs{{"target_token_ids", I64({4})},
                         {"target_positions", I64({4})},
                         {"next_token_ids", I64({2})},
                         {"out_input_ids", I64({8})},
                         {"out_positions", I64({8})},
                         {"out_is_rejected_token_mask", Flags({8})},
                         {"out_is_masked_token_mask", Flags({8})},
                         {"out_new_token_indices", I32({4})},
                         {"out_hidden_state_mapping", I32({4})},
                         {"query_start_loc", I32({3})},
                         {"query_end_loc", I32({2})},
                         {"padding_token_id", int64_t{0}},
                         {"parallel_drafting_token_id", int64_t{9}},
                         {"total_input_tokens", int64_t{4}},
                         {"num_padding_slots_per_request", int64_t{2}},
                         {"shift_input_ids", true}};
      })
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterVllmSpeculationOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddRejectionOps(RejectionNames::kVllm, registry));
  QUERN_RETURN_IF_ERROR(AddSlotMapping(registry));
  QUERN_RETURN_IF_ERROR(AddPaddedInputs(registry));
  QUERN_RETURN_IF_ERROR(AddNextTokens(registry));
  QUERN_RETURN_IF_ERROR(AddNextSlots(registry));
  return AddExpandInputs(registry);
}

}  // namespace quern
