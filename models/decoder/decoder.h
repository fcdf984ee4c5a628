#ifndef QUERN_MODELS_DECODER_DECODER_H_
#define QUERN_MODELS_DECODER_DECODER_H_

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
// general.architecture of the file decides on the details: each architecture
// has a file in models/architectures that says what it does differently, such
// as llama.cc, gemma2.cc and deepseek2.cc.
//
// A layer over latents rounds each of its steps to the type of the rows. A long
// prompt that begins a sequence takes the direct form there. Every other item
// takes the absorbed form. The layer's operator, multi_head_latent_attention,
// takes the place of linear, rotary_embedding, write_kv and paged_attention;
// each state makes its own.
//
// A recurrent layer remembers a sequence in a state of fixed size, whatever its
// length. It rounds each of its steps to the type of the rows; a state in f32
// is not rounded. Its operator, short_conv, mamba_mixer2 or gated_delta_net,
// takes the place of linear, write_kv and paged_attention there.
//
// Over ranks (DecoderOptions::communicator), each rank holds some heads, some
// columns of the feed-forward layer and some of the vocabulary, and reads only
// these from the file. The ranks' contributions to x are summed and the logits
// are gathered, so that every rank has all of them, with the same bits. Create,
// NewSequence, EndSequence, Fork and Forward are collective: all ranks call
// them with the same arguments and in the same order. If one rank refuses the
// arguments or the shape of the model, all refuse. If a step is impossible on
// one rank, for lack of memory for example, Forward fails on all. If a Create
// fails on one rank, the program must tell the others before their next call,
// as examples/generate does.
//
// A norm multiplies by the weights in the file. This holds for gemma2 and
// qwen3next too, because writers of GGUF files have already added 1 to the
// weights that these models store less 1.
//
// A model with recurrent layers, or with layers over latents, runs on one rank:
// others are refused.
//
// Each rank routes by itself, so with experts all ranks need CPUs of one
// instruction set: a logit that differs in its last bit may choose another
// expert.
//
// Matrices are f32, bf16, f16, int8 or in the file's blocks; routers are f32 in
// every form. The rows that matrices multiply are bf16, f32 or int8. Everything
// else is f32.
//
// A file is not trusted. The memory for loading and running it is bounded by
// DecoderOptions::max_bytes and DecoderStateSpec::max_bytes, which are checked
// before anything is read or allocated.
//
//   QUERN_ASSIGN_OR_RETURN(GgufFile file, GgufFile::Open(path));
//   QUERN_ASSIGN_OR_RETURN(Decoder model,
//                          Decoder::Create(file, {}, executor));
//   QUERN_ASSIGN_OR_RETURN(DecoderState state,
//                          DecoderState::Create(model, {}));
//   QUERN_ASSIGN_OR_RETURN(int32_t sequence, state.NewSequence());
//   QUERN_ASSIGN_OR_RETURN(auto logits,
//                          state.Forward({{sequence, tokens}},
//                                        LogitsOf::kLastTokens, executor));

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder_options.h"  // IWYU pragma: export
#include "quern/models/decoder/decoder_work.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

class OpRegistry;  // ops/registry/op_registry.h

// Registers what models are made of: vocab_parallel_embedding, rms_norm,
// add_rms_norm, linear, fused_moe, rotary_embedding, write_kv, paged_attention,
// sigmoid_mul, short_conv, mamba_mixer2, gated_delta_net,
// multi_head_latent_attention, gather_rows and logits_processor, with the
// families that they belong to.
absl::Status RegisterDecoderOps(OpRegistry& registry);

// The type of keys and values in the cache where nobody says. Its products are
// dot products on CPUs that have them.
constexpr DType kDefaultCacheDType = DType::kBF16;

// Packed weights, and plans. Immutable: any number of states, each on its own
// thread, may use one model. States of a model over ranks share its
// communicator, so only one of them may be in Forward at a time.
class Decoder {
 public:
  // Reads and packs all weights; `file` is not needed afterwards. Refuses what
  // DecoderConfig::Create and the operators refuse. ResourceExhausted, before
  // any weight is read, if options.max_bytes is too small. Cancelled if
  // options.cancelled says so.
  static absl::StatusOr<Decoder> Create(const GgufFile& file,
                                        const DecoderOptions& options,
                                        Executor& executor);

  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;
  ~Decoder();

  const DecoderConfig& config() const;
  // Length of the longest sequence: the smaller of the model's and the options'
  // context.
  int64_t context() const;
  // The forms in which matrices are kept: one or several of "bf16", "f32",
  // "f16", "int8", and the names of block formats, such as "q4_k".
  const std::string& weights() const;
  // Bytes of the packed matrices and of the embedding table.
  int64_t weight_bytes() const;
  // Number of ranks that hold the model, and the index of this rank.
  int ranks() const;
  int rank() const;
  // Bytes of sums and of gathered logits that a rank sends for one token whose
  // logits are wanted; 0 with one rank.
  int64_t rank_bytes_per_token() const;
  // Number of a prompt's tokens that a step should read: 512 where the rows of
  // as many tokens fit into half of this machine's last-level cache, else 256.
  // Each step reads all weights once, and more tokens share a mixture's
  // experts.
  int64_t step_tokens() const;
  // Instruction set of the operators, e.g. "AVX3_ZEN4".
  const char* target() const;
  // Describes the instruction set and the matrices' kernels for 1 and 256 rows.
  std::string Explain() const;

