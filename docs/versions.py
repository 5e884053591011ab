"""Write what the version picker of the site reads: ``python docs/versions.py FOLDER``.

FOLDER has a folder for each version, ``main`` or a tag. ``versions.json`` lists them, newest first, and ``index.html``
leads to the newest release, or to ``main`` before the first one.
"""

import json
import re
import sys
from pathlib import Path

PAGE = """\
<!doctype html>
<meta charset="utf-8">
<title>pfl-lightning</title>
<meta http-equiv="refresh" content="0; url={name}/">
<a href="{name}/">pfl-lightning {name}</a>
"""


def ordered(names: list[str]) -> list[str]:
    """Return versions, newest first, and ``main`` after them.

    >>> ordered(["main", "v1.2.0", "v1.10.0", "v2.0.0rc1", "v2.0.0"])
    ['v2.0.0', 'v2.0.0rc1', 'v1.10.0', 'v1.2.0', 'main']

    Args:
        names: in any order.
    """

    def key(name: str) -> tuple[list[int], bool, str]:
        numbers, rest = re.fullmatch(r"v?([\d.]*)(.*)", name).groups()  # type: ignore[union-attr]
        return [int(number) for number in numbers.split(".") if number], not rest, rest

    return sorted(names, key=key, reverse=True)


def write(site: Path) -> None:
    """Write the list of versions and the first page.

    Args:
        site: the folder with a folder for each version.
    """
    names = ordered([page.parent.name for page in site.glob("*/index.html")])
    (site / "versions.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    released = [name for name in names if re.fullmatch(r"v[\d.]+", name)]
    (site / "index.html").write_text(PAGE.format(name=(released or names)[0]), encoding="utf-8")
    # else the pages of the repository leave out folders such as _static
    (site / ".nojekyll").touch()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
