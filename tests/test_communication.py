"""What travels has the sizes that FedClassAvg's paper reports."""

import importlib.util
from pathlib import Path

import pytest

from pfl_lightning.messages import num_bytes

FILE = Path(__file__).parents[1] / "benchmarks" / "communication.py"


@pytest.fixture(scope="module")
def communication():
    spec = importlib.util.spec_from_file_location("communication", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exchanged(communication):
    """Update and payload by method."""
    return {name: communication.exchange(*method) for name, method in communication.METHODS.items()}


def test_what_travels_is_what_the_methods_say(exchanged):
    sizes = {name: (num_bytes(up), num_bytes(down)) for name, (up, down) in exchanged.items()}
    classifier, public = 4 * (512 * 10 + 10), 3000 * 3 * 32 * 32
    assert sizes.pop("FedAvg")[0] > 4 * (11_439_168 + 5_130)
    assert sizes == {
        # beside 8 bytes for the number of samples, and 80 for those of each class
        "FedClassAvg": (classifier + 8, classifier),
        "FedProto": (4 * 10 * 512 + 80, 4 * 10 * 512),
        "KT-pFL": (4 * 3000 * 10, public + 4 * 3000 * 10),
        "FedDistill": (400, 400),
    }


def test_files_have_the_papers_sizes_within_a_percent(communication, exchanged):
    model, classifier = (communication.file_size(exchanged[name][0]) for name in ("FedAvg", "FedClassAvg"))
    public = communication.file_size(exchanged["KT-pFL"][1])
    assert model == pytest.approx(43.73 * 2**20, rel=0.01)
    assert public == pytest.approx(8.90 * 2**20, rel=0.01)
    # KB may be thousands too, and older versions of torch write 400 bytes less
    assert 0.99 * 22 * 1000 < classifier < 1.01 * 22 * 1024


def test_the_table_sets_them_beside_each_other(communication, exchanged, monkeypatch, capsys):
    names = {method: name for name, method in communication.METHODS.items()}
    monkeypatch.setattr(communication, "exchange", lambda *method: exchanged[names[method]])
    communication.main()
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:]}
    assert list(rows) == list(communication.METHODS)
    assert rows["KT-pFL"][1:3] == ["120,000", "9,336,000"]
    assert rows["FedAvg"][3:] == ["43.73", "MB", "43.73", "MB", "43.73", "MB,", "up", "+0.00%"]
    assert len(rows["FedProto"]) == len(rows["FedDistill"]) == 7
