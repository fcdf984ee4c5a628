#!/usr/bin/env python3
"""Checks that each translation says what its English document has: X.zh.md translates X.md, and docs/zh/X.md
translates docs/X.md.

usage: tools/check_translations.py [--root=ROOT]
       tools/check_translations.py [--root=ROOT] --stamp [--draft] TRANSLATION...

Both documents must have the same headings by level, and below each heading the same paragraphs, list items, rows of
tables with as many cells, and code, byte for byte. Every one of these must have the same code spans, links and numbers
in both, in any order; a link to a translated document or heading must go to the translation. Chinese has a space beside
Latin letters, full-width punctuation, and no line break within a paragraph, where it would show as a space.

Below each heading of a translation, <!-- en 1a2b3c4d --> is a stamp: a hash of the English section and the heading
above it. A stamp that is no longer true says that the English sentences have changed since they were translated.
--stamp writes the stamps that are missing or not true, in files in which all else agrees. --draft adds the word draft
to them, for text that no reader of Chinese has approved: one who has deletes the word.
"""
import argparse
import collections
import hashlib
import os
import pathlib
import re
import sys

sys.dont_write_bytecode = True
import markdown_document as md  # noqa: E402

NOT_TRANSLATED = {"docs/zh/terms.md"}  # written in both languages
STAMP = re.compile(r"<!-- en ([0-9a-f]{8})( draft)? -->")
HAN, LATIN = r"[\u3400-\u9fff]", r"[A-Za-z0-9]"
FULL_WIDTH = r"[\u3000-\u303f\uff00-\uffef\u2018-\u201d]"
TYPOGRAPHY = (
    (f"{HAN}{LATIN}|{LATIN}{HAN}", "needs a space between Chinese and Latin"),
    (f"{HAN}[,;:!?]|{HAN}\\.(?!\\w)|{HAN}\\(|\\){HAN}", "needs full-width punctuation, or a space beside parentheses"),
    (f"{FULL_WIDTH} | {FULL_WIDTH}", "has a space beside full-width punctuation"),
    (f"(?:{HAN}|{FULL_WIDTH})\n|\n(?:{HAN}|{FULL_WIDTH})", "has a line break, which would show as a space"),
)


def english_path(path):
    if path.name.endswith(".zh.md"):
        return path.with_name(path.name[: -len(".zh.md")] + ".md")
    return pathlib.Path("docs") / path.relative_to("docs/zh")


def translations(root):
    return [
        path
        for path in md.documents(root)
        if (path.name.endswith(".zh.md") or path.parts[:2] == ("docs", "zh")) and str(path) not in NOT_TRANSLATED
    ]


def numbers(text):
    return re.findall(r"\d+(?:[.,]\d+)*", md.prose(text))


def quoted(counter):
    return ", ".join(f"'{thing}'" for thing in sorted(counter.elements()))


