"""Each dependency has a licence that fits, and stands in the documentation's table."""

import importlib
import inspect
import re
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

import pfl_lightning.data
from pfl_lightning.data import FederatedDataModule

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def licences():
    """The script that writes the table."""
    pytest.importorskip("packaging", reason="reads requirements by packaging")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("licences")


def package(**fields: str) -> SimpleNamespace:
    metadata = Message()
    for name, value in fields.items():
        metadata[name.replace("_", "-")] = value
    return SimpleNamespace(metadata=metadata)


def test_metadata_are_read_as_packages_write_them(licences):
    assert licences.licences(package(License_Expression="Apache-2.0 AND MIT")) == {"Apache-2.0", "MIT"}
    assert licences.licences(package(Classifier="License :: OSI Approved :: BSD License", License="see file")) == {
        "BSD"
    }
    assert licences.licences(package(License="GNU Lesser General Public License")) == {"GPL"}
    assert licences.licences(package(License="LGPLv3+")) == {"GPL"}
    assert licences.licences(package(License="UNKNOWN")) == set()
    bare = package(License_File="LICENSE")
    bare.read_text = {"licenses/LICENSE": "Apache License, Version 2.0".ljust(400) + "GPL"}.get
    assert licences.licences(bare) == {"Apache-2.0"}


def test_the_table_has_each_dependency_with_its_licence(licences):
    rows = re.findall(r"^\| ([\w.-]+) \| .* \| .+ \|$", licences.PAGE.read_text(), re.MULTILINE)
    assert [row for row in rows if row not in ("package", "---")] == list(licences.declared())
    assert licences.TABLE.search(licences.PAGE.read_text())[0] == licences.table(), "run python docs/licences.py"


def test_the_licence_of_each_installed_package_fits(licences):
    cuda = {name for name in licences.installed(["torch"]) if name.startswith(("nvidia-", "cuda-"))}
    found = licences.installed(licences.declared())
    assert {"torch", "lightning", "numpy", "pyyaml"} <= found.keys()
    known = {name: licences.licences(each) for name, each in found.items() if name not in cuda | licences.APART.keys()}
    assert not {name: kinds for name, kinds in known.items() if not kinds or kinds - licences.FIT}
    # what is a tool alone never comes with a plain installation
    plain = [name for name, extras in licences.declared().items() if "" in extras]
    assert not licences.APART.keys() & licences.installed(plain).keys()


def test_each_data_set_has_its_terms():
    part = (
        (ROOT / "docs" / "data" / "existing.md").read_text().partition("## Terms of data sets")[2].partition("\n## ")[0]
    )
    told = set(re.findall(r"`(\w+)`", part))
    classes = {name: getattr(pfl_lightning.data, name) for name in pfl_lightning.data.__all__}
    of_a_file = re.compile(r"pfl_lightning\.data\.\w+$")
    sets = {
        name
        for name, each in classes.items()
        if inspect.isclass(each) and issubclass(each, FederatedDataModule) and of_a_file.match(each.__module__)
    } - {"FederatedDataModule", "ImageFolder"}
    assert "Digits" in sets and sets <= told and told <= classes.keys()
