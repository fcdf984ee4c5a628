"""Plots as SVG text: axes, lines, dots, and labels that keep out of each other's way.

Everything is plain arithmetic on the data, and numbers are written with one decimal, so the same
data gives the same bytes on every machine.
"""

import math
from xml.sax.saxutils import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
SIZE = 12  # px, of all text but titles


class Theme:
    """Colours for a light or a dark page. The series are Okabe and Ito's, dark or light enough to be text."""

    def __init__(self, name, background, text, muted, grid, series):
        self.name, self.background, self.text, self.muted, self.grid = name, background, text, muted, grid
        self.series = series


LIGHT = Theme("light", "#ffffff", "#1f2328", "#59636e", "#dfe3e8",
              ["#0067b0", "#b84a00", "#007a5a", "#a03d80", "#7d5f00", "#1f2328", "#6e7781", "#00788f",
               "#5b4bb5", "#9b1c31"])
DARK = Theme("dark", "#0d1117", "#e6edf3", "#9aa4b0", "#2b323b",
             ["#56b4e9", "#ff9446", "#2fcf9d", "#e58ec6", "#e3b505", "#e6edf3", "#9aa4b0", "#6fd6e8",
              "#a99cff", "#ff7b86"])
THEMES = (LIGHT, DARK)


def number(value):
    """A coordinate: one decimal, none where it is zero."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def width_of(text, size=SIZE):
    """About the width of a text in px: an upper bound for the fonts above."""
    narrow = sum(text.count(c) for c in "iljt.,:;|!' ()[]")
    return size * (0.61 * (len(text) - narrow) + 0.36 * narrow)


def compact(value):
    """A tick's text: 0.5, 4, 64, 2k, 64k (1024 is 1k), 1M."""
    if value >= 1024 and value == int(value) and int(value) % 1024 == 0:
        return f"{int(value) // 1024}k"
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}"


def spread(wanted, gap, low, high):
    """Positions near the wanted ones, in the same order, at least `gap` apart, between low and high.

    Labels that touch become a group, which stands where its members' mean wants it.
    """
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    groups = []  # [first position, count, sum of (wanted - offset)]

    def place(total, count):
        most = max(low, high - gap * (count - 1))
        return min(max(total / count, low), most)

    for i in order:
        groups.append([place(wanted[i], 1), 1, wanted[i]])
        while len(groups) > 1 and groups[-2][0] + gap * groups[-2][1] > groups[-1][0] + 1e-9:
            _, count, total = groups.pop()
            first = groups[-1]
            first[2] += total - count * first[1] * gap
            first[1] += count
            first[0] = place(first[2], first[1])
    result = [0.0] * len(wanted)
    at = 0
    for start, count, _ in groups:
        for j in range(count):
            result[order[at]] = start + gap * j
            at += 1
    return result


