"""Tables of text for terminals, Markdown and LaTeX, and durations in words."""

from collections.abc import Container, Sequence

LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}
"""Replacement of each special character in LaTeX."""


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, the first row above a line.

    >>> print(text_table([["method", "last"], ["FedAvg", "78.20"]]))
    method  last
    ------  -----
    FedAvg  78.20

    Args:
        rows: cells, the header first.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *others = rows
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, ["-" * width for width in widths], *others]
    )


def labelled(lines: Sequence[tuple[str, str]]) -> str:
    """Return one line per value, names on the left.

    >>> print(labelled([("method", "FedPer"), ("rounds", "20")]))
    method  FedPer
    rounds  20

    Args:
        lines: name and value of each line, at least one.
    """
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def duration(seconds: float) -> str:
    """Return a duration in words.

    >>> duration(7.4), duration(200), duration(7500), duration(180_000)
    ('7 s', '3 min 20 s', '2 h 5 min', '2 d 2 h')

    Args:
        seconds: the duration, 0 or more.
    """
    # rounded once, before the division: 59.6 s is 1 min 0 s and not 60 s
    whole = round(seconds)
    for large, small, size, part in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // part} {small}"
    return f"{whole} s"


def markdown_table(rows: Sequence[Sequence[str]], bold: Container[tuple[int, int]] = ()) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table([["method", "last"], ["FedAvg", "78.20"]]))
    | method | last |
    | --- | --- |
    | FedAvg | 78.20 |

    Args:
        rows: cells, the header first.
        bold: row and column of each cell to print bold.
    """
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    header, *others = [
        [f"**{cell}**" if (at, column) in bold else cell for column, cell in enumerate(row)]
        for at, row in enumerate(escaped)
    ]
    cells = [header, ["---"] * len(header), *others]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def latex_table(rows: Sequence[Sequence[str]], caption: str, label: str, bold: Container[tuple[int, int]] = ()) -> str:
    r"""Return a LaTeX ``table`` with the rules of the package booktabs.

    >>> print(latex_table([["method", "last"], ["fed_avg", "78.20 ± 0.11"]], "Accuracy in %.", "tab:digits"))
    \begin{table}
    \centering
    \caption{Accuracy in \%.}
    \label{tab:digits}
    \begin{tabular}{lr}
    \toprule
    method & last \\
    \midrule
    fed\_avg & 78.20 $\pm$ 0.11 \\
    \bottomrule
    \end{tabular}
    \end{table}

    Args:
        rows: cells, the header first.
        caption: caption of the table.
        label: label for references.
        bold: row and column of each cell to print bold.
    """
    written = [
        [rf"\textbf{{{latex(cell)}}}" if (at, column) in bold else latex(cell) for column, cell in enumerate(row)]
        for at, row in enumerate(rows)
    ]
    header, *others = (" & ".join(row) + r" \\" for row in written)
    columns = "l" + "r" * (len(rows[0]) - 1)
    lines = [
        *(r"\begin{table}", r"\centering", rf"\caption{{{latex(caption)}}}", rf"\label{{{label}}}"),
        *(rf"\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule", *others, r"\bottomrule"),
    ]
    return "\n".join([*lines, r"\end{tabular}", r"\end{table}"])


def latex(text: str) -> str:
    """Escape LaTeX's special characters."""
    return "".join(LATEX.get(character, character) for character in text)
