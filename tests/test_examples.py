"""The examples do what they say."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))


def test_a_plain_loop_gives_the_same_weights(tmp_path, monkeypatch, capsys):
    import fedavg_by_hand

    monkeypatch.chdir(tmp_path)
    fedavg_by_hand.main()
    shown = capsys.readouterr().out
    assert shown.count("largest difference 0.0e+00") == len(shown.splitlines()) == 4


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("examples/*.py")), ids=lambda path: path.name)
def test_examples_are_documented(path):
    assert path.read_text().startswith('"""')
