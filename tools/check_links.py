#!/usr/bin/env python3
"""Checks that the links between files resolve: each relative link of every Markdown file names a file or folder of
the repository, and its fragment a heading of that file.

usage: tools/check_links.py [ROOT]    ROOT is this repository unless given
"""
import pathlib
import sys

sys.dont_write_bytecode = True
import markdown_document as md  # noqa: E402


def check(root):
    wrong, count, fragments = [], 0, {}
    paths = md.documents(root)
    for path in paths:
        document = md.Document(root, path)
        for block in document.blocks():
            if "code" in block.kind:
                continue
            for target in md.links(block.text):
                to, fragment = document.resolve(target)
                if to is None:
                    continue
                count += 1
                place = f"{path}:{block.line}"
                if to.startswith(("/", "..")) or not (root / to).exists():
                    wrong.append(f"{place}: the link to {target} names no file of this repository")
                elif fragment and to.endswith(".md"):
                    if to not in fragments:
                        fragments[to] = md.Document(root, to).fragments()
                    if fragment not in fragments[to]:
                        wrong.append(f"{place}: the link to {target} names no heading of {to}")
    if not count:
        wrong.append(f"{root} has no links to look at")
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    if not wrong:
        print(f"links: {count} in {len(paths)} documents resolve")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(check(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent))
