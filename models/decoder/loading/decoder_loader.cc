#include "quern/models/decoder/loading/decoder_loader.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/algorithms/checksum.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder_options.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/models/decoder/loading/model_work.h"
#include "quern/models/decoder/loading/packed_file.h"
#include "quern/models/decoder/loading/split_blocks.h"
#include "quern/models/gguf/gguf.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/quant/block_format.h"
#include "quern/quant/int8_quantize.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

}  // namespace

DecoderLoader::DecoderLoader(const GgufFile& file, const DecoderConfig& config,
                             const ModelShard& shard,
                             const DecoderOptions& options,
                             const OpDispatcher& ops, Executor& executor)
    : file_(file),
      config_(config),
      shard_(shard),
      options_(options),
      ops_(ops),
      executor_(executor, options.cancelled),
      rows_dtype_(RowsOf()) {
  const absl::Status counted =
      ForEachTensor(config, [this](const TensorEntry& entry, int64_t layer) {
        total_ += ExtentOf(entry.matrices, config_) *
                  GgufFile::PartBytes(TensorIn(entry.id, layer),
                                      shard_.PartOf(entry));
        return absl::OkStatus();
      });
  QUERN_CHECK(counted.ok());
}

int64_t DecoderLoader::BlockOf(const GgufFile& file) {
  int64_t block = 1;
  for (const GgufTensor& tensor : file.tensors()) {
    block = std::max(block, GgufBlockOf(tensor.type).elements);
  }
  return block;
}

const GgufTensor& DecoderLoader::TensorIn(TensorId id, int64_t layer) const {
  return **file_.FindTensor(TensorName(PlaceOf(id, config_).id, layer));
}

// Type of the rows: bf16 if every matrix has at most its precision or is in
// blocks that multiply int8, otherwise f32. f16 is not used, because sums in a
// model may exceed its range.
DType DecoderLoader::RowsOf() const {
  if (options_.weights == DecoderWeights::kBF16 ||
      options_.weights == DecoderWeights::kInt8) {
    return DType::kBF16;
  }
  if (options_.weights == DecoderWeights::kF32) return DType::kF32;
  bool narrow = true;
  const absl::Status looked = ForEachTensor(
      config_, [&, this](const TensorEntry& entry, int64_t layer) {
        const GgufTensorType type = TensorIn(entry.id, layer).type;
        // Everything else, such as routers and convolutions, is small, and f32
        // in every file.
        const bool blocks = type == GgufTensorType::kQ8_0 ||
                            type == GgufTensorType::kQ4_0 ||
                            (int8_rows() && IsBlockType(type));
        narrow = narrow && (!entry.is_weight() || blocks ||
                            type == GgufTensorType::kBF16);
        return absl::OkStatus();
      });
  QUERN_CHECK(looked.ok());
  return narrow ? DType::kBF16 : DType::kF32;
}

DType DecoderLoader::embedding_dtype() const {
  const WeightFormat format = FormatOf({{TensorId::kEmbedding}});
  const bool codes = format == WeightFormat::kI8Channel || IsSplit(format) ||
                     format == WeightFormat::kBlocks;
  return codes ? rows_dtype_ : ReadType(format);
}

int64_t DecoderLoader::BytesOf(TensorId id, int64_t layer, DType dtype) const {
  const GgufPart part = shard_.PartOf(TensorOf(id));
  return dtype == DType::kU8
             ? GgufFile::PartBytes(TensorIn(id, layer), part)
             : part.rows * part.cols * static_cast<int64_t>(SizeOf(dtype));
}

int64_t DecoderLoader::BytesOf(const std::vector<TensorId>& ids, int64_t layer,
                               DType dtype) const {
  int64_t bytes = 0;
  for (const TensorId id : ids) bytes += BytesOf(id, layer, dtype);
  return bytes;
}

