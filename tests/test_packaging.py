"""What a release is made of."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import yaml

import pfl_lightning

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pfl_lightning"


@pytest.fixture(scope="module")
def settings() -> ConfigParser:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def setup_file() -> Any:
    pytest.importorskip("setuptools", reason="setup.py needs setuptools, which a plain environment may lack")
    spec = spec_from_file_location("setup_file", ROOT / "setup.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_that_the_package_reads_goes_into_the_wheel(settings):
    patterns = settings["options.package_data"]["pfl_lightning"].split()
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert packed == {
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".md")
    }


@pytest.mark.parametrize("editable", [False, True])
def test_the_build_puts_the_configurations_into_the_package(tmp_path, monkeypatch, editable):
    # as a build does; files that others name are relative to it
    monkeypatch.chdir(ROOT)
    module = setup_file()
    build = module.BuildWithConfigs(importlib.import_module("setuptools").Distribution())
    build.ensure_finalized()
    build.build_lib, build.editable_mode = str(tmp_path), editable
    build.run()
    built = {path.relative_to(tmp_path / "pfl_lightning") for path in tmp_path.rglob("*.yaml")}
    here = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    assert len(here) > 100 and built == (set() if editable else here)
    assert {Path(path) for path in build.get_source_files()} == here
    assert all((tmp_path / "pfl_lightning" / path).read_bytes() == (ROOT / path).read_bytes() for path in built)


def tracked() -> list[list[str]]:
    """Return mode and path of each file that git tracks here."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    return [[line.split()[0], line.partition("\t")[2]] for line in listed.stdout.splitlines()]


def test_a_checkout_needs_no_links():
    # git makes none on Windows, but a file with the target's name
    assert not [path for mode, path in tracked() if mode == "120000"]


def test_names_of_files_hold_on_each_system():
    paths = [path for _, path in tracked()]
    assert len({path.casefold() for path in paths}) == len(paths)
    devices = {"con", "prn", "aux", "nul", *(f"{name}{number}" for name in ("com", "lpt") for number in range(10))}
    for part in {part for path in paths for part in Path(path).parts}:
        assert not re.search(r'[<>:"\\|?*]|[. ]$', part) and part.split(".")[0].lower() not in devices, part


def test_folders_with_code_are_packages():
    assert all((path.parent / "__init__.py").exists() for path in PACKAGE.rglob("*.py"))


def test_the_readme_has_whole_addresses_in_the_package_index(settings):
    shown = setup_file().with_addresses((ROOT / "README.md").read_text(), settings["metadata"]["url"])
    addresses = re.findall(r"\]\(([^)]+)\)", shown)
    repository = f"{settings['metadata']['url']}/"
    own = [address.removeprefix(repository) for address in addresses if re.match(rf"{repository}(raw|blob)/", address)]
    assert "raw/HEAD/docs/hospitals.png" in own and "blob/HEAD/docs/claims.md" in own
    assert all((ROOT / address.split("/", 2)[2].partition("#")[0]).exists() for address in own)
    assert all(address.startswith("https://") for address in addresses)


def test_the_version_and_the_address_are_the_same_everywhere(settings):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == pfl_lightning.__version__
    assert citation["repository-code"] == settings["metadata"]["url"]
    assert citation["license"] == settings["metadata"]["license"]
    assert f"## {pfl_lightning.__version__}" in (ROOT / "CHANGELOG.md").read_text()


FILES = {
    "src/pfl_lightning/__init__.py": '__version__ = "1.2.0"\n',
    "CITATION.cff": "version: 1.2.0\ndate-released: 2027-01-31\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2027-01-31)\n\n* New.\n* Newer.\n\n## 1.1.0 (2026-01-31)\n\n* Old.\n",
}


