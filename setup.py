"""The README as the page of the package index, and the configurations in the package; all else is in setup.cfg."""

import re
import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


def with_addresses(text: str, repository: str) -> str:
    """A text whose relative pictures and links are the repository's.

    Args:
        text: in Markdown.
        repository: the repository's address.
    """

    def absolute(link: "re.Match[str]") -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{kind}/HEAD/{link['path']})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?!https?:|#)(?P<path>[^)]+)\)", absolute, text)


class BuildWithConfigs(build_py):
    """Put the configurations, which a checkout has at its top, into the package.

    A link in ``src`` would do so too, but not where git makes none, as on Windows.
    """

    def run(self) -> None:
        """Build the package; an editable installation finds the configurations in the checkout."""
        super().run()
        if not self.editable_mode:
            for source, target in self.configs():
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(HERE / source, target)

    def configs(self) -> "list[tuple[str, str]]":
        """Return the path of each configuration, relative to this folder, and the path where the build has it."""
        found = sorted((HERE / "configs").rglob("*.yaml"))
        relative = [path.relative_to(HERE) for path in found]
        return [(path.as_posix(), str(Path(self.build_lib, "pfl_lightning", path))) for path in relative]

    def get_source_files(self) -> "list[str]":
        """Return the files of an sdist."""
        return [*super().get_source_files(), *(source for source, _ in self.configs())]

    def get_outputs(self, include_bytecode: bool = True) -> "list[str]":
        """Return the files of a build."""
        return [*super().get_outputs(include_bytecode), *(target for _, target in self.configs())]


if __name__ == "__main__":
    settings = ConfigParser()
    settings.read(HERE / "setup.cfg", encoding="utf-8")
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(long_description=with_addresses(readme, settings["metadata"]["url"]), cmdclass={"build_py": BuildWithConfigs})
