#ifndef QUERN_MODELS_DECODER_LOADING_DECODER_LOADER_H_
#define QUERN_MODELS_DECODER_LOADING_DECODER_LOADER_H_

// Private: reads a rank's part of tensors, and makes matrices of them, in the
// form that the options ask for and by the operator `linear`, telling how far
// it is.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_join.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder_options.h"
#include "quern/models/decoder/decoder_work.h"
#include "quern/models/decoder/loading/cancellable_executor.h"
#include "quern/models/decoder/loading/matrix.h"
#include "quern/models/decoder/loading/model_shard.h"
#include "quern/models/decoder/loading/model_work.h"
#include "quern/models/decoder/loading/packed_file.h"
#include "quern/models/gguf/gguf.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/quant/block_format.h"

namespace quern {

// A dense view of memory whose dtype is a run-time value. `data` may be null if
// a dimension is 0.
inline AnyTensorView DenseAny(DType dtype, void* data, int64_t rows,
                              int64_t cols) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {cols, 1});
}

// This rank's part of y = W x + b. W is the rows of the tensors `rows`, one
// tensor after another, and b is `biases`, if any.
struct MatrixParts {
  std::vector<TensorId> rows;
  int64_t layer = 0;
  int64_t n = 0, k = 0;
  std::vector<TensorId> biases = {};
  DType y = DType::kF32;
  LinearActivation activation = LinearActivation::kNone;
  bool residual = false;  // y += W x + b
  int64_t expert = 0;     // the matrix of tensors that have one for each expert
};

class DecoderLoader {
 public:
  // `config` must have been made from `file`, and options.activations must have
  // a value. All arguments must outlive the loader.
  DecoderLoader(const GgufFile& file, const DecoderConfig& config,
                const ModelShard& shard, const DecoderOptions& options,
                const OpDispatcher& ops, Executor& executor);

  // Number of elements in the largest block of any tensor of the file.
  static int64_t BlockOf(const GgufFile& file);

  // Element type of the rows that matrices multiply.
  DType rows_dtype() const { return rows_dtype_; }
  DType embedding_dtype() const;

  // ResourceExhausted if a model with a rotary table of `context` positions may
  // take more than options.max_bytes while it is loaded. Reads no tensor.
  absl::Status CheckBytes(int64_t context) const;

  // This rank's rows of the embedding, followed by zeros.
  absl::StatusOr<AlignedBuffer> Embedding();
  // A norm's weights, in f32.
  absl::StatusOr<AlignedBuffer> Norm(TensorId id, int64_t layer = 0) {
    return Vector(id, layer);
  }
  // The numbers of a small tensor, in f32.
  absl::StatusOr<AlignedBuffer> Vector(TensorId id, int64_t layer = 0) {
    return Read({id}, layer, DType::kF32);
  }
  // Descriptions of the matrices of a layer, and of the one that computes
  // logits. QkvParts has one, or one for each run of q, k and v of one type
  // where blocks are among them.
  std::vector<MatrixParts> QkvParts(int64_t layer) const;
  MatrixParts AttnOutParts(int64_t layer) const;
  MatrixParts GateUpParts(int64_t layer) const;
  MatrixParts DownParts(int64_t layer) const;
  MatrixParts RouterParts(int64_t layer) const;
  MatrixParts ExpertGateUpParts(int64_t layer, int64_t expert) const;
  MatrixParts ExpertDownParts(int64_t layer, int64_t expert) const;
  MatrixParts SharedGateUpParts(int64_t layer) const;
  MatrixParts SharedDownParts(int64_t layer) const;
  // With kSharedGate: hidden -> 1.
  MatrixParts SharedRouterParts(int64_t layer) const;
  MatrixParts OutputParts() const;
  // A recurrent layer's first and last matrix.
  MatrixParts RecurrentInParts(int64_t layer) const;
  MatrixParts RecurrentOutParts(int64_t layer) const;
  // The last matrix of a layer over latents.
  MatrixParts LatentOutParts(int64_t layer) const;
  absl::StatusOr<Matrix> MakeMatrix(const MatrixParts& parts);
  // The weights of a matrix that another operator multiplies by.
  absl::StatusOr<LinearWeights> MakeWeights(const MatrixParts& parts);
  // All matrices of a layer over latents.
  absl::StatusOr<MlaWeights> MakeLatentWeights(int64_t layer);
  const OpDispatcher& ops() const { return ops_; }
  // The argument `activations` of operators that multiply by matrices.
  const char* activations() const {
    return int8_rows() ? "int8_blocks" : "exact";
  }

  // Takes matrices from `packed` from now on; it must outlive them.
  absl::Status Adopt(const PackedFile& packed);
  // Writes all matrices made so far to a packed file.
  absl::Status WritePacked(const std::string& path);

  // Bytes of the matrices made so far.
  int64_t packed_bytes() const { return packed_bytes_; }
  // The matrices made so far, by how often a step multiplies by them. Only the
  // three groups are set.
  const ModelWork& work() const { return work_; }
  // Forms of the matrices made so far, such as "bf16" or "q4_k and q6_k".
  std::string Forms() const { return absl::StrJoin(forms_, " and "); }

 private:
  struct Int8Rows {
    AlignedBuffer codes, scales;
  };

