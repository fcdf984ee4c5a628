#include "models/llama_loader.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "gemm/epilogue.h"
#include "models/byte_limit.h"
#include "models/gguf.h"
#include "models/llama.h"
#include "models/llama_config.h"
#include "models/llama_impl.h"
#include "models/llama_matrix.h"

namespace quern {
namespace {

constexpr char kOp[] = "llama";

std::string LayerTensor(int64_t layer, absl::string_view part,
                        absl::string_view kind = "weight") {
  return absl::StrCat("blk.", layer, ".", part, ".", kind);
}

// Bytes that `elements` take as `type` in a file.
double FileBytes(GgufTensorType type, double elements) {
  switch (type) {
    case GgufTensorType::kF32:
      return 4 * elements;
    case GgufTensorType::kF16:
    case GgufTensorType::kBF16:
      return 2 * elements;
    case GgufTensorType::kQ8_0:
      return elements / GgufFile::kQ8Block * GgufFile::kQ8BlockBytes;
  }
  return 0;
}

}  // namespace

LlamaLoader::LlamaLoader(const GgufFile& file, const LlamaConfig& config,
                         const LlamaOptions& options, Executor& executor)
    : file_(file),
      config_(config),
      options_(options),
      executor_(executor),
      rows_dtype_(RowsOf(file, options.weights)) {
  for (const GgufTensor& tensor : file.tensors()) total_ += tensor.bytes;
}

// bf16 where all that the rows meet has no more bits than that, else f32. Not
// f16, whose range sums of a model may leave.
DType LlamaLoader::RowsOf(const GgufFile& file, LlamaWeights weights) {
  if (weights == LlamaWeights::kBF16 || weights == LlamaWeights::kInt8) {
    return DType::kBF16;
  }
  if (weights == LlamaWeights::kF32) return DType::kF32;
  for (const GgufTensor& tensor : file.tensors()) {
    const bool narrow = tensor.type == GgufTensorType::kBF16 ||
                        tensor.type == GgufTensorType::kQ8_0;
    if (tensor.rows() > 1 && !narrow) return DType::kF32;  // not a norm
  }
  return DType::kBF16;
}

DType LlamaLoader::embedding_dtype() const {
  const Form form = FormOf({"token_embd.weight"});
  return form == Form::kInt8 || form == Form::kQ8_0 ? rows_dtype_
                                                    : ReadType(form);
}

const char* LlamaLoader::FormName(Form form) {
  switch (form) {
    case Form::kF32:
      return "f32";
    case Form::kBF16:
      return "bf16";
    case Form::kF16:
      return "f16";
    case Form::kInt8:
      return "int8";
    case Form::kQ8_0:
      return "q8_0";
  }
  return "unknown";
}

DType LlamaLoader::ReadType(Form form) {
  switch (form) {
    case Form::kF32:
    case Form::kInt8:
      return DType::kF32;
    case Form::kBF16:
      return DType::kBF16;
    case Form::kF16:
      return DType::kF16;
    case Form::kQ8_0:
      return DType::kU8;
  }
  return DType::kF32;
}

std::string LlamaLoader::Forms() const {
  std::vector<std::string> names;
  for (const Form form : forms_) names.emplace_back(FormName(form));
  return absl::StrJoin(names, " and ");
}

LlamaLoader::Form LlamaLoader::FormOf(
    const std::vector<std::string>& names) const {
  switch (options_.weights) {
    case LlamaWeights::kBF16:
      return Form::kBF16;
    case LlamaWeights::kF32:
      return Form::kF32;
    case LlamaWeights::kInt8:
      return Form::kInt8;
    case LlamaWeights::kAsInFile:
      break;
  }
  const GgufTensorType type = (*file_.FindTensor(names[0]))->type;
  for (const std::string& name : names) {
    // f32 holds each of the types exactly.
    if ((*file_.FindTensor(name))->type != type) return Form::kF32;
  }
  switch (type) {
    case GgufTensorType::kF32:
      return Form::kF32;
    case GgufTensorType::kF16:
      return Form::kF16;
    case GgufTensorType::kBF16:
      return Form::kBF16;
    case GgufTensorType::kQ8_0:
      return Form::kQ8_0;
  }
  return Form::kF32;
}

LlamaLoader::Parts LlamaLoader::QkvParts(int64_t layer) const {
  Parts parts;
  for (const char* part : {"attn_q", "attn_k", "attn_v"}) {
    parts.names.push_back(LayerTensor(layer, part));
    if (config_.qkv_bias) {
      parts.biases.push_back(LayerTensor(layer, part, "bias"));
    }
  }
  parts.n = config_.q_cols() + 2 * config_.kv_cols();
  parts.k = config_.hidden;
  return parts;
}

LlamaLoader::Parts LlamaLoader::AttnOutParts(int64_t layer) const {
  return {{LayerTensor(layer, "attn_output")},
          config_.hidden,
          config_.q_cols(),
          {},
          {}};
}

LlamaLoader::Parts LlamaLoader::GateUpParts(int64_t layer) const {
  return {{LayerTensor(layer, "ffn_gate"), LayerTensor(layer, "ffn_up")},
          2 * config_.ffn,
          config_.hidden,
          {rows_dtype_, config_.activation},
          {}};
}

LlamaLoader::Parts LlamaLoader::DownParts(int64_t layer) const {
  return {
      {LayerTensor(layer, "ffn_down")}, config_.hidden, config_.ffn, {}, {}};
}

LlamaLoader::Parts LlamaLoader::OutputParts() const {
  return {{HasOutputWeight(file_) ? "output.weight" : "token_embd.weight"},
          config_.vocab,
          config_.hidden,
          {},
          {}};
}

double LlamaLoader::PackedBytes(const Parts& parts) const {
  // Columns come in panels of 16, each half of a gated matrix by itself; k
  // comes in lines of 4 at most. Each column may have a scale, a sum and a
  // bias.
  const auto n = static_cast<double>(IsGated(parts.y.activation)
                                         ? 2 * RoundUp(parts.n / 2, 16)
                                         : RoundUp(parts.n, 16));
  const auto k = static_cast<double>(RoundUp(parts.k, 4));
  constexpr double kOfColumn = 16;
  constexpr double kOfPlan = 4096;
  const double rest = n * kOfColumn + kOfPlan;
  switch (FormOf(parts.names)) {
    case Form::kF32:
      return n * k * 4 + rest;
    case Form::kBF16:
    case Form::kF16:
      return n * k * 2 + rest;
    case Form::kInt8:
      return n * k + rest;
    case Form::kQ8_0:  // and an f32 scale of each block
      return n * k * (1 + 4.0 / GgufFile::kQ8Block) + rest;
  }
  return 0;
}

double LlamaLoader::UnpackedBytes(const Parts& parts) const {
  const double elements =
      static_cast<double>(parts.n) * static_cast<double>(parts.k);
  const Form form = FormOf(parts.names);
  if (form == Form::kQ8_0) return FileBytes(GgufTensorType::kQ8_0, elements);
  const double codes = form == Form::kInt8 ? elements : 0;
  return elements * static_cast<double>(SizeOf(ReadType(form))) + codes;
}

absl::Status LlamaLoader::CheckBytes(int64_t context) const {
  const ByteLimit limit = {options_.max_bytes, int64_t{256} << 20, 16,
                           file_.file_bytes(), "file's"};
  const LlamaConfig& c = config_;
  // The bytes of all matrices, and what the largest takes while it is being
  // packed. They are double, because a sparse file may claim any size.
  double matrices = 0, largest = 0;
  const auto add = [&](const Parts& parts) {
    matrices += PackedBytes(parts);
    largest = std::max(largest, UnpackedBytes(parts));
  };
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    add(QkvParts(layer));
    add(AttnOutParts(layer));
    add(GateUpParts(layer));
    add(DownParts(layer));
  }
  add(OutputParts());
  const double embedding = static_cast<double>(c.vocab) *
                           static_cast<double>(c.hidden) *
                           static_cast<double>(SizeOf(embedding_dtype()));
  // Norms are in f32, and fewer than six of the widest.
  const double norms = 6 * 4 * static_cast<double>(c.layers + 1) *
                       static_cast<double>(std::max(c.hidden, c.head_dim));
  // A cosine and a sine for each element that turns, in the layout that takes
  // more.
  const double rotary =
      8 * static_cast<double>(context) * static_cast<double>(c.rope_dim);
  const double bytes = matrices + largest + embedding + norms + rotary;
  if (bytes <= limit.bytes()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: loading takes up to %.0f bytes: %.0f of matrices, %.0f of the "
      "embedding, %.0f of the rotary table for context=%d, "
      "rope.dimension_count=%d; %s",
      kOp, bytes, matrices + largest + norms, embedding, rotary, context,
      c.rope_dim, limit.Need()));
}

