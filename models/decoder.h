#ifndef QUERN_MODELS_DECODER_H_
#define QUERN_MODELS_DECODER_H_

// The forward pass of a Llama, and of models that differ from it in details,
// composed of this library's operators. For the tokens t of a step,
// x[t, hidden] in f32:
//
//   x = embedding[token]
//   each layer:  [q, k, v] = linear(rms_norm(x));  q, k = rope(q), rope(k)
//                k, v to the paged cache;  x += linear(attention(q, cache))
//                [gate, up] = linear(rms_norm(x))
//                x += linear(silu(gate) * up)
//   logits = output * rms_norm(x)
//
// general.architecture of the file decides on the details:
//
//   llama   as above; RoPE turns the pairs (2j, 2j + 1)
//   qwen2   q, k and v have biases; RoPE turns the pairs (j, j + rope_dim / 2),
//           as it does in those below
//   qwen3   q, k = rope(rms_norm(q)), rope(rms_norm(k)), each head by itself
//   gemma2  x = sqrt(hidden) * embedding[token]
//           x += rms_norm(linear(attention(q, cache)))
//           x += rms_norm(linear(gelu_tanh(gate) * up))
//           soft caps on attention's scores and on logits; layers 0, 2, 4 ...
//           are local: a query sees no more than the window's tokens
//
// Over ranks (DecoderOptions::communicator) each rank holds some heads, some
// columns of the feed-forward layer and some of the vocabulary, and reads only
// these from the file. The ranks' parts of what x gains are summed, and the
// logits gathered, so that every rank has all of them, with the same bits.
// Create, NewSequence, EndSequence, Fork and Forward are then called by all
// ranks, with the same arguments and in the same order; what one rank refuses
// for its arguments or the shape of the model, all refuse. Where a step cannot
// be done on one rank, for want of memory say, Forward fails on all; where a
// Create fails on one, the program must tell the others before their next call,
// as examples/generate does.
//
// A norm multiplies by the weights in the file, those of gemma2 too: whoever
// writes GGUF has added Gemma's 1 to them.
//
// Matrices are f32, bf16, f16, int8 or in the blocks of Q8_0, the rows that
// they multiply bf16, f32 or int8; the rest is f32.
//
// A file is not trusted: what loading it and running it take is bounded by
// DecoderOptions::max_bytes and DecoderStateSpec::max_bytes, which are checked
// before anything is read or allocated.
//
//   QUERN_ASSIGN_OR_RETURN(GgufFile file, GgufFile::Open(path));
//   QUERN_ASSIGN_OR_RETURN(Decoder model,
//                          Decoder::Create(file, {}, executor));
//   QUERN_ASSIGN_OR_RETURN(DecoderState state, DecoderState::Create(model,
//   {})); QUERN_ASSIGN_OR_RETURN(int32_t sequence, state.NewSequence());
//   QUERN_ASSIGN_OR_RETURN(logits, state.Forward({{sequence, tokens}},
//                                                LogitsOf::kLastTokens, ...));

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/decoder_config.h"
#include "quern/models/gguf.h"

namespace quern {

class OpDispatcher;  // ops/registry/op_dispatcher.h
class OpRegistry;    // ops/registry/op_registry.h

// Registers what models are made of: vocab_parallel_embedding, rms_norm,
// add_rms_norm, linear, rotary_embedding, write_kv, paged_attention,
// gather_rows and logits_processor, with the families that they belong to.
absl::Status RegisterDecoderOps(OpRegistry& registry);

enum class DecoderWeights {
  // Each matrix as the file has it: F32, BF16, F16, or Q8_0 in its blocks; f32
  // where the parts of a matrix differ, as q, k and v may. Rows are bf16 if all
  // matrices of the file are BF16 or Q8_0, else f32. Rows of an embedding in
  // Q8_0 become the type of rows.
  kAsInFile,
  kBF16,
  kF32,
  // All matrices to int8, each row by its largest magnitude; the rows that they
  // multiply to int8, each by its own; embedding table and other rows bf16.
  kInt8,
};

struct DecoderOptions {
  DecoderWeights weights = DecoderWeights::kAsInFile;
  // Positions are limited to this: the rotary table is as long.
  int64_t max_context = 32768;
  // The most that Create may take at any time: matrices, embedding, norms and
  // rotary table, and what the largest matrix needs while it is packed. 0: 256
  // MiB and 16 times the file's bytes.
  int64_t max_bytes = 0;
  // A file of packed matrices (models/packed_file.h). If there is one, they are
  // used where they lie in it, mapped; FailedPrecondition if it was packed from
  // another file or in another form, by the size of the file, the names, types
  // and sizes of its tensors and the first, the middle and the last row of
  // each: remove it after a change that these do not show. If there is none, it
  // is written, unless another process has meanwhile. Empty: matrices are
  // packed to memory each time.
  std::string packed_path = {};
  // The ranks that hold the model together, see above; borrowed, it outlives
  // the model and its states. Null: this process has all of it.
  Communicator* communicator = nullptr;
  // Where all operators of the model and of its states come from, so that a
  // policy or an override reaches them; borrowed, it outlives the model. Its
  // registry has what RegisterDecoderOps registers. Null: each operator's first
  // provider.
  const OpDispatcher* operators = nullptr;
  // Called now and then while weights are read: bytes done, of total.
  std::function<void(int64_t done, int64_t total)> progress;
  // Elements read between two calls of `progress`, at least a row.
  int64_t progress_elements = int64_t{8} << 20;
};

// Weights, packed, and plans. Immutable: any number of states, each on its own
// thread, may use one model. Over ranks they share its communicator, so that
// only one of them may be in a Forward at a time.
class Decoder {
 public:
  // Reads and packs all weights; `file` is not needed afterwards. Refuses what
  // DecoderConfig::Create refuses, and what the operators refuse;
  // ResourceExhausted, before a weight is read, if options.max_bytes does not
  // suffice.
  static absl::StatusOr<Decoder> Create(const GgufFile& file,
                                        const DecoderOptions& options,
                                        Executor& executor);

  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;
  ~Decoder();