 private:
  friend class DecoderState;
  struct Impl;
  explicit Decoder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct DecoderStateSpec {
  // Each sequence has a slot of fixed size in the memory of recurrent layers.
  int64_t max_sequences = 1;
  int64_t max_step_tokens = 512;  // of one Forward, over all sequences
  // Number of tokens that the cache holds, over all sequences. 0 means
  // max_sequences times the model's context. Local layers have a smaller cache
  // of their own, because pages that their window has left are given back.
  int64_t cache_tokens = 0;
  int64_t page_size = 32;  // a multiple of 16 for layers over latents
  // kF32, kBF16, kF16, kI8, kF8E4M3 or kF8E5M2. Types of one byte have an f32
  // scale for each token and head, computed when the token is written. If the
  // model's rows are bf16 and the cache is bf16 or of one byte, queries are
  // rounded to bf16, so that their products are bf16 dot products. Layers over
  // latents take kF8E4M3 with a scale for each block (KvScaling::kPerBlock),
  // and refuse other types of one byte.
  DType cache_dtype = kDefaultCacheDType;
  // Upper limit on the bytes of cache, of recurrent layers' memory and of
  // activations together. 0 means 4 GiB plus 64 times the model's
  // weight_bytes(). Logits, and the scratch of matrices and attention, are not
  // included; they grow with the calls of Forward.
  int64_t max_bytes = 0;
};

// New tokens for one sequence.
struct DecoderBatchItem {
  int32_t sequence;
  absl::Span<const int32_t> tokens;
};

enum class LogitsOf {
  kLastTokens,  // one row for each item
  kAllTokens,   // one row for each token, item by item
};

// Sequences in progress, with a paged cache and scratch. Not thread-safe.
class DecoderState {
 public:
  // `model` must outlive the state. InvalidArgument names the field;
  // ResourceExhausted if spec.max_bytes is too small or the memory cannot be
  // allocated.
  static absl::StatusOr<DecoderState> Create(const Decoder& model,
                                             const DecoderStateSpec& spec);

  DecoderState(DecoderState&&) noexcept;
  DecoderState& operator=(DecoderState&&) noexcept;
  ~DecoderState();

  // Starts an empty sequence. ResourceExhausted if there are max_sequences
  // already.
  absl::StatusOr<int32_t> NewSequence();
  // Ends a sequence and gives its pages back. InvalidArgument for an unknown
  // sequence.
  absl::Status EndSequence(int32_t sequence);
  // Starts a sequence that begins with all tokens of `sequence` and shares its
  // pages; what recurrent layers remember is copied. No token is computed
  // again, and a step with both sequences reads the common keys once.
  // InvalidArgument for an unknown sequence; ResourceExhausted as in
  // NewSequence.
  absl::StatusOr<int32_t> Fork(int32_t sequence);
  // Number of tokens of a sequence so far; -1 for an unknown sequence.
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
  // A sequence's logits depend neither on the other items nor on how its tokens
  // are divided into calls. With Mamba-2 layers, items of 16 tokens and more go
  // by chunks there, and so may differ from shorter ones by roundings. The same
  // holds for the first items of sequences in layers over latents, where the
  // form changes with the item's length.
  absl::StatusOr<MatrixView<const float>> Forward(
      absl::Span<const DecoderBatchItem> items, LogitsOf logits_of,
      Executor& executor);

  int64_t max_step_tokens() const;
  // Size of the cache in bytes, including scales and the memory of recurrent
  // layers.
  int64_t cache_bytes() const;
  // Over all layers; recurrent ones take none.
  int64_t cache_bytes_per_token() const;
  // Number of tokens that the free pages can hold, in the layers that have
  // fewest.
  int64_t free_tokens() const;
  // Number of keys of each head that the last Forward did not read again,
  // because several of its sequences share them.
  int64_t shared_tokens() const;
  // What the last Forward that succeeded read and computed on this rank; zero
  // before the first. Products with matrices, of attention and of recurrent
  // layers are counted; norms, activations and softmax are not.
  DecoderWork last_work() const;
  // What attention is computed by, for a person to read: "AVX3_ZEN4 bf16 dot",
  // where the last words are what queries meet keys in.
  std::string ExplainAttention() const;
  // Bytes of all buffers except the cache.
  int64_t scratch_bytes() const;

 private:
  struct Impl;
  explicit DecoderState(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_DECODER_H_
