"""Markdown tables."""

from revrnn.recipes import markdown


def test_tables_are_aligned() -> None:
    assert markdown.table(["a", "name"], [["1.5", "x"], ["10", "long"]]) == (
        "|   a | name |\n| --: | ---- |\n| 1.5 | x    |\n|  10 | long |"
    )


def test_a_cell_that_is_not_known_is_no_word() -> None:
    assert markdown.table(["a"], [["1"], [""]]).splitlines()[1] == "| -: |"