  const DecoderConfig& config() const;
  // The longest sequence: the smaller of the model's and the options' context.
  int64_t context() const;
  // What matrices are kept as: "bf16", "f32", "f16", "int8" or "q8_0", or
  // several of these.
  const std::string& weights() const;
  // Bytes of the packed matrices and of the embedding table.
  int64_t weight_bytes() const;
  // Ranks that hold the model, and which of them this is.
  int ranks() const;
  int rank() const;
  // Bytes of sums and of gathered logits that a rank contributes for one token
  // whose logits are wanted; 0 with one rank.
  int64_t rank_bytes_per_token() const;
  // Instruction set of the operators, e.g. "AVX3_ZEN4".
  const char* target() const;
  // What runs: the instruction set, the matrices' kernels for 1 and 256 rows.
  std::string Explain() const;

 private:
  friend class DecoderState;
  struct Impl;
  explicit Decoder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct DecoderStateSpec {
  int64_t max_sequences = 1;
  int64_t max_step_tokens = 512;  // of one Forward, all sequences together
  // Tokens that the cache holds, all sequences together; 0: max_sequences
  // times the model's context. Local layers, which have a cache of their own,
  // need less of it: what their window has left is given back.
  int64_t cache_tokens = 0;
  int64_t page_size = 32;
  // kF32, kBF16, kF16, kI8, kF8E4M3 or kF8E5M2. Of one byte: with a scale for
  // each token and head, f32, found as the token is written. Queries are
  // rounded to bf16 where the model's rows are and the cache is of bf16 or one
  // byte: their products are bf16 dot products then.
  DType cache_dtype = DType::kF16;
  // The most that the cache and the activations may take together. 0: 4 GiB and
  // 64 times the model's weight_bytes(). Logits and the scratch of matrices and
  // of attention, which grow with what Forward is asked for, come on top.
  int64_t max_bytes = 0;
};

// New tokens of one sequence.
struct DecoderBatchItem {
  int32_t sequence;
  absl::Span<const int32_t> tokens;
};

enum class LogitsOf {
  kLastTokens,  // one row for each item
  kAllTokens,   // one row for each token, item by item
};

// Sequences in progress: a paged cache and scratch. For one thread at a time.
class DecoderState {
 public:
  // `model` must outlive this. InvalidArgument names the field;
  // ResourceExhausted if spec.max_bytes does not suffice or the memory cannot
  // be had.
  static absl::StatusOr<DecoderState> Create(const Decoder& model,
                                             const DecoderStateSpec& spec);

  DecoderState(DecoderState&&) noexcept;
  DecoderState& operator=(DecoderState&&) noexcept;
  ~DecoderState();

  // An empty sequence. ResourceExhausted if there are max_sequences already.
  absl::StatusOr<int32_t> NewSequence();
  // Gives its pages back. InvalidArgument if there is no such sequence.
  absl::Status EndSequence(int32_t sequence);
  // A new sequence that begins with all tokens of `sequence`, whose pages both
  // hold: no token is computed again, and a step with both reads their keys
  // once. InvalidArgument if there is no such sequence; ResourceExhausted as
  // NewSequence.
  absl::StatusOr<int32_t> Fork(int32_t sequence);
  // Tokens so far; -1 if there is no such sequence.
  int64_t length(int32_t sequence) const;

  // Appends each item's tokens to its sequence and computes logits. The result
  // is valid until the next call.
  //
  // InvalidArgument: an item without tokens, an unknown sequence or one named
  // twice, a token id outside the vocabulary, more tokens than max_step_tokens
  // or than the context holds. ResourceExhausted: the cache is full.
  // Unavailable: another rank could not do the step. No sequence gets longer
  // then.
  //
  // A sequence's logits do not depend on the other items; how its tokens are
  // cut into calls does not matter either.
  absl::StatusOr<MatrixView<const float>> Forward(
      absl::Span<const DecoderBatchItem> items, LogitsOf logits_of,
      Executor& executor);

  int64_t max_step_tokens() const;
  // Bytes of the cache, scales included.
  int64_t cache_bytes() const;
  int64_t cache_bytes_per_token() const;  // all layers
  // Tokens that new pages have room for, in the layers that have the least.
  int64_t free_tokens() const;
  // Keys of each head that the last Forward did not read again, because
  // sequences of it share them.
  int64_t shared_tokens() const;
  // What attention is computed by, for a person to read: "AVX3_ZEN4 bf16 dot",
  // where the last words are what queries meet keys in.
  std::string ExplainAttention() const;
  // Bytes of all buffers but the cache.
  int64_t scratch_bytes() const;

 private:
  struct Impl;
  explicit DecoderState(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_H_
