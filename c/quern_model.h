#ifndef QUERN_C_QUERN_MODEL_H_
#define QUERN_C_QUERN_MODEL_H_

/* Language models of GGUF files in C: text to tokens, tokens to logits, several
 * sequences at once, and the next token of each.
 *
 *   quern_tokenizer* words;  quern_model* model;  quern_model_state* state;
 *   quern_model_options of_model = {sizeof(of_model)};
 *   quern_tokenizer_options of_words = {sizeof(of_words)};
 *   of_model.path = of_words.path = "model.gguf";
 *   quern_tokenizer_create(library, &of_words, &words);
 *   quern_model_create(library, &of_model, executor, &model);
 *   quern_model_state_create(library, model, NULL, &state);
 *
 *   int32_t ids[64];  size_t count;  int32_t sequence;  quern_tensor logits;
 *   quern_tokenizer_encode(words, "Hello", 5, QUERN_ENCODE_BOS, ids, 64,
 *                          &count);
 *   quern_model_state_begin(state, &sequence);
 *   const quern_model_item item = {sequence, 0, ids, (int64_t)count};
 *   const quern_model_step step = {sizeof(step), &item, 1, 0, 0};
 *   quern_model_state_forward(state, &step, executor, &logits);
 *
 * quern.h has the rules of all functions here: codes, messages, objects,
 * structs that begin with their size, and defaults that are 0 or NULL.
 * models/decoder/decoder.h has the equations, and models/README.md says which
 * files are read.
 *
 * A file is not trusted. Everything in it is checked, and max_bytes bounds the
 * memory that it makes the library allocate.
 *
 * Structs that end in _options or _info, and quern_model_step, begin with their
 * size, and so does quern_sampling_filters. quern_model_item and quern_sampling
 * never change.
 */

#include <stddef.h>
#include <stdint.h>

#include "quern/c/quern.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct quern_model quern_model;
typedef struct quern_model_state quern_model_state;
typedef struct quern_tokenizer quern_tokenizer;
typedef struct quern_sampler quern_sampler;

/* ---- Models ------------------------------------------------------------- */

typedef struct quern_model_options {
  size_t size;
  /* The file: a path, or the bytes of a whole file, and not both. Neither is
   * needed after the call. */
  const char* path;
  const void* bytes;
  size_t num_bytes;
  const char* weights;     /* "file" (as in the file), "bf16", "f32", "int8":
                            * the form in which matrices are kept; NULL: "file".
                            * "as_in_file" is an older name of "file" */
  const char* activations; /* "exact", or "int8" for matrices in blocks with
                            * "file"; NULL: "int8" with "file", else "exact" */
  int64_t max_context;     /* largest position, exclusive; 0: 32768 */
  int64_t max_bytes;       /* of memory during the call; 0: 256 MiB and 47 times
                            * the file's bytes */
  const char* packed_path; /* a file of packed matrices, which is mapped if it
                            * exists and written if it does not; NULL: none */
  /* Called by the thread that creates the model, now and then, with the bytes
   * read and all bytes. NULL: nobody is told. */
  void (*progress)(void* progress_context, int64_t done, int64_t total);
  void* progress_context;
  /* Asked by the thread that creates the model whether to give up: between
   * matrices, and some 50 times a second within one if the executor runs tasks
   * on that thread, as those of quern_executor_create_pool do. Another answer
   * than 0 ends the call with QUERN_CANCELLED. NULL: nobody is asked. */
  int32_t (*cancelled)(void* cancelled_context);
  void* cancelled_context;
} quern_model_options;

/* Reads and packs the weights. Refused are files that are not GGUF, an
 * architecture, shape or tensor that models/architectures does not have
 * (QUERN_INVALID_ARGUMENT, QUERN_UNIMPLEMENTED), a file that is missing
 * (QUERN_NOT_FOUND), may not be read (QUERN_PERMISSION_DENIED) or ends too
 * early (QUERN_DATA_LOSS), a packed file of another model
 * (QUERN_FAILED_PRECONDITION), and too little max_bytes
 * (QUERN_RESOURCE_EXHAUSTED). QUERN_CANCELLED if `cancelled` has said so. The
 * operators are those of the library, by its policy. */
QUERN_API quern_status quern_model_create(quern_library* library,
                                          const quern_model_options* options,
                                          quern_executor* executor,
                                          quern_model** model);

typedef struct quern_model_info {
  size_t size;
  int64_t context; /* length of the longest sequence */
  int64_t vocab;   /* tokens are 0 <= token < vocab */
  int64_t hidden;
  int64_t layers;
  int64_t weight_bytes; /* of the packed matrices and the embedding */
  int64_t step_tokens;  /* of a prompt, which a step should read on this machine
                         * at most */
} quern_model_info;

