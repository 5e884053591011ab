"""Draws test accuracy by round of the long runs on CIFAR-10 with two classes a client; prints the table behind it.

python docs/plot_two_classes.py docs/two_classes.png     # reads docs/records/cifar10_two_classes
"""

import csv
from argparse import ArgumentParser
from pathlib import Path

from matplotlib.figure import Figure

RECORDS = Path(__file__).parent / "records" / "cifar10_two_classes"
LINES: dict[str, tuple[str, float | None]] = {
    "cwFedAvg with WDR": ("wdr", 91.23),
    "cwFedAvg, Dist": ("dist", 91.35),
    "FedAvg, fine-tuned": ("fine_tuned", None),
    "Local": ("local", 88.82),
    "FedAvg": ("fedavg", 60.68),
}
"""Record, and the paper's figure, the best of 1,000 rounds over three seeds; None without one."""
SHOWN = (10, 30, 60, 100, 150, 400)
"""Rounds of the table."""


def accuracies(name: str) -> dict[int, float]:
    """Test accuracy in per cent by round."""
    with (RECORDS / f"{name}.csv").open(newline="") as file:
        return {int(row["round"]): 100 * float(row["test/acc"]) for row in csv.DictReader(file) if row["test/acc"]}


def main() -> None:
    """Print the table and write the picture."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    path = parser.parse_args().picture
    figure = Figure(figsize=(9, 4), layout="constrained")
    # the methods that decide are within three points of one another, and FedAvg is thirty below
    whole, close = figure.subplots(1, 2)
    print(f"| | {' | '.join(f'round {round}' for round in SHOWN)} | paper |\n|{' --- |' * (len(SHOWN) + 2)}")
    curves = {title: accuracies(name) for title, (name, _) in LINES.items()}
    last = max(max(values) for values in curves.values())
    for place, (title, (_, paper)) in enumerate(LINES.items()):
        values = curves[title]
        colour = "black" if title == "Local" else f"C{place}"
        for axes in (whole, close):
            axes.plot(list(values), list(values.values()), color=colour, label=title)
            if paper is not None:
                # beside the curves, as it is of another number of rounds
                axes.plot(1.03 * last, paper, marker="<", color=colour, clip_on=axes is close)
        # only the two that decide have all rounds
        cells = [f"{values[round]:.2f}" if round in values else "" for round in SHOWN]
        print(f"| {title} | {' | '.join(cells)} | {'' if paper is None else paper} |")
    for axes in (whole, close):
        axes.set(xlabel="round", xlim=(0, 1.06 * last))
        axes.grid(alpha=0.3)
    whole.set(ylabel="test accuracy, %", title="CIFAR-10, two classes a client")
    close.set(ylim=(82, 92), title="the upper ten points")
    whole.legend(loc="lower right", bbox_to_anchor=(1, 0.55), fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
