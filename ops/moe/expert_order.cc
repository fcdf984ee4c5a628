#include "quern/ops/moe/expert_order.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/check_indices.h"
#include "quern/ops/index_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "expert_order";

// Routes for which another worker is worth its fork-join of a microsecond.
constexpr int64_t kRoutesPerPart = 4096;

// Memory for the counts: how many routes each expert has in each part of the
// tokens, and later where its next route goes. Each part begins at a cache
// line.
int64_t CountsStride(int64_t experts) { return RoundUp(experts, 16); }
template <typename Allocator>
int32_t* LayOut(Allocator& allocator, int64_t experts, int64_t parts) {
  return allocator.template Allocate<int32_t>("counts",
                                              parts * CountsStride(experts));
}

// fn(expert, route) for the routes of the tokens [begin, end) that have one.
template <typename Fn>
void ForEachRoute(const ExpertOrderArgs& args, int64_t experts, int64_t begin,
                  int64_t end, const Fn& fn) {
  const int64_t top_k = args.ids.extent(1);
  const int32_t* const map = args.map.data();
  const auto all =
      static_cast<uint32_t>(map == nullptr ? experts : args.map.extent(0));
  for (int64_t t = begin; t < end; ++t) {
    const int32_t* const ids = args.ids.Row(t);
    for (int64_t j = 0; j < top_k; ++j) {
      // A negative id is too large as an unsigned number.
      const auto id = static_cast<uint32_t>(ids[j]);
      if (id >= all) continue;
      const auto expert = map == nullptr ? id : static_cast<uint32_t>(map[id]);
      if (expert >= static_cast<uint32_t>(experts)) continue;
      fn(static_cast<int64_t>(expert), static_cast<int32_t>(t * top_k + j));
    }
  }
}

// Replaces counts by the places where they begin. The parts of one expert stand
// one behind the other, in the order of tokens.
void CountsToPlaces(int64_t experts, int64_t parts, int32_t* counts,
                    int32_t* offsets) {
  const int64_t stride = CountsStride(experts);
  int32_t next = 0;
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e] = next;
    for (int64_t p = 0; p < parts; ++p) {
      int32_t& place = counts[p * stride + e];
      const int32_t count = place;
      place = next;
      next += count;
    }
  }
  offsets[experts] = next;
}

}  // namespace

absl::StatusOr<ExpertOrderPlan> ExpertOrderPlan::Create(
    const ExpertOrderSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "experts", spec.experts, 1, kMaxExperts));
  return ExpertOrderPlan(spec);
}

absl::StatusOr<int64_t> ExpertOrderPlan::WorkspaceBytes(int64_t max_tokens,
                                                        int max_workers) const {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_tokens", max_tokens, 0));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_workers", max_workers, 1));
  WorkspaceLayout layout;
  LayOut(layout, spec_.experts, max_workers);
  return layout.bytes();
}

absl::Status ExpertOrderPlan::CheckIds(
    const MatrixView<const int32_t>& ids,
    const VectorView<const int32_t>& map) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "ids", AnyTensorView(ids), DType::kI32,
                                   {kAnyExtent, kAnyExtent}));
  int64_t routes = 0;
  if (!CheckedMul(ids.extent(0), ids.extent(1), &routes) ||
      routes > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument(kOp, "ids is [", ids.extent(0), ", ", ids.extent(1),
                           "]; need fewer than 2^31 routes");
  }
  int64_t all = spec_.experts;
  if (map.data() != nullptr || map.extent(0) > 0) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "map", AnyTensorView(map), DType::kI32, {kAnyExtent}));
    QUERN_RETURN_IF_ERROR(
        CheckIndices(kOp, "map", "expert", map, spec_.experts, -1));
    all = map.extent(0);
  }
  for (int64_t t = 0; t < ids.extent(0); ++t) {
    const IndexView row = DenseVector(ids.Row(t), ids.extent(1));
    if (CheckIndices(kOp, "ids", "id", row, all, -1).ok()) continue;
    return CheckIndices(kOp, absl::StrCat("ids[", t, "]"), "id", row, all, -1);
  }
  return absl::OkStatus();
}

absl::Status ExpertOrderPlan::CheckArgs(const ExpertOrderArgs& args) const {
  const AnyTensorView ids(args.ids), map(args.map), offsets(args.offsets),
      order(args.order);
  QUERN_RETURN_IF_ERROR(CheckIds(args.ids, args.map));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "offsets", offsets, DType::kI32, {spec_.experts + 1}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "order", order, DType::kI32,
                                    {ids.extent(0) * ids.extent(1)}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "ids", ids, "offsets", offsets));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "ids", ids, "order", order));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "offsets", offsets, "order", order));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "map", map, "offsets", offsets));
  return CheckApart(kOp, "map", map, "order", order);
}

void ExpertOrderPlan::Execute(const ExpertOrderArgs& args, Workspace workspace,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const int64_t tokens = args.ids.extent(0);
  const int64_t experts = spec_.experts;
  const int64_t routes = tokens * args.ids.extent(1);
  const int64_t parts = std::clamp<int64_t>(DivCeil(routes, kRoutesPerPart), 1,
                                            executor.num_workers());
  int32_t* const all_counts = LayOut(workspace, experts, parts);
  const int64_t part_tokens = DivCeil(tokens, parts);
  // fn(counts of the part, first token, end).
  const auto for_each_part = [&](const auto& fn) {
    const auto task = [&](int64_t p, int /*worker*/) {
      fn(all_counts + p * CountsStride(experts),
         std::min(p * part_tokens, tokens),
         std::min((p + 1) * part_tokens, tokens));
    };
    if (parts == 1) return task(0, 0);
    executor.ParallelFor(parts, task);
  };
  for_each_part([&](int32_t* counts, int64_t begin, int64_t end) {
    std::fill_n(counts, experts, 0);
    ForEachRoute(args, experts, begin, end,
                 [counts](int64_t expert, int32_t) { ++counts[expert]; });
  });
  CountsToPlaces(experts, parts, all_counts, args.offsets.data());
  int32_t* const order = args.order.data();
  for_each_part([&](int32_t* counts, int64_t begin, int64_t end) {
    ForEachRoute(args, experts, begin, end,
                 [counts, order](int64_t expert, int32_t route) {
                   order[counts[expert]++] = route;
                 });
  });
}

}  // namespace quern
