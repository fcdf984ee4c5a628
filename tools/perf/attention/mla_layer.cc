#include "quern/tools/perf/attention/mla_layer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/latent_blocks_testutil.h"
#include "quern/cache/page_table.h"
#include "quern/cache/write_kv.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/mla/reference_mla_testutil.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/testing/errors/rounding_error.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/attention/latent_cache.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/row_util.h"

namespace quern {
namespace {

constexpr char kOp[] = "mla_layer";
constexpr double kBase = 10000;

// A dense matrix [n, k] of random reals whose products with rows of ones are
// about 1.
struct Dense {
  absl::Status Create(DType dtype, int64_t rows, int64_t cols, double size) {
    n = rows;
    k = cols;
    type = dtype;
    QUERN_RETURN_IF_ERROR(
        data.Create(1, n * k * static_cast<int64_t>(SizeOf(dtype))));
    WithType(dtype, [&](auto t) { FillReals<decltype(t)>(-size, size, data); });
    return absl::OkStatus();
  }
  absl::Status CreateWeights(DType dtype, int64_t rows, int64_t cols) {
    return Create(dtype, rows, cols,
                  std::sqrt(3.0 / static_cast<double>(cols)));
  }
  AnyTensorView view() {
    return AnyTensorView(type, static_cast<const void*>(data.at(0)), 2, {n, k},
                         {k, 1});
  }
  std::vector<double> doubles() { return Doubles(type, data, 0, n * k); }
  absl::StatusOr<LinearWeights> Pack(Executor& executor) {
    LinearWeightsSpec spec;
    spec.n = n;
    spec.k = k;
    spec.format = FormatOfFloats(type);
    LinearSource source;
    source.codes = view();
    return LinearWeights::Pack(spec, {source}, executor);
  }

  SetBuffer data;
  int64_t n = 0, k = 0;
  DType type = DType::kF32;
};

// Working sets have weights and caches of their own, of equal values.
class MlaLayer final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = absl::WrapUnique(new MlaLayer);
    QUERN_RETURN_IF_ERROR(op->Parse(args));
    return std::unique_ptr<Op>(std::move(op));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat(
        "batch=", batch_, " q_len=", q_len_, " kv_len=", kv_len_,
        " heads=", spec_.heads, " hidden=", spec_.hidden,
        " q_lora=", spec_.q_lora, " kv_lora=", spec_.kv_lora,
        " nope=", spec_.nope, " rope=", spec_.rope,
        " v_head_dim=", spec_.v_head_dim, direct() ? " direct" : " absorbed",
        in_blocks() ? " kv=f8e4m3" : "");
    info.dtype = std::string(DTypeName(spec_.dtype));
    if (!plans_.empty()) info.isa = plans_[0].target();
    info.SetTraffic(
        static_cast<double>(WeightBytes() + CacheBytes() + RowsBytes()),
        static_cast<double>(RowsBytes()));
    info.flops = 2 * MultiplyAdds();
    info.peak_kind = PeakKindOf(spec_.dtype);
    return info;
  }
  int64_t set_bytes() const override {
    return WeightBytes() + CacheBytes() + 2 * RowsBytes();
  }
  int64_t max_sets() const override { return 32; }

