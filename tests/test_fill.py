"""Tables of the docs are written by the commands above them."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).parent.parent / "docs" / "fill.py"
SPEC = importlib.util.spec_from_file_location("fill", PATH)
fill = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fill)

PAGE = """Words.

    python --no-such-option  # of no table

More words.

    python -c "print('| a |'); \\
        print(1 + 1)"

<!-- table -->
old
<!-- end -->

    python -c "not of a table"

More.
"""


def test_a_table_is_what_its_command_prints_and_nothing_else_changes():
    once = fill.filled(PAGE)
    assert once == PAGE.replace("old\n", "| a |\n2\n") and fill.filled(once) == once


def test_a_command_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"-c .*no such thing"):
        fill.filled(PAGE.replace("print('| a |')", "raise SystemExit('no such thing')"))
