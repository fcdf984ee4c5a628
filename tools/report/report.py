#!/usr/bin/env python3
"""Measures this machine, and writes docs/performance.md and its plots.

usage: report.py --slug=NAME --title=TEXT [--isa=best] [--threads=N] [--part=table,linear,...] [--note=TEXT]...
       report.py --render    writes the page again from docs/performance/*.json
       report.py --check     fails where the page is not what those files give

NAME is the file's name in docs/performance, such as zen5; TEXT is what the page calls it. Without --part all
parts are measured: table, linear, attention, onednn, peers, generation. A part that is named replaces what the file
had of it. //tools/report passes the programs: --perf, --generate, --make_random_gguf, --quantize_gguf. --llama_bench=PROGRAM
is measured beside generate, or the llama-bench that PATH has.
"""

import json
import os
import pathlib
import subprocess
import sys

sys.dont_write_bytecode = True
import dataset  # noqa: E402
import measure  # noqa: E402
import pages  # noqa: E402

PARTS = ("table", "linear", "attention", "onednn", "peers", "generation")
PROGRAMS = ("perf", "generate", "make_random_gguf", "quantize_gguf", "models", "llama_bench")
KEYS = ("slug", "title", "isa", "threads", "part", "note", "root", "render", "check") + PROGRAMS


def fail(text):
    sys.exit(f"report: {text}")


def parse(args):
    given = {}
    for arg in args:
        key, equals, value = arg[2:].partition("=")
        if not arg.startswith("--") or key not in KEYS or (equals == "") != (key in ("render", "check")):
            fail(f"{arg}\n{__doc__}")
        given.setdefault(key, []).append(value)
    notes = given.pop("note", [])
    return {key: values[-1] for key, values in given.items()}, notes


def missing(given):
    """The first key that a measurement needs and was not given, or None."""
    return next((key for key in ("slug", "title", "perf", "generate") if key not in given), None)


def write(root, check):
    """Writes what differs, or says it."""
    files = pages.render(dataset.load_all(root / "docs/performance"))
    kept = {f"performance/{path.name}" for path in (root / "docs/performance").glob("*.svg")}
    wrong = []
    for name, text in files.items():
        path = root / "docs" / name
        if not path.exists() or path.read_text() != text:
            wrong.append(name)
            if not check:
                path.write_text(text)
    for name in sorted(kept - set(files)):
        wrong.append(name)
        if not check:
            (root / "docs" / name).unlink()
    if check and wrong:
        fail("not what docs/performance/*.json give: docs/" + ", docs/".join(wrong)
             + "; write them again: tools/report/report.py --render")
    print(f"report: {len(files)} files of docs agree with docs/performance" if check else
          f"report: wrote {len(wrong)} of {len(files)} files")


def main(args):
    given, notes = parse(args)
    root = pathlib.Path(given.get("root") or os.environ.get("BUILD_WORKSPACE_DIRECTORY")
                        or pathlib.Path(__file__).resolve().parents[2])
    if not ("render" in given or "check" in given):
        if missing(given):
            fail(f"--{missing(given)} is missing\n{__doc__}")
        parts = given["part"].split(",") if "part" in given else PARTS
        for part in parts:
            if part not in PARTS:
                fail(f"--part={part}; need some of {','.join(PARTS)}")
        path = root / "docs/performance" / f"{given['slug']}.json"
        before = json.loads(path.read_text()) if path.exists() else None
        commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        content = measure.measure(dict(given, commit=commit), given["slug"], given["title"], given.get("isa", "best"),
                                  int(given.get("threads", os.cpu_count())), parts, before, notes)
        dataset.Data(content, path.name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(dataset.text(content))
    write(root, "check" in given)


if __name__ == "__main__":
    main(sys.argv[1:])