/* Fills *info, whose size the caller has set. */
QUERN_API quern_status quern_model_get_info(quern_model* model,
                                            quern_model_info* info);

/* ---- Sequences in progress ------------------------------------------------
 *
 * A model has any number of states, each with a cache of its own. begin, fork,
 * end and forward change their state: one call at a time, and others that meet
 * it are refused.
 */

typedef struct quern_model_state_options {
  size_t size;
  int64_t max_sequences;   /* 0: 1 */
  int64_t max_step_tokens; /* in one forward, over all sequences; 0: 512 */
  int64_t cache_tokens;    /* over all sequences; 0: max_sequences times the
                            * model's context */
  int64_t page_size;       /* tokens of a page of the cache; 0: 32 */
  const char* cache_dtype; /* "f32", "bf16", "f16", "i8", "f8e4m3", "f8e5m2";
                            * NULL: "bf16" */
  int64_t max_bytes;       /* of cache and activations; 0: 4 GiB and 64 times
                            * the model's weight_bytes */
} quern_model_state_options;

/* `options` may be NULL. The state keeps the model, which may be destroyed. */
QUERN_API quern_status quern_model_state_create(
    quern_library* library, quern_model* model,
    const quern_model_state_options* options, quern_model_state** state);

typedef struct quern_model_state_info {
  size_t size;
  int64_t cache_bytes;           /* and what recurrent layers remember */
  int64_t cache_bytes_per_token; /* over all layers */
  int64_t free_tokens;           /* that free pages hold */
  int64_t scratch_bytes;         /* of all other memory */
} quern_model_state_info;

/* Fills *info, whose size the caller has set. */
QUERN_API quern_status quern_model_state_get_info(quern_model_state* state,
                                                  quern_model_state_info* info);

/* Starts an empty sequence. QUERN_RESOURCE_EXHAUSTED where there are
 * max_sequences already. */
QUERN_API quern_status quern_model_state_begin(quern_model_state* state,
                                               int32_t* sequence);
/* Starts a sequence that begins with all tokens of `sequence`, which are not
 * computed again. */
QUERN_API quern_status quern_model_state_fork(quern_model_state* state,
                                              int32_t sequence,
                                              int32_t* forked);
/* Ends a sequence and frees its part of the cache. Its number may then be
 * another's. */
QUERN_API quern_status quern_model_state_end(quern_model_state* state,
                                             int32_t sequence);
/* The number of tokens of a sequence. */
QUERN_API quern_status quern_model_state_length(quern_model_state* state,
                                                int32_t sequence,
                                                int64_t* length);

/* New tokens of one sequence. */
typedef struct quern_model_item {
  int32_t sequence;
  int32_t reserved; /* 0 */
  const int32_t* tokens;
  int64_t num_tokens; /* 1 or more */
} quern_model_item;

typedef struct quern_model_step {
  size_t size;
  const quern_model_item* items; /* each of another sequence */
  size_t num_items;
  int32_t all_logits; /* 0: logits after each item's last token; 1: after every
                       * token, item by item */
  int32_t reserved;   /* 0 */
} quern_model_step;

/* Appends each item's tokens to its sequence and computes the logits of what
 * follows: f32[rows, vocab], whose data and shape live until the next forward
 * of the state, or until the state is destroyed. A refused call leaves every
 * sequence as it was; unless another call was in the way, logits then has no
 * rows. QUERN_RESOURCE_EXHAUSTED: the cache is full. QUERN_INTERNAL: the
 * caller's executor has not kept its promise; the sequences of the step are
 * longer, and must be ended because what they remember is unspecified.
 *
 * A sequence's logits depend neither on the other items, nor on the executor.
 */
QUERN_API quern_status quern_model_state_forward(quern_model_state* state,
                                                 const quern_model_step* step,
                                                 quern_executor* executor,
                                                 quern_tensor* logits);

/* ---- Text --------------------------------------------------------------- */

typedef struct quern_tokenizer_options {
  size_t size;
  /* As in quern_model_options. Weights are not read. */
  const char* path;
  const void* bytes;
  size_t num_bytes;
} quern_tokenizer_options;

/* Reads the vocabulary of a file. QUERN_UNIMPLEMENTED for kinds that
 * models/tokenizer/tokenizer.h does not have. */
QUERN_API quern_status quern_tokenizer_create(
    quern_library* library, const quern_tokenizer_options* options,
    quern_tokenizer** tokenizer);

