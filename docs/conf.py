"""The documentation site: ``sphinx-build -W --keep-going docs docs/_build``; every reference must lead somewhere."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pfl_lightning

project = "pfl-lightning"
author = "pfl-lightning contributors"
version = release = pfl_lightning.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "docstrings", "native_math", "site_pages"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "pfl-lightning"
html_math_renderer = "mathml"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True, "ignore-module-all": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
exclude_patterns = ["_build"]
# types in signatures, most of them other packages'; what docstrings and pages refer to is checked
nitpick_ignore_regex = [("py:(class|exc|data)", ".*"), ("py:obj", r"typing\..*")]
nitpicky = True
