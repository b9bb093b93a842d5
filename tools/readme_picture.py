"""Draw docs/tour.png, the README's picture: four answers about the shipped model, measured while it runs.

python tools/readme_picture.py
"""

from pathlib import Path

from matplotlib import pyplot as plt

import moe_lab as lab
from moe_lab.activations import Inputs
from moe_lab.bench.batching import measure_batching
from moe_lab.plots.style import LabFigure, png, style

OUT = Path(__file__).resolve().parents[1] / "docs" / "tour.png"
MIDDLE, DECODED = 3, 96


def main() -> None:
    """Measure, draw, write."""
    ckpt = lab.open(lab.sample())
    assert ckpt.spec is not None
    inputs = Inputs(ckpt.path, ckpt.spec.d_model, 512)
    layers = {n: ckpt.layer(n) for n in ckpt.moe_layers}
    with lab.record() as routed:
        for n, layer in layers.items():
            layer(inputs.layer(n), "reference")
    batched = measure_batching(layers[MIDDLE], inputs.layer(MIDDLE), tokens=(1, 2, 4, 8, 16, 32, 64))
    parity = lab.compare(layers[MIDDLE], inputs.layer(MIDDLE), arms=["gemv", "reference"])
    slots = ckpt.spec.num_experts * len(layers) // 4
    with lab.ExpertCache(slots=slots) as cache, lab.record() as streamed:
        from_disk = {n: ckpt.layer(n, cache=cache) for n in layers}
        for t in range(DECODED):
            for n, layer in from_disk.items():
                layer(inputs.layer(n)[t : t + 1], "gemv")
    with style():
        figure = plt.figure(FigureClass=LabFigure, figsize=(16, 8), layout="constrained")
        axes = figure.subplots(2, 2)
        lab.plot.load(routed.trace, ax=axes[0, 0])
        lab.plot.batching(batched, ax=axes[0, 1])
        lab.plot.phases(streamed.timings, ax=axes[1, 0])
        lab.plot.parity(parity.bins(), ax=axes[1, 1])
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_bytes(png(figure))
    print(OUT)


if __name__ == "__main__":
    main()