class Axis:
    """Maps data to px, linear or logarithmic."""

    def __init__(self, low, high, ticks, log=False, names=None):
        self.low, self.high, self.log = low, high, log
        self.ticks = [t for t in ticks if low <= t <= high]
        self.names = names or compact

    def fraction(self, value):
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def decades(low, high, steps=(1,)):
    """Ticks of a logarithmic axis: steps times the powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [s * 10.0 ** e for e in range(first, last + 1) for s in steps if low <= s * 10.0 ** e <= high]


class Svg:
    def __init__(self, width, height, theme, title, description):
        self.width, self.height, self.theme = width, height, theme
        self.title, self.description = title, description
        self.parts = []
        self.taken = []  # boxes of texts and dots: (x0, y0, x1, y1)

    def add(self, part):
        self.parts.append(part)

    def text(self, x, y, text, anchor="start", color=None, size=SIZE, bold=False, take=False):
        """A text whose baseline begins, is centred or ends at x, y."""
        weight = ' font-weight="600"' if bold else ""
        self.add(f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" font-size="{size}"{weight} '
                 f'fill="{color or self.theme.text}">{escape(text)}</text>')
        if take:
            self.taken.append(self.box_of(x, y, text, anchor, size))

    @staticmethod
    def box_of(x, y, text, anchor="start", size=SIZE):
        width = width_of(text, size)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        return (left, y - size * 0.85, left + width, y + size * 0.25)

    def line(self, x0, y0, x1, y1, color=None, width=1.0, dash=None):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.add(f'<line x1="{number(x0)}" y1="{number(y0)}" x2="{number(x1)}" y2="{number(y1)}" '
                 f'stroke="{color or self.theme.grid}" stroke-width="{number(width)}"{dashes}/>')

    def path(self, points, color, width=2.0, dash=None):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        drawn = " ".join(("M" if i == 0 else "L") + number(x) + " " + number(y) for i, (x, y) in enumerate(points))
        self.add(f'<path d="{drawn}" fill="none" stroke="{color}" stroke-width="{number(width)}" '
                 f'stroke-linejoin="round"{dashes}/>')

    def dot(self, x, y, color, radius=3.5, opacity=1.0, take=False):
        clear = f' fill-opacity="{number(opacity)}"' if opacity < 1 else ""
        self.add(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{color}"{clear}/>')
        if take:
            self.taken.append((x - radius, y - radius, x + radius, y + radius))

    @staticmethod
    def boxes_of_line(x0, y0, x1, y1, skip=0):
        """Small boxes along a line, from `skip` px behind its start on."""
        length = math.hypot(x1 - x0, y1 - y0)
        for i in range(int(skip // 4) + 1, int(length // 4) + 1):
            x, y = x0 + (x1 - x0) * 4 * i / length, y0 + (y1 - y0) * 4 * i / length
            yield (x - 2.1, y - 2.1, x + 2.1, y + 2.1)  # wider than half a step, so that lines cannot cross unseen

    def take_line(self, x0, y0, x1, y1):
        """Keeps labels off a line."""
        self.taken += self.boxes_of_line(x0, y0, x1, y1)

    def free_line(self, x0, y0, x1, y1, skip):
        return all(self.free(box) for box in self.boxes_of_line(x0, y0, x1, y1, skip))

    def free(self, box):
        return not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in self.taken)

    def finish(self):
        t = self.theme
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{FONT}">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(self.description)}</desc>",
            f'<rect width="{self.width}" height="{self.height}" fill="{t.background}"/>',
        ] + self.parts + ["</svg>", ""])


class Panel:
    """A rectangle of an Svg with two axes: grid lines, the numbers at them, and the names of the axes."""

    def __init__(self, svg, box, x, y, title="", y_name="", x_name="", head=None):
        self.svg, self.x_axis, self.y_axis = svg, x, y
        self.left, self.top, self.right, self.bottom = box
        t = svg.theme
        for tick in y.ticks:
            at = self.y(tick)
            svg.line(self.left, at, self.right, at)
            svg.text(self.left - 6, at + 4, y.names(tick), "end", t.muted)
        for tick in x.ticks:
            at = self.x(tick)
            svg.line(at, self.top, at, self.bottom)
            svg.text(at, self.bottom + 16, x.names(tick), "middle", t.muted)
        head = self.left if head is None else head
        if title:
            svg.text(head, self.top - (26 if y_name else 10), title, bold=True, size=13)
        if y_name:
            svg.text(head, self.top - 9, y_name, color=t.muted)
        if x_name:
            svg.text((self.left + self.right) / 2, self.bottom + 34, x_name, "middle", t.muted)

    def x(self, value):
        return self.left + (self.right - self.left) * self.x_axis.fraction(value)

    def y(self, value):
        return self.bottom - (self.bottom - self.top) * self.y_axis.fraction(value)

    def curve(self, points, color, dash=None, dots=True, width=2.0):
        """Joins data points; points is [(x, y), ...]."""
        placed = [(self.x(x), self.y(y)) for x, y in points]
        if len(placed) > 1:
            self.svg.path(placed, color, width, dash)
        if dots:
            for x, y in placed:
                self.svg.dot(x, y, color)

    def end_labels(self, labels, gap=SIZE + 3, offset=10):
        """Names lines at their right ends: labels is [(text, x, y, colour), ...], x and y in data."""
        at = spread([self.y(y) for _, _, y, _ in labels], gap, self.top + 4, self.bottom)
        for (text, x, y, color), placed in zip(labels, at):
            start, wanted = self.x(x), self.y(y)
            edge = max(start, self.right)
            if abs(placed - wanted) > 3 or edge - start > 6:
                self.svg.path([(start + 4, wanted), (edge + offset - 3, placed)], color, 0.8)
            self.svg.text(edge + offset, placed + 4, text, color=color)
