"""The table of families: what it says, that the README has it, and the option that prints it.

After a change of the families `python tests/runtime/test_family_table.py` writes the README's table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from skote.model.adapters import FAMILIES
from skote.runtime.family_table import TESTED, family_table
from skote.runtime.generate import main

ROOT = Path(__file__).parent.parent.parent
BEGIN, END = "<!-- families: written by tests/runtime/test_family_table.py -->", "<!-- end of families -->"


def parted() -> tuple[str, str, str]:
    """The README before the table, the table, and the README after it."""
    before, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    table, _, after = rest.partition(f"\n{END}")
    return before, table, after


def test_the_readme_has_the_table() -> None:
    assert parted()[1] == family_table()


def test_every_family_has_a_row_with_models() -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in family_table().splitlines()[2:]]

    assert [row[0] for row in rows] == list(FAMILIES)
    assert all(len(row) == 5 and all(row) for row in rows)
    assert {row[2] for row in rows} == {"tier 1"}
    by_name = {row[0]: row[3] for row in rows}
    assert by_name["llama"] == "tier 1"
    assert "layer_norm" in by_name["gpt2"]


def test_the_version_is_the_one_that_is_installed_for_tests() -> None:
    (line,) = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("transformers==")
    ]

    assert line.removeprefix("transformers==").rpartition(".")[0] == TESTED.removeprefix("Transformers ")


@pytest.mark.parametrize("arguments", [["--families"], ["--families", "nowhere", "--prompt", "a"]])
def test_the_option_prints_the_table_and_ends(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(family_table())
    assert printed.err == ""


if __name__ == "__main__":
    head, _, tail = parted()
    (ROOT / "README.md").write_text(f"{head}{BEGIN}\n{family_table()}\n{END}{tail}", encoding="utf-8")
