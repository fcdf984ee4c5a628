"""Prints a prompt and what a model writes after it.

    python3 python/generate.py models/quern_kjv_4m/quern-kjv-4m.bf16.gguf "In the beginning"
"""

import sys

import quern


def main(path, prompt):
    model = quern.Model(path)
    print(prompt, end="")
    for piece in model.generate(prompt, max_tokens=64):  # each piece as soon as it is there
        print(piece, end="", flush=True)
    print()

    # README: several prompts at once
    texts = model.generate_batch([prompt, "And it came to pass"], max_tokens=16, temperature=0)

    # README: tokens and logits
    tokens = model.tokenizer.encode(prompt)
    state = model.state(max_sequences=2, cache_tokens=1024)
    first = state.begin()
    logits = state.forward([(first, tokens)])  # f32[1, vocab]: what follows the last token
    second = state.fork(first)  # goes on from the same tokens
    logits = state.forward([(first, [int(logits[0].argmax())]), (second, [4])])

    if texts[0] != model.generate(prompt, max_tokens=16, temperature=0).text() or len(logits) != 2:
        sys.exit(f"generate: {texts[0]!r} is not what follows alone")


if __name__ == "__main__":
    main(*sys.argv[1:])
