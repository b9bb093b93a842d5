"""Draw docs/routing.png: four questions about the shipped model's routing, measured while it runs.

python tools/routing_picture.py
"""

from pathlib import Path

from matplotlib import pyplot as plt

import moe_lab as lab
from moe_lab.plots.style import LabFigure, png, style

OUT = Path(__file__).resolve().parents[1] / "docs" / "routing.png"


def main() -> None:
    """Measure, draw, write."""
    ckpt, data = lab.open(lab.sample()), lab.sample().parent
    trace, recorded = lab.RoutingTrace.load(data / "trace.parquet"), lab.Activations.load(data / "activations.npz")
    reuse, union = lab.analysis.reuse(trace), lab.analysis.union(trace)
    ahead = lab.analysis.next_layer(ckpt, recorded)
    flips = lab.analysis.flip_rate(lab.analysis.router_flips(ckpt, recorded))
    with style():
        figure = plt.figure(FigureClass=LabFigure, figsize=(16, 8), layout="constrained")
        axes = figure.subplots(2, 2)
        lab.plot.reuse(reuse, ax=axes[0, 0])
        lab.plot.union(union, ax=axes[0, 1])
        lab.plot.next_layer(ahead, ax=axes[1, 0])
        lab.plot.flips(flips, ax=axes[1, 1])
    OUT.write_bytes(png(figure))
    print(OUT)


if __name__ == "__main__":
    main()
