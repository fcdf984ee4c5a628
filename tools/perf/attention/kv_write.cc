#include "quern/tools/perf/attention/kv_write.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
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
#include "quern/cache/write_kv.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

constexpr DType kStored[] = {DType::kF32, DType::kBF16,   DType::kF16,
                             DType::kI8,  DType::kF8E4M3, DType::kF8E5M2};
constexpr absl::string_view kLayouts[] = {"auto", "plain", "paired"};
constexpr absl::string_view kScalings[] = {"auto", "none", "per_tensor",
                                           "per_head", "per_token_head"};
constexpr absl::string_view kRotations[] = {"none", "halves", "pairs"};
constexpr int64_t kMaxPositions = 4096;
constexpr int64_t kMaxDim = 1 << 16;

absl::StatusOr<KvLayoutSpec> ParseLayout(const Args& args) {
  KvLayoutSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.dtype, args.Type("kv", kStored));
  QUERN_ASSIGN_OR_RETURN(spec.kv_heads, args.Int("kv_heads", 1, 4096));
  QUERN_ASSIGN_OR_RETURN(spec.head_dim, args.Int("head_dim", 1, kMaxDim));
  QUERN_ASSIGN_OR_RETURN(spec.page_size, args.Int("page_size", 1, 1 << 20));
  QUERN_ASSIGN_OR_RETURN(const std::string layout,
                         args.Choice("layout", kLayouts));
  if (layout == "plain") spec.form = KvForm::kPlain;
  if (layout == "paired") spec.form = KvForm::kPaired;
  QUERN_ASSIGN_OR_RETURN(const std::string scaling,
                         args.Choice("scaling", kScalings));
  for (const KvScaling s :
       {KvScaling::kPerTensor, KvScaling::kPerHead, KvScaling::kPerTokenHead}) {
    if (scaling == KvScalingName(s)) spec.scaling = s;
  }
  if (scaling == "auto" && SizeOf(spec.dtype) == 1) {
    spec.scaling = KvScaling::kPerTokenHead;
  }
  return spec;
}

// `batch` sequences, of equal shares of the tokens, each from `start` on.
struct Shape {
  int64_t tokens = 0;
  int64_t batch = 0;
  int64_t start = 0;
};

