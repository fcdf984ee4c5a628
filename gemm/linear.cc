#include "quern/gemm/linear.h"

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/quant/int8_quantize.h"

namespace quern {

// Defined in gemm/onednn/backend.cc. A weak reference, rather than a table that
// implementations enter before main: it needs no order of initialisation and no
// state that changes, and its value is known when the program is linked.
const LinearImplementation* LinkedOneDnn() __attribute__((weak));

namespace {

constexpr char kOp[] = "linear";
constexpr char kVariable[] = "QUERN_KERNELS";

absl::StatusOr<std::unique_ptr<const LinearLayer>> CreatePacked(
    const LinearSpec& spec, const LinearWeights& weights,
    Executor& /*executor*/) {
  return CreatePackedLayer(spec, weights);
}

constexpr LinearImplementation kPacked = {
    "packed",
    [](const LinearSpec&, const LinearWeightsSpec&) { return std::string(); },
    &CreatePacked};

// An implementation that a caller may name, linked or not.
struct Candidate {
  absl::string_view name;
  const LinearImplementation* implementation;  // null: not linked
};

// In the order in which they are tried. The packed kernels come first because
// every program has them and they run everything; and measured against oneDNN
// 3.7.2 on Zen 4 (2026) they are faster for m <= 128 and within 2 % beyond in
// bf16, and faster for m <= 64 in int8 (gemm/README.md). With AMX, for which
// oneDNN has tiles and the packed kernels do not, it takes two thirds of their
// time for 64 rows of bf16 and twice their time for one (Emerald Rapids, 2026).
// Rows are not known here, so a caller with many must ask for it.
std::vector<Candidate> AllCandidates() {
  return {{"packed", &kPacked},
          {"onednn", OneDnnIsLinked() ? LinkedOneDnn() : nullptr}};
}

// The implementations to try, in order, and what set the order.
struct Order {
  std::vector<Candidate> candidates;
  std::string names;
  absl::string_view asked_by;  // ", as the spec asks", or empty
};

absl::StatusOr<Order> OrderOf(const LinearSpec& spec) {
  Order order;
  const char* const variable = std::getenv(kVariable);
  absl::string_view field = "kernels", names = spec.kernels;
  order.asked_by = ", as the spec asks";
  if (names.empty() && variable != nullptr) {
    field = kVariable;
    names = variable;
    order.asked_by = ", as QUERN_KERNELS asks";
  }
  const std::vector<Candidate> all = AllCandidates();
  if (names.empty()) {
    order.asked_by = "";
    for (const Candidate& candidate : all) {
      if (candidate.implementation != nullptr) {
        order.candidates.push_back(candidate);
      }
    }
  } else {
    for (const absl::string_view part : absl::StrSplit(names, ',')) {
      const absl::string_view name = absl::StripAsciiWhitespace(part);
      bool known = false;
      for (const Candidate& candidate : all) {
        if (candidate.name != name) continue;
        order.candidates.push_back(candidate);
        known = true;
      }
      if (!known) {
        return InvalidArgument(kOp, field, " names \"", name,
                               "\"; need packed or onednn");
      }
    }
  }
  order.names = absl::StrJoin(order.candidates, ",",
                              [](std::string* out, const Candidate& c) {
                                absl::StrAppend(out, c.name);
                              });
  return order;
}

std::string WhyNot(const Candidate& candidate, const LinearSpec& spec,
                   const LinearWeightsSpec& weights) {
  if (candidate.implementation == nullptr) {
    return "not in this program; need @quern//gemm/onednn in its deps";
  }
  return candidate.implementation->why_not(spec, weights);
}

// "first" of a list, or "third".
std::string Ordinal(size_t index) {
  constexpr const char* kWords[] = {"first", "second", "third"};
  if (index < 3) return kWords[index];
  return absl::StrCat("number ", index + 1);
}

// a_scales and a_zero_points, which are there for an i8 a per token.
absl::Status CheckRowTerms(const LinearSpec& spec, bool i8_weights,
                           const LinearArgs& args) {
  const bool scales = i8_weights && spec.a == DType::kI8 &&
                      spec.granularity == Int8Granularity::kPerToken;
  if (scales) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "a_scales", args.a_scales,
                                     DType::kF32, {args.a.extent(0)}));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, "a_scales", args.a_scales, "c", args.c));
  } else if (!IsEmpty(args.a_scales)) {
    return InvalidArgument(kOp,
                           "a_scales is given; need none, as a is not i8, or "
                           "has the scale of the spec");
  }
  if (scales && spec.zero_points == Int8ZeroPoint::kUsed) {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, "a_zero_points", args.a_zero_points,
                                     DType::kI32, {args.a.extent(0)}));
    return CheckApart(kOp, "a_zero_points", args.a_zero_points, "c", args.c);
  }
  if (!IsEmpty(args.a_zero_points)) {
    return InvalidArgument(kOp,
                           "a_zero_points is given; need none, as the spec has "
                           "none for each row of an i8 a");
  }
  return absl::OkStatus();
}

}  // namespace

bool OneDnnIsLinked() {
  return LinkedOneDnn != nullptr && LinkedOneDnn() != nullptr;
}