absl::StatusOr<AlignedBuffer> LlamaLoader::Read(
    const std::vector<std::string>& names, DType dtype) {
  const auto bytes_of = [&](const GgufTensor& tensor) {
    return dtype == DType::kU8
               ? tensor.bytes
               : tensor.elements * static_cast<int64_t>(SizeOf(dtype));
  };
  int64_t bytes = 0;
  for (const std::string& name : names) {
    QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor, file_.FindTensor(name));
    bytes += bytes_of(*tensor);
  }
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Create(bytes));
  int64_t begin = 0;
  for (const std::string& name : names) {
    QUERN_ASSIGN_OR_RETURN(const GgufTensor* tensor, file_.FindTensor(name));
    QUERN_RETURN_IF_ERROR(ReadTensor(*tensor, dtype, buffer.data() + begin));
    begin += bytes_of(*tensor);
  }
  return buffer;
}

// Reads in pieces, so that progress shows within a large tensor too.
absl::Status LlamaLoader::ReadTensor(const GgufTensor& tensor, DType dtype,
                                     uint8_t* out) {
  const int64_t step =
      std::max<int64_t>(1, options_.progress_elements / tensor.cols());
  for (int64_t row = 0; row < tensor.rows(); row += step) {
    const int64_t rows = std::min(step, tensor.rows() - row);
    const int64_t begin = row * tensor.cols();
    const auto elements = static_cast<size_t>(rows * tensor.cols());
    if (dtype == DType::kF32) {
      QUERN_RETURN_IF_ERROR(file_.ReadRows(
          tensor, row,
          absl::MakeSpan(reinterpret_cast<float*>(out) + begin, elements)));
    } else if (dtype == DType::kBF16) {
      QUERN_RETURN_IF_ERROR(file_.ReadRows(
          tensor, row,
          absl::MakeSpan(reinterpret_cast<BFloat16*>(out) + begin, elements)));
    } else {
      QUERN_RETURN_IF_ERROR(file_.ReadBytes(
          tensor, row,
          absl::MakeSpan(out + row * tensor.row_bytes(),
                         static_cast<size_t>(rows * tensor.row_bytes()))));
    }
    if (options_.progress) {
      // An embedding that is the output matrix too is read twice.
      options_.progress(
          std::min(total_, done_ + tensor.row_bytes() * (row + rows)), total_);
    }
  }
  done_ += tensor.bytes;
  return absl::OkStatus();
}

