"""Writes the tables of a page anew, each out of the output of the command above it.

    python docs/fill.py docs/results.md

A table stands between `<!-- table -->` and `<!-- end -->`, and the command is the indented block before it. Commands
run here, in the folder that the page's paths begin from; what is between the marks is replaced by their output. A
command that fails ends the page as it was.
"""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys

BLOCK = re.compile(r"(?P<command>(?:^    [^\n]*\n)+)\n<!-- table -->\n(?P<table>.*?)<!-- end -->", re.M | re.S)


def filled(page: str) -> str:
    """Returns the page with what its commands print now.

    Raises:
      RuntimeError: a command fails; its last words are in the message.
    """

    def made(found: re.Match[str]) -> str:
        words = shlex.split(found["command"].replace("\\\n", " "))
        words[0] = sys.executable if words[0] == "python" else words[0]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(words[1:4])} ...: {done.stderr.strip().splitlines()[-1:]}")
        return f"{found['command']}\n<!-- table -->\n{done.stdout.strip()}\n<!-- end -->"

    return BLOCK.sub(made, page)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        path = pathlib.Path(name)
        try:
            page = filled(path.read_text(encoding="utf-8"))
        except (OSError, RuntimeError) as error:
            sys.exit(f"{name}: {error}")
        path.write_text(page, encoding="utf-8")
        print(f"{name}: {len(BLOCK.findall(page))} tables")
