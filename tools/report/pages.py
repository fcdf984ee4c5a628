"""Writes docs/performance.md and its plots from the files of docs/performance."""

import plots
import dataset
import dram
from svg import THEMES

LIMITS = (("dram_read", "DRAM, reads", "GB/s"), ("dram_write", "DRAM, writes", "GB/s"),
          ("dram_copy", "DRAM, a write for each read", "GB/s"), ("dram_update", "DRAM, reads and writes in place", "GB/s"),
          ("l3_read", "L3, reads", "GB/s"), ("l2_read", "L2, reads", "GB/s"),
          ("f32_fma", "f32 multiply-adds", "GFLOP/s"), ("bf16_dot", "bf16 products", "GFLOP/s"),
          ("i8_dot", "int8 products", "GOP/s"), ("i6_dot", "int8 by codes of at most six bits", "GOP/s"))


# The command of this page and of tools/README.md.
COMMAND = "./bazelw run -c opt //tools/report -- --slug=NAME --title=TEXT"


def picture(name, alt, folder="performance"):
    return (f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}_dark.svg">\n'
            f'  <img alt="{alt}" src="{folder}/{name}_light.svg" width="800">\n</picture>')


def table(head, rows):
    """A table of Markdown; columns after the first are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def rounded(value):
    """Three digits, or all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def limits_table(data):
    rows = [(name, f"{rounded(data.limit(key))} {unit}") for key, name, unit in LIMITS if data.limit(key) is not None]
    reads = data.read_rates()
    if rows and reads:
        rows.insert(1, ("DRAM, reads, beside the cases", f"{rounded(reads[0])} to {rounded(reads[1])} GB/s"))
    return table(("Limit", "measured"), rows) if rows else ""


def versions(data):
    found = {row["peer"]: row["version"] for row in data.rows("peers")}
    return "; ".join(found[key] for key in sorted(found))


def peer_cell(row, slowest):
    """GFLOP/s, and the rate of DRAM where the row depends on it."""
    speed = rounded(plots.gflops(row))
    if not dataset.needs_dram(row, slowest):
        return speed
    return f"{speed} ({row['dram_gbps']:.0f})" if row.get("dram_gbps") else f"{speed} (?)"


def peers_table(data):
    """GFLOP/s of each library by type and rows."""
    lines = []
    slowest = min((row["dram_gbps"] for row in data.rows("table", "onednn", "peers") if row.get("dram_gbps")), default=0)
    for dtype in ("f32", "bf16", "int8"):
        curves = plots.peer_rows(data, dtype)
        if len(curves) < 2:
            continue
        every = sorted({m for rows in curves.values() for m in rows})
        for name, rows in curves.items():
            lines.append((f"{dtype}, {name}", *(peer_cell(rows[m], slowest) if m in rows else "" for m in every)))
    return table(("GFLOP/s (int8: GOP/s), rows:", *map(str, every)), lines) if lines else ""


def generation_table(data):
    head = ("Matrices, prompt", "prompt, tokens/s", "of its limit", "generation, tokens/s", "of its limit", "DRAM, GB/s")
    return table(head, [(f"{row['matrices']}, {row['context']} tokens", rounded(row["prompt_tokens_s"]),
                         f"{row['prompt_of_limit']:.2f}", rounded(row["generation_tokens_s"]),
                         f"{row['generation_of_limit']:.2f}", rounded(row["dram_gbps"]))
                        for row in data.rows("generation")])


def engines_table(data):
    """Other programs that write text, on the files of the table above and in turn with it."""
    def cell(value):
        return "" if value is None else rounded(value)

    head = ("Program, matrices, prompt", "prompt, tokens/s", "generation, tokens/s", "DRAM, GB/s")
    return table(head, [(f"{row['engine']}, {row['matrices']}, {row['context']} tokens", cell(row.get("prompt_tokens_s")),
                         cell(row.get("generation_tokens_s")), cell(row.get("dram_gbps"))) for row in data.rows("engines")])


def by_machine(all_data):
    """[[data, ...], ...]: the files of one CPU together, in the order of the first of each."""
    found = {}
    for data in all_data:
        found.setdefault(tuple(data.machine[key] for key in ("cpu", "family", "model")), []).append(data)
    return list(found.values())


def machines_table(all_data):
    """The limits of each file beside one another, and where its section is."""
    rows = []
    for data in all_data:
        limits = [data.limit(key) for key in ("dram_read", "f32_fma", "bf16_dot", "i8_dot")]
        cells = ["" if limit is None else rounded(limit) for limit in limits]
        reads = data.read_rates()
        if reads and reads[1] > dram.ONE_RATE * reads[0]:
            cells[0] = f"{rounded(reads[0])} to {rounded(reads[1])}"
        rows.append((f"[{data.title}](#{anchor(data.title)})", str(data.threads), *cells))
    return table(("Machine", "threads", "DRAM reads, GB/s", "f32, GFLOP/s", "bf16, GFLOP/s", "int8, GOP/s"), rows)