class Pair:
    """A translation and its English document."""

    def __init__(self, root, path, paths):
        self.root, self.path = root, path
        self.from_path = english_path(path)
        self.wrong = []
        self.english, self.translated = md.Document(root, self.from_path), md.Document(root, path)
        self.translated_paths = {str(english_path(other)): str(other) for other in paths}
        here = os.path.relpath(self.from_path, path.parent)
        there = os.path.relpath(path, self.from_path.parent)
        for document, line in ((self.english, f"English | [简体中文]({there})"),
                               (self.translated, f"[English]({here}) | 简体中文")):
            first = document.sections[min(1, len(document.sections) - 1)]
            if [block.text for block in first.blocks if block.kind != "heading"][:1] != [line]:
                self.wrong.append(f"{document.path}: below its title, '{line}' is missing")
            else:
                first.blocks = [block for block in first.blocks if block.text != line]
                first.source = [source for source in first.source if source != line]

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
        for section in self.translated.sections:
            for block in section.blocks:
                self.wrong += misprints(f"{self.path}, '{section.title}': line {block.line}", block)

    def _compare_sections(self, one, other):
        at = f"{self.from_path}, '{one.title}'"
        for kind in ("paragraph", "list item", "table row", "code"):
            have, want = (sum(kind in block.kind for block in section.blocks) for section in (other, one))
            if have != want:
                self.say(other, f"{have} {kind}{'s' * (have != 1)}, and {want} in {at}")
        if [block.kind for block in one.blocks] != [block.kind for block in other.blocks]:
            if not self.wrong or f"'{other.title}'" not in self.wrong[-1]:
                self.say(other, f"paragraphs, list items, tables and code come in another order than in {at}")
            return
        for block, ours in zip(one.blocks, other.blocks):
            self._compare_blocks(other, block, ours)

    def _compare_blocks(self, section, block, ours):
        place = f"line {ours.line} ({self.from_path}:{block.line})"
        if "code" in block.kind:
            if block.text != ours.text:
                self.say(section, f"{place}: the code differs")
            return
        if block.kind == "table row":
            if len(block.cells()) != len(ours.cells()):
                self.say(section, f"{place}: {len(ours.cells())} cells in a row instead of {len(block.cells())}")
                return
            parts = list(zip(block.cells(), ours.cells()))
        else:
            parts = [(block.text, ours.text)]
        for text, our_text in parts:
            for what, wanted, found in (
                ("code spans", md.code_spans(text), md.code_spans(our_text)),
                ("numbers", numbers(text), numbers(our_text)),
                ("links", self._translated_links(text), self._links(self.translated, our_text)),
            ):
                missing = collections.Counter(wanted) - collections.Counter(found)
                extra = collections.Counter(found) - collections.Counter(wanted)
                if missing or extra:
                    differs = [f"without {quoted(missing)}"] * bool(missing) + [f"with {quoted(extra)}"] * bool(extra)
                    self.say(section, f"{place}: {what} differ, {' and '.join(differs)}")

    @staticmethod
    def _links(document, text):
        found = []
        for path, fragment in (document.resolve(target) for target in md.links(text)):
            found.append(f"{path}#{fragment}" if path and fragment else path or fragment)
        return found

    def _translated_links(self, text):
        """The links of an English text as a translation must have them."""
        found = []
        for path, fragment in (self.english.resolve(target) for target in md.links(text)):
            to = self.translated_paths.get(path)
            if to and fragment:
                names = md.Document(self.root, path).fragments()
                ours = md.Document(self.root, to).fragments()
                if fragment in names[: len(ours)]:
                    fragment = ours[names.index(fragment)]
            path = to or path
            found.append(f"{path}#{fragment}" if path and fragment else path or fragment)
        return found

    def stamp(self, index):
        text = " ".join(" ".join(self.english.sections[index].source).split())
        text += "\n" + self.translated.sections[index].title
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:8]

    def check_stamps(self):
        """Appends to `wrong`; returns the titles of drafts."""
        drafts = []
        for index, section in enumerate(self.translated.sections):
            if not section.level:
                continue
            found = STAMP.search(section.source[1]) if len(section.source) > 1 else None
            if not found:
                self.say(section, "the heading has no stamp below it; tools/check_translations.py --stamp "
                                  f"{self.path} writes it")
            elif found[1] != self.stamp(index):
                self.say(section, f"{self.from_path}, '{self.english.sections[index].title}', has changed since it was "
                                  f"translated, or this heading has; translate the change, then tools/"
                                  f"check_translations.py --stamp {self.path}")
            elif found[2]:
                drafts.append(f"{self.path}, '{section.title}'")
        return drafts

    def write_stamps(self, draft):
        lines, count = [], 0
        for index, section in enumerate(self.translated.sections):
            source = list(section.source)
            if section.level:
                found = STAMP.fullmatch(source[1]) if len(source) > 1 else None
                mark = " draft" if (found and found[2]) or draft else ""
                if not found or found[1] != self.stamp(index):
                    source[1: 2 if found else 1] = [f"<!-- en {self.stamp(index)}{mark} -->"]
                    count += 1
            lines += source
        return lines, count


def misprints(place, block):
    """A sentence for each kind of misprint in a block of Chinese text."""
    found = []
    for text in [] if "code" in block.kind else block.cells() if block.kind == "table row" else [block.text]:
        text = md.prose(text)
        for pattern, what in TYPOGRAPHY:
            if at := re.search(pattern, text):
                near = text[max(0, at.start() - 6): at.end() + 6].replace("\n", " ")
                found.append(f"{place}: '{near}' {what}")
    return found


def main():
    parser = argparse.ArgumentParser(description="Compares translations with their English documents.")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--stamp", action="store_true", help="write the stamps of these translations")
    parser.add_argument("--draft", action="store_true", help="mark what --stamp writes as a draft")
    parser.add_argument("translation", nargs="*", type=pathlib.Path)
    options = parser.parse_args()
    root = options.root
    paths = translations(root)
    wrong, drafts = [], []
    if not paths:
        wrong.append(f"{root} has no translation to look at")
    if bool(options.translation) != options.stamp or (options.draft and not options.stamp):
        parser.error("--stamp needs the translations to stamp, and only --stamp takes any or --draft")
    for path in options.translation:
        if path not in paths:
            parser.error(f"{path} is no translation; need one of: {' '.join(map(str, paths))}")
    for path in options.translation or paths:
        if not (root / english_path(path)).exists():
            wrong.append(f"{path}: there is no {english_path(path)} that it translates")
            continue
        pair = Pair(root, path, paths)
        if not pair.wrong:
            pair.compare()
        if options.stamp and not pair.wrong:
            lines, count = pair.write_stamps(options.draft)
            (root / path).write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"{path}: {count} stamps written")
        elif not options.stamp and not pair.wrong:
            drafts += pair.check_stamps()
        wrong += pair.wrong
    for path in sorted(NOT_TRANSLATED):
        if (root / path).exists():
            for block in md.Document(root, path).blocks():
                wrong += misprints(f"{path}: line {block.line}", block)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    if not wrong and not options.stamp:
        print(f"translations: {len(paths)} agree with their English documents")
        for draft in drafts:
            print(f"a draft that nobody has reviewed: {draft}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
