import os
import pickle
import re
import stat
import time
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import equal
from pfl_lightning.engines import ClientState
from pfl_lightning.flower import states as module
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.flower.template import Refused


def state(value: float) -> ClientState:
    return ClientState(
        {"w": torch.full((3,), value), "b": torch.full((), value, dtype=torch.bfloat16)},
        {"": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}},
        {"scale": 8.0},
    )


def tokens(folder: Path) -> set[str]:
    return {path.stem for path in folder.rglob("*.pt")}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_kept_comes_back_in_another_process(tmp_path):
    token = StateVersions(tmp_path / "a" / "b").keep(3, state(1.0))
    assert re.fullmatch("[0-9a-f]{16}", token)
    back = StateVersions(tmp_path / "a" / "b").load(3, token)
    assert equal(vars(back), vars(state(1.0)))
    assert back.personal["b"].dtype == torch.bfloat16


def test_a_version_never_changes(tmp_path):
    versions = StateVersions(tmp_path)
    first = versions.keep(3, state(1.0))
    second = versions.keep(3, state(2.0), first)
    third = versions.keep(3, state(3.0), first)
    assert [versions.load(3, token).personal["w"][0].item() for token in (first, second, third)] == [1.0, 2.0, 3.0]


def test_only_the_owner_may_look(tmp_path):
    folder = tmp_path / "states"
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        versions = StateVersions(folder)
        versions.keep(3, state(2.0), versions.keep(3, state(1.0)))
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    for path in folder.rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MisconfigurationException, match=r"state-dir=.*file.* can't hold what stays with clients"):
        StateVersions(tmp_path / "file")


@pytest.mark.parametrize(
    "token", ["", "0" * 15, "0" * 17, "G" * 16, "../../etc/passwd", "*" * 16, "0" * 16 + "\n", None, 7, "A" * 16]
)
def test_a_token_is_looked_at_before_a_path_is_made_of_it(tmp_path, token):
    versions = StateVersions(tmp_path)
    versions.keep(3, state(1.0))
    with pytest.raises(Refused, match="a token is 16 hexadecimal digits"):
        versions.load(3, token)


FIRST = ("personal", "optimizers", "scaler")
"""Entries of a state in files of the first version with deployments."""


def test_a_file_of_the_first_version_is_read_and_followed(tmp_path):
    (tmp_path / "3" / ("a" * 16)).mkdir(parents=True)
    content = {name: vars(state(1.0))[name] for name in FIRST}
    torch.save(content, tmp_path / "3" / ("a" * 16) / f"{'b' * 16}.pt")
    versions = StateVersions(tmp_path)
    assert equal(vars(versions.load(3, "b" * 16)), vars(state(1.0)))
    second = versions.keep(3, state(2.0), "b" * 16, live=())
    assert tokens(tmp_path / "3" / ("a" * 16)) == {second, "b" * 16}


def test_one_client_has_none_of_another(tmp_path):
    versions = StateVersions(tmp_path)
    token = versions.keep(3, state(1.0))
    for refused in (lambda: versions.load(4, token), lambda: versions.keep(4, state(2.0), token)):
        with pytest.raises(Refused, match=f"client 4: its site has no version {token} of its state"):
            refused()


@pytest.mark.parametrize("damage", ["cut", "bits", "pickle", "other"])
def test_a_damaged_version_is_refused(tmp_path, damage):
    versions = StateVersions(tmp_path)
    token = versions.keep(3, state(1.0))
    (path,) = tmp_path.rglob("*.pt")
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "bits":
        place = data.index(state(1.0).personal["w"].numpy().tobytes())
        path.write_bytes(data[:place] + b"\x01" + data[place + 1 :])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps({"personal": {}}))
    else:
        torch.save({"weights": {}}, path)
    with pytest.raises(Refused, match=f"client 3: the version {token} of its state is damaged"):
        versions.load(3, token)


def test_nothing_of_a_version_is_run(tmp_path):
    class Bad:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "run"),))

    versions = StateVersions(tmp_path / "states")
    token = versions.keep(3, state(1.0))
    (path,) = tmp_path.rglob("*.pt")
    torch.save({"personal": Bad()}, path)
    with pytest.raises(Refused, match="damaged"):
        versions.load(3, token)
    assert not (tmp_path / "run").exists()


def test_what_no_checkpoint_needs_is_dropped(tmp_path):
    versions = StateVersions(tmp_path)
    first = versions.keep(3, state(1.0), live=())
    second = versions.keep(3, state(2.0), first, live=())
    assert tokens(tmp_path) == {first, second}
    third = versions.keep(3, state(3.0), second, live=[first])
    assert tokens(tmp_path) == {first, second, third}
    fourth = versions.keep(3, state(4.0), third, live=[second])
    assert tokens(tmp_path) == {second, third, fourth}
    # resumed from an earlier checkpoint
    fifth = versions.keep(3, state(5.0), second, live=[second])
    # the server may take the third or the fourth, if they answered the same question
    assert tokens(tmp_path) == {second, third, fourth, fifth}
    sixth = versions.keep(3, state(6.0), fifth, live=[second])
    assert tokens(tmp_path) == {second, fifth, sixth}


def test_nothing_of_others_is_dropped(tmp_path):
    versions = StateVersions(tmp_path)
    of_another = versions.keep(4, state(1.0))
    of_an_earlier_run = versions.keep(3, state(1.0))
    of_an_earlier_run_too = versions.keep(3, state(2.0), of_an_earlier_run)
    first = versions.keep(3, state(1.0), live=())
    second = versions.keep(3, state(2.0), first, live=())
    third = versions.keep(3, state(3.0), second, live=["f" * 16])
    assert tokens(tmp_path) == {of_another, of_an_earlier_run, of_an_earlier_run_too, second, third}


def test_what_a_killed_process_left_goes_in_time(tmp_path):
    versions = StateVersions(tmp_path)
    first = versions.keep(3, state(1.0))
    old, new = (tmp_path / "3" / first / f"{name * 16}.pt.partial" for name in "ab")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    versions.keep(3, state(2.0), first, live=())
    assert not old.exists() and new.exists()


def test_a_version_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(f"sync {'folder' if os.path.isdir(path) else Path(path).suffix}")
        fsync(descriptor)

    def replaced(one: Path, other: Path) -> None:
        events.append(f"rename to {other.suffix}")
        replace(one, other)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to see which file is meant")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    StateVersions(tmp_path).keep(3, state(1.0))
    assert events[:3] == ["sync .partial", "rename to .pt", "sync folder"]


def test_nothing_is_left_of_what_cannot_be_written(tmp_path, monkeypatch):
    versions = StateVersions(tmp_path)
    first = versions.keep(3, state(1.0))

    def full(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save", full)
    with pytest.raises(MisconfigurationException, match=rf"{tmp_path}/3/.*: No space left on device at the site; make"):
        versions.keep(3, state(2.0), first, live=())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{first}.pt"]
