"""Check that a release's version is the same everywhere, and print the changelog's section of it.

python .ci/version.py            the version at hand, which may be unreleased
python .ci/version.py v1.0.0     a tag: version, citation and changelog must have it, with the day of the release
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def section(root: Path, tag: str | None) -> str:
    """Return the changelog's section of the version at hand.

    Args:
        root: the checkout.
        tag: the release's tag; None allows an unreleased version.

    Raises:
        SystemExit: if tag, package, citation and changelog differ, or the changelog has nothing to say.
    """

    def text(name: str) -> str:
        return (root / name).read_text(encoding="utf-8")

    def found(pattern: str, name: str) -> str:
        match = re.search(pattern, text(name), re.MULTILINE)
        return match[1] if match else ""

    version = found(r'^__version__ = "(.+)"$', "src/pfl_lightning/__init__.py")
    cited, cited_on = found(r"^version: (\S+)$", "CITATION.cff"), found(r"^date-released: (\S+)$", "CITATION.cff")
    head, _, body = text("CHANGELOG.md").partition("\n## ")[2].partition("\n")
    changed, _, changed_on = head.partition(" ")
    changed_on = changed_on.strip("()")
    places = {
        "the tag": version if tag is None else tag,
        "__init__.py": version if tag is None else f"v{version}",
        "CITATION.cff": cited if tag is None else f"v{cited}",
        "the top of CHANGELOG.md": changed if tag is None else f"v{changed}",
    }
    if len(set(places.values())) > 1 or not version:
        told = ", ".join(f"{place} {value or 'nothing'}" for place, value in places.items())
        raise SystemExit(f"the version differs: {told}; write one into all, then tag that commit.")
    if tag is not None and not (cited_on == changed_on and re.fullmatch(r"\d{4}-\d{2}-\d{2}", changed_on)):
        raise SystemExit(
            f"{tag}: the top of CHANGELOG.md says ({changed_on}) and date-released of CITATION.cff "
            f"{cited_on or 'nothing'}; both must be the day of the release, as 2026-01-31."
        )
    notes = body.partition("\n## ")[0].strip()
    if not notes:
        raise SystemExit(f"CHANGELOG.md has nothing below {head}; say what is new.")
    return notes


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(section(ROOT, sys.argv[1] if len(sys.argv) > 1 else None))
