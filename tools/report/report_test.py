#!/usr/bin/env python3
"""Tests of the page of numbers, on made-up data. `.ci/run checks` runs them."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

sys.dont_write_bytecode = True
import dataset  # noqa: E402
import measure  # noqa: E402
import pages  # noqa: E402
import peers  # noqa: E402
import plots  # noqa: E402
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


class ReportTest(unittest.TestCase):
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
