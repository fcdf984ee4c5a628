#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/sglang_pack.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/sglang_ops.h"
#include "quern/ops/registry/sglang_packed.h"
#include "quern/packing/sglang_layout.h"
#include "quern/packing/sglang_pack.h"
#include "quern/quant/s8s8_compensation.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;

constexpr char kPack[] = "convert_weight_packed";
// What SGLang calls the packing of one block.
constexpr char kPackVnni[] = "pack_vnni";
constexpr char kCompensation[] = "s8s8_compensation";
// SGLang packs from so many columns on.
constexpr int64_t kLeastColumns = 16;

// How the weights of an operator are packed.
struct Packing {
  SglangLayout layout;  // of one expert
  int64_t experts = 1;
  bool transposed = false;  // to f32[k, n] instead
};

absl::StatusOr<Packing> PackingOf(const char* op, const TensorMeta& weight) {
  const std::vector<int64_t>& w = weight.extents;
  if (w.size() != 2 && w.size() != 3) {
    return InvalidArgument(op, "weight has rank ", w.size(),
                           "; need [n, k] or [experts, n, k]");
  }
  Packing packing;
  if (w.size() == 3) packing.experts = w[0];
  const int64_t n = w[w.size() - 2];
  if (w.size() == 2 && n < kLeastColumns &&
      (weight.dtype == DType::kBF16 || weight.dtype == DType::kF16)) {
    packing.transposed = true;
    return packing;
  }
  const int64_t k = w.back() * (weight.dtype == DType::kU8 ? 2 : 1);
  const auto layout = SglangLayout::Create(weight.dtype, k, n);
  if (!layout.ok()) return OfOp(op, layout.status());
  packing.layout = *layout;
  return packing;
}

template <const char* kOp>
Metas PackShapes(const TensorMeta& weight) {
  QUERN_ASSIGN_OR_RETURN(const Packing packing, PackingOf(kOp, weight));
  if (packing.transposed) {
    return std::vector<TensorMeta>{
        {DType::kF32, {weight.extents[1], weight.extents[0]}}};
  }
  TensorMeta out = weight;
  if (packing.layout.has_compensation()) out.extents.back() += 4;
  return std::vector<TensorMeta>{out};
}

// The tensors are weight, out.
class BoundPack final : public BoundOp {
 public:
  // `op` is a literal.
  BoundPack(const char* op, const TensorMeta& weight, const TensorMeta& out,
            const Packing& packing, const SglangPackPlan& plan,
            std::optional<SglangInt8PackPlan> int8, bool native)
      : op_(op),
        weight_(weight),
        out_(out),
        packing_(packing),
        plan_(plan),
        int8_(std::move(int8)),
        native_(native) {}

