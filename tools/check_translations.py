#!/usr/bin/env python3
"""Checks that each translation says what its English document has: X.zh.md translates X.md, and docs/zh/X.md
translates docs/X.md.

usage: tools/check_translations.py [--stamp] [ROOT]    ROOT is this repository unless given

Both documents must have the same headings by level, and below each heading the same paragraphs, list items, rows of
tables with as many cells, and code, byte for byte. Each paragraph, item and cell must have the same code spans, links
and numbers in both, in any order. A link to a translated document or heading must go to the translation.

Below each heading of a translation, <!-- en 1a2b3c4d --> is a stamp: a hash of the English section. A stamp that
differs says that the English sentences have changed since they were translated. --stamp writes the stamps that are
missing or differ, in the translations in which all else agrees.
"""
import collections
import hashlib
import os
import pathlib
import re
import sys

sys.dont_write_bytecode = True
import markdown_document as md  # noqa: E402

STAMP = re.compile(r"<!-- en ([0-9a-f]{8}) -->")


def english_path(path):
    if path.name.endswith(".zh.md"):
        return path.with_name(path.name[: -len(".zh.md")] + ".md")
    return pathlib.Path("docs") / path.relative_to("docs/zh")


def translations(root):
    return [path for path in md.documents(root) if path.name.endswith(".zh.md") or path.parts[:2] == ("docs", "zh")]


def numbers(text):
    return re.findall(r"\d+(?:[.,]\d+)*", md.prose(text))


def quoted(counter):
    return ", ".join(f"'{thing}'" for thing in sorted(counter.elements()))


