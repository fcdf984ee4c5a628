#!/usr/bin/env python3
"""Turns the golden JSON files of a model into lines that C++ tests read without a JSON library.

usage: tools/golden_to_text.py FOLDER, which is models/quern_kjv_4m or quant

Reads golden.json, tokenizer_golden.json and gguf_formats_golden.json there and writes a .txt file beside each.
Texts are hexadecimal UTF-8 ("-" if empty), lists are separated by commas ("-" if empty).

  golden.txt            prompt TEXT IDS GREEDY_IDS GREEDY_TEXT
                        top20 ID:LOGIT,...              of the prompt above it
                        perplexity WINDOWS WINDOW_TOKENS NLL PERPLEXITY FIRST_WINDOW_NLL
  tokenizer_golden.txt  TEXT IDS DECODED
  gguf_formats_golden.txt
                        FORMAT GGUF_TYPE BLOCK_VALUES BLOCK_BYTES BLOCKS VALUES
                        blocks in hexadecimal; of each value 8 digits, the bits of its f32
"""
import json
import pathlib
import sys


def text(s):
    return s.encode("utf-8").hex() or "-"


def items(values):
    return ",".join(str(v) for v in values) or "-"


def model(source, out):
    for p in source["prompts"]:
        print("prompt", text(p["text"]), items(p["ids"]), items(p["greedy_ids"]), text(p["greedy_text"]), file=out)
        print("top20", items(f"{i}:{logit}" for i, logit in p["top20"]), file=out)
    x = source["perplexity"]
    print("perplexity", x["windows"], x["context"], x["all"]["nll"], x["all"]["perplexity"], x["first_window_nll"],
          file=out)


def tokenizer(source, out):
    for c in source["cases"]:
        print(text(c["text"]), items(c["ids"]), text(c["decoded"]), file=out)


def formats(source, out):
    for f in source["formats"]:
        for c in f["cases"]:
            print(f["type"], f["gguf_type"], f["block_elements"], f["block_bytes"], c["bytes"], c["values"], file=out)


for name, write in {"golden": model, "tokenizer_golden": tokenizer, "gguf_formats_golden": formats}.items():
    path = pathlib.Path(sys.argv[1]) / f"{name}.json"
    if path.exists():
        with open(path.with_suffix(".txt"), "w") as out:
            write(json.loads(path.read_text()), out)
