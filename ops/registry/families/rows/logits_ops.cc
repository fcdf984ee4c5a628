#include "quern/ops/registry/families/rows/logits_ops.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "quern/ops/registry/op_declaration.h"
#include "quern/ops/sampling/adjust_logits.h"
#include "quern/ops/sampling/token_logprobs.h"

namespace quern {
namespace {

constexpr char kAdjust[] = "adjust_logits";
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct AdjustTensors {
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

AdjustLogitsArgs AdjustArgsOf(const AdjustTensors& a) {
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

absl::Status CheckAdjust(const AdjustLogitsPlan& plan, const AdjustTensors& a) {
  QUERN_RETURN_IF_ERROR(CheckOutput(kAdjust, "logits", a.logits, DType::kF32,
                                    {kAnyExtent, plan.spec().vocab}));
  const int64_t rows = a.logits.extent(0);
  if (a.bitmask.rank() != 0) {
    QUERN_RETURN_IF_ERROR(CheckInput(kAdjust, "bitmask", a.bitmask, DType::kI32,
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
    QUERN_RETURN_IF_ERROR(CheckIndexView(kAdjust, name, view, {kAnyExtent}));
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
    QUERN_RETURN_IF_ERROR(
        CheckInput(kAdjust, name, view, DType::kF32, {extent}));
  }
  return plan.CheckArgs(AdjustArgsOf(a));
}
void ExecuteAdjust(const AdjustLogitsPlan& plan, const AdjustTensors& a,
                   Workspace, Executor& executor) {
  plan.Execute(AdjustArgsOf(a), executor);
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
void NativeAdjust(const AdjustLogitsSpec& spec, const AdjustTensors& tensors) {
  const AdjustLogitsArgs a = AdjustArgsOf(tensors);
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

absl::Status AddAdjust(OpRegistry& registry) {
  using Spec = AdjustLogitsSpec;
  const auto index = IndexDType<Spec>();
  return OpDeclaration<AdjustLogitsPlan, Spec, AdjustTensors>(kAdjust)
      .InOut("logits", &AdjustTensors::logits, nullptr, {kRows, &Spec::vocab},
             OpDType<Spec>::OneOf({DType::kF32}))
      .Maybe("bitmask", &AdjustTensors::bitmask, {kAny, kAny}, DType::kI32)
      .Maybe("mask_rows", &AdjustTensors::mask_rows, {kRows}, index)
      .Maybe("prompt_ids", &AdjustTensors::prompt_ids, {kAny}, index)
      .Maybe("prompt_starts", &AdjustTensors::prompt_starts, {kAny}, index)
      .Maybe("output_ids", &AdjustTensors::output_ids, {kAny}, index)
      .Maybe("output_counts", &AdjustTensors::output_counts, {kAny}, index)
      .Maybe("output_starts", &AdjustTensors::output_starts, {kAny}, index)
      .Maybe("repetition", &AdjustTensors::repetition, {kRows}, DType::kF32)
      .Maybe("presence", &AdjustTensors::presence, {kRows}, DType::kF32)
      .Maybe("frequency", &AdjustTensors::frequency, {kRows}, DType::kF32)
      .Maybe("bias_ids", &AdjustTensors::bias_ids, {kAny}, index)
      .Maybe("bias", &AdjustTensors::bias, {kAny}, DType::kF32)
      .Maybe("bias_starts", &AdjustTensors::bias_starts, {kAny}, index)
      .Maybe("forbidden_ids", &AdjustTensors::forbidden_ids, {kAny}, index)
      .Maybe("forbidden_starts", &AdjustTensors::forbidden_starts, {kAny},
             index)
      .Calls(&CheckAdjust, &ExecuteAdjust)
      .Reference(&NativeAdjust)
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

constexpr char kLogprobs[] = "token_logprobs";

struct LogprobsTensors {
  AnyTensorView logits, ids, top_ids, top_logprobs, logprobs, ranks;
};

TokenLogprobsArgs LogprobsArgsOf(const LogprobsTensors& a) {
  return {a.logits.As<const float, 2>(), a.ids.As<const int32_t, 2>(),
          a.top_ids.As<int32_t, 2>(),    a.top_logprobs.As<float, 2>(),
          a.logprobs.As<float, 2>(),     a.ranks.As<int32_t, 2>()};
}

absl::Status CheckLogprobs(const TokenLogprobsPlan& plan,
                           const LogprobsTensors& a) {
  const TokenLogprobsSpec& spec = plan.spec();
  QUERN_RETURN_IF_ERROR(CheckInput(kLogprobs, "logits", a.logits, DType::kF32,
                                   {kAnyExtent, spec.vocab}));
  const int64_t rows = a.logits.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kLogprobs, "ids", a.ids, DType::kI32, {rows, spec.given}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kLogprobs, "top_ids", a.top_ids,
                                    DType::kI32, {rows, spec.top_n}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kLogprobs, "top_logprobs", a.top_logprobs,
                                    DType::kF32, {rows, spec.top_n}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kLogprobs, "logprobs", a.logprobs,
                                    DType::kF32, {rows, spec.given}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kLogprobs, "ranks", a.ranks, DType::kI32,
                                    {rows, spec.given}));
  return plan.CheckArgs(LogprobsArgsOf(a));
}
void ExecuteLogprobs(const TokenLogprobsPlan& plan, const LogprobsTensors& a,
                     Workspace workspace, Executor& executor) {
  plan.Execute(LogprobsArgsOf(a), workspace, executor);
}

// In double, by as many passes as there are results.
void NativeLogprobs(const TokenLogprobsSpec& spec,
                    const LogprobsTensors& tensors) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const TokenLogprobsArgs a = LogprobsArgsOf(tensors);
  for (int64_t r = 0; r < a.logits.extent(0); ++r) {
    const float* const l = a.logits.Row(r);
    // Whether token i comes before j; none comes before j = -1.
    const auto before = [l](int64_t i, int64_t j) {
      return j >= 0 && l[i] > kNone &&
             (!(l[j] > kNone) || l[i] > l[j] || (l[i] == l[j] && i < j));
    };
    float most = kNone;
    for (int64_t i = 0; i < spec.vocab; ++i) most = l[i] > most ? l[i] : most;
    const auto below = [l, most](int64_t i) {
      return l[i] == most
                 ? 0.0
                 : static_cast<double>(l[i]) - static_cast<double>(most);
    };
    double sum = 0.0;
    for (int64_t i = 0; i < spec.vocab; ++i) {
      if (l[i] > kNone) sum += std::exp(below(i));
    }
    const auto logprob = [&](int64_t i) {
      return i >= 0 && l[i] > kNone
                 ? static_cast<float>(below(i) - std::log(sum))
                 : kNone;
    };
    int32_t last = -1;
    for (int64_t place = 0; place < spec.top_n; ++place) {
      int32_t next = -1;
      for (int32_t i = 0; i < spec.vocab; ++i) {
        const bool left = place == 0 || before(last, i);
        if (l[i] > kNone && left && (next < 0 || before(i, next))) next = i;
      }
      a.top_ids.Row(r)[place] = next;
      a.top_logprobs.Row(r)[place] = logprob(next);
      if (next < 0) {
        for (; place < spec.top_n; ++place) {
          a.top_ids.Row(r)[place] = next;
          a.top_logprobs.Row(r)[place] = kNone;
        }
      }
      last = next;
    }
    for (int64_t g = 0; g < spec.given; ++g) {
      const int64_t id = a.ids.Row(r)[g];
      int32_t rank = id < 0 ? 0 : 1;
      for (int64_t i = 0; i < spec.vocab; ++i) rank += before(i, id) ? 1 : 0;
      a.ranks.Row(r)[g] = rank;
      a.logprobs.Row(r)[g] = logprob(id);
    }
  }
}

absl::Status AddLogprobs(OpRegistry& registry) {
  using Spec = TokenLogprobsSpec;
  return OpDeclaration<TokenLogprobsPlan, Spec, LogprobsTensors>(kLogprobs)
      .In("logits", &LogprobsTensors::logits, {kRows, &Spec::vocab},
          OpDType<Spec>::OneOf({DType::kF32}))
      .In("ids", &LogprobsTensors::ids, {kRows, &Spec::given},
          OpDType<Spec>::OneOf({DType::kI32}))
      .Attr("top_n", int64_t{1}, &Spec::top_n)
      .Out("top_ids", &LogprobsTensors::top_ids, {kRows, &Spec::top_n},
           DType::kI32)
      .Out("top_logprobs", &LogprobsTensors::top_logprobs,
           {kRows, &Spec::top_n}, DType::kF32)
      .Out("logprobs", &LogprobsTensors::logprobs, {kRows, &Spec::given},
           DType::kF32)
      .Out("ranks", &LogprobsTensors::ranks, {kRows, &Spec::given}, DType::kI32)
      .Calls(&CheckLogprobs, &ExecuteLogprobs)
      .Reference(&NativeLogprobs)
      .Example({{"logits", {4, 256}},
                {"ids", {4, 2}, DType::kI32},
                {"top_n", int64_t{5}}})
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterLogitsOps(OpRegistry& registry) {
  QUERN_RETURN_IF_ERROR(AddAdjust(registry));
  return AddLogprobs(registry);
}

}  // namespace quern