absl::Status DecoderLoader::ReadTensors(const std::vector<TensorId>& ids,
                                        int64_t layer, DType dtype,
                                        int64_t expert, uint8_t* out) {
  for (const TensorId id : ids) {
    QUERN_RETURN_IF_ERROR(ReadTensor(id, layer, dtype, expert, out));
    out += BytesOf(id, layer, dtype);
  }
  return absl::OkStatus();
}

absl::StatusOr<AlignedBuffer> DecoderLoader::Read(
    const std::vector<TensorId>& ids, int64_t layer, DType dtype,
    int64_t expert) {
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer buffer,
                         AlignedBuffer::Create(BytesOf(ids, layer, dtype)));
  QUERN_RETURN_IF_ERROR(ReadTensors(ids, layer, dtype, expert, buffer.data()));
  return buffer;
}

absl::StatusOr<uint8_t*> DecoderLoader::ReadUnpacked(
    const std::vector<TensorId>& ids, int64_t layer, DType dtype,
    int64_t expert) {
  const int64_t bytes = BytesOf(ids, layer, dtype);
  if (static_cast<int64_t>(unpacked_.bytes()) < bytes) {
    unpacked_ = AlignedBuffer();  // two at once would exceed CheckBytes
    QUERN_ASSIGN_OR_RETURN(unpacked_, AlignedBuffer::Create(bytes));
  }
  QUERN_RETURN_IF_ERROR(
      ReadTensors(ids, layer, dtype, expert, unpacked_.data()));
  return unpacked_.data();
}

absl::StatusOr<AlignedBuffer> DecoderLoader::Embedding() {
  const DType dtype = embedding_dtype();
  const int64_t row_bytes =
      config_.hidden * static_cast<int64_t>(SizeOf(dtype));
  const int64_t bytes = shard_.vocab().width * row_bytes;
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Create(bytes));
  QUERN_RETURN_IF_ERROR(
      ReadTensor(TensorId::kEmbedding, 0, dtype, 0, buffer.data()));
  const int64_t read = BytesOf(TensorId::kEmbedding, 0, dtype);
  std::memset(buffer.data() + read, 0, static_cast<size_t>(bytes - read));
  return buffer;
}

absl::Status DecoderLoader::ReadTensor(TensorId id, int64_t layer, DType dtype,
                                       int64_t expert, uint8_t* out) {
  const GgufTensor& tensor = TensorIn(id, layer);
  const TensorEntry& entry = TensorOf(id);
  GgufPart whole = shard_.PartOf(entry);
  whole.row +=
      expert * ExtentOf(entry.rows, config_) + PlaceOf(id, config_).row;
  const int64_t groups = ExtentOf(entry.groups, config_);
  if (groups == 1) return ReadRows(tensor, whole, dtype, out);
  GgufPart half = whole;
  half.rows = whole.rows / (2 * groups);
  for (const int64_t which : {0, 1}) {
    for (int64_t group = 0; group < groups; ++group) {
      half.row = whole.row + (2 * group + which) * half.rows;
      QUERN_RETURN_IF_ERROR(ReadRows(tensor, half, dtype, out));
    }
  }
  return absl::OkStatus();
}

void DecoderLoader::ReadAhead(const GgufTensor& tensor, const GgufPart& part) {
  // A disk that gives 1 GB/s needs 64 ms for as much.
  constexpr int64_t kAhead = int64_t{64} << 20;
  const int64_t end =
      tensor.offset + (part.row + part.rows) * tensor.row_bytes();
  const bool same_part = asked_part_ == tensor.part;
  if (same_part && end + kAhead / 2 <= asked_until_) return;
  const int64_t from = same_part ? std::max(end, asked_until_) : end;
  file_.ExpectReads(tensor.part, from, end + kAhead - from);
  asked_part_ = tensor.part;
  asked_until_ = end + kAhead;
}

