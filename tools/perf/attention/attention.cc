#include "quern/tools/perf/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/shared_prefix.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/testing/reference_attention.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/attention/attention_util.h"
#include "quern/tools/perf/attention/latent_cache.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

constexpr DType kCacheTypes[] = {DType::kF32, DType::kBF16,   DType::kF16,
                                 DType::kI8,  DType::kF8E4M3, DType::kF8E5M2};
// Queries that Check compares, all heads of each: the reference is slow.
constexpr int64_t kCheckedQueries = 32;

// `batch` sequences of equal length over a paged cache, in random page order.
class Attention final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    AttentionLengths lengths;
    KvLayoutSpec kv;
    AttentionSpec spec;
    QUERN_ASSIGN_OR_RETURN(const DType dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(lengths, ParseAttentionLengths(args));
    QUERN_ASSIGN_OR_RETURN(spec.q_heads, args.Int("q_heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(kv.kv_heads, args.Int("kv_heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(kv.head_dim, args.Int("head_dim", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(kv.page_size, args.Int("page_size", 1, 1 << 20));
    int64_t window = 0, soft_cap = 0;
    QUERN_ASSIGN_OR_RETURN(kv.dtype, args.Type("kv", kCacheTypes));
    QUERN_ASSIGN_OR_RETURN(window, args.Int("window", 0, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(soft_cap, args.Int("softcap", 0, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(
        lengths.prefix, args.Int("prefix", 0, lengths.kv_len - lengths.q_len));
    lengths.prefix -= lengths.prefix %
                      std::lcm(kv.page_size, AttentionSchedule::kChunkTokens);
    if (window > 0) spec.window_left = window - 1;
    spec.soft_cap = static_cast<float>(soft_cap);
    spec.q_dtype = spec.out_dtype = dtype;
    if (kv.dtype == DType::kI8) kv.scaling = KvScaling::kPerTensor;
    return Create("attention", lengths, kv, spec);
  }

  static absl::StatusOr<std::unique_ptr<Op>> CreateMla(const Args& args) {
    AttentionLengths lengths;
    KvLayoutSpec kv;
    AttentionSpec spec;
    int64_t rope_dim = 0;
    QUERN_ASSIGN_OR_RETURN(const DType dtype, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(lengths, ParseAttentionLengths(args));
    QUERN_ASSIGN_OR_RETURN(spec.q_heads, args.Int("heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(kv.v_head_dim, args.Int("latent_dim", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(rope_dim, args.Int("rope_dim", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(kv.page_size, args.Int("page_size", 1, 1 << 20));
    kv.kv_heads = 1;
    kv.head_dim = kv.v_head_dim + rope_dim;
    kv.form = KvForm::kLatent;
    kv.dtype = spec.q_dtype = spec.out_dtype = dtype;
    QUERN_RETURN_IF_ERROR(ParseLatentCache(args, kv));
    return Create("mla", lengths, kv, spec);
  }
  OpInfo Info() const override {
    OpInfo info;
    const bool latent = spec().kv.form() == KvForm::kLatent;
    info.shape =
        absl::StrCat("batch=", lengths_.batch, " q_len=", lengths_.q_len,
                     " kv_len=", lengths_.kv_len, " q_heads=", spec().q_heads,
                     " kv_heads=", spec().kv.kv_heads(), " head_dim=", dim(),
                     latent ? absl::StrCat(" v_head_dim=", v_dim()) : "",
                     " page_size=", spec().kv.page_size());
    if (spec().kv.dtype() != spec().q_dtype) {
      absl::StrAppend(&info.shape, " kv=", DTypeName(spec().kv.dtype()));
    }
    if (spec().window_left != kNoWindow) {
      absl::StrAppend(&info.shape, " window=", spec().window_left + 1);
    }
    if (spec().soft_cap > 0) {
      absl::StrAppend(&info.shape, " softcap=", spec().soft_cap);
    }
    if (lengths_.prefix > 0) {
      absl::StrAppend(&info.shape, " prefix=", lengths_.prefix);
    }
    if (lengths_.tree > 0) {
      absl::StrAppend(&info.shape, " tree=", lengths_.tree);
    }
    info.dtype = std::string(DTypeName(spec().q_dtype));
    info.isa = plan_.target();
    const auto tokens = static_cast<double>(lengths_.batch * lengths_.q_len);
    // Keys that any query of a sequence sees.
    const int64_t any =
        spec().window_left == kNoWindow
            ? lengths_.kv_len
            : std::min(lengths_.kv_len, spec().window_left + lengths_.q_len);
    const auto kv_tokens = static_cast<double>(
        lengths_.batch * any - (lengths_.batch - 1) * lengths_.prefix);
    // Dimensions of q and out, and of the cache, whose latent form holds values
    // in keys.
    const auto dims = static_cast<double>(dim() + v_dim());
    const double kv_dims = latent ? static_cast<double>(dim()) : dims;
    // A dimension of q or of out.
    const double row_bytes = static_cast<double>(SizeOf(spec().q_dtype)) *
                             tokens * static_cast<double>(spec().q_heads);
    const double key_bytes =
        in_blocks() ? static_cast<double>(spec().kv.token_bytes())
                    : static_cast<double>(SizeOf(spec().kv.dtype())) * kv_dims;
    info.SetTraffic(
        kv_tokens * key_bytes * static_cast<double>(spec().kv.kv_heads()) +
            row_bytes * static_cast<double>(dim()),
        row_bytes * static_cast<double>(v_dim()));
    // Keys that a query sees, on average, where no window hides them.
    int64_t keys = 0;
    for (int64_t i = 0; i < lengths_.q_len; ++i) keys += lengths_.KeysOf(i);
    const double before =
        static_cast<double>(keys) / static_cast<double>(lengths_.q_len);
    const double seen =
        spec().window_left == kNoWindow
            ? before
            : std::min(before, static_cast<double>(spec().window_left + 1));
    info.flops = 2 * tokens * seen * static_cast<double>(spec().q_heads) * dims;
    info.peak_kind = PeakKindOf(spec().q_dtype);
    return info;
  }

  int64_t set_bytes() const override {
    return cache_bytes() + RowBytes(dim()) + RowBytes(v_dim());
  }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(cache_.Create(sets, cache_bytes()));
    QUERN_RETURN_IF_ERROR(q_.Create(sets, RowBytes(dim())));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, RowBytes(v_dim())));
    WithType(spec().q_dtype,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, q_); });
    if (in_blocks()) {
      QUERN_RETURN_IF_ERROR(FillLatentBlocks(spec().kv, executor, cache_));
    } else {
      WithType(spec().kv.dtype(), [this](auto type) {
        FillReals<decltype(type)>(-1 / kv_scale(), 1 / kv_scale(), cache_);
      });
    }
    // Pages in an order that no prefetcher guesses.
    std::vector<int32_t> ids(static_cast<size_t>(num_pages()));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    uint64_t state = 1;
    for (size_t i = ids.size(); i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(ids[i - 1], ids[(state >> 33) % i]);
    }
    const auto each = static_cast<size_t>(pages_per_sequence());
    const auto shared =
        static_cast<size_t>(lengths_.prefix / spec().kv.page_size());
    for (size_t s = 0; s < static_cast<size_t>(lengths_.batch); ++s) {
      std::copy_n(ids.begin(), shared, ids.begin() + s * each);
      page_storage_.Append(
          absl::Span<const int32_t>(ids).subspan(s * each, each));
    }
    QUERN_ASSIGN_OR_RETURN(
        pages_, page_storage_.Build(spec().kv.page_size(), num_pages()));
    const auto batch = static_cast<size_t>(lengths_.batch);
    const std::vector<int64_t> q_lens(batch, lengths_.q_len);
    const std::vector<int64_t> kv_lens(batch, lengths_.kv_len);
    AttentionBatch lens = {q_lens, kv_lens, {}, {}, {}};
    if (lengths_.prefix > 0) {
      QUERN_ASSIGN_OR_RETURN(
          const SharedPrefixes prefixes,
          SharedPrefixes::Find(pages_, q_lens, kv_lens, prefix_storage_));
      lens.prefix_groups = prefixes.groups();
      lens.prefix_members = prefixes.members();
    }
    const std::vector<uint64_t> masks = lengths_.DraftMasks();
    if (!masks.empty()) lens.draft_lens = q_lens;
    lens.draft_masks = masks;
    QUERN_ASSIGN_OR_RETURN(
        schedule_,
        AttentionSchedule::Build(spec(), lens, AttentionTiles(),
                                 executor.num_workers(), schedule_storage_));
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        plan_.WorkspaceBytes(schedule_, executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(workspace_, AlignedBuffer::Create(bytes));
    return plan_.CheckArgs(MakeArgs(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(MakeArgs(set),
                  Workspace(workspace_.data(), workspace_.bytes()), executor);
  }

  // All heads of queries spread evenly over the tokens, the last among them.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    const int64_t tokens = lengths_.batch * lengths_.q_len;
    const int64_t checked = std::min(tokens, kCheckedQueries);
    Verdict all;
    executor.ParallelFor(
        checked * spec().kv.kv_heads(), [&](int64_t task, int) {
          const int64_t i = task / spec().kv.kv_heads();
          const int64_t token = (i + 1) * tokens / checked - 1;
          Verdict mine;
          WithType(spec().q_dtype, [&](auto type) {
            CheckHead<decltype(type)>(token, task % spec().kv.kv_heads(), mine);
          });
          all.Merge(mine);
        });
    return all.Result(name_);
  }

 private:
  Attention(const char* name, PagedAttentionPlan plan,
            const AttentionLengths& lengths)
      : name_(name), plan_(std::move(plan)), lengths_(lengths) {}

  static absl::StatusOr<std::unique_ptr<Op>> Create(
      const char* name, const AttentionLengths& lengths, const KvLayoutSpec& kv,
      AttentionSpec spec) {
    QUERN_ASSIGN_OR_RETURN(spec.kv, KvLayout::Create(kv));
    QUERN_ASSIGN_OR_RETURN(PagedAttentionPlan plan,
                           PagedAttentionPlan::Create(spec));
    auto op = absl::WrapUnique(new Attention(name, std::move(plan), lengths));
    // 2^12 * 2^24 tokens of 2^24 elements do not fit: every product above is
    // of numbers that fit, this one bounds the rest.
    int64_t bytes = 0;
    if (!CheckedMul(op->num_pages(), spec.kv.page_bytes(), &bytes) ||
        bytes > std::numeric_limits<int64_t>::max() / 8) {
      return InvalidArgument(name, "the cache exceeds 2^60 bytes");
    }
    return std::unique_ptr<Op>(std::move(op));
  }

  const AttentionSpec& spec() const { return plan_.spec(); }
  int64_t dim() const { return spec().kv.head_dim(); }
  // What a stored element is to be multiplied by.
  double kv_scale() const {
    return spec().kv.dtype() == DType::kI8 ? static_cast<double>(scale_) : 1;
  }
  int64_t v_dim() const { return spec().kv.v_head_dim(); }
  bool in_blocks() const { return spec().kv.scaling() == KvScaling::kPerBlock; }
  int64_t pages_per_sequence() const {
    return DivCeil(lengths_.kv_len, spec().kv.page_size());
  }
  int64_t num_pages() const { return lengths_.batch * pages_per_sequence(); }
  int64_t cache_bytes() const { return num_pages() * spec().kv.page_bytes(); }
  // Bytes of q, or of out.
  int64_t RowBytes(int64_t dim) const {
    return lengths_.batch * lengths_.q_len * spec().q_heads * dim *
           static_cast<int64_t>(SizeOf(spec().q_dtype));
  }
  AnyTensorView Heads(void* data, int64_t dim) const {
    return AnyTensorView(spec().q_dtype, data, 3,
                         {lengths_.batch * lengths_.q_len, spec().q_heads, dim},
                         {spec().q_heads * dim, dim, 1});
  }
  KvCacheView Cache(int64_t set) {
    KvCacheView cache(spec().kv, num_pages(), cache_.at(set));
    if (spec().kv.scaling() == KvScaling::kPerTensor) {
      cache.set_scales({&scale_, 0, 0}, {&scale_, 0, 0});
    }
    return cache;
  }
  PagedAttentionArgs MakeArgs(int64_t set) {
    PagedAttentionArgs args;
    args.q = Heads(q_.at(set), dim());
    args.kv = Cache(set);
    args.pages = pages_;
    args.schedule = schedule_;
    args.out = Heads(out_.at(set), v_dim());
    return args;
  }

  // The query heads of one key/value head of one token.
  template <typename T>
  void CheckHead(int64_t token, int64_t kv_head, Verdict& verdict) {
    ReferenceAttentionSpec reference;
    const int64_t sequence = token / lengths_.q_len;
    reference.q_len = 1;
    const int64_t query = token % lengths_.q_len;
    reference.kv_len = lengths_.KeysOf(query);
    reference.q_heads = spec().group();
    reference.head_dim = dim();
    reference.v_head_dim = v_dim();
    reference.scale = 1 / std::sqrt(static_cast<double>(dim()));
    reference.window = spec().window_left + 1;
    reference.soft_cap = static_cast<double>(spec().soft_cap);

    const KvCacheView cache = Cache(0);
    std::vector<double> q, k, v;
    const int64_t row = token * spec().q_heads + kv_head * spec().group();
    for (int64_t d = 0; d < spec().group() * dim(); ++d) {
      q.push_back(ToDouble(q_.at<T>(0)[row * dim() + d]));
    }
    const int64_t page_size = spec().kv.page_size();
    for (int64_t t = 0; t <= lengths_.kv_len - lengths_.q_len + query; ++t) {
      if (!lengths_.Sees(query, t)) continue;
      const int64_t slot = pages_.Slot(sequence, t);
      AppendStored(cache, slot / page_size, kv_head, slot % page_size,
                   kv_scale(), k, v);
    }
    const ReferenceAttentionResult want =
        ReferenceAttention(reference, q, k, v);
    const double bound = AttentionErrorBound(reference, spec().out_dtype);
    for (int64_t d = 0; d < spec().group() * v_dim(); ++d) {
      const int64_t at = row * v_dim() + d;
      verdict.Add(at, ToDouble(out_.at<T>(0)[at]),
                  want.out[static_cast<size_t>(d)], bound);
    }
  }

  const char* name_;
  PagedAttentionPlan plan_;
  AttentionLengths lengths_;
  float scale_ = 1.0f / 127;  // of int8
  SetBuffer cache_, q_, out_;
  PageTableStorage page_storage_;
  PageTable pages_;
  SharedPrefixStorage prefix_storage_;
  AttentionScheduleStorage schedule_storage_;
  AttentionSchedule schedule_;
  AlignedBuffer workspace_;
};

}  // namespace

OpEntry AttentionOp() {
  return {"attention",
          "causal attention over a paged KV cache; decode where q_len is 1",
          {{"dtype", "bf16", "f32, bf16 or f16, of q and out"},
           {"kv", "bf16", "of the cache: also i8, f8e4m3 and f8e5m2"},
           {"batch", "1", "sequences"},
           {"q_len", "1", "new tokens of each, the last of its kv_len"},
           {"kv_len", "4096", "tokens of each"},
           {"q_heads", "32", "a multiple of kv_heads"},
           {"kv_heads", "8", "key/value heads"},
           {"head_dim", "128", "elements of a head"},
           {"page_size", "128", "tokens of a page"},
           {"window", "0", "keys that a query sees; 0: all before it"},
           {"softcap", "0", "of the logits; 0: none"},
           {"prefix", "0",
            "tokens that all share, of whole pages and chunks of 256"},
           {"tree", "0",
            "0, or the q_len tokens are drafts, of which so many follow each"}},
          &Attention::Create};
}

OpEntry MlaOp() {
  return {"mla",
          "multi-head latent attention, absorbed, over a paged latent cache",
          {{"dtype", "bf16", "f32, bf16 or f16, of q and out"},
           {"batch", "1", "sequences"},
           {"q_len", "1", "new tokens of each, the last of its kv_len"},
           {"kv_len", "4096", "tokens of each"},
           {"heads", "16", "query heads"},
           {"latent_dim", "512", "elements of a latent, which is the value"},
           {"rope_dim", "64", "elements of a key behind them"},
           {"page_size", "128", "tokens of a page, a multiple of 16"},
           LatentCacheKey(),
           {"tree", "0",
            "0, or the q_len tokens are drafts, of which so many follow each"}},
          &Attention::CreateMla};
}

}  // namespace quern
