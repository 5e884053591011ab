"""What holds for tests of callbacks."""

import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine


@pytest.fixture(autouse=True)
def pictures_are_drawn_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arranging the parts of a picture takes longer than a tiny federation; the tests of plots do so."""
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda engine, figure: None)
