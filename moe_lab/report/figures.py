"""The "data" links under a figure of a report: its frame as CSV and what was drawn of it as JSON, inside the page, so
that they work with the network off.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from moe_lab.card import FIGURE_MIME, csv_link


def data_links(output: Any) -> str:
    """HTML under a picture: links for each panel that carries data; "" for a figure that carries none.

    The bundle comes out of a notebook, so perhaps from a stranger: every text is escaped, every name is made plain.
    """
    bundle = output.get("data", {}).get(FIGURE_MIME)
    panels = bundle.get("panels") if isinstance(bundle, Mapping) else None
    if not isinstance(panels, Sequence) or isinstance(panels, str):
        return ""
    links = [_link(panel) for panel in panels if isinstance(panel, Mapping)]
    return f'<p class="moe-data">Data: {", ".join(links)}</p>' if links else ""


def _link(panel: Mapping[str, Any]) -> str:
    name, text = str(panel.get("plot") or "data"), panel.get("csv")
    about = f"{panel.get('rows', '?')} rows: {', '.join(map(str, panel.get('columns') or ()))}"
    if not isinstance(text, str):
        return html.escape(f"{name} has {about}; too large for a page, lab.plot.save writes it")
    spec = {key: panel.get(key) for key in ("plot", "options", "rows", "columns")}
    return csv_link(name, text, about, spec)
