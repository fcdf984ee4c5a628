"""What was measured: one JSON file for each machine and instruction set.

    {"schema": 1, "slug": "zen5_avx2", "title": "AMD EPYC, Zen 5, AVX2", "isa": "AVX2", "threads": 1,
     "machine": {"cpu": ..., "cores": ..., "l2_kib": ..., ...}, "notes": ["a sentence", ...],
     "parts": {PART: {"date": ..., "commit": ..., "commands": [...], "rows": [...], "failed": [...]}}}

A part is what one group of commands measured (measure.py). Rows of `limits`, `table`, `linear`,
`attention` and `onednn` are lines of tools/perf, of which FIELDS are kept, with the
command line that repeats each. Rows of `peers`, `generation` and `engines` (other programs that write text, on the
files of `generation`) have fields of their own.
"""

import json
import pathlib
import re
import statistics

import dram

SCHEMA = 1
PARTS = ("limits", "table", "linear", "attention", "onednn", "peers", "generation", "engines")
FIELDS = ("command", "op", "shape", "dtype", "isa", "median_us", "bytes", "flops", "dram_kind", "dram_gbps",
          "peak_kind", "peak_gflops", "of_dram", "of_peak", "of_roof", "limits", "ghz")

# The families of operators, in the order in which pages list them.
FAMILIES = {
    "linear, other": ("linear", "scaled_linear", "fp8_block_linear", "int4_linear", "int8_group_linear"),
    "experts": ("moe", "grouped_linear"),
    "latent attention": ("mla", "mla_layer"),
    "attention without a cache": ("varlen_attention",),
    "norms": ("rms_norm", "fused_add_rms_norm", "gemma_rms_norm", "l2_norm", "layer_norm",
              "rms_norm_gated", "mixer2_gated_rms_norm"),
    "norms to fp8": ("rms_norm_quant", "fused_add_rms_norm_quant", "rms_norm_static_quant",
                     "fused_add_rms_norm_static_quant"),
    "gated activations": ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul",
                          "gelu_and_mul_sparse", "swigluoai_and_mul", "fatrelu_and_mul", "sigmoid_mul"),
    "activations": ("silu", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu2", "xielu"),
    "rotary embeddings": ("rotary_embedding", "mrope", "dual_chunk_rotary_embedding", "apply_rotary_emb"),
    "embedding, logits, router": ("vocab_parallel_embedding", "gather_rows", "logits_processor", "sample", "adjust_logits",
                                  "token_logprobs", "sample_recovered_tokens", "router"),
    "quantisation": ("quantize", "quant_fp8", "static_quant_fp8", "quant_int8"),
    "conversion of types": ("convert",),
    "packing of weights": ("pack",),
    "writing to the KV cache": ("kv_write",),
    "recurrent layers": ("state_update", "causal_conv1d", "delta_rule", "mixer"),
    "convolutions": ("conv2d", "conv3d"),
}
FAMILY_OF = {op: family for family, ops in FAMILIES.items() for op in ops}

# Weights of a linear layer: what the pages call them, and the start of the command of tools/perf.
FORMATS = (
    ("f32", "linear --n=4096 --k=4096 --dtype=f32 --out=f32"),
    ("f16", "linear --n=4096 --k=4096 --dtype=f16 --out=f16"),
    ("bf16", "linear --n=4096 --k=4096 --dtype=bf16"),
    ("fp8 in blocks", "fp8_block_linear --n=4096 --k=4096"),
    ("int8, W8A8", "scaled_linear --n=4096 --k=4096"),
    ("int8 in groups", "int8_group_linear --n=4096 --k=4096"),
    ("q8_0", "linear --n=4096 --k=4096 --weights=q8_0"),
    ("q6_k", "linear --n=4096 --k=4096 --weights=q6_k"),
    ("q4_k", "linear --n=4096 --k=4096 --weights=q4_k"),
    ("q4_0", "linear --n=4096 --k=4096 --weights=q4_0"),
    ("int4, int8 rows", "int4_linear --n=4096 --k=4096 --group=128 --activations=int8"),
    ("int4, exact rows", "int4_linear --n=4096 --k=4096 --group=128"),
)

