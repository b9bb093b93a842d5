"""How an arm on experts in a layout is called in benchmarks, comparisons and arm tables: "gemv", or "gemv@tiles"."""

from moe_lab.formats.layouts import RAW, check_layout


def with_layout(arm: str, layout: str) -> str:
    """The name of an arm on experts in a layout; the arm's own for raw ones."""
    return arm if layout == RAW else f"{arm}@{layout}"


def split_layout(name: str) -> tuple[str, str]:
    """The inverse: arm and layout. LabError for a layout that there is not."""
    arm, at, layout = name.partition("@")
    if at:
        check_layout(layout)
    return arm, layout if at else RAW
