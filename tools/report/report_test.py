#!/usr/bin/env python3
"""Tests of the page of numbers, on made-up data. `.ci/run checks` runs them."""

import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

sys.dont_write_bytecode = True
import dataset  # noqa: E402
import dram  # noqa: E402
import measure  # noqa: E402
import pages  # noqa: E402
import peers  # noqa: E402
import plots  # noqa: E402
import report  # noqa: E402
import svg  # noqa: E402

STATS = """prompt: 513 tokens, 1.3 s, 392 tokens/s, 1.06 GB/s, 782 GFLOP/s, 0.76 of the arithmetic limit
generation: 32 tokens, 1.2 s, 27 tokens/s, 56.1 GB/s, 56 GFLOP/s, 0.71 of the DRAM limit
limits: DRAM read 79.0 GB/s, f32 541 GFLOP/s
"""


def case(command, fraction, kind="read", **more):
    row = {"command": command, "op": command.split()[0], "median_us": 100.0, "bytes": 4e6, "flops": 8e7,
           "dram_kind": kind, "dram_gbps": 50.0, "peak_kind": "f32", "peak_gflops": 540.0, "of_dram": fraction,
           "of_peak": fraction / 2, "of_roof": fraction, "limits": "steady"}
    return dict(row, **more)


def part(rows):
    return {"date": "2026-11-24", "commit": "0123456789", "commands": ["perf"], "rows": rows}


def content():
    limits = [{"op": "limits", "shape": shape, "threads": 2, "median_us": 1000.0, **amount} for shape, amount in (
        ("dram_read", {"bytes": 5e7}), ("dram_copy", {"bytes": 6e7}), ("f32_fma", {"flops": 5.4e8}),
        ("bf16_dot", {"flops": 1e9}), ("i8_dot", {"flops": 2e9}))]
    linear = [case(f"{start} --m={m}", 0.1 * (i % 9) + 0.1, median_us=50.0 * m ** 0.5)
              for i, (_, start) in enumerate(dataset.FORMATS) for m in (1, 4, 16, 64, 256)]
    attention = [case(f"attention --batch=1 --kv_len={n} --kv={kv}", 0.8) for n in (4096, 32768) for kv in ("bf16", "i8")]
    attention += [case(f"attention --q_len={n} --kv_len={n} --kv=bf16", 0.8) for n in (512, 2048)]
    peers = [{"peer": "numpy", "version": "NumPy", "op": "linear", "dtype": "f32", "m": m, "flops": 1e8, "median_us": 9e3}
             for m in (1, 256)]
    return {"schema": 1, "slug": "made_up", "title": "Made & up", "isa": "best", "threads": 2,
            "machine": {"cpu": "CPU", "family": "1", "model": "2", "cpus": 2, "l2": "1 MiB", "l3": "32 MiB",
                        "virtual": True, "compiler": "GCC 12"}, "notes": [],
            "parts": {"limits": part(limits), "table": part(linear + attention + [case("rms_norm --dtype=f32", 0.3)]),
                      "peers": part(peers), "generation": part([measure.generation_row("BF16", STATS)])}}


def program(folder, name, text):
    """A program that stands for another."""
    path = pathlib.Path(folder, name)
    path.write_text(f"#!{sys.executable}\nimport sys\n{text}")
    path.chmod(0o755)
    return path