typedef struct quern_tokenizer_info {
  size_t size;
  int32_t vocab;
  int32_t bos; /* begins a text; -1: none */
  int32_t eos; /* ends a text */
  /* 1 where the model expects bos before a text: what QUERN_ENCODE_BOS adds. */
  int32_t adds_bos;
} quern_tokenizer_info;

/* Fills *info, whose size the caller has set. */
QUERN_API quern_status quern_tokenizer_get_info(quern_tokenizer* tokenizer,
                                                quern_tokenizer_info* info);
/* Sets *is_end to 1 where generation stops at `token`, which is eos or the end
 * of a turn; else to 0. */
QUERN_API quern_status quern_tokenizer_is_end(quern_tokenizer* tokenizer,
                                              int32_t token, int32_t* is_end);

enum {
  /* The text of a control token, "<|im_end|>", becomes that token. Without it,
   * what a user wrote commands nothing. */
  QUERN_ENCODE_SPECIALS = 1,
  /* bos comes first where the model expects it. A text that begins with bos,
   * which QUERN_ENCODE_SPECIALS may find, gets no second one. */
  QUERN_ENCODE_BOS = 2
};

/* The tokens of text[num_bytes], which need not end in 0. Writes at most
 * `capacity` of them and sets *num_tokens to how many there are; `tokens` may
 * be NULL where capacity is 0. */
QUERN_API quern_status quern_tokenizer_encode(quern_tokenizer* tokenizer,
                                              const char* text,
                                              size_t num_bytes, uint64_t flags,
                                              int32_t* tokens, size_t capacity,
                                              size_t* num_tokens);

/* The tokens follow others: the space in front of a text is not dropped. So
 * texts of single tokens, one after the other, make the whole text; each may
 * end within a character of UTF-8. */
enum { QUERN_DECODE_CONTINUES = 1 };

/* The bytes of `tokens`. Writes at most `capacity` bytes, the last of them 0,
 * and sets *num_bytes to the length of the whole text without the 0. The text
 * may contain other zeros. `text` may be NULL where capacity is 0. Control
 * tokens, and ids outside the vocabulary, give nothing. */
QUERN_API quern_status quern_tokenizer_decode(quern_tokenizer* tokenizer,
                                              const int32_t* tokens,
                                              size_t num_tokens, uint64_t flags,
                                              char* text, size_t capacity,
                                              size_t* num_bytes);

/* ---- The next token ------------------------------------------------------ */

/* How one row is sampled; ops/sampling/sampler.h has the equation. All zeros
 * take the largest logit. */
typedef struct quern_sampling {
  float temperature; /* 0: the largest logit */
  float top_p;       /* in (0, 1]; 0: 1, which keeps all */
  int64_t top_k;     /* 0: all */
  uint64_t seed;     /* names the sequence's stream of draws */
  uint64_t step;     /* number of the draw, such as the sequence's length */
} quern_sampling;

/* More of how one row is sampled. All zeros but `size` change nothing. */
typedef struct quern_sampling_filters {
  size_t size;
  float min_p;       /* least weight, as a share of the largest: in [0, 1] */
  float top_n_sigma; /* logits within so many standard deviations of the
                      * largest; 0: all */
  float typical_p;   /* in (0, 1]; 0: 1, which keeps all */
  int32_t reserved;  /* 0 */
} quern_sampling_filters;

/* What a row of logits gives that has no number to choose. */
#define QUERN_NO_TOKEN (-1)

/* `vocab`, 1 to 2^31 - 1, is that of quern_model_info. */
QUERN_API quern_status quern_sampler_create(quern_library* library,
                                            int64_t vocab,
                                            quern_sampler** sampler);

/* logits f32[num_rows, vocab], sampling[num_rows] -> tokens[num_rows]. A token
 * depends on its row and its quern_sampling alone. Changes the sampler: one
 * call at a time, and others that meet it are refused. */
QUERN_API quern_status quern_sampler_sample(quern_sampler* sampler,
                                            const quern_tensor* logits,
                                            const quern_sampling* sampling,
                                            size_t num_rows, int32_t* tokens,
                                            quern_executor* executor);

/* The same with filters[num_rows]; NULL: none. */
QUERN_API quern_status quern_sampler_sample_filtered(
    quern_sampler* sampler, const quern_tensor* logits,
    const quern_sampling* sampling, const quern_sampling_filters* filters,
    size_t num_rows, int32_t* tokens, quern_executor* executor);

#ifdef __cplusplus
}
#endif

#endif /* QUERN_C_QUERN_MODEL_H_ */