# Those that the plot has.
FORMATS_DRAWN = ("f32", "bf16", "fp8 in blocks", "int8, W8A8", "q8_0", "q4_k", "int4, int8 rows")

# Peers of peers.py, as pages name them.
PEER_NAMES = {"numpy": "NumPy", "torch": "PyTorch", "eigen": "Eigen"}


def keys(command):
    """The keys of a command line: {"m": "4"} of `linear --m=4`."""
    return dict(re.findall(r"--([a-z0-9_]+)=(\S+)", command))


def family(row):
    """What a page calls the family of a row of tools/perf."""
    given = keys(row["command"])
    if row["op"] == "attention":
        return "attention, prompts" if int(given.get("q_len", 1)) > 1 else "attention, decode"
    for name, start in FORMATS:
        if row["command"].startswith(start + " --m="):
            return "linear, " + name
    return FAMILY_OF.get(row["op"], row["op"].replace("_", " "))


def peer_name(row):
    """What pages call the library of a row of peers.py. NumPy's products are those of the BLAS that it has found."""
    if row["peer"] == "numpy" and "openblas" in row["version"].lower():
        return "OpenBLAS"
    return PEER_NAMES.get(row["peer"], row["peer"])


def peer_bytes(row):
    """The least traffic of a row of peers.py: weights of 4096 x 4096, the rows in and the rows out, each once."""
    return {"f32": 4, "bf16": 2}[row["dtype"]] * (4096 * 4096 + 2 * 4096 * row["m"])


def bound(row):
    """The name of the limit that binds a row: a kind of DRAM traffic, or a type of arithmetic."""
    dram, peak = row.get("of_dram"), row.get("of_peak")
    return "DRAM" if peak is None or (dram is not None and dram >= peak) else row["peak_kind"]


def needs_dram(row, slowest):
    """Whether a case takes a quarter of the rate of DRAM or more, so that it depends on which rate DRAM had."""
    rate = row.get("dram_gbps") or slowest
    return row["bytes"] / row["median_us"] * 1e-3 >= rate / 4


class OneRate:
    """The rows that one plot may compare. DRAM may have had two rates during a run, which are no property of a format
    or a context: of the rows that depend on it, only the most that are within 10 % of each other are kept."""

    def __init__(self, rows):
        slowest = min((row["dram_gbps"] for row in rows if row.get("dram_gbps")), default=0)
        rates = sorted(row["dram_gbps"] for row in rows if row.get("dram_gbps") and needs_dram(row, slowest))
        windows = [[rate for rate in rates[i:] if rate <= dram.ONE_RATE * first] for i, first in enumerate(rates)]
        most = max(windows, key=len, default=[0])
        self.low, self.high = most[0], most[-1]
        self.left_out = 0
        self._slowest = slowest

    def keeps(self, row):
        """Counts the rows that it does not keep. A row whose own rate is unknown is kept if no rate would bind it."""
        kept = not needs_dram(row, self._slowest) or self.low <= (row.get("dram_gbps") or 0) <= self.high
        self.left_out += not kept
        return kept

    def sentence(self):
        """What a plot says about it; empty where DRAM binds nothing."""
        if not self.low:
            return ""
        rates = f"DRAM gave {self.low:.0f} to {self.high:.0f} GB/s."
        if not self.left_out:
            return rates
        return rates + (f" {self.left_out} cases at other or unknown rates are" if self.left_out > 1
                        else " A case at another or an unknown rate is") \
            + " left out."


