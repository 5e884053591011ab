"""Formulas as MathML, which browsers draw by themselves: no script, no font, no network."""

import re

from docutils.nodes import NodeVisitor, SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def mathml(formula: str, block: bool = False) -> str:
    r"""The MathML of a formula in LaTeX.

    >>> "<mfrac>" in mathml(r"\frac12")
    True
    """
    # fences grow by themselves in MathML
    formula = re.sub(r"\\[bB]igg?[lr]?(?=[\W_])", "", " ".join(formula.split()))
    return tex2mathml(formula, as_block=block)


def setup(app: Sphinx) -> dict[str, bool]:
    """Makes ``html_math_renderer = "mathml"`` known."""

    def inline(visitor: NodeVisitor, node) -> None:
        visitor.body.append(mathml(node.astext()))
        raise SkipNode

    def block(visitor, node) -> None:
        visitor.body.append(f'<div class="math">{mathml(node.astext(), block=True)}</div>')
        raise SkipNode

    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True}
