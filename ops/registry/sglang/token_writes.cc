#include "quern/ops/registry/sglang/token_writes.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/families/attention/token_cache.h"
#include "quern/ops/registry/reference/attention.h"

namespace quern {
namespace {

absl::StatusOr<WriteKvPlan> PlanOf(const KvLayout& layout, DType input) {
  WriteKvSpec spec;
  spec.kv = layout;
  spec.input = input;
  return WriteKvPlan::Create(spec);
}

// The elements [begin, end) of each row of a tensor of rank 3.
AnyTensorView Columns(const AnyTensorView& rows, int64_t begin, int64_t end) {
  AnyTensorView::Dims extents{}, strides{};
  for (int d = 0; d < 3; ++d) {
    extents[static_cast<size_t>(d)] = d == 2 ? end - begin : rows.extent(d);
    strides[static_cast<size_t>(d)] = rows.stride(d);
  }
  const auto* data = static_cast<const uint8_t*>(rows.data());
  if (!IsEmpty(rows)) {
    data += begin * static_cast<int64_t>(SizeOf(rows.dtype()));
  }
  return {rows.dtype(), static_cast<const void*>(data), 3, extents, strides};
}

}  // namespace

absl::StatusOr<TokenWrites> TokenWrites::Create(const KvLayout& layout,
                                                DType input) {
  QUERN_ASSIGN_OR_RETURN(const WriteKvPlan both, PlanOf(layout, input));
  std::optional<WriteKvPlan> keys;
  const int64_t rest = layout.head_dim() - layout.v_head_dim();
  if (rest > 0) {
    QUERN_ASSIGN_OR_RETURN(const KvLayout parts,
                           TokenLayout(layout.dtype(), layout.kv_heads(),
                                       layout.v_head_dim(), rest));
    QUERN_ASSIGN_OR_RETURN(keys, PlanOf(parts, input));
  }
  return TokenWrites(both, keys);
}

bool TokenWrites::KeysAlone(const TokenWriteArgs& args) const {
  const AnyTensorView& k = args.k_buffer;
  const AnyTensorView& v = args.v_buffer;
  if (!keys_.has_value() || k.data() != v.data()) return false;
  for (int d = 0; d < 2; ++d) {
    if (k.extent(d) > 1 && k.stride(d) != v.stride(d)) return false;
  }
  return true;
}

WriteKvArgs TokenWrites::ArgsOf(const TokenWriteArgs& args) const {
  WriteKvArgs to;
  to.slots = args.slots;
  if (!KeysAlone(args)) {
    to.k = args.key;
    to.v = args.value;
    to.cache = TokenCache(both_.spec().kv, args.k_buffer, args.v_buffer);
    return to;
  }
  const int64_t middle = both_.spec().kv.v_head_dim();
  const int64_t end = both_.spec().kv.head_dim();
  to.k = Columns(args.key, 0, middle);
  to.v = Columns(args.key, middle, end);
  to.cache = TokenCache(keys_->spec().kv, Columns(args.k_buffer, 0, middle),
                        Columns(args.k_buffer, middle, end));
  return to;
}

absl::Status TokenWrites::CheckArgs(const TokenWriteArgs& args) const {
  const KvLayout& kv = both_.spec().kv;
  const auto tokens = static_cast<int64_t>(args.slots.size());
  QUERN_RETURN_IF_ERROR(CheckInput("write_kv", "the new keys", args.key,
                                   both_.spec().input,
                                   {tokens, kv.kv_heads(), kv.head_dim()}));
  return (KeysAlone(args) ? *keys_ : both_).CheckArgs(ArgsOf(args));
}

void TokenWrites::Execute(const TokenWriteArgs& args,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  (KeysAlone(args) ? *keys_ : both_).Execute(ArgsOf(args), executor);
}

void TokenWrites::ExecuteNative(const TokenWriteArgs& args) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  NativeWriteKv(ArgsOf(args));
}

void NewSlots::Clear() {
  slots_.clear();
  loc_.clear();
}

void NewSlots::Read(const AnyTensorView& loc) {
  const auto* const given = static_cast<const int64_t*>(loc.data());
  loc_.assign(given, given + loc.extent(0));
  slots_ = loc_;
  std::unordered_set<int64_t> later;
  for (size_t i = slots_.size(); i-- > 0;) {
    if (!later.insert(slots_[i]).second) slots_[i] = -1;
  }
}

absl::Status NewSlots::CheckSame(absl::string_view op,
                                 const AnyTensorView& loc) const {
  const auto* const given = static_cast<const int64_t*>(loc.data());
  for (size_t i = 0; i < loc_.size(); ++i) {
    if (given[i] == loc_[i]) continue;
    return InvalidArgument(op, "loc[", i, "]=", given[i],
                           "; Prepare was given ", loc_[i]);
  }
  return absl::OkStatus();
}

}  // namespace quern