  absl::Status Setup(int64_t sets, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(MakeSources());
    for (int64_t set = 0; set < sets; ++set) {
      MlaWeights weights;
      if (spec_.q_lora > 0) {
        QUERN_ASSIGN_OR_RETURN(weights.q_a, q_a_.Pack(executor));
      }
      QUERN_ASSIGN_OR_RETURN(weights.q, q_.Pack(executor));
      QUERN_ASSIGN_OR_RETURN(weights.kv_a, kv_a_.Pack(executor));
      QUERN_ASSIGN_OR_RETURN(weights.out, o_.Pack(executor));
      QUERN_RETURN_IF_ERROR(PackKvB(spec_, kv_b_.view(), executor, weights));
      QUERN_ASSIGN_OR_RETURN(MlaPlan plan,
                             MlaPlan::Create(spec_, weights, executor));
      plans_.push_back(std::move(plan));
    }
    RotaryEmbeddingSpec rope;
    rope.head_dim = rope.rot_dim = spec_.rope;
    rope.max_positions = kv_len_;
    rope.base = kBase;
    rope.style = RotaryStyle::kPairs;
    rope.dtype = spec_.dtype;
    QUERN_ASSIGN_OR_RETURN(RotaryEmbeddingPlan rotary,
                           RotaryEmbeddingPlan::Create(rope));
    rope_ = std::make_unique<RotaryEmbeddingPlan>(std::move(rotary));
    QUERN_RETURN_IF_ERROR(BuildSchedule(executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(
        const int64_t bytes,
        plans_[0].WorkspaceBytes(schedule_, executor.num_workers()));
    QUERN_ASSIGN_OR_RETURN(memory_, AlignedBuffer::Create(bytes));
    QUERN_RETURN_IF_ERROR(x_.Create(sets, RowsBytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, RowsBytes()));
    QUERN_RETURN_IF_ERROR(
        cache_.Create(sets, pages() * spec_.cache.page_bytes()));
    WithType(spec_.dtype,
             [this](auto type) { FillReals<decltype(type)>(-1, 1, x_); });
    for (int64_t set = 0; set < sets; ++set) {
      QUERN_RETURN_IF_ERROR(FillCache(set, executor));
    }
    return plans_[0].CheckArgs(ArgsOf(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plans_[static_cast<size_t>(set)].Execute(ArgsOf(set), Workspace(memory_),
                                             executor);
  }

  // The last token of the first sequence.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    const ReferenceMla reference(
        spec_,
        {spec_.q_lora > 0 ? q_a_.doubles() : std::vector<double>(),
         q_.doubles(), kv_a_.doubles(), kv_b_.doubles(), o_.doubles(),
         spec_.q_lora > 0 ? q_norm_.doubles() : std::vector<double>(),
         kv_norm_.doubles()},
        RotaryStyle::kPairs, kBase);
    const int64_t context = kv_len_ - q_len_;
    std::vector<ReferenceMlaKey> keys(static_cast<size_t>(kv_len_));
    executor.ParallelFor(kv_len_, [&](int64_t t, int) {
      keys[static_cast<size_t>(t)] =
          t < context ? ReferenceMla::Cached(ContextRow(t))
                      : reference.Key(Row(x_, t - context), t, direct());
    });
    const BoundedRow want =
        reference.Token(direct(), Row(x_, q_len_ - 1), kv_len_ - 1, keys);
    const std::vector<double> got = Row(out_, q_len_ - 1);
    RoundingError error;
    for (size_t i = 0; i < got.size(); ++i) {
      error.Add(got[i], want[i].value, want[i].rounded - want[i].value);
    }
    const std::string complaint = error.Complaint();
    if (complaint.empty()) return error.largest();
    return absl::InternalError(absl::StrCat(kOp, ": ", complaint));
  }

 private:
  absl::Status Parse(const Args& args) {
    QUERN_ASSIGN_OR_RETURN(batch_, args.Int("batch", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(q_len_, args.Int("q_len", 1, 1 << 16));
    QUERN_ASSIGN_OR_RETURN(kv_len_, args.Int("kv_len", 0, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(spec_.heads, args.Int("heads", 1, 1024));
    QUERN_ASSIGN_OR_RETURN(spec_.hidden, args.Int("hidden", 1, 1 << 16));
    QUERN_ASSIGN_OR_RETURN(spec_.q_lora, args.Int("q_lora", 0, 1 << 16));
    QUERN_ASSIGN_OR_RETURN(spec_.kv_lora, args.Int("kv_lora", 4, 1 << 16));
    QUERN_ASSIGN_OR_RETURN(spec_.nope, args.Int("nope", 1, 1 << 12));
    QUERN_ASSIGN_OR_RETURN(spec_.rope, args.Int("rope", 2, 1 << 12));
    QUERN_ASSIGN_OR_RETURN(spec_.v_head_dim,
                           args.Int("v_head_dim", 1, 1 << 12));
    QUERN_ASSIGN_OR_RETURN(spec_.dtype, args.Type("dtype", kFloatDTypes));
    spec_.norm_dtype = spec_.dtype;
    constexpr absl::string_view kForms[] = {"auto", "absorbed", "direct"};
    QUERN_ASSIGN_OR_RETURN(const std::string form, args.Choice("form", kForms));
    if (form == kForms[1]) spec_.form = MlaForm::kAbsorbed;
    if (form == kForms[2]) spec_.form = MlaForm::kDirect;
    if (kv_len_ == 0) kv_len_ = q_len_;
    if (kv_len_ < q_len_) {
      return InvalidArgument(kOp, "kv_len=", kv_len_,
                             "; need at least q_len=", q_len_,
                             ", or 0 for a prompt");
    }
    KvLayoutSpec layout;
    layout.dtype = spec_.dtype;
    layout.kv_heads = 1;
    layout.head_dim = spec_.latent_row();
    layout.v_head_dim = spec_.kv_lora;
    layout.page_size = 32;
    layout.form = KvForm::kLatent;
    QUERN_RETURN_IF_ERROR(ParseLatentCache(args, layout));
    QUERN_ASSIGN_OR_RETURN(spec_.cache, KvLayout::Create(layout));
    return CheckMlaSpec(spec_);
  }

  bool direct() const { return UsesDirectForm(spec_, q_len_, kv_len_); }
  int64_t tokens() const { return batch_ * q_len_; }
  int64_t sequence_pages() const {
    return DivCeil(kv_len_, spec_.cache.page_size());
  }
  int64_t pages() const { return batch_ * sequence_pages(); }
  int64_t Bytes(int64_t elements) const {
    return elements * static_cast<int64_t>(SizeOf(spec_.dtype));
  }
  int64_t RowsBytes() const { return Bytes(tokens() * spec_.hidden); }
  int64_t CacheBytes() const {
    return batch_ * kv_len_ *
           (in_blocks() ? spec_.cache.token_bytes()
                        : Bytes(spec_.latent_row()));
  }
  bool in_blocks() const { return spec_.cache.dtype() == DType::kF8E4M3; }
  // Elements of the matrices that a call reads, each once.
  int64_t Weights() const {
    const int64_t q = spec_.heads * spec_.head_dim();
    return (spec_.q_lora > 0 ? spec_.q_lora * (spec_.hidden + q)
                             : q * spec_.hidden) +
           spec_.latent_row() * spec_.hidden +
           spec_.heads * (spec_.nope + spec_.v_head_dim) * spec_.kv_lora +
           spec_.heads * spec_.v_head_dim * spec_.hidden;
  }
  int64_t WeightBytes() const { return Bytes(Weights()); }
  double MultiplyAdds() const {
    const double pairs =
        static_cast<double>(tokens()) *
        (static_cast<double>(kv_len_) - (static_cast<double>(q_len_) - 1) / 2);
    const int64_t pair = direct() ? spec_.head_dim() + spec_.v_head_dim
                                  : spec_.latent_row() + spec_.kv_lora;
    return static_cast<double>(tokens()) * static_cast<double>(Weights()) +
           pairs * static_cast<double>(spec_.heads * pair);
  }

  absl::Status MakeSources() {
    const DType t = spec_.dtype;
    const int64_t q = spec_.heads * spec_.head_dim();
    if (spec_.q_lora > 0) {
      QUERN_RETURN_IF_ERROR(q_a_.CreateWeights(t, spec_.q_lora, spec_.hidden));
      QUERN_RETURN_IF_ERROR(q_norm_.Create(t, 1, spec_.q_lora, 1));
    }
    QUERN_RETURN_IF_ERROR(
        q_.CreateWeights(t, q, spec_.q_lora > 0 ? spec_.q_lora : spec_.hidden));
    QUERN_RETURN_IF_ERROR(
        kv_a_.CreateWeights(t, spec_.latent_row(), spec_.hidden));
    QUERN_RETURN_IF_ERROR(kv_b_.CreateWeights(
        t, spec_.heads * (spec_.nope + spec_.v_head_dim), spec_.kv_lora));
    QUERN_RETURN_IF_ERROR(
        o_.CreateWeights(t, spec_.hidden, spec_.heads * spec_.v_head_dim));
    QUERN_RETURN_IF_ERROR(kv_norm_.Create(t, 1, spec_.kv_lora, 1));
    return context_.Create(t, std::max<int64_t>(kv_len_ - q_len_, 1),
                           spec_.latent_row(), 1);
  }

  absl::Status BuildSchedule(int workers) {
    std::vector<int32_t> ids(static_cast<size_t>(sequence_pages()));
    for (int64_t s = 0; s < batch_; ++s) {
      std::iota(ids.begin(), ids.end(),
                static_cast<int32_t>(s * sequence_pages()));
      table_.Append(ids);
      for (int64_t i = 0; i < q_len_; ++i) {
        positions_.push_back(kv_len_ - q_len_ + i);
      }
    }
    QUERN_ASSIGN_OR_RETURN(const PageTable pages_of,
                           table_.Build(spec_.cache.page_size(), pages()));
    const std::vector<int64_t> q_lens(static_cast<size_t>(batch_), q_len_);
    const std::vector<int64_t> kv_lens(static_cast<size_t>(batch_), kv_len_);
    QUERN_ASSIGN_OR_RETURN(
        schedule_, MlaSchedule::Build(spec_, {q_lens, kv_lens, pages_of},
                                      workers, storage_));
    return absl::OkStatus();
  }

  // Every sequence has the same context.
  absl::Status FillCache(int64_t set, Executor& executor) {
    WriteKvSpec spec;
    spec.kv = spec_.cache;
    spec.input = spec_.dtype;
    QUERN_ASSIGN_OR_RETURN(const WriteKvPlan write, WriteKvPlan::Create(spec));
    const int64_t count = kv_len_ - q_len_, row = spec_.latent_row();
    std::vector<int64_t> slots(static_cast<size_t>(count));
    const auto part = [&](int64_t from, int64_t dim) {
      return AnyTensorView(
          spec_.dtype,
          static_cast<const void*>(context_.data.at(0) + Bytes(from)), 3,
          {count, 1, dim}, {row, dim, 1});
    };
    for (int64_t s = 0; s < batch_ && count > 0; ++s) {
      std::iota(slots.begin(), slots.end(),
                s * sequence_pages() * spec_.cache.page_size());
      WriteKvArgs args;
      args.k = part(0, spec_.kv_lora);
      args.v = part(spec_.kv_lora, spec_.rope);
      args.slots = slots;
      args.cache = KvCacheView(spec_.cache, pages(), cache_.at(set));
      QUERN_RETURN_IF_ERROR(write.CheckArgs(args));
      write.Execute(args, executor);
    }
    return absl::OkStatus();
  }

  // A latent of the context, as the first sequence's cache has it.
  std::vector<double> ContextRow(int64_t token) {
    if (!in_blocks()) {
      return Doubles(spec_.dtype, context_.data, token * spec_.latent_row(),
                     spec_.latent_row());
    }
    const int64_t page_size = spec_.cache.page_size();
    return LatentRow(KvCacheView(spec_.cache, pages(), cache_.at(0)),
                     token / page_size, 0, token % page_size);
  }
  std::vector<double> Row(SetBuffer& buffer, int64_t row) {
    return Doubles(spec_.dtype, buffer, row * spec_.hidden, spec_.hidden);
  }
  static AnyTensorView Vector(Dense& row) {
    return AnyTensorView(row.type, static_cast<const void*>(row.data.at(0)), 1,
                         {row.k}, {1});
  }
  MlaArgs ArgsOf(int64_t set) {
    MlaArgs args;
    args.x = Matrix(spec_.dtype, x_.at(set), tokens(), spec_.hidden);
    args.positions = DenseVector<const int64_t>(positions_.data(), tokens());
    if (spec_.q_lora > 0) args.q_norm = Vector(q_norm_);
    args.kv_norm = Vector(kv_norm_);
    args.rope = rope_.get();
    args.cache = KvCacheView(spec_.cache, pages(), cache_.at(set));
    args.schedule = schedule_;
    args.out = Matrix(spec_.dtype, out_.at(set), tokens(), spec_.hidden);
    return args;
  }

  MlaSpec spec_;
  int64_t batch_ = 0, q_len_ = 0, kv_len_ = 0;
  Dense q_a_, q_, kv_a_, kv_b_, o_, q_norm_, kv_norm_;
  Dense context_;  // latents before the new tokens
  std::vector<MlaPlan> plans_;
  std::unique_ptr<RotaryEmbeddingPlan> rope_;
  std::vector<int64_t> positions_;
  PageTableStorage table_;
  MlaScheduleStorage storage_;
  MlaSchedule schedule_;
  SetBuffer x_, out_, cache_;
  AlignedBuffer memory_;
};

}  // namespace

OpEntry MlaLayerOp() {
  return {kOp,
          "a layer of multi-head latent attention, with its projections",
          {{"batch", "1", "sequences"},
           {"q_len", "1", "new tokens of each"},
           {"kv_len", "1024", "all tokens of each; 0: q_len, a prompt"},
           {"heads", "16", "query heads"},
           {"hidden", "2048", "columns of x and out"},
           {"q_lora", "0", "columns of q_a; 0: one projection of queries"},
           {"kv_lora", "512", "elements of a latent, a multiple of 4"},
           {"nope", "128", "elements of a query and key without rotation"},
           {"rope", "64", "rotated elements"},
           {"v_head_dim", "128", "elements of a value"},
           {"dtype", "bf16", "f32, bf16 or f16, of everything but the cache"},
           LatentCacheKey(),
           {"form", "auto", "auto, absorbed or direct"}},
          &MlaLayer::Create};
}

}  // namespace quern