class OneRateOfDramTest(unittest.TestCase):
    """DRAM that gives 36 GB/s for some cases and 67 for others, which no plot may show as a property of the cases."""

    def two_rates(self):
        changed = content()
        for row in changed["parts"]["table"]["rows"]:
            row["dram_gbps"] = 67.0
            # The last prompt needs little of DRAM, so it does not matter that DRAM was slow beside it.
            if row["command"].endswith(("--q_len=2048 --kv_len=2048 --kv=bf16", "--kv_len=4096 --kv=bf16")) or (
                    row["command"] == dataset.FORMATS[2][1] + " --m=1"):
                row["dram_gbps"] = 36.0
            if "--q_len=" in row["command"]:
                row["bytes"] = 1e5
        return changed

    def test_plots_leave_out_cases_at_another_rate(self):
        data = dataset.Data(self.two_rates())
        drawn = plots.linear(data, svg.LIGHT)
        self.assertIn(">DRAM gave 67 to 67 GB/s. A case at another or an unknown rate is left out.<", drawn)
        all_there = plots.linear(dataset.Data(content()), svg.LIGHT)
        self.assertEqual(drawn.count("<circle") + 1, all_there.count("<circle"))
        drawn = plots.attention(data, svg.LIGHT)
        self.assertIn("A case at another or an unknown rate is left out.", drawn)
        self.assertEqual(drawn.count("<circle") + 1, plots.attention(dataset.Data(content()), svg.LIGHT).count("<circle"))

    def test_rates_within_a_tenth_are_one(self):
        rows = [case("linear", 0.8, dram_gbps=rate) for rate in (60.0, 66.0, 66.1, 36.0)]
        rate = dataset.OneRate(rows)
        self.assertEqual([rate.keeps(row) for row in rows], [True, True, False, False])
        self.assertEqual(rate.sentence(), "DRAM gave 60 to 66 GB/s. 2 cases at other or unknown rates are left out.")
        self.assertEqual(dataset.OneRate([]).sentence(), "")

    def test_the_roofline_has_a_line_for_each_rate(self):
        text = "solid: DRAM reads, at its slowest 36 and at its fastest 67 GB/s"
        data = dataset.Data(self.two_rates())
        self.assertIn(text, plots.roofline(data, svg.LIGHT))
        page = pages.render([data])["performance.md"]
        self.assertIn("| DRAM, reads, beside the cases | 36.0 to 67.0 GB/s |", page)
        self.assertIn("| 2 | 36.0 to 67.0 |", page)
        self.assertIn("solid: DRAM reads, 50 GB/s", plots.roofline(dataset.Data(content()), svg.LIGHT))

    def test_peers_have_the_limit_of_their_own_run(self):
        changed = content()
        for row in changed["parts"]["peers"]["rows"]:
            row["median_us"] = 1300.0 * row["m"]  # 51 GB/s for one row
        page, plot = "performance.md", "performance/made_up_peers_light.svg"
        unknown = pages.render([dataset.Data(changed)])
        self.assertIn("| f32, NumPy | 76.9 (?) |", unknown[page])
        for row, rate in zip(changed["parts"]["peers"]["rows"], (52.0, 30.0)):
            row["dram_gbps"] = rate
        known = pages.render([dataset.Data(changed)])
        self.assertIn("| f32, NumPy | 76.9 (52) |", known[page])
        self.assertEqual(unknown[plot].count("<circle") + 1, known[plot].count("<circle"))

    def test_the_rate_is_read_before_and_after(self):
        with tempfile.TemporaryDirectory() as folder:
            rates = pathlib.Path(folder, "rates")
            rates.write_text("60\n62\n30\n")
            perf = program(folder, "perf", f"""
lines = open({str(rates)!r}).read().split()
open({str(rates)!r}, "w").write("\\n".join(lines[1:]))
assert "--threads=2" in sys.argv, sys.argv
print('{{"dram_gbps": %s}}' % lines[0])
""")
            rate = dram.DramRate(perf, 2)
            self.assertEqual(rate.beside(), {"dram_gbps": 61.0, "limits": "steady"})
            self.assertEqual(rate.beside(), {"dram_gbps": 46.0, "limits": "disturbed"})
        self.assertEqual(dram.DramRate(None, 2).beside(), {})


class EnginesTest(unittest.TestCase):
    """llama-bench beside generate, by a program that tells what llama-bench tells."""

    def bench(self, folder, knows_depth):
        return program(folder, "llama-bench", f"""
import json
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "-d" in given and not {knows_depth}:
    sys.exit("error: invalid parameter for argument: -d")
assert given["-t"] == "2" and given["-o"] == "json" and given["-m"] == "q.gguf", given
print(json.dumps([{{"build_commit": "abc", "build_number": 7, "n_prompt": int(given["-p"]), "n_gen": int(given["-n"]),
                   "avg_ts": 123.4 if given["-p"] != "0" else 6.78}}]))
""")

    def test_a_prompt_and_the_tokens_after_it_are_one_row(self):
        this = measure.Measurement({}, "best", 2, lambda text: None)
        with tempfile.TemporaryDirectory() as folder:
            row, failed = this.llama(self.bench(folder, True), "q.gguf", "Q4_K", 411)
            self.assertEqual(row, {"engine": "llama.cpp abc (7)", "matrices": "Q4_K", "context": 411,
                                   "prompt_tokens_s": 123.4, "generation_tokens_s": 6.8})
            self.assertEqual(failed, [])
            row, failed = this.llama(self.bench(folder, False), "q.gguf", "Q4_K", 411)
            self.assertEqual(row.get("generation_tokens_s"), None)
            self.assertEqual(failed[0]["said"], ["error: invalid parameter for argument: -d"])
        changed = content()
        changed["parts"]["engines"] = part([dict(row, dram_gbps=40.0)])
        self.assertIn("| llama.cpp abc (7), Q4_K, 411 tokens | 123 |  | 40.0 |",
                      pages.render([dataset.Data(changed)])["performance.md"])


