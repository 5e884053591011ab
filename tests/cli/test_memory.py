"""The command `pfl-lightning memory`."""

import re

import pytest

from command import QUICKSTART, pfl, refusal


def table(capsys):
    lines = capsys.readouterr().out.splitlines()
    return {line[:-16].strip(): float(line.split()[-2].replace(",", "")) for line in lines if line.endswith("MiB")}


def test_a_table_of_a_configuration(capsys):
    with pytest.raises(SystemExit) as ended:
        pfl(
            [
                "memory",
                *QUICKSTART.split(),
                "--model.net",
                "MLP",
                "--model.net.hidden",
                "[4096]",
                "--model.optimizer",
                "Adam",
            ]
        )
    assert not ended.value.code
    rows = table(capsys)
    assert rows["gradients"] == rows["trained weights"] > 0 and rows["optimizer"] > 1.8 * rows["gradients"]
    assert re.search(r"states of \d+ clients", " ".join(rows))


def test_mistakes_are_refused_in_a_sentence(capsys):
    assert "such as --config quickstart" in refusal("memory", capsys)
    assert "modle" in refusal("memory --config quickstart --modle FedAvg", capsys)
