"""The plots of a page: each takes data and a theme and returns SVG text, or None where its part is missing."""

import statistics

import dataset
import dram
from svg import Axis, Panel, Svg, compact, decades, width_of

WIDTH = 800
MOST_COLUMNS = 4  # of machines beside one another
BOLD = 1.15  # about the width of bold text over that of plain text


def percent(value):
    return f"{100 * value:.0f} %" if value else "0"


def colors_of_limits(theme):
    return {"DRAM": theme.series[0], "f32": theme.series[4], "bf16": theme.series[1], "i8": theme.series[3],
            "i6": theme.series[3]}


# bf16 and int8 have instructions of their own on some CPUs alone, so they are called products. i6, int8 by codes of
# at most six bits, has the colour of i8.
LIMIT_NAMES = {"DRAM": "DRAM", "f32": "f32 multiply-adds", "bf16": "bf16 products", "i8": "int8 products",
               "i6": "int8 by 6 bits"}


def legend(svg, x, y, theme, kinds):
    """Names the colours of dots, in a row."""
    for kind in kinds:
        svg.dot(x + 4, y - 4, colors_of_limits(theme)[kind])
        svg.text(x + 12, y, LIMIT_NAMES[kind], color=theme.muted)
        x += 12 + width_of(LIMIT_NAMES[kind]) + 14


def kinds_of(rows):
    found = {"i8" if dataset.bound(row) == "i6" else dataset.bound(row) for row in rows}
    return [kind for kind in LIMIT_NAMES if kind in found]


def broken(title, width):
    """A title in one line, or in two if it is too wide."""
    words = title.split()
    if BOLD * width_of(title, 13) <= width or len(words) == 1:
        return [title]
    at = min(range(1, len(words)), key=lambda i: max(width_of(" ".join(part), 13) for part in (words[:i], words[i:])))
    return [" ".join(words[:at]), " ".join(words[at:])]