  const char* target() const override {
    return native_ ? "scalar" : plan_.target();
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(op_, t, 2));
    QUERN_RETURN_IF_ERROR(
        CheckInput(op_, "weight", t[0], weight_.dtype, weight_.extents));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(op_, "out", t[1], out_.dtype, out_.extents));
    QUERN_RETURN_IF_ERROR(
        CheckElementsApart(op_, "weight", t[0], t[0].rank() - 2));
    int64_t want = 1;
    for (int d = t[1].rank(); d-- > 0;) {
      if (t[1].extent(d) > 1 && t[1].stride(d) != want) {
        return InvalidArgument(op_,
                               "out has gaps; need a dense tensor, as "
                               "blocks follow each other");
      }
      want *= t[1].extent(d);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t, int) const override {
    WorkspaceLayout layout;
    LayOut(layout);
    return layout.bytes();
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    const VectorView<int32_t> compensation = DenseVector(
        LayOut(workspace), int8_.has_value() ? packing_.layout.n() : 0);
    auto* const out = static_cast<uint8_t*>(t[1].mutable_data());
    for (int64_t e = 0; e < packing_.experts; ++e) {
      const AnyTensorView w = ExpertOf(t[0], e);
      uint8_t* const to = out + e * packing_.layout.bytes();
      if (native_) {
        PackOneByOne(w, to);
      } else if (int8_.has_value()) {
        int8_->Pack(w.As<const int8_t, 2>(), compensation, to, executor);
      } else {
        plan_.Pack(w, {}, to, executor);
      }
    }
  }

 private:
  template <typename Allocator>
  int32_t* LayOut(Allocator& a) const {
    return a.template Allocate<int32_t>(
        "compensation", int8_.has_value() ? packing_.layout.n() : 0);
  }
  static AnyTensorView ExpertOf(const AnyTensorView& w, int64_t e) {
    if (w.rank() == 2) return w;
    const auto step = w.extent(0) > 1 ? w.stride(0) : 0;
    const auto* const data = static_cast<const uint8_t*>(w.data()) +
                             e * step * static_cast<int64_t>(SizeOf(w.dtype()));
    return AnyTensorView(w.dtype(), static_cast<const void*>(data), 2,
                         {w.extent(1), w.extent(2)},
                         {w.stride(1), w.stride(2)});
  }

  void PackOneByOne(const AnyTensorView& w, uint8_t* to) const {
    const SglangLayout& layout = packing_.layout;
    const auto* const plain = static_cast<const uint8_t*>(w.data());
    const int64_t row_bytes =
        w.stride(0) * static_cast<int64_t>(SizeOf(w.dtype()));
    if (layout.dtype() != DType::kU8) {
      CopyToSglang(layout, plain, row_bytes, to);
    } else {
      PackNibbles(plain, row_bytes, to);
    }
    for (int64_t n = 0; layout.has_compensation() && n < layout.n(); ++n) {
      int32_t sum = 0;
      for (int64_t k = 0; k < layout.k(); ++k) {
        sum += static_cast<int8_t>(plain[n * row_bytes + k]);
      }
      sum *= 128;
      const int64_t block = n / SglangLayout::kBlockCols;
      std::memcpy(to + layout.block_offset(block) +
                      layout.compensation_offset() +
                      n % SglangLayout::kBlockCols * 4,
                  &sum, sizeof(sum));
    }
  }
  // A pair of k has 64 codes, two of each column. Those of the first 16 columns
  // go to the lower halves of 32 bytes, and the others to the upper halves.
  void PackNibbles(const uint8_t* plain, int64_t row_bytes, uint8_t* to) const {
    const SglangLayout& layout = packing_.layout;
    std::memset(to, 0, static_cast<size_t>(layout.bytes()));
    for (int64_t n = 0; n < layout.n(); ++n) {
      const int64_t c = n % SglangLayout::kBlockCols;
      uint8_t* const block =
          to + layout.block_offset(n / SglangLayout::kBlockCols);
      for (int64_t k = 0; k < layout.k(); ++k) {
        const int code =
            (plain[n * row_bytes + k / 2] >> (k % 2 != 0 ? 4 : 0)) & 15;
        const int64_t place = 2 * c + k % 2;
        uint8_t& byte = block[k / 2 * 32 + place % 32];
        byte = static_cast<uint8_t>(byte | code << (place < 32 ? 0 : 4));
      }
    }
  }

  const char* op_;
  TensorMeta weight_, out_;
  Packing packing_;
  SglangPackPlan plan_;
  std::optional<SglangInt8PackPlan> int8_;
  bool native_;
};

// f32[k, n] of w[n, k].
void Transpose(const AnyTensorView& w, const AnyTensorView& out) {
  for (int64_t n = 0; n < w.extent(0); ++n) {
    const ScalarRow from(w, n);
    for (int64_t k = 0; k < w.extent(1); ++k) {
      *out.As<float, 2>().At(k, n) = from[k];
    }
  }
}

template <const char* kOp, bool kNative>
Bound MakePack(const TensorMeta& weight) {
  QUERN_ASSIGN_OR_RETURN(const Packing packing, PackingOf(kOp, weight));
  QUERN_ASSIGN_OR_RETURN(const std::vector<TensorMeta> out,
                         PackShapes<kOp>(weight));
  if (packing.transposed) {
    if (!kNative) return Unimplemented(kOp, "n < 16 has the reference alone");
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar",
        [weight, out](Tensors t) -> absl::Status {
          QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 2));
          QUERN_RETURN_IF_ERROR(
              CheckInput(kOp, "weight", t[0], weight.dtype, weight.extents));
          QUERN_RETURN_IF_ERROR(CheckElementsApart(kOp, "weight", t[0]));
          return CheckOutput(kOp, "out", t[1], DType::kF32, out[0].extents);
        },
        [](Tensors t, Executor&) { Transpose(t[0], t[1]); }));
  }
  const auto plan = SglangPackPlan::Create(packing.layout);
  if (!plan.ok()) return OfOp(kOp, plan.status());
  std::optional<SglangInt8PackPlan> int8;
  if (packing.layout.has_compensation()) {
    const auto made =
        SglangInt8PackPlan::Create(packing.layout.k(), packing.layout.n());
    if (!made.ok()) return OfOp(kOp, made.status());
    int8 = *made;
  }
  return std::unique_ptr<BoundOp>(new BoundPack(
      kOp, weight, out[0], packing, *plan, std::move(int8), kNative));
}

