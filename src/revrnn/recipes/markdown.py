"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned so that it reads well unrendered; columns of numbers to the right."""
    # A rule needs a dash beside its colon.
    widths = [max(2, *(len(line[i]) for line in [header, *rows])) for i in range(len(header))]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [
        "-" * (width - 1) + ":" if to_right else "-" * width
        for width, to_right in zip(widths, right, strict=True)
    ]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-±<"
