/* Prints a prompt and what a model writes after it.
 *
 *   generate MODEL.gguf PROMPT [TOKENS]
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quern/c/quern_model.h"

enum { kMaxPrompt = 4096, kStepTokens = 512 };

/* Ends the program if a call on `object` was refused. */
static void Check(quern_status status, const void* object) {
  char message[512];
  if (status == QUERN_OK) return;
  quern_message(object, message, sizeof(message));
  fprintf(stderr, "generate: status %d: %s\n", (int)status, message);
  exit(1);
}

/* Prints the text of `token`, which follows another. */
static void Print(quern_tokenizer* tokenizer, int32_t token) {
  char text[256];
  size_t length;
  Check(quern_tokenizer_decode(tokenizer, &token, 1, QUERN_DECODE_CONTINUES,
                               text, sizeof(text), &length),
        tokenizer);
  if (length >= sizeof(text)) length = sizeof(text) - 1;
  fwrite(text, 1, length, stdout);
  fflush(stdout);
}

/* Adds the prompt to the sequence, and returns the logits of what follows. */
static quern_tensor Read(quern_model_state* state, quern_executor* executor,
                         int32_t sequence, const int32_t* ids, size_t count) {
  quern_tensor logits;
  size_t done;
  memset(&logits, 0, sizeof(logits));
  for (done = 0; done < count; done += kStepTokens) {
    const size_t left = count - done;
    const quern_model_item item = {
        sequence, 0, ids + done,
        (int64_t)(left < kStepTokens ? left : kStepTokens)};
    const quern_model_step step = {sizeof(step), &item, 1, 0, 0};
    Check(quern_model_state_forward(state, &step, executor, &logits), state);
  }
  return logits;
}

/* Prints up to `limit` tokens, or fewer where the text ends. */
static void Write(quern_model_state* state, quern_executor* executor,
                  quern_tokenizer* tokenizer, quern_sampler* sampler,
                  int32_t sequence, quern_tensor logits, int limit) {
  int32_t token, is_end;
  const quern_sampling sampling = {0, 0, 0, 0, 0}; /* the largest logit */
  const quern_model_item item = {sequence, 0, &token, 1};
  const quern_model_step step = {sizeof(step), &item, 1, 0, 0};
  Check(quern_sampler_sample(sampler, &logits, &sampling, 1, &token, executor),
        sampler);
  while (limit-- > 0 && token != QUERN_NO_TOKEN) {
    Check(quern_tokenizer_is_end(tokenizer, token, &is_end), tokenizer);
    if (is_end) break;
    Print(tokenizer, token);
    if (limit == 0) break;
    Check(quern_model_state_forward(state, &step, executor, &logits), state);
    Check(
        quern_sampler_sample(sampler, &logits, &sampling, 1, &token, executor),
        sampler);
  }
}

int main(int argc, char** argv) {
  static int32_t ids[kMaxPrompt];
  quern_library* library;
  quern_executor* executor;
  quern_tokenizer* tokenizer;
  quern_model* model;
  quern_model_state* state;
  quern_sampler* sampler;
  quern_tokenizer_options words = {0};
  quern_model_options weights = {0};
  quern_model_info info = {0};
  char message[512];
  int32_t sequence;
  size_t count;
  if (argc < 3) {
    fprintf(stderr, "usage: generate MODEL.gguf PROMPT [TOKENS]\n");
    return 2;
  }
  if (quern_library_create(NULL, &library, message, sizeof(message)) !=
      QUERN_OK) {
    fprintf(stderr, "generate: %s\n", message);
    return 1;
  }
  Check(quern_executor_create_pool(library, 0, &executor), library);
  words.size = sizeof(words);
  weights.size = sizeof(weights);
  info.size = sizeof(info);
  words.path = weights.path = argv[1];
  Check(quern_tokenizer_create(library, &words, &tokenizer), library);
  Check(quern_model_create(library, &weights, executor, &model), library);
  Check(quern_model_get_info(model, &info), model);
  Check(quern_model_state_create(library, model, NULL, &state), library);
  Check(quern_sampler_create(library, info.vocab, &sampler), library);

  Check(quern_tokenizer_encode(tokenizer, argv[2], strlen(argv[2]),
                               QUERN_ENCODE_BOS, ids, kMaxPrompt, &count),
        tokenizer);
  if (count == 0 || count > kMaxPrompt) {
    fprintf(stderr, "generate: the prompt has %lu tokens; need 1 to %d\n",
            (unsigned long)count, (int)kMaxPrompt);
    return 1;
  }
  Check(quern_model_state_begin(state, &sequence), state);
  fputs(argv[2], stdout);
  Write(state, executor, tokenizer, sampler, sequence,
        Read(state, executor, sequence, ids, count),
        argc > 3 ? atoi(argv[3]) : 32);
  putchar('\n');
  Check(quern_destroy(library), library); /* and all that was made in it */
  return 0;
}
