"""Figures of paper E again from their tables, for panels that were run one by one.

    python benchmarks/paper_e_plot.py docs/results/paper_e.md

Every table of the file with columns "IQR at" counts; those with PM in a sampler's name make figure 2, the others figure 1.
"""

import pathlib
import sys

from paper_e import draw


def rows_of(file):
    """``(set, kernel, sampler, budgets, ranges)`` of every row."""
    budgets = []
    for line in pathlib.Path(file).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and any(cell.startswith("IQR at") for cell in cells):
            budgets = [int(cell.removeprefix("IQR at ")) for cell in cells if cell.startswith("IQR at")]
        elif not line.startswith("|"):
            budgets = []
        elif budgets and not cells[0].startswith("-"):
            ranges = [float(cell) if cell else float("nan") for cell in cells[5 : 5 + len(budgets)]]
            yield cells[0], cells[1], cells[4], budgets, ranges


def main():
    rows = list(rows_of(sys.argv[1]))
    draw([row for row in rows if "PM-" not in row[2]], "paper_e_figure1.png")
    draw([row for row in rows if "PM-" in row[2]], "paper_e_figure2.png")


if __name__ == "__main__":
    main()
