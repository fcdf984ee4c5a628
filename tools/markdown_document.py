"""Reads a Markdown document of this repository as sections of blocks, for check_links.py and check_translations.py."""
import dataclasses
import os
import pathlib
import re

CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
ITEM = re.compile(r" *(?:[-*+]|\d+\.) +")


@dataclasses.dataclass
class Block:
    """A heading, paragraph, list item, row of a table or piece of code."""

    kind: str
    text: str
    line: int

    def cells(self):
        return [cell.strip() for cell in re.split(r"(?<!\\)\|", self.text.strip().strip("|"))]


@dataclasses.dataclass
class Section:
    """A heading and what follows it up to the next one; before the first heading, level 0."""

    level: int
    title: str
    blocks: list = dataclasses.field(default_factory=list)
    source: list = dataclasses.field(default_factory=list)  # its lines


def code_spans(text):
    return [" ".join(span.split()) for _, span in CODE_SPAN.findall(text)]


def without_code(text):
    """The text with a letter in place of each code span, so that nothing in code counts as prose."""
    return CODE_SPAN.sub("x", text)


def links(text):
    return [target for _, target in LINK.findall(without_code(text))]


def prose(text):
    """What a reader sees of the text, but for code."""
    text = without_code(text)
    while LINK.search(text):
        text = LINK.sub(lambda link: link.group(1), text).replace("![", "[")
    return text.replace("**", "")


def slug(title):
    """The fragment by which GitHub links to a heading."""
    title = LINK.sub(lambda link: link.group(1), title).lower()
    return re.sub(r"[^\w\- ]", "", title).replace(" ", "-")


class Document:
    """A file, by its path from the root of the repository."""

    def __init__(self, root, path):
        self.path = pathlib.PurePosixPath(path)
        self.lines = (root / path).read_text(encoding="utf-8").splitlines()
        self.sections = [Section(0, "")]
        self._read()

    def _read(self):
        fence, block, after_blank = None, None, True
        for number, line in enumerate(self.lines, 1):
            text = line.strip()
            if fence:
                block.text += line + "\n"
                if text == fence:
                    fence = block = None
            elif re.match(r" *```", line):
                fence = re.match(r"`+", text).group()
                block = self._add("code", line + "\n", number)
            elif block and block.kind == "indented code" and (not text or line.startswith("    ")):
                block.text += line + "\n"
            elif not text:
                block = None
            elif text.startswith("<!--") and text.endswith("-->"):
                block = None
            elif heading := re.match(r"(#+) +(.+)", line):
                self.sections.append(Section(len(heading[1]), heading[2].strip()))
                self._add("heading", heading[2].strip(), number)
                block = None
            elif text.startswith("|"):
                block = None
                self._add("table row", text, number)
            elif item := ITEM.match(line):
                block = self._add("list item", line[item.end():], number)
            elif line.startswith("    ") and after_blank and not self._in_list():
                block = self._add("indented code", line + "\n", number)
            elif block and block.kind in ("paragraph", "list item"):
                block.text += "\n" + text
            else:
                block = self._add("paragraph", text, number)
            self.sections[-1].source.append(line)
            after_blank = not text
        for section in self.sections:
            for block in section.blocks:
                if "code" in block.kind:
                    block.text = block.text.rstrip("\n")

    def _add(self, kind, text, number):
        self.sections[-1].blocks.append(Block(kind, text, number))
        return self.sections[-1].blocks[-1]

    def _in_list(self):
        blocks = self.sections[-1].blocks
        return bool(blocks) and blocks[-1].kind == "list item"

    def blocks(self):
        return [block for section in self.sections for block in section.blocks]

    def fragments(self):
        """The fragments of the headings, in order; the second of two equal ones ends in -1."""
        seen, found = {}, []
        for section in self.sections:
            if section.level:
                name = slug(section.title)
                found.append(f"{name}-{seen[name]}" if name in seen else name)
                seen[name] = seen.get(name, 0) + 1
        return found

    def resolve(self, target):
        """The target of a link as a path from the root and a fragment; None for the path of another site."""
        if re.match(r"[a-z][a-z+.-]*:", target):
            return None, target
        path, _, fragment = target.partition("#")
        path = os.path.normpath(self.path.parent / path) if path else str(self.path)
        return path, fragment


def documents(root):
    """The paths of all Markdown files below root, from it, but for hidden folders and what Bazel links."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "bazel-")))
        found += [pathlib.Path(folder, name).relative_to(root) for name in sorted(files) if name.endswith(".md")]
    return found