def anchor(heading):
    """What GitHub calls a heading in a link."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def cases_table(all_data):
    """Every case of `perf --table`, with its time and the fraction of its limit, for each file of one machine."""
    commands = {}
    for data in all_data:
        for row in data.rows("table"):
            commands.setdefault(row["command"], None)
    head = ["`perf ...`"]
    for data in all_data:
        head += [f"{data.title}, us", "of limit", "limit"]
    lines = []
    for command in commands:
        line = [f"`{command}`"]
        for data in all_data:
            row = data.find(command, "table")
            if row is None or row.get("of_roof") is None:
                line += ["" if row is None else rounded(row["median_us"]), "", ""]
                continue
            dram = dataset.bound(row) == "DRAM"
            unsteady = "" if row.get("limits") == "steady" else "*"
            line += [rounded(row["median_us"]), f"{'D' if dram else 'A'} {row['of_roof']:.2f}{unsteady}",
                     f"{row['dram_gbps' if dram else 'peak_gflops']:.0f}"]
        lines.append(line)
    return table(head, lines)


def commands_of(data):
    """Dates, commits and commands of what was measured, each once."""
    lines, names = [], {}
    for name, part in data.parts.items():
        names.setdefault(tuple(part["commands"]), []).append(name)
    for commands, of in names.items():
        part = data.parts[of[-1]]
        lines += [f"- {' and '.join(of)}, {part['date']}, commit {part['commit'][:7]}:", ""]
        lines += [f"      {command}" for command in commands] + [""]
        lines += [f"  `{f['command']}` ended with code {f['code']}: {' '.join(f['said'])}\n" for f in part.get("failed", [])]
    return "\n".join(lines)


def section(data, names):
    m = data.machine
    cores = "1 CPU" if m["cpus"] == 1 else f"{m['cpus']} CPUs"
    lines = [f"## {data.title}", "",
             f"{m['cpu']} (family {m['family']}, model {m['model']}), {cores}{' of a virtual machine' if m['virtual'] else ''}, "
             f"L2 {m['l2']}, L3 {m['l3']}, {m['compiler']}; {plots.threads(data)}.", ""]
    lines += [note + "\n" for note in data.notes]
    lines += [limits_table(data), ""]
    for plot, _, alt in plots.PLOTS:
        if (data.slug, plot) not in names:
            continue
        lines += [picture(f"{data.slug}_{plot}", alt), ""]
        if plot == "peers":
            lines += [peers_table(data), "",
                      f"Each library computes x[m, k] times weights[n, k] transposed, n = k = 4096, on "
                      f"{plots.threads(data)}. Calls rotate over several matrices, so that their weights come from DRAM. "
                      f"Quern and oneDNN, the version that `//gemm/onednn` links, multiply weights that were packed before. "
                      f"The others take the rows of weights as they are: {versions(data)}.", "",
                      "In brackets, where a product takes a quarter of it or more: the rate of DRAM beside it, in GB/s. "
                      "Compare products at one rate alone. A question mark stands where nobody measured the rate; the plot "
                      "leaves such products out.", ""]
            if any(row["peer"] == "eigen" for row in data.rows("peers")):
                lines += ["Eigen is compiled for this CPU. It multiplies a single row on one thread, and keeps the sums of "
                          "bf16 products in bf16; the others keep them in f32.", ""]
        if plot == "generation":
            lines += [generation_table(data), "",
                      f"A model of {data.rows('generation')[0]['model']} with random weights reads a prompt and writes 32 "
                      f"tokens (`generate --stats --limits`). Its limit is the time in which DRAM gives the weights, keys "
                      f"and values of every step, or that of the operations, whichever is longer. The last column is the "
                      f"rate of DRAM before and after the text.", ""]
            if data.rows("engines"):
                lines += [engines_table(data), "",
                          "`llama-bench` took turns with `generate` on the same files, with as many threads and flash "
                          "attention: prompts of as many tokens, and 32 tokens after them. DRAM's rate was measured before "
                          "and after it.", ""]
    lines += ["<details><summary>Commands</summary>", "", commands_of(data), "</details>", ""]
    return lines


def render(all_data):
    """{file name below docs: text} of the page and its plots."""
    files, names = {}, set()
    for theme in THEMES:
        drawn = plots.fractions(all_data, theme)
        if drawn:
            files[f"performance/operators_{theme.name}.svg"] = drawn
        for data in all_data:
            for plot, draw, _ in plots.PLOTS:
                drawn = draw(data, theme)
                if drawn:
                    names.add((data.slug, plot))
                    files[f"performance/{data.slug}_{plot}_{theme.name}.svg"] = drawn
    lines = ["# Performance", "",
             "How near Quern's operators come to the limits of a machine: the rates of its DRAM and of its arithmetic, which "
             "are measured beside each case. A fraction is the least time that a case needs at these limits, over the time "
             "that it took. DRAM is the limit where the bytes of the arguments need more time than the operations, and "
             "arithmetic elsewhere. A fraction above 1 means that something disturbed the limit, or that a faster loop "
             "exists than the one that measured it.", "",
             "The hosts of virtual machines change the rate of DRAM during a run. A plot of times compares cases only where "
             "the rates of DRAM beside them are within 10 % of each other, or where a case takes less than a quarter of that "
             "rate; its foot says what it leaves out.", "",
             f"`{COMMAND}` measures the machine that it runs on and writes a file of numbers, NAME.json, into "
             "[performance](performance); TEXT is what the page calls the machine. This page and its plots are written from those files. "
             "[benchmarking.md](benchmarking.md) says how times and limits are measured, "
             "[performance_notes.md](performance_notes.md) what helped and what did not.", "",
             machines_table(all_data), "",
             picture("operators", "One row of dots for each family of operators: the fraction of the limit of each case"), ""]
    for data in all_data:
        lines += section(data, names)
    lines += ["## Every case", "",
              "The cases of `perf --table`. *us*: the median time of a call. *of limit*: the fraction of the limit that "
              "binds the case, D for DRAM with as many reads and writes as the case has, A for the arithmetic of the "
              "instruction set; `*` if that limit was not steady meanwhile. *limit*: that limit, in GB/s after D and in "
              "GFLOP/s (int8: GOP/s) after A.", ""]
    for machine in by_machine(all_data):
        lines += [f"<details><summary>{'; '.join(data.title for data in machine)}</summary>", "", cases_table(machine), "",
                  "</details>", ""]
    files["performance.md"] = "\n".join(lines)
    return files