def section(folder: Path, tag: str | None) -> str:
    """What .ci/version.py says of a checkout."""
    spec = spec_from_file_location("version", ROOT / ".ci" / "version.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.section(folder, tag)


def written(folder: Path, **changed: str) -> Path:
    """A checkout's files with versions, some of them changed."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(path.stem.strip("_"), text))
    return folder


def test_a_release_has_its_section_of_the_changelog(tmp_path):
    assert section(written(tmp_path), "v1.2.0") == section(tmp_path, None) == "* New.\n* Newer."
    unreleased = FILES["CHANGELOG.md"].replace("2027-01-31", "unreleased")
    assert section(written(tmp_path, CHANGELOG=unreleased), None) == "* New.\n* Newer."
    assert section(ROOT, None)


@pytest.mark.parametrize(
    ("tag", "changed", "said"),
    [
        ("v1.3.0", {}, "the tag v1.3.0, __init__.py v1.2.0"),
        ("1.2.0", {}, "the tag 1.2.0"),
        ("v1.2.0", {"init": '__version__ = "1.2.1"\n'}, "__init__.py v1.2.1"),
        ("v1.2.0", {"CITATION": "version: 1.1.0\ndate-released: 2027-01-31\n"}, "CITATION.cff v1.1.0"),
        ("v1.2.0", {"CITATION": "version: 1.2.0\n"}, "date-released of CITATION.cff nothing"),
        ("v1.2.0", {"CHANGELOG": "# Changelog\n\n## 1.1.0 (2026-01-31)\n\n* Old.\n"}, "CHANGELOG.md v1.1.0"),
        ("v1.2.0", {"CHANGELOG": "# Changelog\n\n## 1.2.0 (unreleased)\n\n* New.\n"}, r"says \(unreleased\)"),
        (
            "v1.2.0",
            {"CHANGELOG": "# Changelog\n\n## 1.2.0 (2027-01-31)\n\n## 1.1.0 (2026-01-31)\n"},
            "nothing below 1.2.0",
        ),
        (None, {"CITATION": "version: 1.1.0\n"}, "__init__.py 1.2.0, CITATION.cff 1.1.0"),
    ],
)
def test_a_release_whose_versions_differ_is_refused(tmp_path, tag, changed, said):
    with pytest.raises(SystemExit, match=said):
        section(written(tmp_path, **changed), tag)


def jobs(workflow: str) -> dict[str, Any]:
    """The jobs of a workflow."""
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"]
    return found


def test_versions_of_python_are_those_that_are_tested(settings):
    named = re.findall(r"Python :: (3\.\d+)", settings["metadata"]["classifiers"])
    assert named == jobs("ci")["wheel"]["strategy"]["matrix"]["python"]
    assert named == jobs("release")["try"]["strategy"]["matrix"]["python"]
    assert settings["options"]["python_requires"] == f">={named[0]}"


def test_nothing_is_published_that_was_not_tried():
    release = jobs("release")
    order = {"build": None, "try": "build", "publish": "try", "announce": "publish"}
    assert {name: job.get("needs") for name, job in release.items()} == order
    # the index knows the workflow by its token, so there is no secret to keep
    assert release["publish"]["permissions"] == {"id-token": "write"}
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    assert not any("secrets." in text or "password" in text for text in texts)


def test_badges_are_of_workflows_and_notebooks_that_are_here(settings):
    badges = re.findall(r"\[!\[[^]]+\]\((\S+)\)\]\((\S+)\)", (ROOT / "README.md").read_text())
    url, addresses = settings["metadata"]["url"], [address for badge in badges for address in badge]
    assert settings["metadata"]["project_urls"].partition("Documentation = ")[2].split()[0] in addresses
    workflows = {file for address in addresses for file in re.findall(rf"{url}/actions/workflows/(\w+\.yml)", address)}
    assert workflows and all((ROOT / ".github" / "workflows" / file).exists() for file in workflows)
    assert any(address.endswith("notebooks/quickstart.ipynb") for address in addresses)


def test_systems_begin_with_the_first_command_of_the_readme():
    spec = spec_from_file_location("systems", ROOT / ".ci" / "systems.py")
    systems = module_from_spec(spec)
    spec.loader.exec_module(systems)
    assert systems.first_command() == ["pfl-lightning", "fit", "--config", "quickstart"]


def test_the_container_s_file_has_instructions_that_its_script_follows():
    loader = SourceFileLoader("container", str(ROOT / ".ci" / "container"))
    module = module_from_spec(spec_from_loader("container", loader))
    loader.exec_module(module)
    found = list(module.instructions((ROOT / "containers" / "Dockerfile").read_text()))
    assert [name for name, _ in found][-2:] == ["ENTRYPOINT", "CMD"] and found[0][0] == "FROM"
    assert json.loads(found[-2][1]) + json.loads(found[-1][1]) == ["pfl-lightning", "fit", "--config", "quickstart"]
    assert list(module.instructions("# a\nRUN x \\\ny\n\nUSER 1\n")) == [("RUN", "x  y"), ("USER", "1")]


def test_the_page_of_the_installation_has_each_extra(settings):
    page = (ROOT / "docs" / "install.md").read_text().partition("## Extras")[2]
    told = {word for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)}
    assert told == set(settings["options.extras_require"])


def test_the_site_lists_its_versions(tmp_path):
    for name in ("main", "v1.9.0", "v1.10.0", "v2.0.0rc1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run([sys.executable, ROOT / "docs" / "versions.py", tmp_path], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert json.loads((tmp_path / "versions.json").read_text()) == ["v2.0.0rc1", "v1.10.0", "v1.9.0", "main"]
    # a candidate for a release isn't where readers land
    assert "url=v1.10.0/" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem)
def test_forms_and_workflows_can_be_read(path, settings):
    content = yaml.safe_load(path.read_text())
    if path.parent.name == "workflows":
        commands = [step["run"] for job in content["jobs"].values() for step in job["steps"] if "run" in step]
        programs = [command.split()[0] for command in commands]
        files = [word for command in commands for word in command.split() if word.endswith(".py")]
        # on the machines of the workflows, and those that the extra dev brings
        elsewhere = {"gh", "docker", *settings["options.extras_require"]["dev"].split()}
        assert all(each in elsewhere or shutil.which(each) or shutil.which(ROOT / each) for each in programs)
        assert all((ROOT / file).is_file() for file in files)
    elif path.stem == "dependabot":
        assert {update["package-ecosystem"] for update in content["updates"]} == {"github-actions", "pip"}
    elif path.stem == "config":
        assert all(link["url"].startswith(settings["metadata"]["url"]) for link in content["contact_links"])
    else:
        assert content["name"] and content["description"]
        assert len({part["id"] for part in content["body"]}) == len(content["body"])