absl::Status DecoderLoader::ReadPiece(const GgufTensor& tensor,
                                      const GgufPart& part, DType dtype,
                                      uint8_t* out) {
  // Small enough for the L2 cache, and long enough to hide the cost of a task.
  constexpr int64_t kTaskBytes = int64_t{128} << 10;
  GgufPart row = part;
  row.rows = 1;
  const int64_t file_bytes = GgufFile::PartBytes(tensor, row);
  const int64_t out_bytes =
      dtype == DType::kU8 ? file_bytes
                          : part.cols * static_cast<int64_t>(SizeOf(dtype));
  const int64_t rows =
      std::max<int64_t>(1, kTaskBytes / std::max(file_bytes, out_bytes));
  std::mutex mutex;
  absl::Status status;
  executor_.ParallelFor(DivCeil(part.rows, rows), [&](int64_t task, int) {
    GgufPart mine = part;
    mine.row += task * rows;
    mine.rows = std::min(rows, part.rows - task * rows);
    uint8_t* const to = out + task * rows * out_bytes;
    const auto elements = static_cast<size_t>(mine.rows * mine.cols);
    const absl::Status read =
        dtype == DType::kF32
            ? file_.ReadPart(
                  tensor, mine,
                  absl::MakeSpan(reinterpret_cast<float*>(to), elements))
        : dtype == DType::kBF16
            ? file_.ReadPart(
                  tensor, mine,
                  absl::MakeSpan(reinterpret_cast<BFloat16*>(to), elements))
            : file_.ReadPartBytes(
                  tensor, mine,
                  absl::MakeSpan(to,
                                 static_cast<size_t>(mine.rows * file_bytes)));
    if (read.ok()) return;
    const std::lock_guard<std::mutex> lock(mutex);
    status.Update(read);
  });
  QUERN_RETURN_IF_ERROR(executor_.Check());
  return status;
}

// Reads in pieces, so that progress is reported within a large tensor too.
absl::Status DecoderLoader::ReadRows(const GgufTensor& tensor,
                                     const GgufPart& whole, DType dtype,
                                     uint8_t*& out) {
  const int64_t step =
      std::max<int64_t>(1, options_.progress_elements / whole.cols);
  for (int64_t row = 0; row < whole.rows; row += step) {
    GgufPart part = whole;
    part.row += row;
    part.rows = std::min(step, whole.rows - row);
    const int64_t file_bytes = GgufFile::PartBytes(tensor, part);
    ReadAhead(tensor, part);
    QUERN_RETURN_IF_ERROR(ReadPiece(tensor, part, dtype, out));
    out += dtype == DType::kU8
               ? file_bytes
               : part.rows * part.cols * static_cast<int64_t>(SizeOf(dtype));
    // Clamped, because an embedding that is also the output matrix is read
    // twice.
    done_ = std::min(total_, done_ + file_bytes);
    if (options_.progress) options_.progress(done_, total_);
  }
  return absl::OkStatus();
}

// Quantises w to int8, each row symmetric, by its largest magnitude.
absl::StatusOr<DecoderLoader::Int8Rows> DecoderLoader::Quantise(
    MatrixView<const float> w) {
  const int64_t n = w.extent(0), k = w.extent(1);
  Int8QuantizeSpec spec;
  spec.dtype = DType::kF32;
  QUERN_ASSIGN_OR_RETURN(const Int8QuantizePlan quantize,
                         Int8QuantizePlan::Create(spec));
  Int8Rows rows;
  QUERN_ASSIGN_OR_RETURN(rows.codes, AlignedBuffer::Create(n * k));
  QUERN_ASSIGN_OR_RETURN(rows.scales, AlignedBuffer::Create(n * 4));
  quantize.Execute(w, DenseMatrix(rows.codes.data<int8_t>(), n, k),
                   DenseVector(rows.scales.data<float>(), n),
                   VectorView<int32_t>(), executor_);
  return rows;
}

