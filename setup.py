"""The README as the page of the package index, which has no files beside it; all else is in setup.cfg."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

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


if __name__ == "__main__":
    settings = ConfigParser()
    settings.read(HERE / "setup.cfg", encoding="utf-8")
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(long_description=with_addresses(readme, settings["metadata"]["url"]))
