#include "cache/write_kv.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/head_rows.h"
#include "cache/kv_layout.h"
#include "cache/write_kv_kernels.h"
#include "core/check.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "write_kv";

// Tokens of one task: a few microseconds of copying.
constexpr int64_t kTaskTokens = 16;

const uint8_t* RowOf(const AnyTensorView& rows, int64_t token, int64_t head) {
  return static_cast<const uint8_t*>(rows.data()) +
         HeadRowOffsetBytes(rows, token, head);
}

}  // namespace

absl::StatusOr<WriteKvPlan> WriteKvPlan::Create(const WriteKvSpec& spec) {
  if (spec.kv == KvLayout()) return InvalidArgument(kOp, "kv layout is empty");
  if (spec.input != DType::kF32 && spec.input != DType::kBF16) {
    return Unimplemented(kOp, "input is ", DTypeName(spec.input),
                         "; need f32 or bf16");
  }
  if (SizeOf(spec.kv.dtype()) == 1) {
    return Unimplemented(kOp, "kv is ", DTypeName(spec.kv.dtype()),
                         "; need f32, bf16 or f16");
  }
  return WriteKvPlan(spec, GetWriteKvKernels(spec.input, spec.kv.dtype()));
}

absl::Status WriteKvPlan::CheckArgs(const WriteKvArgs& args) const {
  const KvLayout& layout = spec_.kv;
  const auto tokens = static_cast<int64_t>(args.slots.size());
  QUERN_RETURN_IF_ERROR(CheckHeadRows(kOp, "k", args.k, spec_.input, tokens,
                                      layout.kv_heads(), layout.head_dim()));
  QUERN_RETURN_IF_ERROR(CheckHeadRows(kOp, "v", args.v, spec_.input, tokens,
                                      layout.kv_heads(), layout.v_head_dim()));
  if (args.cache.layout() != layout) {
    return InvalidArgument(kOp, "the cache has another layout than the plan");
  }
  QUERN_RETURN_IF_ERROR(CheckCacheOut(kOp, args.cache));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "k", args.k, args.cache));
  QUERN_RETURN_IF_ERROR(CheckApartFromCache(kOp, "v", args.v, args.cache));
  // Blocks of at least page_size bytes lie apart: no overflow.
  const int64_t end = args.cache.num_pages() * layout.page_size();
  for (size_t token = 0; token < args.slots.size(); ++token) {
    if (args.slots[token] >= end) {
      return InvalidArgument(kOp, "slots[", token, "]=", args.slots[token],
                             "; need slot < ", end, ", or negative to skip");
    }
  }
  std::vector<int64_t> sorted(args.slots.begin(), args.slots.end());
  std::sort(sorted.begin(), sorted.end());
  const auto first = std::lower_bound(sorted.begin(), sorted.end(), 0);
  const auto twice = std::adjacent_find(first, sorted.end());
  if (twice != sorted.end()) {
    return InvalidArgument(kOp, "slot ", *twice,
                           " is given twice; need distinct slots");
  }
  return absl::OkStatus();
}

void WriteKvPlan::Execute(const WriteKvArgs& args,
                          Executor& executor) const noexcept {
  const KvLayout& layout = spec_.kv;
  QUERN_DCHECK(args.cache.layout() == layout);
  QUERN_DCHECK(args.k.dtype() == spec_.input && args.v.dtype() == spec_.input);
  const auto tokens = static_cast<int64_t>(args.slots.size());
  const auto element = static_cast<int64_t>(SizeOf(layout.dtype()));
  const auto k_dim = static_cast<size_t>(layout.head_dim());
  const auto v_dim = static_cast<size_t>(layout.v_head_dim());
  executor.ParallelFor(
      DivCeil(tokens, kTaskTokens), [&](int64_t task, int /*worker*/) {
        const int64_t end = std::min(tokens, (task + 1) * kTaskTokens);
        for (int64_t token = task * kTaskTokens; token < end; ++token) {
          const int64_t slot = args.slots[static_cast<size_t>(token)];
          if (slot < 0) continue;
          const int64_t page = slot / layout.page_size();
          const int64_t offset = slot % layout.page_size();
          for (int64_t head = 0; head < layout.kv_heads(); ++head) {
            uint8_t* k =
                args.cache.K(page, head) + layout.KOffset(offset, 0) * element;
            uint8_t* v =
                args.cache.V(page, head) + layout.VOffset(offset, 0) * element;
            if (layout.form() == KvForm::kPlain) {
              kernels_.convert(RowOf(args.k, token, head), k_dim, k);
              kernels_.convert(RowOf(args.v, token, head), v_dim, v);
            } else {
              const auto pair = static_cast<size_t>(layout.pair());
              kernels_.scatter(RowOf(args.k, token, head), k_dim, pair,
                               KvLayout::kGroupTokens * pair, k);
              kernels_.scatter(RowOf(args.v, token, head), v_dim, 1, pair, v);
            }
          }
        }
      });
}

}  // namespace quern
