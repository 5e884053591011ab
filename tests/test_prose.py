"""How the package's docstrings and comments and the pages of the documentation read, by counts."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import pfl_lightning

FILES = sorted(Path(pfl_lightning.__file__).parent.rglob("*.py"))
POINTING = re.compile(r"\b(what|who|whom|whose|that|it|its|them|they|those|of which|others|there)\b", re.IGNORECASE)
ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in ("readme", "contributing")),
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
    *sorted((ROOT / "docs" / "data").glob("*.md")),
]
QUESTION = re.compile(r"(What|Who|Whether|Where|How|Which|When)\b")


def first_paragraphs(tree):
    """The first paragraph of each docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [" ".join(text.split("\n\n")[0].split()) for text in texts if text]


def lines_of_docstrings(tree):
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return {
        line for node in texts if isinstance(node.value.value, str) for line in range(node.lineno, node.end_lineno + 1)
    }


def lines_of_comments(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }


@pytest.fixture(scope="module")
def counts():
    """First paragraphs of all docstrings, and numbers of lines of code and of comments."""
    paragraphs, code, comments = [], 0, 0
    for path in FILES:
        source = path.read_text()
        tree = ast.parse(source)
        paragraphs += first_paragraphs(tree)
        written = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()}
        own = lines_of_comments(source) - lines_of_docstrings(tree)
        comments += len(own)
        code += len(written - lines_of_docstrings(tree) - own)
    return paragraphs, code, comments


def test_docstrings_name_things_and_do_not_point(counts):
    paragraphs, *_ = counts
    words = sum(len(paragraph.split()) for paragraph in paragraphs)
    assert sum(len(POINTING.findall(paragraph)) for paragraph in paragraphs) <= 0.02 * words


def test_docstrings_begin_with_what_is_done(counts):
    paragraphs, *_ = counts
    assert sum(bool(QUESTION.match(paragraph)) for paragraph in paragraphs) <= 0.01 * len(paragraphs)


def test_comments_say_why(counts):
    _, code, comments = counts
    assert comments >= 0.06 * code


def test_the_counts_see_what_they_count():
    tree = ast.parse(
        '"""What it is."""\n\n\ndef f():\n    """Return a sum.\n\n    Those are others.\n    """\n    # why\n'
    )
    assert first_paragraphs(tree) == ["What it is.", "Return a sum."]
    assert lines_of_docstrings(tree) == {1, 5, 6, 7, 8}
    assert lines_of_comments("x = 1  # beside\n# alone\n") == {2}


def prose(page):
    """The sentences of a page in Markdown: no code, tables and addresses."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^(    |\|).*$", "", page, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "x", page))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_name_things_and_do_not_point(page):
    words = prose(page.read_text())
    # three words are allowed to pages of a few sentences
    assert len(POINTING.findall(words)) <= max(3, 0.025 * len(words.split()))


def test_the_prose_of_a_page_has_no_code_tables_and_addresses():
    page = "What `it` is:\n\n    that\n\n| who |\n\n```\nthem\n```\n\n[x](its.md)\n"
    assert POINTING.findall(prose(page)) == ["What"]
