#include "quern/c/objects/attention.h"

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/c/library.h"
#include "quern/c/objects/by_name.h"
#include "quern/c/quern.h"
#include "quern/c/tensor.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"

namespace quern {
namespace c_abi {
namespace {

constexpr char kCache[] = "quern_kv_cache_create";
constexpr char kSchedule[] = "quern_schedule_create";
constexpr char kBuild[] = "quern_schedule_build";
constexpr int64_t kMaxSequences = int64_t{1} << 30;

using Made = absl::StatusOr<std::unique_ptr<Object>>;

absl::StatusOr<KvLayoutSpec> SpecOf(const quern_kv_cache_options& options) {
  constexpr KvForm kForms[] = {KvForm::kPlain, KvForm::kPaired,
                               KvForm::kLatent};
  // The operators by name take no scales that lie outside the pages.
  constexpr KvScaling kScalings[] = {KvScaling::kNone, KvScaling::kPerTokenHead,
                                     KvScaling::kPerBlock};
  KvLayoutSpec spec;
  QUERN_RETURN_IF_ERROR(CheckNotNull(kCache, "dtype", options.dtype));
  QUERN_ASSIGN_OR_RETURN(spec.dtype,
                         CacheDTypeOf(kCache, "dtype", options.dtype));
  if (options.form != nullptr) {
    QUERN_ASSIGN_OR_RETURN(
        spec.form, ByName(kCache, "form", options.form, kForms, &KvFormName));
  }
  if (options.scaling != nullptr) {
    QUERN_ASSIGN_OR_RETURN(
        spec.scaling,
        ByName(kCache, "scaling", options.scaling, kScalings, &KvScalingName));
  }
  spec.kv_heads = options.kv_heads;
  spec.head_dim = options.head_dim;
  spec.v_head_dim = options.v_head_dim;
  spec.page_size = options.page_size;
  return spec;
}

Made MakeCache(const quern_kv_cache_options* options) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kCache, "options", options));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_kv_cache_options", options->size,
                                  sizeof(quern_kv_cache_options)));
  QUERN_ASSIGN_OR_RETURN(const KvLayoutSpec spec, SpecOf(*options));
  QUERN_ASSIGN_OR_RETURN(const KvLayout layout, KvLayout::Create(spec));
  QUERN_ASSIGN_OR_RETURN(
      KvCache cache,
      KvCache::Create(layout, options->num_pages, options->num_layers));
  return std::make_unique<KvCacheObject>(std::move(cache));
}

Made MakeSchedule(const Library& library, quern_kv_cache* cache,
                  const quern_schedule_options* options) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kSchedule, "options", options));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_schedule_options", options->size,
                                  sizeof(quern_schedule_options)));
  Borrowed held;
  QUERN_RETURN_IF_ERROR(held.Take(cache, Kind::kKvCache, Mode::kHold));
  if (held.slot()->library != &library) {
    return InvalidArgument(kSchedule, "cache", kOtherLibrary);
  }
  AttentionSpec spec;
  spec.kv = held.As<KvCacheObject>().layout();
  spec.q_heads = options->q_heads;
  spec.window_left = options->window_left;
  spec.window_right = options->window_right;
  QUERN_RETURN_IF_ERROR(CheckAttentionSpec(kSchedule, spec));
  AttentionLimits limits;
  limits.max_sequences = options->max_sequences;
  limits.max_kv_len = options->max_kv_len;
  QUERN_RETURN_IF_ERROR(CheckRange(kSchedule, "max_sequences",
                                   limits.max_sequences, 0, kMaxSequences));
  QUERN_RETURN_IF_ERROR(CheckRange(kSchedule, "max_kv_len", limits.max_kv_len,
                                   0, AttentionSchedule::kMaxTokens));
  if ((limits.max_sequences == 0) != (limits.max_kv_len == 0)) {
    return InvalidArgument(kSchedule, "max_sequences=", limits.max_sequences,
                           " and max_kv_len=", limits.max_kv_len,
                           "; need both limits, or 0 for both");
  }
  return std::make_unique<ScheduleObject>(std::move(held), spec, limits);
}

}  // namespace

std::string KvCacheObject::Explain() const {
  const KvLayout& layout = cache_.layout();
  return absl::StrCat("KV cache in ", DTypeName(layout.dtype()), ", ",
                      KvFormName(layout.form()), ", ", layout.kv_heads(),
                      " heads of ", layout.head_dim(), ", ",
                      cache_.num_layers(), " layers of ", cache_.num_pages(),
                      " pages of ", layout.page_size(), " tokens");
}

absl::Status KvCacheObject::Pages(int64_t layer, quern_tensor& pages) {
  QUERN_RETURN_IF_ERROR(CheckRange("quern_kv_cache_pages", "layer", layer, 0,
                                   cache_.num_layers() - 1));
  const AnyTensorView view = CachePages(cache_.Layer(layer));
  pages = quern_dense(view.mutable_data(), ToC(view.dtype()), 2, shape_);
  return absl::OkStatus();
}

std::string ScheduleObject::Explain() const {
  return absl::StrCat("schedule of ", step_.schedule.sequences().size(),
                      " sequences, ", step_.schedule.num_tokens(),
                      " new tokens, ", step_.schedule.work().size(), " items");
}