absl::Status CheckLinearSpec(absl::string_view op, const LinearSpec& spec,
                             const LinearWeightsSpec& w) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "n of the weights", w.n, 1));
  const bool i8 = w.format == WeightFormat::kI8Channel;
  const DType with_i8[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kI8};
  QUERN_RETURN_IF_ERROR(i8 ? CheckDTypeIn(op, "a", spec.a, with_i8)
                           : CheckDTypeIn(op, "a", spec.a, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(op, "c", spec.c, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckActivation(op, spec.activation, w.n));
  if (IsGated(spec.activation) != w.gated) {
    return InvalidArgument(
        op, "activation is ", LinearActivationName(spec.activation), "; need ",
        w.gated ? "a gated one" : "one that is not gated",
        ", as the weights are packed with gated=", w.gated ? "true" : "false");
  }
  if (spec.activations == LinearActivations::kInt8Blocks &&
      !TakesInt8Blocks(w)) {
    if (w.format == WeightFormat::kI4Group) {
      return Unimplemented(op, "activations=int8_blocks with weights of ",
                           WeightFormatName(w.format), ", k=", w.k,
                           ", group_size=", w.group_size,
                           "; need multiples of 32, or exact");
    }
    return Unimplemented(op, "activations=int8_blocks with weights of ",
                         WeightFormatName(w.format),
                         "; need exact with these weights");
  }
  if (!i8) return absl::OkStatus();
  if (spec.zero_points == Int8ZeroPoint::kUsed) {
    QUERN_RETURN_IF_ERROR(
        CheckRange(op, "k", w.k, 1, LinearPlan::kMaxKZeroPoint));
  }
  // Proves scale and zero point, also where a is given as i8.
  return Int8QuantizePlan::Create(QuantizeSpecOf(spec)).status();
}

absl::StatusOr<LinearPlan> LinearPlan::Create(const LinearSpec& spec,
                                              const LinearWeights& weights,
                                              Executor& executor) {
  LinearPlan plan;
  plan.spec_ = spec;
  plan.weights_ = weights.spec();
  QUERN_RETURN_IF_ERROR(CheckLinearSpec(kOp, spec, plan.weights_));
  QUERN_ASSIGN_OR_RETURN(const Order order, OrderOf(spec));
  std::string refused;
  for (size_t i = 0; i < order.candidates.size(); ++i) {
    const Candidate& candidate = order.candidates[i];
    std::string why_not = WhyNot(candidate, spec, plan.weights_);
    if (why_not.empty()) {
      auto layer = candidate.implementation->create(spec, weights, executor);
      if (layer.ok()) {
        plan.layer_ = *std::move(layer);
        plan.implementation_ = candidate.implementation->name;
        plan.why_ = absl::StrCat(refused, "; ", Ordinal(i), " of ", order.names,
                                 order.asked_by);
        return plan;
      }
      if (!absl::IsUnimplemented(layer.status())) return layer.status();
      why_not = std::string(layer.status().message());
    }
    absl::StrAppend(&refused, "; ", candidate.name, ": ", why_not);
  }
  return Unimplemented(kOp, "none of ", order.names, " can run this",
                       order.asked_by, refused);
}

LinearPlan::LinearPlan() = default;
LinearPlan::LinearPlan(LinearPlan&&) noexcept = default;
LinearPlan& LinearPlan::operator=(LinearPlan&&) noexcept = default;
LinearPlan::~LinearPlan() = default;

const char* LinearPlan::target() const { return layer_->target(); }

std::string LinearPlan::Explain(int64_t m) const {
  return absl::StrCat(layer_->Explain(m), why_);
}

int64_t LinearPlan::packed_bytes() const { return layer_->packed_bytes(); }

absl::StatusOr<int64_t> LinearPlan::WorkspaceBytes(int64_t max_m,
                                                   int max_workers) const {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_m", max_m, 0));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_workers", max_workers, 1, kMaxWorkers));
  return layer_->WorkspaceBytes(max_m, max_workers);
}

absl::Status LinearPlan::CheckArgs(const LinearArgs& args) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a", args.a, spec_.a, {kAnyExtent, k()}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "c", args.c, spec_.c,
                  {args.a.extent(0), ColumnsOfC(spec_.activation, n())}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "a", args.a, "c", args.c));
  if (args.residual.rank() != 0 && !spec_.residual) {
    return InvalidArgument(kOp,
                           "residual is given; need a spec that allows it");
  }
  QUERN_RETURN_IF_ERROR(CheckResidual(kOp, args.residual, args.c));
  QUERN_RETURN_IF_ERROR(
      CheckRowTerms(spec_, weights_.format == WeightFormat::kI8Channel, args));
  return layer_->CheckArgs(args);
}

absl::Status LinearPlan::CheckRows(const AnyTensorView& a) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "a", a, spec_.a, {kAnyExtent, k()}));
  return layer_->CheckRows(a);
}

absl::Status LinearPlan::CheckRowStride(absl::string_view op,
                                        absl::string_view field,
                                        const AnyTensorView& rows) const {
  const LinearLayer::RowStrides may = layer_->row_strides(rows.extent(1));
  const int64_t stride = rows.stride(0);
  if (rows.extent(0) <= 1 || (may.least <= stride && stride <= may.most)) {
    return absl::OkStatus();
  }
  // Only a refusal allocates.
  return CheckRange(op, absl::StrCat(field, ".stride(0)"), stride, may.least,
                    may.most);
}

void LinearPlan::Execute(const LinearArgs& args, const Workspace& workspace,
                         Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  layer_->Execute(args, workspace, executor);
}

}  // namespace quern