absl::StatusOr<SglangLayout> PackedInt8Of(const TensorMeta& packed) {
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kCompensation, "packed", packed.dtype, {DType::kI8}));
  if (packed.extents.size() != 2 || packed.extents[1] < 4) {
    return InvalidArgument(kCompensation, "packed is not i8[n, k + 4]");
  }
  const auto layout = SglangLayout::Create(DType::kI8, packed.extents[1] - 4,
                                           packed.extents[0]);
  if (!layout.ok()) return OfOp(kCompensation, layout.status());
  return *layout;
}
Metas CompensationShapes(const TensorMeta& packed) {
  QUERN_RETURN_IF_ERROR(PackedInt8Of(packed).status());
  return std::vector<TensorMeta>{{DType::kI32, {packed.extents[0]}}};
}
template <bool kNative>
Bound MakeCompensation(const TensorMeta& packed) {
  QUERN_ASSIGN_OR_RETURN(const SglangLayout layout, PackedInt8Of(packed));
  const auto plan = S8S8CompensationPlan::Create({layout.k(), layout.n()});
  if (!plan.ok()) return OfOp(kCompensation, plan.status());
  return std::unique_ptr<BoundOp>(new BoundCalls(
      kNative ? "scalar" : plan->target(),
      [layout](Tensors t) -> absl::Status {
        QUERN_RETURN_IF_ERROR(CheckTensorCount(kCompensation, t, 2));
        QUERN_RETURN_IF_ERROR(CheckInput(kCompensation, "packed", t[0],
                                         DType::kI8,
                                         {layout.n(), layout.k() + 4}));
        QUERN_RETURN_IF_ERROR(CheckEqual(kCompensation, "row stride of packed",
                                         t[0].stride(0), layout.k() + 4,
                                         "a dense matrix has"));
        return CheckOutput(kCompensation, "out", t[1], DType::kI32,
                           {layout.n()});
      },
      [layout, plan = *plan](Tensors t, Executor& executor) {
        const auto* const packed = static_cast<const int8_t*>(t[0].data());
        const VectorView<int32_t> out = t[1].As<int32_t, 1>();
        if (!kNative) {
          plan.FromPanels({packed, SglangLayout::kBlockCols,
                           SglangLayout::kBlockCols * layout.col_bytes()},
                          out, executor);
          return;
        }
        for (int64_t n = 0; n < layout.n(); ++n) {
          int32_t sum = 0;
          for (int64_t k = 0; k < layout.k(); ++k) {
            sum += packed[SglangByte(layout, n, k)];
          }
          *out.At(n) = 128 * sum;
        }
      }));
}

NamedArgs PackExample(DType dtype) {
  // f32 stands for int8, as weights of f32 are not packed.
  return {{"weight",
           TensorMeta{dtype == DType::kF32 ? DType::kI8 : dtype, {32, 64}}}};
}
NamedArgs CompensationExample(DType) {
  return {{"packed", TensorMeta{DType::kI8, {32, 68}}}};
}
}  // namespace

absl::Status RegisterSglangPackOps(OpRegistry& r) {
  constexpr absl::string_view kSimd = "simd";
  constexpr absl::string_view kReference = OpRegistry::kReference;
  QUERN_RETURN_IF_ERROR(r.Define<&PackShapes<kPack>>(
      "convert_weight_packed(Tensor weight) -> Tensor", &PackExample,
      OpKind::kLayer));
  QUERN_RETURN_IF_ERROR((r.Add<&MakePack<kPack, false>>(kPack, kSimd)));
  QUERN_RETURN_IF_ERROR((r.Add<&MakePack<kPack, true>>(kPack, kReference)));
  QUERN_RETURN_IF_ERROR(r.Define<&PackShapes<kPackVnni>>(
      "pack_vnni(Tensor weight) -> Tensor", &PackExample, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR((r.Add<&MakePack<kPackVnni, false>>(kPackVnni, kSimd)));
  QUERN_RETURN_IF_ERROR(
      (r.Add<&MakePack<kPackVnni, true>>(kPackVnni, kReference)));
  QUERN_RETURN_IF_ERROR(r.Define<&CompensationShapes>(
      "s8s8_compensation(Tensor packed) -> Tensor", &CompensationExample,
      OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Add<&MakeCompensation<false>>(kCompensation, kSimd));
  return r.Add<&MakeCompensation<true>>(kCompensation, kReference);
}

}  // namespace quern
