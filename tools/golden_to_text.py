#!/usr/bin/env python3
"""Turns the golden JSON files of a model into lines that C++ tests read without a JSON library.

usage: tools/golden_to_text.py models/quern_kjv_4m

Reads golden.json and tokenizer_golden.json there and writes golden.txt and tokenizer_golden.txt beside them.
Texts are hexadecimal UTF-8 ("-" if empty), lists are separated by commas ("-" if empty).

  golden.txt            prompt TEXT IDS GREEDY_IDS GREEDY_TEXT
                        top20 ID:LOGIT,...              of the prompt above it
                        perplexity WINDOWS WINDOW_TOKENS NLL PERPLEXITY FIRST_WINDOW_NLL
  tokenizer_golden.txt  TEXT IDS DECODED
"""
import json
import pathlib
import sys


def text(s):
    return s.encode("utf-8").hex() or "-"


def items(values):
    return ",".join(str(v) for v in values) or "-"


folder = pathlib.Path(sys.argv[1])
golden = json.loads((folder / "golden.json").read_text())
with open(folder / "golden.txt", "w") as out:
    for p in golden["prompts"]:
        print("prompt", text(p["text"]), items(p["ids"]), items(p["greedy_ids"]), text(p["greedy_text"]), file=out)
        print("top20", items(f"{i}:{logit}" for i, logit in p["top20"]), file=out)
    x = golden["perplexity"]
    print("perplexity", x["windows"], x["context"], x["all"]["nll"], x["all"]["perplexity"], x["first_window_nll"],
          file=out)
with open(folder / "tokenizer_golden.txt", "w") as out:
    for c in json.loads((folder / "tokenizer_golden.json").read_text())["cases"]:
        print(text(c["text"]), items(c["ids"]), text(c["decoded"]), file=out)
