/* Prints a prompt and what a model writes after it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quern/c/quern_model.h"

/* Ends the program if a call on `object` was refused. */
static void Check(quern_status status, const void* object) {
  char why[512];
  if (status == QUERN_OK) return;
  quern_message(object, why, sizeof(why));
  fprintf(stderr, "generate: status %d: %s\n", (int)status, why);
  exit(1);
}

int main(int argc, char** argv) {
  quern_library* lib;
  char text[512] = "usage: generate MODEL.gguf PROMPT [TOKENS]";
  if (argc < 3 || quern_library_create(NULL, &lib, text, sizeof(text))) {
    fprintf(stderr, "%s\n", text);
    return 2;
  }
  quern_executor* cores;
  quern_tokenizer* words;
  quern_model* model;
  quern_model_state* state;
  quern_sampler* pick;
  quern_tokenizer_options text_of = {.size = sizeof(text_of), .path = argv[1]};
  quern_model_options model_of = {.size = sizeof(model_of), .path = argv[1]};
  quern_model_info info = {.size = sizeof(info)};
  Check(quern_executor_create_pool(lib, 0, &cores), lib);
  Check(quern_tokenizer_create(lib, &text_of, &words), lib);
  Check(quern_model_create(lib, &model_of, cores, &model), lib);
  Check(quern_model_get_info(model, &info), model);
  Check(quern_model_state_create(lib, model, NULL, &state), lib);
  Check(quern_sampler_create(lib, info.vocab, &pick), lib);
  int32_t ids[513], is_end; /* a step takes 512 tokens, and refuses 513 */
  size_t count;
  Check(quern_tokenizer_encode(words, argv[2], strlen(argv[2]),
                               QUERN_ENCODE_BOS, ids, 513, &count),
        words);
  quern_model_item item = {0, 0, ids, count < 513 ? (int64_t)count : 513};
  const quern_model_step step = {sizeof(step), &item, 1, 0, 0};
  Check(quern_model_state_begin(state, &item.sequence), state);
  fputs(argv[2], stdout);
  for (int left = argc > 3 ? atoi(argv[3]) : 32; left > 0; --left) {
    const quern_sampling largest = {.temperature = 0};
    quern_tensor logits;
    Check(quern_model_state_forward(state, &step, cores, &logits), state);
    Check(quern_sampler_sample(pick, &logits, &largest, 1, ids, cores), pick);
    Check(quern_tokenizer_is_end(words, ids[0], &is_end), words);
    if (is_end) break;
    Check(quern_tokenizer_decode(words, ids, 1, QUERN_DECODE_CONTINUES, text,
                                 sizeof(text), &count),
          words);
    fputs(text, stdout);
    item.num_tokens = 1;
  }
  putchar('\n');
  return quern_destroy(lib); /* and all that was made in it */
}