absl::StatusOr<LlamaMatrix> LlamaLoader::Matrix(const Parts& parts) {
  const Form form = FormOf(parts.names);
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer weights,
                         Read(parts.names, ReadType(form)));
  QUERN_ASSIGN_OR_RETURN(const AlignedBuffer values,
                         Read(parts.biases, DType::kF32));
  AnyTensorView bias;
  if (!parts.biases.empty()) {
    bias = DenseVector<const float>(values.data<float>(), parts.n);
  }
  auto matrix = [&] {
    switch (form) {
      case Form::kInt8:
        return LlamaMatrix::CreateInt8(
            DenseMatrix<const float>(weights.data<float>(), parts.n, parts.k),
            bias, rows_dtype_, parts.y, executor_);
      case Form::kQ8_0:
        return LlamaMatrix::CreateQ8_0(
            DenseMatrix<const uint8_t>(
                weights.data(), parts.n,
                parts.k / GgufFile::kQ8Block * GgufFile::kQ8BlockBytes),
            bias, rows_dtype_, parts.y, executor_);
      default:
        return LlamaMatrix::Create(
            DenseAny(ReadType(form), weights.data(), parts.n, parts.k), bias,
            rows_dtype_, parts.y, executor_);
    }
  }();
  if (!matrix.ok()) return matrix;
  packed_bytes_ += matrix->packed_bytes();
  if (std::find(forms_.begin(), forms_.end(), form) == forms_.end()) {
    forms_.push_back(form);
  }
  return matrix;
}

absl::StatusOr<LlamaLayer> LlamaLoader::Layer(int64_t layer) {
  const LlamaConfig& c = config_;
  const auto norm = [&](absl::string_view part) {
    return Read({LayerTensor(layer, part)}, DType::kF32);
  };
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer attn_norm, norm("attn_norm"));
  QUERN_ASSIGN_OR_RETURN(LlamaMatrix qkv, Matrix(QkvParts(layer)));
  AlignedBuffer q_norm, k_norm, post_attn_norm, post_ffn_norm;
  if (c.head_norms) {
    QUERN_ASSIGN_OR_RETURN(q_norm, norm("attn_q_norm"));
    QUERN_ASSIGN_OR_RETURN(k_norm, norm("attn_k_norm"));
  }
  QUERN_ASSIGN_OR_RETURN(LlamaMatrix attn_out, Matrix(AttnOutParts(layer)));
  if (c.post_norms) {
    QUERN_ASSIGN_OR_RETURN(post_attn_norm, norm("post_attention_norm"));
    QUERN_ASSIGN_OR_RETURN(post_ffn_norm, norm("post_ffw_norm"));
  }
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer ffn_norm, norm("ffn_norm"));
  QUERN_ASSIGN_OR_RETURN(LlamaMatrix gate_up, Matrix(GateUpParts(layer)));
  QUERN_ASSIGN_OR_RETURN(LlamaMatrix down, Matrix(DownParts(layer)));
  return LlamaLayer{std::move(attn_norm), std::move(qkv),
                    std::move(q_norm),    std::move(k_norm),
                    std::move(attn_out),  std::move(post_attn_norm),
                    std::move(ffn_norm),  std::move(gate_up),
                    std::move(down),      std::move(post_ffn_norm)};
}

}  // namespace quern
