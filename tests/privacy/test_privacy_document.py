"""What docs/privacy.md says in Python."""

import re
from pathlib import Path

from test_documents import shown

PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()


def test_its_python_gives_what_it_says():
    names = shown("docs/privacy.md")
    numbers = re.findall(r"# ([\d.]+)$", PAGE, re.MULTILINE)
    assert [f"{names['epsilon']([names['Release'](1.0, 0.01, 1000)], 1e-5):.2f}"] == numbers[:1]
    assert [f"{names['noise_for'](2.0, 1e-5, 1000, 0.01, tight=False):.2f}"] == numbers[1:]
