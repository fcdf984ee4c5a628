#ifndef QUERN_MODELS_DECODER_DECODER_WORK_H_
#define QUERN_MODELS_DECODER_DECODER_WORK_H_

// What steps of a decoder read and compute: bytes, and operations of products
// with matrices, of attention and of recurrent layers. Experts count as if no
// two tokens shared one. Over the rates of a machine they tell how fast it
// could be (examples/generate --limits).

#include <cstdint>

namespace quern {

struct DecoderWork {
  // Packed matrices, each once a step, and the embedding's rows of the tokens.
  int64_t weight_bytes = 0;
  // Keys, values and latents that the step's queries see, and the states of
  // recurrent layers, each once a step. Keys that sequences share count once in
  // layers without a window, and latents for each sequence.
  int64_t cache_bytes = 0;
  // Operations by the type that multiplies. A multiply-add is two. bf16 counts
  // as bf16 on instruction sets without its dot product too, where f32 is its
  // limit.
  int64_t f32_ops = 0, bf16_ops = 0, int8_ops = 0;

  int64_t bytes() const { return weight_bytes + cache_bytes; }
  int64_t ops() const { return f32_ops + bf16_ops + int8_ops; }
  DecoderWork& operator+=(const DecoderWork& other) {
    weight_bytes += other.weight_bytes;
    cache_bytes += other.cache_bytes;
    f32_ops += other.f32_ops;
    bf16_ops += other.bf16_ops;
    int8_ops += other.int8_ops;
    return *this;
  }
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_DECODER_WORK_H_
