#include "quern/tools/perf/registered/registered.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/registered/registered_check.h"

namespace quern {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;
constexpr int64_t kHeadDim = kRegisteredHeadDim;
constexpr int64_t kMaxPosition = kRegisteredMaxPosition;

int64_t BytesOf(const TensorMeta& meta) {
  int64_t bytes = static_cast<int64_t>(SizeOf(meta.dtype));
  for (const int64_t extent : meta.extents) bytes *= extent;
  return bytes;
}

absl::StatusOr<NamedArgs> ArgsOf(absl::string_view op, DType dtype,
                                 int64_t rows, int64_t hidden) {
  const TensorMeta x = {dtype, {rows, hidden}};
  const TensorMeta weight = {dtype, {hidden}};
  if (op == "fused_add_rms_norm") {
    return NamedArgs{{"x", x}, {"residual", x}, {"weight", weight}};
  }
  if (op == "rms_norm_gated") {
    return NamedArgs{{"x", x}, {"z", x}, {"weight", weight}};
  }
  if (op == "sigmoid_mul") return NamedArgs{{"x", x}, {"gate", x}};
  if (op == "mixer2_gated_rms_norm") {
    return NamedArgs{{"x", x}, {"gate", x}, {"weight", weight}};
  }
  if (op == "layer_norm") {
    return NamedArgs{{"x", x}, {"weight", weight}, {"bias", weight}};
  }
  if (op == "gemma_rms_norm" || op == "rms_norm_quant") {
    return NamedArgs{{"x", x}, {"weight", weight}};
  }
  if (op == "fused_add_rms_norm_quant") {
    return NamedArgs{{"x", x}, {"residual", x}, {"weight", weight}};
  }
  if (op == "rms_norm_static_quant") {
    return NamedArgs{{"x", x}, {"weight", weight}, {"scale", kRegisteredScale}};
  }
  if (op == "fused_add_rms_norm_static_quant") {
    return NamedArgs{{"x", x},
                     {"residual", x},
                     {"weight", weight},
                     {"scale", kRegisteredScale}};
  }
  if (op == "gather_rows") {
    return NamedArgs{{"x", TensorMeta{dtype, {kMaxPosition, hidden}}},
                     {"rows", TensorMeta{DType::kI32, {rows}}}};
  }
  if (op == "l2_norm" || op == "quant_fp8" || op == "quant_int8") {
    return NamedArgs{{"x", x}};
  }
  if (op == "static_quant_fp8") {
    return NamedArgs{{"x", x}, {"scale", TensorMeta{DType::kF32, {1, 1}}}};
  }
  if (op == "vocab_parallel_embedding") {
    return NamedArgs{{"ids", TensorMeta{DType::kI32, {rows}}},
                     {"weight", TensorMeta{dtype, {kMaxPosition, hidden}}}};
  }
  if (op == "logits_processor") {
    return NamedArgs{{"logits", x}, {"soft_cap", kRegisteredSoftCap}};
  }
  if (hidden % (4 * kHeadDim) != 0) {
    return InvalidArgument(op, "hidden=", hidden, "; need a multiple of ",
                           4 * kHeadDim, ", query heads of ", kHeadDim);
  }
  const int64_t heads = hidden / kHeadDim;
  const TensorMeta query = {dtype, {rows, heads, kHeadDim}};
  const TensorMeta key = {dtype, {rows, heads / 4, kHeadDim}};
  if (op == "apply_rotary_emb") {
    const TensorMeta table = {dtype, {rows, kHeadDim / 2}};
    return NamedArgs{{"x", query}, {"cos", table}, {"sin", table}};
  }
  if (op == "mrope") {
    return NamedArgs{{"positions", TensorMeta{DType::kI32, {3, rows}}},
                     {"query", query},
                     {"key", key},
                     {"max_position", kMaxPosition},
                     {"section_t", kRegisteredSections[0]},
                     {"section_h", kRegisteredSections[1]},
                     {"section_w", kRegisteredSections[2]}};
  }
  if (op == "dual_chunk_rotary_embedding") {
    return NamedArgs{{"positions", TensorMeta{DType::kI32, {rows}}},
                     {"query", query},
                     {"key", key},
                     {"max_position", kMaxPosition},
                     {"chunk_size", kRegisteredChunk},
                     {"local_size", kRegisteredLocal}};
  }
  return NamedArgs{{"positions", TensorMeta{DType::kI32, {rows}}},
                   {"query", query},
                   {"key", key},
                   {"max_position", kMaxPosition}};
}

// Tokens stand at neighbouring places, and those of each stream elsewhere, so
// that a stream taken for another gives wrong results.
int32_t PositionOf(int64_t t, int64_t rows) {
  return static_cast<int32_t>((3000 + t % rows + 401 * (t / rows)) %
                              kMaxPosition);
}

class Registered final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args,
                                                    Tamper tamper) {
    auto op = absl::WrapUnique(new Registered());
    op->tamper_ = std::move(tamper);
    op->name_ = std::string(args.op());
    QUERN_ASSIGN_OR_RETURN(op->rows_, args.Int("rows", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(op->hidden_, args.Int("hidden", 1, kMaxDim));
    QUERN_ASSIGN_OR_RETURN(op->dtype_, args.Type("dtype", kFloatDTypes));
    OpRegistry registry;
    QUERN_RETURN_IF_ERROR(RegisterAllOps(registry));
    QUERN_ASSIGN_OR_RETURN(
        const NamedArgs named,
        ArgsOf(op->name_, op->dtype_, op->rows_, op->hidden_));
    const OpDispatcher ops(registry, OpPolicy());
    QUERN_ASSIGN_OR_RETURN(op->fast_, ops.Make(op->name_, named));

    const OpSchema& schema = registry.Find(op->name_)->schema;
    QUERN_ASSIGN_OR_RETURN(const std::vector<OpArg> arranged,
                           ArrangeArgs(schema, named));
    for (size_t i = 0; i < arranged.size(); ++i) {
      if (const auto* meta = std::get_if<TensorMeta>(&arranged[i])) {
        op->tensors_.push_back({*meta, true, schema.params[i].mutated});
      }
    }
    QUERN_ASSIGN_OR_RETURN(const std::vector<TensorMeta> returns,
                           registry.InferShapes(op->name_, named));
    for (const TensorMeta& meta : returns) {
      op->tensors_.push_back({meta, false, true});
    }
    return op;
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("rows=", rows_, " hidden=", hidden_);
    info.dtype = std::string(DTypeName(dtype_));
    info.isa = fast_.op->target();
    double read = 0, written = 0, updated = 0;
    for (const Tensor& t : tensors_) {
      const auto bytes = static_cast<double>(UsedBytes(t));
      (!t.written ? read : t.read ? updated : written) += bytes;
    }
    info.SetTraffic(read, written, updated);
    info.flops = 4.0 * static_cast<double>(rows_ * hidden_);
    return info;
  }

  int64_t set_bytes() const override {
    int64_t bytes = 0;
    for (const Tensor& t : tensors_) bytes += BytesOf(t.meta);
    return bytes;
  }

  absl::Status Setup(int64_t sets, Executor&) override {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      buffers_.push_back(std::make_unique<SetBuffer>());
      QUERN_RETURN_IF_ERROR(
          buffers_[i]->Create(sets, BytesOf(tensors_[i].meta)));
      if (tensors_[i].meta.dtype == DType::kI32) {
        for (int64_t set = 0; set < sets; ++set) {
          const int64_t count =
              BytesOf(tensors_[i].meta) / int64_t{sizeof(int32_t)};
          for (int64_t t = 0; t < count; ++t) {
            buffers_[i]->at<int32_t>(set)[t] = PositionOf(t, rows_);
          }
        }
      } else if (tensors_[i].read) {
        // A static scale is positive; logits are beyond their cap, too.
        const double least = name_ == "static_quant_fp8" && i == 1 ? 0.01
                             : name_ == "logits_processor"         ? -90
                                                                   : -2;
        const double most = name_ == "logits_processor" ? 90 : 2;
        WithType(tensors_[i].meta.dtype, [&](auto type) {
          FillReals<decltype(type)>(least, most, *buffers_[i]);
        });
      }
    }
    // Run allocates nothing.
    for (int64_t set = 0; set < sets; ++set) {
      std::vector<AnyTensorView> views;
      for (size_t i = 0; i < tensors_.size(); ++i) {
        views.push_back(View(tensors_[i].meta, buffers_[i]->at(set)));
      }
      views_.push_back(std::move(views));
    }
    return fast_.op->CheckArgs(views_[0]);
  }

  void Run(int64_t set, Executor& executor) override {
    fast_.op->Execute(views_[static_cast<size_t>(set)], executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    // Some of the tensors are written in place.
    std::vector<std::vector<uint8_t>> before;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const uint8_t* data = buffers_[i]->at(0);
      before.emplace_back(data, data + BytesOf(tensors_[i].meta));
    }
    Run(0, executor);
    if (tamper_) tamper_(views_[0]);
    std::vector<CheckedTensor> tensors;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      tensors.push_back({tensors_[i].meta.dtype, tensors_[i].meta.extents,
                         before[i].data(), buffers_[i]->at(0)});
    }
    return CheckRegistered(name_, rows_, tensors, executor);
  }

 private:
  struct Tensor {
    TensorMeta meta;
    bool read;
    bool written;
  };

  // The bytes of a tensor that a call touches. An embedding and gather_rows
  // touch one row of their table for each token.
  int64_t UsedBytes(const Tensor& t) const {
    const int64_t bytes = BytesOf(t.meta);
    if (name_ != "vocab_parallel_embedding" && name_ != "gather_rows") {
      return bytes;
    }
    return t.meta.extents.size() == 2 && t.read && rows_ < kMaxPosition
               ? bytes / kMaxPosition * rows_
               : bytes;
  }

  static AnyTensorView View(const TensorMeta& meta, void* data) {
    AnyTensorView::Dims extents{}, strides{};
    int64_t stride = 1;
    for (size_t d = meta.extents.size(); d-- > 0;) {
      extents[d] = meta.extents[d];
      strides[d] = stride;
      stride *= extents[d];
    }
    return AnyTensorView(meta.dtype, data,
                         static_cast<int>(meta.extents.size()), extents,
                         strides);
  }

  std::string name_;
  int64_t rows_ = 0;
  int64_t hidden_ = 0;
  DType dtype_ = DType::kF32;
  MadeOp fast_;
  Tamper tamper_;
  std::vector<Tensor> tensors_;
  std::vector<std::unique_ptr<SetBuffer>> buffers_;
  std::vector<std::vector<AnyTensorView>> views_;  // the tensors of each set
};

absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
  return Registered::Create(args, nullptr);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Op>> MakeRegisteredForTest(const Args& args,
                                                          Tamper tamper) {
  return Registered::Create(args, std::move(tamper));
}

std::vector<OpEntry> RegisteredOps() {
  struct Named {
    absl::string_view name, summary;
  };
  std::vector<OpEntry> ops;
  for (const Named& named : {
           Named{"fused_add_rms_norm",
                 "residual += x; x = rms_norm(residual), in place"},
           Named{"gemma_rms_norm", "out = rms_norm(x) * (1 + weight)"},
           Named{"l2_norm", "out = x / sqrt(sum of x^2 + eps)"},
           Named{"layer_norm", "out = (x - mean) / deviation * weight + bias"},
           Named{"rms_norm_gated", "out = rms_norm(x * silu(z)) * weight"},
           Named{"mixer2_gated_rms_norm",
                 "out = rms_norm(x * silu(gate)) * weight, of one rank"},
           Named{"rms_norm_quant", "q, scales = fp8 of rms_norm(x), per token"},
           Named{"fused_add_rms_norm_quant",
                 "residual += x; q, scales = fp8 of rms_norm(residual)"},
           Named{"rms_norm_static_quant", "q = fp8 of rms_norm(x) / scale"},
           Named{"fused_add_rms_norm_static_quant",
                 "residual += x; q = fp8 of rms_norm(residual) / scale"},
           Named{"quant_fp8", "q, scales = fp8 of x, per token"},
           Named{"static_quant_fp8", "q = fp8 of x / scale"},
           Named{"quant_int8", "q, scales = int8 of x, per token"},
           Named{"rotary_embedding",
                 "turns heads of 128, of queries and a quarter as many keys"},
           Named{"mrope", "the same by three positions"},
           Named{"dual_chunk_rotary_embedding",
                 "the same, queries five times, by chunks of 1024"},
           Named{"apply_rotary_emb",
                 "turns heads of 128 by given cosines and sines"},
           Named{"vocab_parallel_embedding", "rows of a table of 4096"},
           Named{"gather_rows", "rows of a matrix of 4096"},
           Named{"logits_processor", "30 tanh(x / 30), in place"},
           Named{"sigmoid_mul", "out = x * sigmoid(gate)"},
       }) {
    ops.push_back({named.name,
                   named.summary,
                   {{"dtype", named.name == "logits_processor" ? "f32" : "bf16",
                     "f32, bf16 or f16"},
                    {"rows", "4096", "tokens"},
                    {"hidden", "4096", "elements of a row"}},
                   &Create});
  }
  return ops;
}

}  // namespace quern