class Pair:
    """A translation and its English document."""

    def __init__(self, root, path, paths):
        self.root, self.path, self.from_path = root, path, english_path(path)
        self.wrong = []
        self.english, self.translated = md.Document(root, self.from_path), md.Document(root, path)
        self.translated_paths = {str(english_path(other)): str(other) for other in paths}
        here, there = os.path.relpath(self.from_path, path.parent), os.path.relpath(path, self.from_path.parent)
        self._take_language_line(self.english, f"English | [简体中文]({there})")
        self._take_language_line(self.translated, f"[English]({here}) | 简体中文")

    def _take_language_line(self, document, line):
        """The line is not compared, because each document names the other one."""
        for section in document.sections[1:2]:
            if [block.text for block in section.blocks[1:2]] == [line]:
                del section.blocks[1]
                return
        self.wrong.append(f"{document.path}: below its title, '{line}' is missing")

    def say(self, section, what):
        self.wrong.append(f"{self.path}, '{section.title}': {what}")

    def compare(self):
        """Collects in `wrong` a sentence for each difference but those of stamps."""
        for one, other in zip(self.english.sections, self.translated.sections):
            if one.level != other.level:
                self.say(other, f"this heading has level {other.level}, and the heading in its place in "
                                f"{self.from_path}, '{one.title}', has level {one.level}")
                return
        count, wanted = len(self.translated.sections), len(self.english.sections)
        if count != wanted:
            longer = max(self.english, self.translated, key=lambda document: len(document.sections))
            self.wrong.append(f"{self.path} has {count - 1} headings, and {self.from_path} has {wanted - 1}; the first "
                              f"without a counterpart is '{longer.sections[min(count, wanted)].title}'")
            return
        for one, other in zip(self.english.sections, self.translated.sections):
            self._compare_sections(one, other)

    def _compare_sections(self, one, other):
        kinds, wanted = ([block.kind for block in section.blocks] for section in (other, one))
        if kinds != wanted:
            at = next((i for i, pair in enumerate(zip(kinds, wanted)) if pair[0] != pair[1]),
                      min(len(kinds), len(wanted)))
            have, want = (f"'{section.blocks[at].kind}' in line {section.blocks[at].line}"
                          if at < len(section.blocks) else "nothing more" for section in (other, one))
            self.say(other, f"{have}, where {self.from_path}, '{one.title}', has {want}")
            return
        for block, ours in zip(one.blocks, other.blocks):
            self._compare_blocks(other, block, ours)

    def _compare_blocks(self, section, block, ours):
        place = f"line {ours.line} ({self.from_path}:{block.line})"
        if "code" in block.kind:
            if block.text != ours.text:
                self.say(section, f"{place}: the code differs")
            return
        texts, our_texts = [block.text], [ours.text]
        if block.kind == "table row":
            texts, our_texts = block.cells(), ours.cells()
            if len(texts) != len(our_texts):
                self.say(section, f"{place}: {len(our_texts)} cells in a row instead of {len(texts)}")
        for text, our_text in zip(texts, our_texts):
            for what, wanted, found in (
                ("code spans", md.code_spans(text), md.code_spans(our_text)),
                ("numbers", numbers(text), numbers(our_text)),
                ("links", self._links(self.english, text, self._to_translation),
                 self._links(self.translated, our_text, lambda path, fragment: (path, fragment))),
            ):
                missing = collections.Counter(wanted) - collections.Counter(found)
                extra = collections.Counter(found) - collections.Counter(wanted)
                if missing or extra:
                    differs = [f"without {quoted(missing)}"] * bool(missing) + [f"with {quoted(extra)}"] * bool(extra)
                    self.say(section, f"{place}: {what} differ, {' and '.join(differs)}")

    @staticmethod
    def _links(document, text, change):
        found = [change(*document.resolve(target)) for target in md.links(text)]
        return [f"{path}#{fragment}" if path and fragment else path or fragment for path, fragment in found]

    def _to_translation(self, path, fragment):
        """Where a translation must link to, for a link of the English document."""
        to = self.translated_paths.get(path)
        if to and fragment:
            names, ours = md.Document(self.root, path).fragments(), md.Document(self.root, to).fragments()
            if fragment in names[: len(ours)]:
                fragment = ours[names.index(fragment)]
        return to or path, fragment

    def _stamps(self):
        """Each section, the stamp that it must have and the one that it has."""
        for english, section in zip(self.english.sections, self.translated.sections):
            text = " ".join(" ".join(english.source).split())
            found = STAMP.fullmatch(section.source[1]) if section.level and len(section.source) > 1 else None
            yield english, section, hashlib.sha256(text.encode("utf-8")).hexdigest()[:8], found and found[1]

    def check_stamps(self):
        for english, section, want, have in self._stamps():
            if any(STAMP.fullmatch(line) for line in section.source[2:]):
                self.say(section, "a second stamp; need the one below the heading alone")
            if section.level and not have:
                self.say(section, "no stamp below this heading; tools/check_translations.py --stamp writes it")
            elif section.level and have != want:
                self.say(section, f"{self.from_path}, '{english.title}', has changed since it was translated; translate "
                                  "the change, then tools/check_translations.py --stamp")

    def write_stamps(self):
        """Returns the number of headings whose stamp was missing or differed."""
        lines, count = [], 0
        for _, section, want, have in self._stamps():
            lines += section.source[:1]
            if section.level:
                lines.append(f"<!-- en {want} -->")
                count += have != want
            lines += section.source[2 if have else 1:]
        (self.root / self.path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return count


def main(arguments):
    stamp = "--stamp" in arguments
    roots = [argument for argument in arguments if argument != "--stamp"]
    if len(roots) > 1 or (roots and roots[0].startswith("-")):
        sys.exit("usage: tools/check_translations.py [--stamp] [ROOT]")
    root = pathlib.Path(roots[0]) if roots else pathlib.Path(__file__).resolve().parent.parent
    paths = translations(root)
    wrong = [] if paths else [f"{root} has no translation to look at"]
    for path in paths:
        if not (root / english_path(path)).exists():
            wrong.append(f"{path}: there is no {english_path(path)} that it translates")
            continue
        pair = Pair(root, path, paths)
        if not pair.wrong:
            pair.compare()
        if not pair.wrong and stamp:
            print(f"{path}: {pair.write_stamps()} stamps written")
        elif not pair.wrong:
            pair.check_stamps()
        wrong += pair.wrong
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    if not wrong:
        print(f"translations: {len(paths)} agree with their English documents")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