class Data:
    """One file. Missing parts are empty, so a page can be drawn before all is measured."""

    def __init__(self, content, name="data"):
        self.content = content
        problem = self._problem()
        if problem:
            raise ValueError(f"{name}: {problem}")
        for key in ("slug", "title", "isa", "threads", "machine"):
            setattr(self, key, content[key])
        self.parts = content["parts"]
        self.notes = content.get("notes", [])

    def _problem(self):
        c = self.content
        if c.get("schema") != SCHEMA:
            return f"schema {c.get('schema')}; need {SCHEMA}"
        missing = [key for key in ("slug", "title", "isa", "threads", "machine", "parts") if key not in c]
        if missing:
            return f"no {missing[0]}"
        if not re.fullmatch(r"[a-z0-9_]+", c["slug"]):
            return f"slug {c['slug']!r}; need small letters, digits and _"
        for part, value in c["parts"].items():
            if part not in PARTS:
                return f"part {part!r}; need one of {', '.join(PARTS)}"
            for key in ("date", "commit", "commands", "rows"):
                if key not in value:
                    return f"part {part!r} has no {key}"
        return ""

    def rows(self, *parts):
        return [row for part in parts for row in self.parts.get(part, {}).get("rows", [])]

    def cases(self):
        """Rows of tools/perf that are operators of Quern."""
        return self.rows("table", "linear", "attention")

    def find(self, command, *parts):
        """The row of a command, or None."""
        for row in self.rows(*(parts or ("table", "linear", "attention"))):
            if row["command"] == command:
                return row
        return None

    def limit(self, name):
        """GB/s or GFLOP/s of a line of `perf limits` on this file's threads and huge pages; None if absent."""
        for row in self.rows("limits"):
            if row["shape"] == name and row["threads"] == self.threads:
                return (row.get("bytes") or row["flops"]) / row["median_us"] * 1e-3
        return None

    def read_rates(self):
        """(slowest, fastest) rate of DRAM's reads that was measured beside the cases, or None."""
        rates = [row["dram_gbps"] for row in self.cases()
                 if row.get("dram_kind") == "read" and row.get("limits") == "steady"]
        return (min(rates), max(rates)) if rates else None

    def peaks(self):
        """[("f32", GFLOP/s), ...] of those that differ by more than 2 %, from the smallest on."""
        found = []
        for name, shape in (("f32", "f32_fma"), ("bf16", "bf16_dot"), ("int8", "i8_dot"), ("int8 by 6 bits", "i6_dot")):
            rate = self.limit(shape)
            if rate is None:
                continue
            if found and abs(rate / found[-1][1] - 1) < 0.02:
                found[-1] = (found[-1][0] + ", " + name, found[-1][1])
            else:
                found.append((name, rate))
        return found

    def linear(self, start, parts=("table", "linear")):
        """[(m, row), ...] of the cases of one format, by rows."""
        found = {}
        for row in self.rows(*parts):
            if row["command"].startswith(start + " --m="):
                found[int(keys(row["command"])["m"])] = row
        return sorted(found.items())

    def by_family(self):
        """{family: [row, ...]} of all cases that have a limit."""
        found = {}
        for row in self.cases():
            if row.get("of_roof") is not None:
                found.setdefault(family(row), []).append(row)
        return found

    def medians(self):
        return {name: statistics.median(row["of_roof"] for row in rows) for name, rows in self.by_family().items()}


def load(path):
    path = pathlib.Path(path)
    data = Data(json.loads(path.read_text()), path.name)
    if data.slug != path.stem:
        raise ValueError(f"{path.name}: slug {data.slug!r}; need {path.stem!r}, the name of the file")
    return data


def load_all(folder):
    """All files of a folder, in the order of their names."""
    return [load(path) for path in sorted(pathlib.Path(folder).glob("*.json"))]


def text(content):
    """JSON with one row a line, so that a diff shows what has changed."""
    lines = []

    def write(value, indent, end):
        # A list of rows is opened; what is inside a row is not.
        if isinstance(value, dict) and indent <= 3:
            lines.append("{")
            for i, (key, item) in enumerate(value.items()):
                lines.append("  " * (indent + 1) + json.dumps(key) + ": ")
                write(item, indent + 1, "," if i + 1 < len(value) else "")
            lines.append("  " * indent + "}" + end)
        elif isinstance(value, list) and value and indent <= 4:
            lines.append("[")
            for i, item in enumerate(value):
                lines.append("  " * (indent + 1) + json.dumps(item, ensure_ascii=False)
                             + ("," if i + 1 < len(value) else ""))
            lines.append("  " * indent + "]" + end)
        else:
            lines.append(json.dumps(value, ensure_ascii=False) + end)

    write(content, 0, "")
    joined = "\n".join(lines) + "\n"
    return re.sub(r'(": )\n', r"\1", joined)