class KvWrite final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    WriteKvSpec spec;
    Shape shape;
    QUERN_ASSIGN_OR_RETURN(shape.tokens, args.Int("tokens", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(shape.batch, args.Int("batch", 1, shape.tokens));
    QUERN_ASSIGN_OR_RETURN(shape.start, args.Int("start", 0, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(spec.input, args.Type("dtype", kFloatDTypes));
    QUERN_ASSIGN_OR_RETURN(const KvLayoutSpec layout, ParseLayout(args));
    QUERN_ASSIGN_OR_RETURN(spec.kv, KvLayout::Create(layout));
    QUERN_ASSIGN_OR_RETURN(const std::string rotation,
                           args.Choice("rotation", kRotations));
    if (rotation != "none") {
      spec.rotation =
          rotation == "pairs" ? KvRotation::kPairs : KvRotation::kHalves;
      spec.rot_dim = layout.head_dim;
    }
    QUERN_ASSIGN_OR_RETURN(WriteKvPlan plan, WriteKvPlan::Create(spec));
    auto op = absl::WrapUnique(new KvWrite(std::move(plan), shape));
    int64_t bytes = 0;
    if (!CheckedMul(op->num_pages(), spec.kv.page_bytes(), &bytes) ||
        bytes > std::numeric_limits<int64_t>::max() / 8) {
      return InvalidArgument("kv_write", "the cache exceeds 2^60 bytes");
    }
    return std::unique_ptr<Op>(std::move(op));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat(
        "tokens=", shape_.tokens, " batch=", shape_.batch,
        " kv_heads=", layout().kv_heads(), " head_dim=", dim(),
        " page_size=", layout().page_size(), " ", KvFormName(layout().form()),
        " scaling=", KvScalingName(layout().scaling()));
    if (rotated()) absl::StrAppend(&info.shape, " rotated");
    info.dtype =
        absl::StrCat(DTypeName(input()), "->", DTypeName(layout().dtype()));
    info.isa = plan_.target();
    // Keys and values.
    const double rows =
        2 * static_cast<double>(shape_.tokens * layout().kv_heads());
    const bool own = layout().scaling() == KvScaling::kPerTokenHead;
    info.SetTraffic(rows * static_cast<double>(dim()) *
                        static_cast<double>(SizeOf(input())),
                    rows * (static_cast<double>(dim()) *
                                static_cast<double>(SizeOf(layout().dtype())) +
                            (own ? sizeof(float) : 0)));
    return info;
  }

  int64_t set_bytes() const override {
    return 2 * rows_bytes() + cache_bytes();
  }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(k_.Create(sets, rows_bytes()));
    QUERN_RETURN_IF_ERROR(v_.Create(sets, rows_bytes()));
    QUERN_RETURN_IF_ERROR(cache_.Create(sets, cache_bytes()));
    WithType(input(), [this](auto type) {
      FillReals<decltype(type)>(-1, 1, k_);
      FillReals<decltype(type)>(-1, 1, v_);
    });
    scales_.assign(static_cast<size_t>(layout().kv_heads()), 1.0f / 64);
    const int64_t half = plan_.spec().rot_dim / 2;
    for (int64_t i = 0; i < kMaxPositions * half; ++i) {
      const auto angle = static_cast<double>(i % 8191) * 1e-3;
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
    // Pages in an order that no prefetcher guesses.
    std::vector<int64_t> pages(static_cast<size_t>(num_pages()));
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i] = static_cast<int64_t>(i);
    }
    uint64_t state = 1;
    for (size_t i = pages.size(); i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(pages[i - 1], pages[(state >> 33) % i]);
    }
    const int64_t page_size = layout().page_size();
    for (int64_t t = 0; t < shape_.tokens; ++t) {
      const int64_t sequence = t / each();
      const int64_t at = shape_.start % page_size + t % each();
      const int64_t page = pages[static_cast<size_t>(
          sequence * pages_of_sequence() + at / page_size)];
      slots_.push_back(page * page_size + at % page_size);
      positions_.push_back((shape_.start + t % each()) % kMaxPositions);
    }
    return plan_.CheckArgs(MakeArgs(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(MakeArgs(set), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    Verdict all;
    executor.ParallelFor(shape_.tokens, [&](int64_t token, int) {
      Verdict mine;
      WithType(layout().dtype(), [&](auto type) {
        for (int64_t head = 0; head < layout().kv_heads(); ++head) {
          CheckRow<decltype(type)>(token, head, /*value=*/false, mine);
          CheckRow<decltype(type)>(token, head, /*value=*/true, mine);
        }
      });
      all.Merge(mine);
    });
    return all.Result("kv_write");
  }

 private:
  KvWrite(WriteKvPlan plan, const Shape& shape)
      : plan_(std::move(plan)), shape_(shape) {}

  const KvLayout& layout() const { return plan_.spec().kv; }
  DType input() const { return plan_.spec().input; }
  bool rotated() const { return plan_.spec().rotation != KvRotation::kNone; }
  int64_t dim() const { return layout().head_dim(); }
  int64_t each() const { return DivCeil(shape_.tokens, shape_.batch); }
  int64_t pages_of_sequence() const {
    return DivCeil(shape_.start % layout().page_size() + each(),
                   layout().page_size());
  }
  int64_t num_pages() const { return shape_.batch * pages_of_sequence(); }
  int64_t cache_bytes() const { return num_pages() * layout().page_bytes(); }
  int64_t rows_bytes() const {
    return shape_.tokens * layout().kv_heads() * dim() *
           static_cast<int64_t>(SizeOf(input()));
  }

  WriteKvArgs MakeArgs(int64_t set) {
    const auto rows = [&](SetBuffer& buffer) {
      return AnyTensorView(input(), static_cast<const void*>(buffer.at(set)), 3,
                           {shape_.tokens, layout().kv_heads(), dim()},
                           {layout().kv_heads() * dim(), dim(), 1});
    };
    WriteKvArgs args;
    args.k = rows(k_);
    args.v = rows(v_);
    args.slots = slots_;
    args.cache = KvCacheView(layout(), num_pages(), cache_.at(set));
    if (layout().scaling() != KvScaling::kPerTokenHead) {
      args.cache.set_scales({scales_.data(), 0, 1}, {scales_.data(), 0, 1});
    }
    if (rotated()) {
      const int64_t half = plan_.spec().rot_dim / 2;
      args.positions = positions_;
      args.cos = DenseMatrix<const float>(cos_.data(), kMaxPositions, half);
      args.sin = DenseMatrix<const float>(sin_.data(), kMaxPositions, half);
    }
    return args;
  }

  // What is stored of a row, before it is rounded.
  std::vector<double> Wanted(int64_t token, int64_t head, bool value) {
    std::vector<double> row;
    WithType(input(), [&](auto type) {
      const auto* x = (value ? v_ : k_).template at<decltype(type)>(0) +
                      (token * layout().kv_heads() + head) * dim();
      for (int64_t d = 0; d < dim(); ++d) row.push_back(ToDouble(x[d]));
    });
    if (value || !rotated()) return row;
    const size_t half = row.size() / 2;
    const bool pairs = plan_.spec().rotation == KvRotation::kPairs;
    const auto position =
        static_cast<size_t>(positions_[static_cast<size_t>(token)]);
    for (size_t j = 0; j < half; ++j) {
      double& a = row[pairs ? 2 * j : j];
      double& b = row[pairs ? 2 * j + 1 : j + half];
      const double c = double{cos_[position * half + j]};
      const double s = double{sin_[position * half + j]};
      const double turned = a * c - b * s;
      b = b * c + a * s;
      a = turned;
    }
    return row;
  }

  // Half a unit of the stored type, in units of the scale; and the roundings of
  // the rotation and of the product, in f32. Values are below 2.
  template <typename T>
  double Bound(double x, double scale) const {
    constexpr double kF32 = 0x1p-21;
    double unit = 0.5;
    if constexpr (IsFloatStorage<T>) unit = RoundingBound<T>(x / scale);
    return unit * scale * (1 + 0x1p-6) + kF32;
  }

  template <typename T>
  void CheckRow(int64_t token, int64_t head, bool value, Verdict& verdict) {
    const WriteKvArgs args = MakeArgs(0);
    const int64_t slot = slots_[static_cast<size_t>(token)];
    const int64_t page = slot / layout().page_size();
    const int64_t offset = slot % layout().page_size();
    const float* scales =
        value ? args.cache.VScales(page, head) : args.cache.KScales(page, head);
    const bool own = layout().scaling() == KvScaling::kPerTokenHead;
    const double scale =
        scales == nullptr ? 1.0 : double{scales[own ? offset : 0]};
    const auto* block = reinterpret_cast<const T*>(
        value ? args.cache.V(page, head) : args.cache.K(page, head));
    const double most =
        layout().scaling() == KvScaling::kNone
            ? std::numeric_limits<double>::infinity()
            : scale * (layout().dtype() == DType::kI8 ? 127.0 : 448.0);
    const std::vector<double> row = Wanted(token, head, value);
    for (int64_t d = 0; d < dim(); ++d) {
      const double x = std::clamp(row[static_cast<size_t>(d)], -most, most);
      const T code = block[value ? layout().VOffset(offset, d)
                                 : layout().KOffset(offset, d)];
      verdict.Add((token * layout().kv_heads() + head) * dim() + d,
                  ToDouble(code) * scale, x, Bound<T>(x, scale));
    }
  }

  WriteKvPlan plan_;
  Shape shape_;
  SetBuffer k_, v_, cache_;
  std::vector<float> scales_, cos_, sin_;
  std::vector<int64_t> slots_, positions_;
};

}  // namespace

OpEntry KvWriteOp() {
  return {"kv_write",
          "new keys and values to their slots of a paged KV cache",
          {{"tokens", "4096", "new tokens"},
           {"batch", "1", "sequences that they belong to, in equal shares"},
           {"start", "0", "tokens that each has already"},
           {"kv_heads", "8", "key/value heads"},
           {"head_dim", "128", "elements of a head"},
           {"page_size", "128", "tokens of a page"},
           {"dtype", "bf16", "of k and v: f32, bf16 or f16"},
           {"kv", "bf16", "of the cache: f32, bf16, f16, i8, f8e4m3, f8e5m2"},
           {"layout", "auto", "auto, plain or paired"},
           {"scaling", "auto",
            "none, per_tensor, per_head, per_token_head; auto: the last, where "
            "elements are of one byte"},
           {"rotation", "none", "of keys: none, halves or pairs"}},
          &KvWrite::Create};
}

}  // namespace quern