absl::StatusOr<LinearWeights> DecoderLoader::Pack(const MatrixParts& parts) {
  const LinearWeightsSpec spec = WeightsOf(parts);
  LinearSource source;
  const DType dtype = ReadType(spec.format);
  QUERN_ASSIGN_OR_RETURN(
      uint8_t* const weights,
      ReadUnpacked(parts.rows, parts.layer, dtype, parts.expert));
  Int8Rows int8;
  SplitBlocks split;
  if (spec.format == WeightFormat::kBlocks) {
    source.layout = WeightLayout::kBlocks;
    source.codes = DenseAny(dtype, weights, parts.n, BlockBytes(parts));
  } else if (IsSplit(spec.format)) {
    QUERN_ASSIGN_OR_RETURN(split, Split(static_cast<BlockFormat>(TypeOf(parts)),
                                        weights, parts.n, parts.k, executor_));
    QUERN_RETURN_IF_ERROR(executor_.Check());
    source.codes = DenseAny(
        spec.format == WeightFormat::kI4Group ? DType::kU8 : DType::kI8,
        split.codes.data(), parts.n, parts.k);
    source.scales = DenseAny(DType::kF16, split.scales.data(),
                             parts.k / SplitBlocks::kGroup, parts.n);
  } else if (spec.format == WeightFormat::kI8Channel) {
    QUERN_ASSIGN_OR_RETURN(
        int8, Quantise(DenseMatrix<const float>(
                  reinterpret_cast<const float*>(weights), parts.n, parts.k)));
    source.codes = DenseAny(DType::kI8, int8.codes.data(), parts.n, parts.k);
    source.scales = DenseVector(int8.scales.data<float>(), parts.n);
  } else {
    source.codes = DenseAny(dtype, weights, parts.n, parts.k);
  }
  QUERN_ASSIGN_OR_RETURN(
      const AlignedBuffer bias,
      Read(parts.biases, parts.layer, DType::kF32, parts.expert));
  if (!parts.biases.empty()) {
    source.bias = DenseVector<const float>(bias.data<float>(), parts.n);
  }
  auto packed = LinearWeights::Pack(spec, {source}, executor_);
  QUERN_RETURN_IF_ERROR(executor_.Check());
  return packed;
}