def fractions(all_data, theme):
    """Every case as a fraction of the limit that binds it: one row of dots for each family of operators."""
    all_data = [data for data in all_data if data.by_family()]
    if not all_data:
        return None
    medians = all_data[0].medians()
    for data in all_data[1:]:
        for name, value in data.medians().items():
            medians.setdefault(name, value)
    names = sorted(medians, key=lambda name: (-medians[name], name))
    columns = min(len(all_data), MOST_COLUMNS)
    step, left, right, gap = 20, 200, 20, 34 if columns < 4 else 24
    width = (WIDTH - left - right - gap * (columns - 1)) / columns
    titles = [broken(data.title, width + 4) for data in all_data]
    top = 84 if max(map(len, titles)) == 1 else 100
    high = step * len(names)  # of one panel; below the next one are its ticks and the titles of the row after it
    pitch = high + 76
    rows = -(-len(all_data) // columns)
    height = top + pitch * (rows - 1) + high + 62
    svg = Svg(WIDTH, height, theme, "Fraction of the limit that every operator reaches",
              "One row for each family of operators, sorted by the median; one dot for each case.")
    svg.text(16, 24, "How near each operator comes to what the machine can do", bold=True, size=15)
    kinds = kinds_of(row for data in all_data for row in data.cases() if row.get("of_roof") is not None)
    legend(svg, 16, 46, theme, kinds)
    ticks = [0, 0.25, 0.5, 0.75, 1] if width > 190 else [0, 0.5, 1]
    for i, data in enumerate(all_data):
        x0, y0 = left + i % columns * (width + gap), top + i // columns * pitch
        panel = Panel(svg, (x0, y0, x0 + width, y0 + high), Axis(0, 1.1, ticks, names=percent), Axis(0, 1, []))
        for j, line in enumerate(reversed(titles[i])):
            svg.text(x0, y0 - 10 - 16 * j, line, bold=True, size=13)
        found = data.by_family()
        svg.line(panel.x(1), y0, panel.x(1), panel.bottom, theme.muted, 1.5)
        for j, name in enumerate(names):
            y = y0 + step * (j + 0.5)
            if i % columns == 0:
                svg.text(left - 12, y + 4, name, "end")
            svg.line(x0, y, x0 + width, y)
            rows = found.get(name, [])
            if rows:
                at = panel.x(min(1.09, statistics.median(row["of_roof"] for row in rows)))
                svg.line(at, y - 8, at, y + 8, theme.text, 2)
            for row in rows:
                svg.dot(panel.x(min(1.09, row["of_roof"])), y, colors_of_limits(theme)[dataset.bound(row)], 3.5, 0.7)
    svg.text((left + WIDTH - right) / 2, height - 28, "time at the limit / time measured", "middle", theme.muted)
    svg.text(16, height - 8, "A dot is a case; its colour says which limit binds it. A bar is the median of a family.",
             color=theme.muted)
    return svg.finish()


SHORT = {"scaled_linear": "W8A8", "fp8_block_linear": "fp8 blocks", "int4_linear": "int4", "int8_group_linear": "int8 groups"}


def short_name(row):
    given = dataset.keys(row["command"])
    name = SHORT.get(row["op"], row["op"].replace("_", " "))
    for key in ("weights", "kv", "dtype"):
        if given.get(key, "float") != "float":
            name += " " + given[key]
            break
    for key, word in (("m", "M"), ("batch", "batch"), ("tokens", "tokens"), ("kv_len", "keys")):
        if key in given:
            name += f" {word}={given[key]}"
            break
    return name


def place_label(svg, x, y, text, color):
    """Puts a name beside a dot where nothing else stands; leaves it out where there is no room."""
    width = width_of(text)
    for dx, dy, anchor in ((8, 4, "start"), (-8, 4, "end"), (0, -9, "middle"), (0, 18, "middle"), (10, 16, "start"),
                           (-10, 16, "end"), (10, -10, "start"), (-10, -10, "end"), (18, 28, "start"),
                           (-18, 28, "end"), (24, 42, "start"), (-24, 42, "end"), (30, 60, "start"), (0, 60, "middle")):
        box = svg.box_of(x + dx, y + dy, text, anchor)
        if box[0] > 46 and box[2] < svg.width - 8 and svg.free(box):
            if abs(dy) > 18:
                end = (x + dx * 0.8, y + dy - 8)
                if not svg.free_line(x, y, *end, 8):
                    continue
                svg.line(x, y, *end, color, 0.8)
                svg.take_line(x, y, *end)
            svg.text(x + dx, y + dy, text, anchor, take=True)
            return width
    return 0


def roofline(data, theme):
    """Every case that computes: useful operations a byte, and a second."""
    rows = [row for row in data.cases() if row.get("flops") and row.get("bytes") and row.get("of_roof") is not None]
    reads, peaks = data.read_rates(), data.peaks()
    if not rows or reads is None or not peaks:
        return None
    # Every case has its own limit, measured beside it. If DRAM had two rates, there are two lines.
    one_rate = reads[1] <= dram.ONE_RATE * reads[0]
    most_dram = max(row["dram_gbps"] for row in data.cases() if row.get("dram_gbps") and row.get("limits") == "steady")
    intensity = [row["flops"] / row["bytes"] for row in rows]
    rate = [row["flops"] / row["median_us"] * 1e-3 for row in rows]
    low_x, high_x = min(min(intensity) / 1.6, 0.25), max(max(intensity) * 12, 1000)
    low_y, high_y = min(rate) / 2, peaks[-1][1] * 2.2
    svg = Svg(WIDTH, 500, theme, "Roofline of " + data.title,
              "Operations a second over operations a byte, for every case, below the limits of the machine.")
    panel = Panel(svg, (62, 56, WIDTH - 26, 442),
                  Axis(low_x, high_x, decades(low_x, high_x), True), Axis(low_y, high_y, decades(low_y, high_y), True),
                  "Roofline: " + data.title + ", " + threads(data), "GFLOP/s (int8: GOP/s)",
                  "useful operations for each byte that must be moved, FLOP/byte", head=16)
    kinds = kinds_of(rows)
    legend(svg, 250, 47, theme, kinds)

    def roof(slope, level, color, dash=None):
        knee = level / slope
        first, last = max(low_x, low_y / slope), min(knee, high_x)
        panel.curve([(first, slope * first), (last, slope * last)], color, dash, False, 1.5)
        svg.take_line(panel.x(first), panel.y(slope * first), panel.x(last), panel.y(slope * last))

    if most_dram > reads[1] * 1.05:
        roof(most_dram, peaks[-1][1], theme.muted, "4 3")
    for slope in reads[1:] if one_rate else reads:
        roof(slope, peaks[-1][1], theme.muted)
    for name, level in peaks:
        panel.curve([(level / most_dram, level), (high_x, level)], theme.muted, None, False, 1.5)
        svg.take_line(panel.x(level / most_dram), panel.y(level), panel.right, panel.y(level))
        svg.text(panel.right - 4, panel.y(level) - 5, f"{name}: {level:.0f} {'GOP/s' if name.startswith('int8') else 'GFLOP/s'}",
                 "end", theme.muted, take=True)
    slow = "" if one_rate else f"at its slowest {reads[0]:.0f} and at its fastest "
    svg.text(panel.left + 8, panel.top + 16, f"solid: DRAM reads, {slow}{reads[1]:.0f} GB/s", color=theme.muted)
    if most_dram > reads[1] * 1.05:
        svg.text(panel.left + 8, panel.top + 33, f"dashed: reads and writes, up to {most_dram:.0f} GB/s", color=theme.muted)
    colors = colors_of_limits(theme)
    places = [(panel.x(i), panel.y(r), row) for i, r, row in zip(intensity, rate, rows)]
    for x, y, row in places:
        svg.dot(x, y, colors[dataset.bound(row)], 3.5, 0.75, take=True)
    named = set()
    for x, y, row in sorted(places, key=lambda p: (p[2]["of_roof"], p[2]["command"])):
        name = short_name(row)
        if row["of_roof"] < 0.4 and dataset.family(row) not in named and len(named) < 12:
            named.add(dataset.family(row))
            place_label(svg, x, y, f"{name}: {percent(row['of_roof'])}", theme.muted)
    svg.text(16, 492, "Named, where there is room: of each family the case farthest from its limit, if that is below 40 %.",
             color=theme.muted)
    return svg.finish()


def threads(data):
    return "1 thread" if data.threads == 1 else f"{data.threads} threads"


def linear(data, theme):
    """Tokens a second through one layer of 4096 x 4096, over rows, for each format of weights."""
    formats = [(name, data.linear(start)) for name, start in dataset.FORMATS if name in dataset.FORMATS_DRAWN]
    rate = dataset.OneRate([row for _, rows in formats for _, row in rows])
    curves = []
    for name, rows in formats:
        points = [(m, m / row["median_us"] * 1e6) for m, row in rows if rate.keeps(row)]
        if points:
            curves.append((name, points))
    if not curves:
        return None
    every = [y for _, points in curves for _, y in points]
    high_m = max(m for _, points in curves for m, _ in points)
    low, high = min(every) / 1.4, max(every) * 1.4
    svg = Svg(WIDTH, 484, theme, "Linear layers of " + data.title,
              "Tokens a second through a layer of 4096 x 4096, over the rows of a call, by the format of weights.")
    panel = Panel(svg, (70, 50, WIDTH - 140, 402),
                  Axis(1, high_m, [2 ** i for i in range(12)], True),
                  Axis(low, high, decades(low, high, (1, 2, 5)), True),
                  f"Linear layer, 4096 x 4096: {data.title}, {threads(data)}", "tokens a second through one layer",
                  "rows of a call: tokens at once", head=16)
    labels = []
    for (name, points), color in zip(curves, theme.series):
        panel.curve(points, color)
        labels.append((name, points[-1][0], points[-1][1], color))
    panel.end_labels(labels)
    svg.text(16, 460, "Left: a call takes the time in which DRAM gives the weights, whatever the rows. Right: it takes "
             "the time of the arithmetic.", color=theme.muted)
    svg.text(16, 476, rate.sentence(), color=theme.muted)
    return svg.finish()


def attention(data, theme):
    """Decode as a fraction of DRAM, and prompts as a fraction of arithmetic, over the context."""
    decode, prompts = {}, {}
    rows = [row for row in data.rows("attention", "table")
            if row["op"] == "attention" and dataset.keys(row["command"]).get("batch", "1") == "1"]
    rate = dataset.OneRate(rows)
    for row in rows:
        if not rate.keeps(row):
            continue
        given = dataset.keys(row["command"])
        q, kv = int(given.get("q_len", 1)), int(given.get("kv_len", 4096))
        name = {"i8": "int8", "f8e4m3": "fp8"}.get(given.get("kv", "bf16"), given.get("kv", "bf16"))
        if q == 1:
            decode.setdefault(name, {})[kv] = row["of_dram"]
        elif q == kv:
            prompts.setdefault(name, {})[kv] = row["of_peak"]
    if not decode and not prompts:
        return None
    svg = Svg(WIDTH, 416, theme, "Attention of " + data.title,
              "The fraction of its limit that attention reaches, over the length of the context.")
    colors = dict(zip(("bf16", "int8", "fp8"), (theme.series[0], theme.series[1], theme.series[2])))
    for found, left, title, name, x_name in (
            (decode, 56, "Decode, one sequence", "fraction of DRAM reads", "keys in the cache"),
            (prompts, 456, "Prompts, causal", "fraction of arithmetic", "tokens of the prompt")):
        every = sorted({length for points in found.values() for length in points})
        if not every:
            continue
        names = [compact(t) for t in every]
        room = max(3, int(258 / max(width_of(n) + 6 for n in names)))
        ticks = every if len(every) <= room else every[::2]
        panel = Panel(svg, (left, 92, left + 264, 340),
                      Axis(every[0], max(every[-1], every[0] * 2), ticks, True),
                      Axis(0, 1.1, [0, 0.25, 0.5, 0.75, 1], names=percent), title, name, x_name, head=left - 40)
        labels = []
        for kv, points in found.items():
            line = sorted(points.items())
            panel.curve(line, colors.get(kv, theme.text))
            labels.append((kv, line[-1][0], line[-1][1], colors.get(kv, theme.text)))
        panel.end_labels(labels)
    svg.text(16, 26, f"Attention, 32 query heads, 8 of keys: {data.title}, {threads(data)}", bold=True, size=15)
    svg.text(16, 392, "Lines: the type of keys and values in the cache.", color=theme.muted)
    svg.text(16, 408, rate.sentence(), color=theme.muted)
    return svg.finish()


def generation(data, theme):
    """Tokens a second of a whole model, over the tokens that are already there."""
    rows = data.rows("generation")
    if not rows:
        return None
    models = {}
    for row in rows:
        models.setdefault(row["matrices"], []).append(row)
    svg = Svg(WIDTH, 400, theme, "Generation of " + data.title, "Tokens a second over the length of the context.")
    svg.text(16, 26, f"{rows[0]['model']}, random weights: {data.title}, {threads(data)}", bold=True, size=15)
    for left, title, key, x_name in ((56, "Generation", "generation", "tokens before the first new one"),
                                     (456, "Prompt", "prompt", "tokens of the prompt")):
        speed = {name: sorted((row["context"], row[key + "_tokens_s"], row[key + "_of_limit"]) for row in of)
                 for name, of in models.items()}
        every = sorted({row["context"] for row in rows})
        high = max(s / max(f, 0.01) for points in speed.values() for _, s, f in points) * 1.08
        unit = next(u for u in (10, 20, 25, 50, 100, 200, 250, 500, 1000, 10 ** 9) if high / u <= 7)
        panel = Panel(svg, (left, 92, left + 264, 340), Axis(0, max(every), [0] + [c for c in every if c > 0.1 * max(every)][-3:]),
                      Axis(0, high, [unit * i for i in range(8)]), title, "tokens/s", x_name, head=left - 40)
        labels = []
        for (name, points), color in zip(sorted(speed.items()), theme.series):
            panel.curve([(c, s / f) for c, s, f in points if f], color, "4 3", False, 1.2)
            panel.curve([(c, s) for c, s, _ in points], color)
            labels.append((name, points[-1][0], points[-1][1], color))
        panel.end_labels(labels)
    svg.text(16, 392, "Dashed: the limit of DRAM or of arithmetic, whichever is lower, measured in the same run.",
             color=theme.muted)
    return svg.finish()


def peer_rows(data, dtype):
    """{name: {m: row}}: Quern first, then peers, each by its fastest variant."""
    start = dict(dataset.FORMATS)[{"int8": "int8, W8A8"}.get(dtype, dtype)]
    found = {"Quern": dict(data.linear(start, ("table",)))}
    for row in data.rows("onednn"):
        given = dataset.keys(row["command"])
        kind = "int8" if row["op"] == "scaled_linear" else given.get("dtype")
        if kind == dtype:
            found.setdefault("oneDNN", {})[int(given["m"])] = row
    for row in data.rows("peers"):
        if row["op"] == "linear" and row["dtype"] == dtype:
            of = found.setdefault(dataset.peer_name(row), {})
            if row["m"] not in of or row["median_us"] < of[row["m"]]["median_us"]:
                of[row["m"]] = dict(row, bytes=dataset.peer_bytes(row))
    return {name: dict(sorted(rows.items())) for name, rows in found.items() if rows}


def gflops(row):
    return row["flops"] / row["median_us"] * 1e-3


def peers(data, theme):
    """Products with matrices in f32 and bf16, beside other libraries."""
    if not data.rows("peers", "onednn"):
        return None
    svg = Svg(WIDTH, 436, theme, "Linear layers beside other libraries: " + data.title,
              "GFLOP/s over the rows of a call, of Quern and of other libraries on the same machine.")
    svg.text(16, 26, f"4096 x 4096 beside other libraries: {data.title}, {threads(data)}", bold=True, size=15)
    kinds = {dtype: peer_rows(data, dtype) for dtype in ("f32", "bf16")}
    rate = dataset.OneRate([row for of in kinds.values() for rows in of.values() for row in rows.values()])
    colors = dict(zip(("Quern", "oneDNN", "OpenBLAS", "Eigen", "PyTorch", "NumPy"), theme.series))
    for left, dtype, title in ((56, "f32", "f32"), (446, "bf16", "bf16")):
        curves = [(name, [(m, gflops(row)) for m, row in rows.items() if rate.keeps(row)])
                  for name, rows in kinds[dtype].items()]
        curves = [(name, points) for name, points in curves if points]
        every = sorted({m for _, points in curves for m, _ in points})
        if not every:
            continue
        peak = data.limit({"f32": "f32_fma", "bf16": "bf16_dot"}[dtype])
        values = [y for _, points in curves for _, y in points]
        low, high = min(values) / 1.5, max(values + ([peak] if peak else [])) * 1.35
        panel = Panel(svg, (left, 92, left + 252, 360), Axis(1, max(every), every, True),
                      Axis(low, high, decades(low, high, (1, 2, 5)), True), title, "GFLOP/s",
                      "rows of a call", head=left - 40)
        if peak:
            panel.curve([(1, peak), (max(every), peak)], theme.muted, "4 3", False, 1.5)
            svg.text(panel.left + 4, panel.y(peak) - 5, f"limit of arithmetic: {peak:.0f}", color=theme.muted)
        labels = []
        for name, points in curves:
            color = colors.get(name, theme.muted)
            panel.curve(points, color, width=3 if name == "Quern" else 1.8)
            labels.append((name, points[-1][0], points[-1][1], color))
        panel.end_labels(labels)
    svg.text(16, 412, "Versions, and what each was asked to do, stand below the table of peers.", color=theme.muted)
    svg.text(16, 428, rate.sentence(), color=theme.muted)
    return svg.finish()


# Name in file names, function, and the text that stands for the picture.
PLOTS = (
    ("roofline", roofline, "Roofline: operations a second of every case over operations a byte, below the limits"),
    ("linear", linear, "Tokens a second through a linear layer over rows, for each format of weights"),
    ("attention", attention, "Fraction of the limit that attention reaches over the length of the context"),
    ("generation", generation, "Tokens a second of a whole model over the length of the context"),
    ("peers", peers, "Linear layers of Quern and of other libraries over rows"),
)
