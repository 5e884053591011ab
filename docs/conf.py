"""The documentation site: ``sphinx-build -W --keep-going docs docs/_build``; every reference must lead somewhere."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pfl_lightning

project = "pfl-lightning"
author = "pfl-lightning contributors"
html_show_copyright = False
version = release = pfl_lightning.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    # brings myst_parser
    "myst_nb",
    "docstrings",
    "native_math",
    "site_pages",
]
myst_enable_extensions = ["deflist", "colon_fence"]
# notebooks hold their outputs; CI runs them by itself
nb_execution_mode = "off"
nb_output_stderr = "remove"
myst_heading_anchors = 3
html_theme = "furo"
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
# the side bar's head, above the version picker, which knows folders alone
html_title = f"pfl-lightning {version}"
html_theme_options = {
    "source_repository": "https://github.com/pfl-lightning/pfl-lightning",
    "source_branch": "main",
    "source_directory": "docs",
}
html_logo = html_favicon = "static/logo.svg"
# commands and code: nobody copies what a command has printed
copybutton_selector = "div:not(.highlight-text):not(.highlight-none):not(.output) > div.highlight > pre"
html_math_renderer = "mathml"
autodoc_member_order = "bysource"
# types stand beside the arguments' descriptions, and signatures stay short
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
add_module_names = False
autodoc_default_options = {"members": True, "show-inheritance": True, "ignore-module-all": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# myst_nb keeps copies of notebooks beside the site
exclude_patterns = ["_build", "jupyter_execute", "records", "templates"]
# types in signatures, most of them other packages'; what docstrings and pages refer to is checked
nitpick_ignore_regex = [("py:(class|exc|data)", ".*"), ("py:obj", r"typing\..*")]
nitpicky = True