absl::Status ScheduleObject::CheckStep(const quern_step& step) const {
  QUERN_RETURN_IF_ERROR(CheckSize("quern_step", step.size, sizeof(quern_step)));
  QUERN_RETURN_IF_ERROR(CheckRange(kBuild, "reserved", step.reserved, 0, 0));
  const bool limited = step_.limits.max_sequences > 0;
  QUERN_RETURN_IF_ERROR(
      CheckRange(kBuild, "num_sequences", step.num_sequences, 0,
                 limited ? step_.limits.max_sequences : kMaxSequences));
  if (step.num_sequences > 0) {
    QUERN_RETURN_IF_ERROR(CheckNotNull(kBuild, "q_lens", step.q_lens));
    QUERN_RETURN_IF_ERROR(CheckNotNull(kBuild, "kv_lens", step.kv_lens));
  }
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kBuild, "pages_stride", step.pages_stride, 0));
  int64_t tokens = 0;
  for (int64_t s = 0; s < step.num_sequences; ++s) {
    if (step.kv_lens[s] > 0) {
      QUERN_RETURN_IF_ERROR(CheckNotNull(kBuild, "pages", step.pages));
    }
    QUERN_RETURN_IF_ERROR(CheckRange(kBuild, "q_lens", step.q_lens[s], 0,
                                     AttentionSchedule::kMaxTokens));
    if (limited) {
      QUERN_RETURN_IF_ERROR(CheckRange(kBuild, "kv_lens", step.kv_lens[s], 0,
                                       step_.limits.max_kv_len));
    }
    if (!CheckedAdd(tokens, step.q_lens[s], &tokens)) {
      return InvalidArgument(kBuild, "q_lens sum to 2^63 or more");
    }
  }
  if (step.slots == nullptr) return absl::OkStatus();
  return CheckEqual(kBuild, "num_slots", step.num_slots, tokens,
                    "q_lens sum to");
}

absl::Status ScheduleObject::Fill(const quern_step& step) {
  const auto count = static_cast<size_t>(step.num_sequences);
  const auto q_lens = absl::MakeConstSpan(step.q_lens, count);
  const auto kv_lens = absl::MakeConstSpan(step.kv_lens, count);
  const KvCacheObject& cache = cache_.As<KvCacheObject>();
  const int64_t page_size = cache.layout().page_size();
  const int64_t stride = step.pages == nullptr ? 0 : step.pages_stride;
  const MatrixView<const int32_t> table(
      step.pages, {step.num_sequences, stride}, {stride, 1});
  QUERN_RETURN_IF_ERROR(table_.SetPadded(table, kv_lens, page_size));
  QUERN_ASSIGN_OR_RETURN(step_.pages,
                         table_.Build(page_size, cache.num_pages()));
  QUERN_ASSIGN_OR_RETURN(step_.schedule,
                         AttentionSchedule::Build(
                             spec_, q_lens, kv_lens,
                             step.workers == 0 ? 1 : step.workers, schedule_));
  if (step.slots == nullptr) return absl::OkStatus();
  return step_.pages.SlotMapping(
      q_lens, kv_lens,
      absl::MakeSpan(step.slots, static_cast<size_t>(step.num_slots)));
}

absl::Status ScheduleObject::Build(const quern_step& step) {
  step_.pages = PageTable();
  step_.schedule = AttentionSchedule();
  absl::Status status = CheckStep(step);
  if (status.ok()) status = Fill(step);
  if (!status.ok()) {
    step_.pages = PageTable();
    step_.schedule = AttentionSchedule();
  }
  return status;
}

}  // namespace c_abi
}  // namespace quern

using quern::c_abi::CallOn;
using quern::c_abi::CheckNotNull;
using quern::c_abi::Kind;
using quern::c_abi::KvCacheObject;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;
using quern::c_abi::Mode;
using quern::c_abi::ScheduleObject;

extern "C" {

quern_status quern_kv_cache_create(quern_library* library,
                                   const quern_kv_cache_options* options,
                                   quern_kv_cache** cache) {
  return MakeObject(
      library, "quern_kv_cache_create", Kind::kKvCache, cache,
      [&](const Library&) { return quern::c_abi::MakeCache(options); });
}

quern_status quern_kv_cache_pages(quern_kv_cache* cache, int64_t layer,
                                  quern_tensor* pages) {
  return CallOn<KvCacheObject>(
      cache, Kind::kKvCache, Mode::kUse, [&](KvCacheObject& object) {
        const absl::Status given =
            CheckNotNull("quern_kv_cache_pages", "pages", pages);
        return given.ok() ? object.Pages(layer, *pages) : given;
      });
}

quern_status quern_schedule_create(quern_library* library,
                                   quern_kv_cache* cache,
                                   const quern_schedule_options* options,
                                   quern_schedule** schedule) {
  return MakeObject(library, "quern_schedule_create", Kind::kSchedule, schedule,
                    [&](const Library& owner) {
                      return quern::c_abi::MakeSchedule(owner, cache, options);
                    });
}

quern_status quern_schedule_build(quern_schedule* schedule,
                                  const quern_step* step) {
  return CallOn<ScheduleObject>(
      schedule, Kind::kSchedule, Mode::kChange, [&](ScheduleObject& object) {
        const absl::Status given =
            CheckNotNull("quern_schedule_build", "step", step);
        return given.ok() ? object.Build(*step) : given;
      });
}

}  // extern "C"