class ReportTest(unittest.TestCase):
    def test_takes_the_command_as_documents_print_it(self):
        root = pathlib.Path(__file__).resolve().parents[2]
        printed = []
        for path in (root / "docs/performance.md", root / "docs/benchmarking.md", root / "tools/README.md", root / "README.md"):
            printed += re.findall(r"\./bazelw run [^`\n]*//tools/report\b[^`\n]*", path.read_text())
        self.assertIn(pages.COMMAND, printed)
        for command in printed:
            flags, _ = report.parse(shlex.split(command.partition(" -- ")[2]))
            self.assertIsNone(report.missing(dict(flags, perf="", generate="")), command)

    def test_labels_keep_their_distance(self):
        placed = svg.spread([10, 11, 12, 50, 51, 100], 15, 0, 100)
        self.assertEqual(placed, sorted(placed))
        self.assertTrue(all(b - a >= 15 - 1e-9 for a, b in zip(placed, placed[1:])))
        self.assertTrue(-1e-9 <= placed[0] and placed[-1] <= 100 + 1e-9)

    def test_reads_what_generate_tells(self):
        row = measure.generation_row("BF16", STATS)
        self.assertEqual((row["context"], row["prompt_of_limit"], row["generation_tokens_s"]), (513, 0.76, 27.0))
        self.assertRaises(ValueError, measure.generation_row, "BF16", "prompt: none")

    def test_refuses_other_files(self):
        for change in ({"schema": 2}, {"slug": "A b"}, {"parts": {"speed": part([])}}, {"parts": {"table": {}}}):
            with self.assertRaises(ValueError):
                dataset.Data(dict(content(), **change))

    def test_draws_and_writes_the_same_again(self):
        files = pages.render([dataset.Data(content())])
        self.assertEqual(files, pages.render([dataset.Data(json.loads(dataset.text(content())))]))
        self.assertEqual(len(files), 1 + 2 * 6)
        for name, text in files.items():
            if name.endswith(".svg"):
                xml.dom.minidom.parseString(text)
                self.assertNotIn("nan", text)
                self.assertIn(f"performance/{pathlib.Path(name).name}", files["performance.md"])
        self.assertIn("| `rms_norm --dtype=f32` | 100 | D 0.30 | 50 |", files["performance.md"])

    def test_peers_that_the_file_has_are_rows_and_lines(self):
        def rows_of(peer, version):
            return [{"peer": peer, "version": version, "op": "linear", "dtype": dtype, "m": m, "flops": 1e8 * m,
                     "median_us": 9e3} for dtype in ("f32", "bf16") for m in (1, 256)]

        changed = content()
        without = pages.render([dataset.Data(changed)])
        changed["parts"]["peers"] = part(rows_of("eigen", "Eigen 9.8.7, GCC 12") + rows_of("numpy", "NumPy on blas/lib"))
        with_them = pages.render([dataset.Data(changed)])
        for text, found in (("| f32, Eigen | 11.1 |", True), ("| bf16, Eigen |", True), ("; NumPy on blas/lib", True),
                            ("Eigen 9.8.7, GCC 12;", True), ("| f32, NumPy |", True), ("OpenBLAS", False)):
            self.assertEqual(text in with_them["performance.md"], found, text)
        self.assertNotIn("Eigen", without["performance.md"])
        self.assertIn(">Eigen<", with_them["performance/made_up_peers_light.svg"])
        self.assertNotIn(">Eigen<", without["performance/made_up_peers_light.svg"])

    def test_names_the_blas_of_numpy(self):
        for version, name in (("NumPy 1 on openblas-pthread/libblas.so.3", "OpenBLAS"), ("NumPy 1 on its own loops", "NumPy")):
            self.assertEqual(dataset.peer_name({"peer": "numpy", "version": version}), name)

    def test_says_which_peer_is_missing(self):
        with tempfile.TemporaryDirectory() as empty:
            env = {"PATH": empty, "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run([sys.executable, "-S", pathlib.Path(peers.__file__), "--threads=1", "--m="], env=env,
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 2)
            self.assertIn("--m=", done.stderr)
            # Without -S, Python would find NumPy where it is installed.
            done = subprocess.run([sys.executable, "-S", pathlib.Path(peers.__file__), "--threads=1", "--m=1"], env=env,
                                  capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (0, ""))
            for library in ("numpy", "torch", "no Eigen: no C++ compiler, g++ or c++ or clang++"):
                self.assertIn(library, done.stderr)
            self.assertIsNone(peers.eigen_headers(pathlib.Path(empty), ()))
            headers = pathlib.Path(empty, "bazel-this/external/eigen")
            (headers / "Eigen").mkdir(parents=True)
            (headers / "Eigen/Core").write_text("")
            self.assertEqual(peers.eigen_headers(pathlib.Path(empty), ()), headers)

    def test_four_files_of_two_machines(self):
        every = []
        for slug, title, model in (("a", "A, AVX-512", "1"), ("a2", "A held to AVX2", "1"), ("b", "B, AVX-512", "2"),
                                   ("b2", "B held to AVX2", "2")):
            changed = content()
            changed.update(slug=slug, title=title, machine=dict(changed["machine"], model=model))
            every.append(dataset.Data(changed))
        files = pages.render(every)
        page = files["performance.md"]
        # Files of one machine share a table, whose columns fit a page.
        self.assertIn("<summary>A, AVX-512; A held to AVX2</summary>", page)
        self.assertIn("<summary>B, AVX-512; B held to AVX2</summary>", page)
        self.assertEqual(page.count("| `rms_norm --dtype=f32` | 100 | D 0.30 | 50 | 100 | D 0.30 | 50 |"), 2)
        self.assertIn("| [B held to AVX2](#b-held-to-avx2) | 2 | 50.0 |", page)
        drawn = files["performance/operators_light.svg"]
        for data in every:
            self.assertTrue(all(f">{line}<" in drawn for line in plots.broken(data.title, 131)), data.title)
        many = [dataset.Data(dict(content(), slug=f"m{i}")) for i in range(5)]
        self.assertEqual(plots.fractions(many, svg.LIGHT).count(">norms<"), 2)  # five panels are two rows

    def test_breaks_titles_where_both_lines_are_short(self):
        self.assertEqual(plots.broken("Zen 5, AVX-512", 131), ["Zen 5, AVX-512"])
        self.assertEqual(plots.broken("Zen 5 held to AVX2", 131), ["Zen 5 held", "to AVX2"])
        self.assertEqual(plots.broken("One_word_that_is_too_wide", 50), ["One_word_that_is_too_wide"])

    def test_labels_keep_off_lines(self):
        drawn = svg.Svg(100, 100, svg.LIGHT, "", "")
        drawn.take_line(0, 50, 100, 50)
        self.assertFalse(drawn.free((40, 45, 60, 55)))
        self.assertTrue(drawn.free((40, 60, 60, 70)))
        self.assertFalse(drawn.free_line(50, 30, 50, 90, 8))
        self.assertTrue(drawn.free_line(50, 60, 50, 90, 8))

    def test_check_finds_what_differs(self):
        with tempfile.TemporaryDirectory() as root:
            folder = pathlib.Path(root, "docs/performance")
            folder.mkdir(parents=True)
            (folder / "made_up.json").write_text(dataset.text(content()))

            def report(flag):
                return subprocess.run([sys.executable, pathlib.Path(__file__).with_name("report.py"), flag,
                                       f"--root={root}"], capture_output=True, text=True)

            self.assertIn("performance.md", report("--check").stderr)
            self.assertEqual(report("--render").returncode, 0)
            self.assertEqual(report("--check").returncode, 0)
            page = pathlib.Path(root, "docs/performance.md")
            page.write_text(page.read_text().replace("0.30", "0.99"))
            self.assertNotEqual(report("--check").returncode, 0)
            self.assertEqual(report("--render").returncode, 0)
            (folder / "stale.svg").write_text("")
            self.assertIn("stale.svg", report("--check").stderr)


if __name__ == "__main__":
    unittest.main()