absl::Status DecoderLoader::Adopt(const PackedFile& packed) {
  QUERN_ASSIGN_OR_RETURN(const uint64_t source, Source());
  if (packed.source() != source) {
    return absl::FailedPreconditionError(
        absl::StrCat(kOp, ": packed_path=", packed.path(),
                     " was packed from another file or for other weights than ",
                     file_.Describe(), "; need another path, or none there"));
  }
  packed_ = &packed;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DecoderLoader::Source() const {
  // Hashes the tensors' metadata and three rows of each.
  uint64_t hash = kFnv1aBasis;
  const auto add = [&](const void* data, size_t bytes) {
    hash = Fnv1a(data, bytes, hash);
  };
  const auto add_number = [&](int64_t value) { add(&value, sizeof(value)); };
  add_number(file_.file_bytes());
  add_number(static_cast<int64_t>(options_.weights));
  // Matrices of floats are packed alike for all rows.
  if (int8_rows() && BlockOf(file_) > 1) {
    add_number(static_cast<int64_t>(*options_.activations));
  }
  add_number(shard_.rank());
  add_number(shard_.size());
  // Rows of real models are shorter. Tensors with longer rows are recognised by
  // their metadata alone.
  constexpr int64_t kMaxRowBytes = 1 << 20;
  std::vector<uint8_t> bytes;
  for (const GgufTensor& tensor : file_.tensors()) {
    add_number(static_cast<int64_t>(tensor.name.size()));
    add(tensor.name.data(), tensor.name.size());
    add_number(static_cast<int64_t>(tensor.type));
    add_number(tensor.bytes);
    if (tensor.row_bytes() > kMaxRowBytes) continue;
    bytes.resize(static_cast<size_t>(tensor.row_bytes()));
    const int64_t last = tensor.rows() - 1;
    for (const int64_t row : {int64_t{0}, last / 2, last}) {
      QUERN_RETURN_IF_ERROR(file_.ReadPartBytes(
          tensor, {row, 1, 0, tensor.cols()}, absl::MakeSpan(bytes)));
      add(bytes.data(), bytes.size());
    }
  }
  return hash;
}

std::string DecoderLoader::NameOf(const MatrixParts& parts) {
  return absl::StrJoin(parts.rows, "+",
                       [&parts](std::string* out, TensorId id) {
                         absl::StrAppend(out, TensorName(id, parts.layer));
                         if (TensorOf(id).matrices != Extent::kOne) {
                           absl::StrAppend(out, "[", parts.expert, "]");
                         }
                       });
}

absl::StatusOr<LinearWeights> DecoderLoader::Find(const std::string& name,
                                                  const LinearWeightsSpec& want,
                                                  bool bias) const {
  QUERN_ASSIGN_OR_RETURN(const auto bytes, packed_->Find(name));
  const auto adopted = LinearWeights::Adopt(bytes);
  if (!adopted.ok()) {
    return absl::Status(
        adopted.status().code(),
        absl::StrCat(kOp, ": ", name, " in packed_path=", packed_->path(), ": ",
                     adopted.status().message(),
                     "; need another path, or none there"));
  }
  const LinearWeights& found = *adopted;
  const LinearWeightsSpec& have = found.spec();
  const bool same_blocks = have.format != WeightFormat::kBlocks ||
                           have.block_format == want.block_format;
  if (have.n != want.n || have.k != want.k || have.format != want.format ||
      !same_blocks || have.gated != want.gated || found.has_bias() != bias) {
    return absl::FailedPreconditionError(absl::StrCat(
        kOp, ": ", name, " in packed_path=", packed_->path(), " is ",
        FormOf(have), "[", have.n, ", ", have.k, "]; need ", FormOf(want), "[",
        want.n, ", ", want.k, "], gated and with a bias as the model has it"));
  }
  return found;
}

absl::Status DecoderLoader::WritePacked(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(const uint64_t source, Source());
  std::vector<PackedFile::Blob> blobs;
  for (const auto& [name, weights] : made_) {
    blobs.emplace_back(name, weights.bytes());
  }
  return PackedFile::Write(path, source, blobs,
                           [this] { return executor_.Check(); });
}

void DecoderLoader::Keep(const std::string& name,
                         const LinearWeights& weights) {
  if (packed_ == nullptr && !options_.packed_path.empty()) {
    made_.emplace_back(name, weights);
  }
  packed_bytes_ += static_cast<int64_t>(weights.bytes().size());
}

absl::StatusOr<LinearWeights> DecoderLoader::MakeWeights(
    const MatrixParts& parts) {
  const std::string name = NameOf(parts);
  QUERN_ASSIGN_OR_RETURN(
      const LinearWeights packed,
      packed_ == nullptr ? Pack(parts)
                         : Find(name, WeightsOf(parts), !parts.biases.empty()));
  Keep(name, packed);
  ModelWork::Add(packed, rows_dtype_, int8_rows(), WorkOf(parts));
  const std::string form = FormOf(packed.spec());
  const bool router = TensorOf(parts.rows[0]).role == TensorRole::kRouter;
  if (!router &&
      std::find(forms_.begin(), forms_.end(), form) == forms_.end()) {
    forms_.push_back(form);
  }
  return packed;
}

absl::StatusOr<Matrix> DecoderLoader::MakeMatrix(const MatrixParts& parts) {
  QUERN_ASSIGN_OR_RETURN(const LinearWeights packed, MakeWeights(parts));
  NamedArgs args = {{"x", TensorMeta{rows_dtype_, {1, parts.k}}},
                    {"weights", &packed},
                    {"activation", LinearActivationName(parts.activation)},
                    {"out_dtype", DTypeName(parts.y)}};
  if (packed.spec().format == WeightFormat::kBlocks) {
    args.emplace_back("activations", activations());
  }
  if (parts.residual) {
    args.emplace_back("residual", TensorMeta{parts.y, {1, parts.n}});
  }
  QUERN_ASSIGN_OR_RETURN(MadeOp linear, ops_.Make("linear", args));
  return Matrix(std::move(linear.op), rows_dtype_, parts.n, parts.k);
}

}  // namespace quern
