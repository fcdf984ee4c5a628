// adjust_logits by name.

#include <cstddef>
#include <cstdint>
#include <limits>

#include "quern/ops/registry/families/rows/logits_ops.h"
#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/sampling/adjust_logits.h"

namespace quern {
namespace {

constexpr char kOp[] = "adjust_logits";
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Args {
  AnyTensorView logits, bitmask, mask_rows;
  AnyTensorView prompt_ids, prompt_starts;
  AnyTensorView output_ids, output_counts, output_starts;
  AnyTensorView repetition, presence, frequency;
  AnyTensorView bias_ids, bias, bias_starts;
  AnyTensorView forbidden_ids, forbidden_starts;
};

IndexView Indices(const AnyTensorView& v) {
  return v.rank() == 0 ? IndexView() : IndicesOf(v);
}
absl::Span<const float> Floats(const AnyTensorView& v) {
  return {static_cast<const float*>(v.data()),
          static_cast<size_t>(v.extent(0))};
}

AdjustLogitsArgs PlanArgs(const Args& a) {
  AdjustLogitsArgs args;
  args.logits = a.logits.As<float, 2>();
  if (a.bitmask.rank() != 0) args.masks = a.bitmask.As<const int32_t, 2>();
  args.mask_rows = Indices(a.mask_rows);
  args.forbidden = {Indices(a.forbidden_ids), Indices(a.forbidden_starts)};
  args.biased = {Indices(a.bias_ids), Indices(a.bias_starts)};
  args.bias = Floats(a.bias);
  args.prompt = {Indices(a.prompt_ids), Indices(a.prompt_starts)};
  args.output = {Indices(a.output_ids), Indices(a.output_starts)};
  args.output_counts = Indices(a.output_counts);
  args.repetition = Floats(a.repetition);
  args.frequency = Floats(a.frequency);
  args.presence = Floats(a.presence);
  return args;
}

absl::Status Check(const AdjustLogitsPlan& plan, const Args& a) {
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "logits", a.logits, DType::kF32,
                                    {kAnyExtent, plan.spec().vocab}));
  const int64_t rows = a.logits.extent(0);
  if (a.bitmask.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "bitmask", a.bitmask, DType::kI32,
                                     {kAnyExtent, kAnyExtent}));
  }
  const struct {
    const char* name;
    const AnyTensorView& view;
  } indices[] = {{"mask_rows", a.mask_rows},
                 {"prompt_ids", a.prompt_ids},
                 {"prompt_starts", a.prompt_starts},
                 {"output_ids", a.output_ids},
                 {"output_counts", a.output_counts},
                 {"output_starts", a.output_starts},
                 {"bias_ids", a.bias_ids},
                 {"bias_starts", a.bias_starts},
                 {"forbidden_ids", a.forbidden_ids},
                 {"forbidden_starts", a.forbidden_starts}};
  for (const auto& [name, view] : indices) {
    if (view.rank() == 0) continue;
    QUERN_RETURN_IF_ERROR(CheckIndexView(kOp, name, view, {kAnyExtent}));
  }
  const struct {
    const char* name;
    const AnyTensorView& view;
    int64_t extent;
  } numbers[] = {{"repetition", a.repetition, rows},
                 {"presence", a.presence, rows},
                 {"frequency", a.frequency, rows},
                 {"bias", a.bias, a.bias_ids.extent(0)}};
  for (const auto& [name, view, extent] : numbers) {
    if (view.rank() == 0) continue;
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, name, view, DType::kF32, {extent}));
  }
  return plan.CheckArgs(PlanArgs(a));
}
void Execute(const AdjustLogitsPlan& plan, const Args& a, Workspace,
             Executor& executor) {
  plan.Execute(PlanArgs(a), executor);
}

// Whether token id is among a row's, and at which place of the list.
int64_t Find(const TokenLists& lists, int64_t row, int64_t id) {
  if (lists.starts.size() == 0) return -1;
  for (int64_t i = lists.starts[row]; i < lists.starts[row + 1]; ++i) {
    if (lists.ids[i] == id) return i;
  }
  return -1;
}