  DType RowsOf() const;
  // Whether blocks multiply rows of int8.
  bool int8_rows() const {
    return options_.activations == DecoderActivations::kInt8;
  }
  // Whether a matrix is packed from SplitBlocks.
  static bool IsSplit(WeightFormat format) {
    return format == WeightFormat::kI4Group || format == WeightFormat::kI8Group;
  }
  // Bytes of a row of `parts` in these blocks.
  int64_t BlockBytes(const MatrixParts& parts) const {
    const GgufBlock block = GgufBlockOf(TypeOf(parts));
    return parts.k / block.elements * block.bytes;
  }
  // The type of the first of the tensors.
  GgufTensorType TypeOf(const MatrixParts& parts) const {
    return TensorIn(parts.rows[0], parts.layer).type;
  }
  static bool IsBlockType(GgufTensorType type) {
    return FindBlockFormat(static_cast<uint32_t>(type)) != nullptr;
  }
  // Name of a form for people to read, in the words of the options and of the
  // file.
  static std::string FormOf(const LinearWeightsSpec& spec);
  // The element type in which a matrix is read; kU8 for blocks.
  static DType ReadType(WeightFormat format);
  // The form in which a matrix is kept.
  WeightFormat FormatOf(const MatrixParts& parts) const;
  LinearWeightsSpec WeightsOf(const MatrixParts& parts) const;
  // The matrix's name in a packed file.
  static std::string NameOf(const MatrixParts& parts);
  MatrixParts IntoStream(TensorId id, int64_t layer) const;
  void AddStreamBias(TensorId bias, MatrixParts& parts) const;
  // The file's tensor that has the rows of this one.
  const GgufTensor& TensorIn(TensorId id, int64_t layer) const;
  // Upper bound on the bytes of `parts` after packing.
  double PackedBytes(const MatrixParts& parts) const;
  // Bytes that packing `parts` needs besides PackedBytes.
  double UnpackedBytes(const MatrixParts& parts) const;

  // A layer over latents: the matrices that multiply its rows, from kv_a on,
  // and the pieces of W_kvb, as MlaWeights has them.
  struct KvBPart {
    std::string name;  // in a packed file
    LinearWeightsSpec spec;
    LinearWeights* weights;
  };
  MatrixParts LatentParts(TensorId id, int64_t layer) const;
  std::vector<MatrixParts> LatentInParts(int64_t layer) const;
  std::vector<KvBPart> KvBParts(int64_t layer, MlaWeights& weights) const;
  // The type in which W_kvb is read and kept.
  DType KvBType(int64_t layer) const;
  // Upper bounds on the bytes of its pieces, and on what packing them needs
  // besides.
  double KvBPackedBytes(int64_t layer) const;
  double KvBUnpackedBytes(int64_t layer) const;
  absl::StatusOr<AlignedBuffer> ReadKvB(int64_t layer, DType dtype);
  absl::Status MakeKvB(int64_t layer, MlaWeights& weights);

  // Packs the matrix from its tensors (Pack), or finds it in the packed file
  // (Find).
  absl::StatusOr<LinearWeights> Pack(const MatrixParts& parts);
  absl::StatusOr<LinearWeights> Find(const std::string& name,
                                     const LinearWeightsSpec& want,
                                     bool bias) const;
  // The group of ModelWork to which the matrix belongs.
  DecoderWork& WorkOf(const MatrixParts& parts);
  // Counts weights, and keeps them for WritePacked.
  void Keep(const std::string& name, const LinearWeights& weights);
  // Identifies the file and how its matrices are kept.
  absl::StatusOr<uint64_t> Source() const;
  absl::StatusOr<Int8Rows> Quantise(MatrixView<const float> w);
  // Reads this rank's parts of the tensors, one after another, as `dtype`;
  // without conversion if that is kU8.
  absl::StatusOr<AlignedBuffer> Read(const std::vector<TensorId>& ids,
                                     int64_t layer, DType dtype,
                                     int64_t expert = 0);
  // Like Read, into memory that the next call uses again.
  absl::StatusOr<uint8_t*> ReadUnpacked(const std::vector<TensorId>& ids,
                                        int64_t layer, DType dtype,
                                        int64_t expert);
  int64_t BytesOf(const std::vector<TensorId>& ids, int64_t layer,
                  DType dtype) const;
  absl::Status ReadTensors(const std::vector<TensorId>& ids, int64_t layer,
                           DType dtype, int64_t expert, uint8_t* out);
  absl::Status ReadTensor(TensorId id, int64_t layer, DType dtype,
                          int64_t expert, uint8_t* out);
  // Reads a part into `out`, on all workers.
  absl::Status ReadPiece(const GgufTensor& tensor, const GgufPart& part,
                         DType dtype, uint8_t* out);
  // Asks the system for what the file has behind a part of a tensor.
  void ReadAhead(const GgufTensor& tensor, const GgufPart& part);
  // Reads rows of a tensor that follow one another, and moves `out` behind
  // them.
  absl::Status ReadRows(const GgufTensor& tensor, const GgufPart& whole,
                        DType dtype, uint8_t*& out);
  // Bytes that ReadTensor writes for a part.
  int64_t BytesOf(TensorId id, int64_t layer, DType dtype) const;

  const GgufFile& file_;
  const DecoderConfig& config_;
  const ModelShard& shard_;
  const DecoderOptions& options_;
  const OpDispatcher& ops_;
  CancellableExecutor executor_;
  DType rows_dtype_;
  AlignedBuffer unpacked_;  // of one matrix after another
  // Up to where the system was asked for the file, and in which of its parts.
  int64_t asked_until_ = 0;
  int32_t asked_part_ = -1;
  int64_t done_ = 0, total_ = 0;
  int64_t packed_bytes_ = 0;
  ModelWork work_;
  std::vector<std::string> forms_;
  const PackedFile* packed_ = nullptr;
  std::vector<std::pair<std::string, LinearWeights>> made_;  // for WritePacked
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_LOADING_DECODER_LOADER_H_
