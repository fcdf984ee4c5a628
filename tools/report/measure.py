"""Measures this machine and returns the content of one file of docs/performance (dataset.py)."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import dataset
import dram

LINEAR_ROWS = "2,8,32,128"  # beside those of the table
DECODE_KEYS = (1024, 2048, 8192, 16384, 65536)
PROMPTS = (128, 256, 1024)
CONTEXTS = (64, 512, 1536)
PEER_ROWS = "1,4,16,64,256"
HERE = pathlib.Path(__file__).resolve().parent


class Measurement:
    def __init__(self, programs, isa, threads, tell):
        self.programs, self.isa, self.threads, self.tell = programs, isa, threads, tell

    def run(self, words, env=None, stdin=None):
        """Standard output, standard error and the exit code of a program."""
        self.tell("report: " + " ".join(str(w) for w in words))
        done = subprocess.run([str(w) for w in words], env=env, input=stdin, capture_output=True, text=True)
        return done.stdout, done.stderr, done.returncode

    def perf(self, command):
        """The rows of a command of tools/perf, each with the command that repeats it, and what it has refused."""
        out, err, code = self.run([self.programs["perf"], *command.split(), f"--threads={self.threads}",
                                   f"--isa={self.isa}", "--format=json"])
        rows, failed = [], []
        for line in out.splitlines():
            row = json.loads(line)
            if row["op"] != "limits" and not row.get("command"):
                row["command"] = re.sub(r"--m=\S+", lambda _: "--" + row["shape"].split()[0], command)
            rows.append(row)
        if code != 0:
            failed.append({"command": command, "code": code, "said": err.strip().splitlines()[-1:]})
        return rows, failed

    def part(self, commands, rows, failed=(), fields=dataset.FIELDS):
        date = time.strftime("%Y-%m-%d", time.gmtime())
        return {"date": date, "commit": self.programs["commit"], "commands": list(commands),
                "rows": [{k: v for k, v in row.items() if v is not None and (fields is None or k in fields)}
                         for row in rows], "failed": list(failed)}

    def shown(self, command):
        more = "" if self.isa == "best" else f" --isa={self.isa}"
        return f"./bazelw run -c opt //tools/perf -- {command} --threads={self.threads}{more}"

    def table(self):
        """The limits and the table, which are one run."""
        rows, failed = self.perf("--table")
        commands = [self.shown("--table")]
        return {"limits": self.part(commands, [r for r in rows if r["op"] == "limits"],
                                    fields=dataset.FIELDS + ("threads", "pages", "gbps", "gflops")),
                "table": self.part(commands, [r for r in rows if r["op"] != "limits"], failed)}

    def several(self, name, commands):
        rows, failed = [], []
        for command in commands:
            more, wrong = self.perf(command)
            rows += more
            failed += wrong
        return {name: self.part([self.shown(c) for c in commands], rows, failed)}

    def linear(self):
        return self.several("linear", [f"{start} --m={LINEAR_ROWS}" for name, start in dataset.FORMATS
                                       if name in dataset.FORMATS_DRAWN])

    def attention(self):
        decode = [f"attention --batch=1 --kv_len={n} --kv={kv}" for kv in ("bf16", "i8", "f8e4m3") for n in DECODE_KEYS]
        return self.several("attention", decode + [f"attention --q_len={n} --kv_len={n} --kv=bf16" for n in PROMPTS])

    def onednn(self):
        starts = dict(dataset.FORMATS)
        return self.several("onednn", [f"{starts[name]} --m={PEER_ROWS} --kernels=onednn"
                                       for name in ("f32", "bf16", "int8, W8A8")])

    def peers(self):
        """Products by other libraries: those of the distribution, which Bazel's PATH finds, or of $QUERN_PYTHON."""
        env = dict(os.environ, PATH="/bin:/usr/bin:/usr/local/bin")
        python = os.environ.get("QUERN_PYTHON", "python3")
        out, err, code = self.run([python, HERE / "peers.py", f"--threads={self.threads}", f"--m={PEER_ROWS}",
                                   f"--perf={pathlib.Path(self.programs['perf']).resolve()}"], env)
        for line in err.splitlines():  # libraries that are missing
            self.tell(line)
        rows = [json.loads(line) for line in out.splitlines()]
        failed = [] if code == 0 else [{"command": "peers.py", "code": code, "said": err.strip().splitlines()[-1:]}]
        return {"peers": self.part([f"python3 tools/report/peers.py --threads={self.threads} --m={PEER_ROWS} "
                                    f"--perf=bazel-bin/tools/perf/perf"],
                                   rows, failed, None)}

    def generation(self):
        """A model of TinyLlama's shape: one prompt of each length and 32 tokens after it. llama-bench, where there is
        one, takes turns with generate on the same files."""
        rows, commands, failed, of_llama = [], [], [], []
        bench = self.programs.get("llama_bench") or shutil.which("llama-bench")
        if not bench:
            self.tell("report: no llama-bench; --llama_bench=PROGRAM names one")
        rate = dram.DramRate(self.programs["perf"] if bench else None, self.threads)
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(self.programs.get("models") or folder)
            bf16, q4_k = made / "bf16.gguf", made / "q4_k.gguf"
            if not bf16.exists():
                self.run([self.programs["make_random_gguf"], "--shape=tinyllama_1.1b", f"--out={bf16}"])
            if not q4_k.exists():
                self.run([self.programs["quantize_gguf"], bf16, q4_k, "Q4_K"])
            for matrices, path in (("BF16", bf16), ("Q4_K", q4_k)):
                for context in CONTEXTS:
                    # In the random vocabulary such a word takes about five tokens.
                    prompt = " ".join(f"w{i}" for i in range(5, 5 + context // 5))
                    _, err, code = self.run([self.programs["generate"], f"--model={path}", "--temperature=0", "--stats",
                                             "--limits", "--max_tokens=32", f"--threads={self.threads}"], stdin=prompt)
                    if code != 0:
                        raise RuntimeError(err)
                    rows.append(generation_row(matrices, err))
                    if bench:
                        rate.beside()
                        row, wrong = self.llama(bench, path, matrices, rows[-1]["context"])
                        of_llama += [dict(row, **rate.beside())] if row else []
                        failed += wrong
        for line in ("tools:make_random_gguf -- --shape=tinyllama_1.1b --out=/tmp/bf16.gguf",
                     "tools:quantize_gguf -- /tmp/bf16.gguf /tmp/q4_k.gguf Q4_K",
                     f"examples/generate -- --model=/tmp/q4_k.gguf --temperature=0 --stats --limits --max_tokens=32 "
                     f"--threads={self.threads} < PROMPT"):
            commands.append("./bazelw run -c opt //" + line)
        found = {"generation": self.part(commands, rows, fields=None), "engines": None}
        if bench:
            shown = [" ".join(llama_words("llama-bench", "/tmp/q4_k.gguf", self.threads, *amount))
                     for amount in (("TOKENS", 0, 0), (0, 32, "TOKENS"))]
            found["engines"] = self.part(shown, of_llama, failed, None)
        return found

    def llama(self, bench, path, matrices, context):
        """A row of llama-bench for a prompt and the 32 tokens after it, and what has failed."""
        rows, failed = [], []
        for amount in ((context, 0, 0), (0, 32, context)):
            words = llama_words(bench, path, self.threads, *amount)
            out, err, code = self.run(words)
            if code == 0:
                rows.append(llama_row(out))
            else:
                failed.append({"command": " ".join(["llama-bench", *words[3:]]), "code": code,
                               "said": err.strip().splitlines()[-1:]})
        if not rows:
            return None, failed
        row = {"engine": rows[0]["engine"], "matrices": matrices, "context": context}
        for found in rows:
            row.update(found)
        return row, failed


def llama_words(bench, path, threads, prompt, tokens, depth):
    """The command of llama-bench that reads a prompt, or writes tokens after `depth` others."""
    words = [bench, "-m", path, "-t", threads, "-p", prompt, "-n", tokens, "-r", 2, "-fa", 1, "-o", "json"]
    return [str(word) for word in words + (["-d", depth] if depth else [])]


def llama_row(text):
    """What one test of `llama-bench -o json` tells."""
    test = json.loads(text)[0]
    key = "prompt_tokens_s" if test["n_prompt"] else "generation_tokens_s"
    return {"engine": f"llama.cpp {test['build_commit']} ({test['build_number']})", key: round(test["avg_ts"], 1)}


def generation_row(matrices, text):
    """What `generate --stats --limits` tells."""
    def line(start):
        found = re.search(rf"^{start}: (\d+) tokens, .*? ([\d.]+) tokens/s,.*? ([\d.]+) of the (\w+) limit$", text, re.M)
        if not found:
            raise ValueError(f"no line '{start}: ...' in what generate tells:\n{text}")
        return int(found[1]), float(found[2]), float(found[3])

    tokens, prompt, of_prompt = line("prompt")
    _, speed, of_speed = line("generation")
    dram = re.search(r"^limits: DRAM read ([\d.]+) GB/s", text, re.M)
    return {"model": "TinyLlama-1.1B's shape", "matrices": matrices, "context": tokens, "prompt_tokens_s": prompt,
            "prompt_of_limit": of_prompt, "generation_tokens_s": speed, "generation_of_limit": of_speed,
            "dram_gbps": float(dram[1]) if dram else None}


def machine():
    """The CPU as Linux describes it."""
    text = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    fields = dict(re.findall(r"^([^:]+):\s+(.*)$", text, re.M))
    compiler = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    return {"cpu": fields.get("Model name", "unknown"), "family": fields.get("CPU family", ""),
            "model": fields.get("Model", ""), "cpus": int(fields.get("CPU(s)", 0)), "l2": fields.get("L2 cache", ""),
            "l3": fields.get("L3 cache", ""), "virtual": "Hypervisor vendor" in fields, "compiler": "GCC " + compiler}


def measure(programs, slug, title, isa, threads, parts, before=None, notes=()):
    """The content of a file. Parts that are not measured stay as they were before."""
    this = Measurement(programs, isa, threads, lambda text: print(text, file=sys.stderr))
    found = dict((before or {}).get("parts", {}))
    for name in parts:
        found.update(getattr(this, name)())
    return {"schema": dataset.SCHEMA, "slug": slug, "title": title, "isa": isa, "threads": threads,
            "machine": machine(), "notes": list(notes or (before or {}).get("notes", [])),
            "parts": {name: found[name] for name in dataset.PARTS if found.get(name)}}