// Token by token, as adjust_logits.h says.
void Reference(const AdjustLogitsSpec& spec, const Args& tensors) {
  const AdjustLogitsArgs a = PlanArgs(tensors);
  const auto of_row = [](absl::Span<const float> numbers, int64_t row,
                         float without) {
    return numbers.empty() ? without : numbers[static_cast<size_t>(row)];
  };
  for (int64_t r = 0; r < a.logits.extent(0); ++r) {
    int64_t mask = a.masks.extent(0) == 0 ? -1 : r;
    if (a.mask_rows.size() != 0) mask = a.mask_rows[r];
    for (int64_t i = 0; i < spec.vocab; ++i) {
      float& l = a.logits.Row(r)[i];
      if (mask >= 0 && (a.masks.Row(mask)[i / 32] >> (i % 32) & 1) == 0) {
        l = -kInfinity;
      }
      if (Find(a.forbidden, r, i) >= 0) l = -kInfinity;
      const int64_t biased = Find(a.biased, r, i);
      if (biased >= 0) l += a.bias[static_cast<size_t>(biased)];
      const int64_t output = Find(a.output, r, i);
      const int64_t count = output < 0 ? 0 : a.output_counts[output];
      const float repetition = of_row(a.repetition, r, 1.0f);
      if (count > 0 || Find(a.prompt, r, i) >= 0) {
        l = l > 0.0f ? l / repetition : l * repetition;
      }
      if (count > 0) {
        const auto product = static_cast<float>(
            static_cast<double>(of_row(a.frequency, r, 0.0f)) *
            static_cast<double>(count));
        l = l - product;
        l = l - of_row(a.presence, r, 0.0f);
      }
    }
  }
}

}  // namespace

absl::Status RegisterLogitsOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(RegisterTokenLogprobs(registry));
  using Spec = AdjustLogitsSpec;
  const auto index = IndexDType<Spec>();
  return OpDeclaration<AdjustLogitsPlan, Spec, Args>(kOp)
      .InOut("logits", &Args::logits, nullptr, {kRows, &Spec::vocab},
             OpDType<Spec>::OneOf({DType::kF32}))
      .Maybe("bitmask", &Args::bitmask, {kAny, kAny}, DType::kI32)
      .Maybe("mask_rows", &Args::mask_rows, {kRows}, index)
      .Maybe("prompt_ids", &Args::prompt_ids, {kAny}, index)
      .Maybe("prompt_starts", &Args::prompt_starts, {kAny}, index)
      .Maybe("output_ids", &Args::output_ids, {kAny}, index)
      .Maybe("output_counts", &Args::output_counts, {kAny}, index)
      .Maybe("output_starts", &Args::output_starts, {kAny}, index)
      .Maybe("repetition", &Args::repetition, {kRows}, DType::kF32)
      .Maybe("presence", &Args::presence, {kRows}, DType::kF32)
      .Maybe("frequency", &Args::frequency, {kRows}, DType::kF32)
      .Maybe("bias_ids", &Args::bias_ids, {kAny}, index)
      .Maybe("bias", &Args::bias, {kAny}, DType::kF32)
      .Maybe("bias_starts", &Args::bias_starts, {kAny}, index)
      .Maybe("forbidden_ids", &Args::forbidden_ids, {kAny}, index)
      .Maybe("forbidden_starts", &Args::forbidden_starts, {kAny}, index)
      .Calls(&Check, &Execute)
      .Reference(&Reference)
      .Example({{"logits", {4, 64}},
                {"bitmask", {4, 2}, DType::kI32},
                {"mask_rows", {4}, DType::kI32},
                {"prompt_ids", {4}, DType::kI32},
                {"prompt_starts", {5}, DType::kI32},
                {"output_ids", {4}, DType::kI64},
                {"output_counts", {4}, DType::kI32},
                {"output_starts", {5}, DType::kI32},
                {"repetition", {4}, DType::kF32},
                {"presence", {4}, DType::kF32},
                {"frequency", {4}, DType::kF32},
                {"bias_ids", {4}, DType::kI32},
                {"bias", {4}, DType::kF32},
                {"bias_starts", {5}, DType::kI32},
                {"forbidden_ids", {4}, DType::kI32},
                {"forbidden_starts", {5}, DType::kI32}})
      .AddTo(registry);
}

}  // namespace quern
