"""`moe_html`: a notebook as one HTML file that works with the network off.

The stock exporter loads a script loader, MathJax and a widget manager from elsewhere. Here formulas become MathML, a
widget's own HTML is preferred to its view, pictures are embedded with their alt text, and nothing is loaded.
`jupyter nbconvert --to moe_html FILE.ipynb` works wherever the package is installed.
"""

import html
import re
from pathlib import Path
from typing import Any

from moe_lab.errors import MissingExtra
from moe_lab.report.figures import data_links
from moe_lab.report.record import page_json

try:
    from jinja2 import pass_context
    from latex2mathml.converter import convert as latex_to_mathml
    from nbconvert.exporters.html import HTMLExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
    from traitlets import default
    from traitlets.config import Config
except ImportError as error:
    raise MissingExtra(error.name or "nbconvert", "report", "Exporting a report") from error

# The widget view is left out: without a kernel it is an empty box, while text/html holds the drawn frames.
_PRIORITY = ["text/html", "text/markdown", "text/latex", "image/svg+xml", "image/png", "image/jpeg", "text/plain"]

_NAMESPACE = (
    ' xmlns="http://www.w3.org/1998/Math/MathML"'  # HTML needs none; without it the page holds no address at all
)

# What the page's security policy keeps from being loaded; a reader should know that something is missing.
_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|link|source|video|audio|embed|object)\b[^>]*?\b(?:src|href|data)\s*=\s*[\"']?(?:https?:)?//",
    re.I,
)
_NOT_LOADED = (
    '<p class="moe-note">This page shows what is inside it alone: {} pictures, scripts or frames that the notebook '
    "names elsewhere are not loaded.</p>"
)


class MathRenderer(IPythonRenderer):
    """Markdown to HTML with formulas as MathML, which browsers draw without a script."""

    def block_math(self, body: str) -> str:
        return mathml(body, display="block")

    def inline_math(self, body: str) -> str:
        return mathml(body, display="inline")

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", display="block")


def mathml(formula: str, *, display: str) -> str:
    """MathML of a LaTeX formula without delimiters; its source as <code> when the converter does not know a macro."""
    try:
        found = latex_to_mathml(formula.strip(), display=display)
    except Exception:  # the converter documents no exception types; a formula must not cost a reader the report
        found = ""
    # An unknown macro comes back as its own name in an identifier: show the source instead of half a formula.
    if not found or "<mi>\\" in found:
        return f"<code>{html.escape(formula.strip())}</code>"
    return found.replace(_NAMESPACE, "")


class MoeHTMLExporter(HTMLExporter):
    """HTML exporter of the lab; options as in nbconvert's HTMLExporter (`theme="dark"` for a dark page)."""

    export_from_notebook = "MoE Lab report"

    @property
    def default_config(self) -> Config:
        # Not merged with the parent's: that would put the widget view back at the head of the list.
        return Config(
            {
                "NbConvertBase": {"display_data_priority": _PRIORITY},
                "HighlightMagicsPreprocessor": {"enabled": True},
                "TagRemovePreprocessor": {"enabled": True, "remove_input_tags": {"hide-input"}},
            }
        )

    @default("template_name")
    def _template_name_default(self) -> str:
        return "moe_lab"

    @default("embed_images")
    def _embed_images_default(self) -> bool:
        return True

    @default("exclude_input_prompt")
    def _exclude_input_prompt_default(self) -> bool:
        return True

    @default("exclude_output_prompt")
    def _exclude_output_prompt_default(self) -> bool:
        return True

    @default("exclude_anchor_links")
    def _exclude_anchor_links_default(self) -> bool:
        return True

    @default("extra_template_basedirs")
    def _extra_template_basedirs_default(self) -> list[str]:
        # Without the parent's working directory: in the source tree, a folder there bears our template's name.
        return [str(Path(__file__).parent / "templates")]

    def from_notebook_node(self, nb: Any, resources: Any = None, **kw: Any) -> tuple[str, Any]:
        page, resources = super().from_notebook_node(nb, resources, **kw)
        # Comments in JupyterLab's CSS hold the only addresses left in the page (and 20 kB).
        page = re.sub(r"<style[^>]*>.*?</style>", _without_comments, page, flags=re.S)
        if left_out := len(_ELSEWHERE.findall(page)):
            page = page.replace("</main>", f"{_NOT_LOADED.format(left_out)}</main>", 1)
        return page, resources

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        """A Markdown cell: the author's HTML stays."""
        return self._render(context, source, escape=False)

    @pass_context
    def markdown2html_untrusted(self, context: Any, source: str) -> str:
        """Markdown that the code printed: HTML inside it is shown as text, links that would run script are dropped."""
        return self._render(context, source, escape=True)

    def default_filters(self) -> Any:
        yield from super().default_filters()
        yield ("markdown2html", self.markdown2html)
        yield ("markdown2html_untrusted", self.markdown2html_untrusted)
        yield ("latex2html", latex2html)
        yield ("data_links", data_links)
        yield ("page_record", page_json)

    def _render(self, context: Any, source: str, *, escape: bool) -> str:
        renderer = MathRenderer(
            escape=escape,
            allow_harmful_protocols=not escape,
            attachments=context.get("cell", {}).get("attachments", {}),
            embed_images=self.embed_images,
            path=context.get("resources", {}).get("metadata", {}).get("path", ""),
            exclude_anchor_links=self.exclude_anchor_links,
        )
        return MarkdownWithMath(renderer=renderer).render(source)


def _without_comments(style: re.Match[str]) -> str:
    return re.sub(r"/\*.*?\*/", "", style[0], flags=re.S)


def latex2html(output: str) -> str:
    """A `text/latex` output, with or without its delimiters, as MathML."""
    body = output.strip()
    for opening, closing, display in (("$$", "$$", "block"), ("$", "$", "inline"), ("\\[", "\\]", "block")):
        if body.startswith(opening) and body.endswith(closing) and len(body) > len(opening) + len(closing):
            return mathml(body[len(opening) : -len(closing)], display=display)
    return mathml(body, display="block")
