#ifndef QUERN_MODELS_DECODER_DECODER_OPTIONS_H_
#define QUERN_MODELS_DECODER_DECODER_OPTIONS_H_

// How a decoder is loaded: the forms of its matrices, its limits, its ranks and
// its operators.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "quern/core/communicator.h"

namespace quern {

class OpDispatcher;  // ops/registry/op_dispatcher.h

enum class DecoderWeights {
  // Each matrix keeps the form of the file: F32, BF16, F16, or blocks
  // (quant/block_format.h). q, k and v of several types with blocks among them
  // are matrices apart. Any other matrix whose parts differ in type becomes
  // f32: gate and up, or the first of a gated delta net. Matrices that
  // attention over latents transposes take the type of rows. Rows are bf16 if
  // all matrices of the file are BF16, Q4_0 or Q8_0, otherwise f32. Rows of an
  // embedding in blocks are converted to the type of rows.
  kAsInFile,
  kBF16,
  kF32,
  // All matrices become int8, each row scaled by its largest magnitude. So do
  // the rows that they multiply. The embedding table and other rows are bf16.
  kInt8,
};

// What matrices in block formats (quant/block_format.h) make of the rows that
// they multiply.
enum class DecoderActivations {
  // Rows have the type that DecoderWeights gives them, and are not rounded
  // further. Blocks other than Q4_0 and Q8_0 multiply as f32.
  kExact,
  // Each 32 numbers of a row become int8 with a scale of their own
  // (LinearActivations::kInt8Blocks), of rows that are bf16 if all matrices are
  // BF16 or in blocks, otherwise f32. Matrices that are not in blocks multiply
  // as with kExact. Needs kAsInFile.
  kInt8,
};

// What matrices in blocks make of rows where nobody says. This and
// kDefaultCacheDType are the defaults of the program examples/generate, of C
// and of Python, too. int8 is up to three times as fast, and costs the shipped
// model at most 0.12 % of its perplexity (docs/numerics.md).
constexpr DecoderActivations DefaultActivations(DecoderWeights weights) {
  return weights == DecoderWeights::kAsInFile ? DecoderActivations::kInt8
                                              : DecoderActivations::kExact;
}

// The names of these options, for the program, C and Python: "file", "bf16",
// "f32" and "int8"; "exact" and "int8".
absl::string_view DecoderWeightsName(DecoderWeights weights);
absl::string_view DecoderActivationsName(DecoderActivations activations);

struct DecoderOptions {
  // Bytes of memory for each byte of the file where max_bytes is 0. The most is
  // needed by a file wholly in TQ2_0, 66 bytes for 256 weights, that is loaded
  // as f32 and whose largest matrix is an embedding that gives the logits too:
  // three copies, the table, the packed matrix, and the one that is being
  // packed. 3 * 4 * 256 / 66 = 46.5.
  static constexpr int64_t kBytesOfFileByte = 47;

  DecoderWeights weights = DecoderWeights::kAsInFile;
  // nullopt: DefaultActivations(weights).
  std::optional<DecoderActivations> activations;
  // Largest position, exclusive; also the length of the rotary table.
  int64_t max_context = 32768;
  // Upper limit on the memory of Create at any time: matrices, embedding,
  // norms, rotary table, and what packing the largest matrix needs. 0 means 256
  // MiB plus kBytesOfFileByte times the file's bytes.
  int64_t max_bytes = 0;
  // Path of a file of packed matrices (models/decoder/loading/packed_file.h);
  // empty to pack into memory each time. If the file exists, it is mapped and
  // its matrices are used in place. FailedPrecondition if it was packed from
  // another GGUF file or in another form; InvalidArgument if it is damaged or
  // of another version of the packed form. The GGUF file is recognised by its
  // size, the names, types and sizes of its tensors, and the first, middle and
  // last row of each tensor; remove the packed file after a change that these
  // do not show. If the file does not exist, it is written, unless another
  // process has written it meanwhile.
  std::string packed_path = {};
  // The ranks that hold the model together. Borrowed; must outlive the model
  // and its states. Null means that this process has the whole model.
  Communicator* communicator = nullptr;
  // Where the operators of the model and of its states come from, so that a
  // policy or an override reaches them; borrowed, it outlives the model. Its
  // registry has what RegisterDecoderOps registers. Create and
  // DecoderState::Create make operators; a step calls their WorkspaceBytes and
  // Execute, and neither Prepare nor CheckArgs. A result may have any row
  // stride, and a norm may write to what it reads. Null: each operator's first
  // provider.
  const OpDispatcher* operators = nullptr;
  // Asked by the thread that calls Create, between matrices and some 50 times a
  // second within one if the executor runs tasks on that thread, as ours do,
  // whether to give up: Create then returns Cancelled, and leaves no packed
  // file. Null: never. It must not throw.
  std::function<bool()> cancelled;
  // Called now and then while weights are read, with the bytes done and the
  // total.
  std::function<void(int64_t done, int64_t total)> progress;
  // Number of elements read between two calls of `progress`; at least a row is
  // read.
  int64_t progress_elements = int64_t{8} << 20;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_DECODER_OPTIONS_H_
