"""Timings of a decode step as a whole layer: who routes, where the shared expert runs, eager or captured.

    PYTHONPATH=.:kernels python benchmarks/device_routing_timings.py --out DIR [--layers qwen3,deepseek] [--tokens 1,8]

A layer has its router, K of E routed experts (q2_k, q2_k, q3_k) and one shared expert of the same formats and width.
First every form is compared with host routing on the main stream, bit for bit. Then, microseconds a call:
    device_us  a CUDA graph holds the call once for each input of a rotation: what the GPU takes
    host_us    calls one after another, the host's clock over many: what a decode loop takes
    launch_us  of it, the time inside Triton's launches; the rest is this package's own and torch's
Rows are written as they come, so that a run that is cut short leaves what it has.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench.gemv_layer import make_weights
from moe_lab.bench.runner import measured_on, time_calls
from moe_lab.bench.workloads import LayerShape
from moe_lab.formats import QuantTensor
from moe_lab.layer import MoELayer, Options, SharedWeights
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab_kernels import backend

ROTATION, REPEATS = 16, 5
FORMATS = ("q2_k", "q3_k")
LAYERS = {
    "qwen3": (LayerShape("qwen3", 2048, 768, 128, 8), RouterSpec(128, 8, normalize=True)),
    "deepseek": (
        LayerShape("deepseek", 7168, 2048, 256, 8),
        RouterSpec(256, 8, score="sigmoid", normalize=True, norm_eps=1e-20, scale=2.5),
    ),
}
FORMS = {
    "host-main": Options(),
    "host-side": Options(shared="side"),
    "host-fused": Options(shared="fused"),
    "device-main": Options(routing="device"),
    "device-side": Options(routing="device", shared="side"),
    "device-fused": Options(routing="device", shared="fused"),
}
COLUMNS = ["layer", "T", "form", "ok", "device_us", "host_us", "launch_us", "launches", "method", "device", "driver",
           "torch", "triton", "commit"]  # fmt: skip


def make_layer(name: str) -> MoELayer:
    """Genuinely quantised weights, an fp32 router of Gaussians."""
    shape, router = LAYERS[name]
    one = LayerShape(shape.name, shape.d_model, shape.d_expert, 1, 1)
    routed, own = (make_weights(s, seed, "cuda", *FORMATS) for s, seed in ((shape, 1), (one, 2)))

    def wrap(w: Any, lead: tuple[int, ...], pick: Callable[[torch.Tensor], torch.Tensor]) -> list[QuantTensor]:
        d, f = shape.d_model, shape.d_expert
        parts = ((w.gate, FORMATS[0], (f, d)), (w.up, FORMATS[0], (f, d)), (w.down, FORMATS[1], (d, f)))
        return [QuantTensor.from_bytes(pick(t), fmt, (*lead, *size)) for t, fmt, size in parts]

    gate, up, down = wrap(routed, (shape.experts,), lambda t: t)
    own_gate, own_up, own_down = wrap(own, (), lambda t: t[0])
    shared = SharedWeights(own_gate, own_up, own_down)
    spec = MoESpec(router, shape.d_model, shape.d_expert, shared=SharedSpec(shape.d_expert))
    weight = torch.randn(router.width, shape.d_model, device="cuda") * shape.d_model**-0.5 * 4
    return MoELayer.from_tensors(spec, router=weight.bfloat16(), gate=gate, up=up, down=down, shared=shared)


@contextmanager
def launch_clock() -> Iterator[list[float]]:
    """Inside, seconds spent in launches are added up in the list's one entry."""
    spent, plain = [0.0], backend.launch

    def timed(*args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        plain(*args, **kwargs)
        spent[0] += time.perf_counter() - begin

    backend.launch = timed
    try:
        yield spent
    finally:
        backend.launch = plain


def loop_us(call: Callable[[int], Any]) -> dict[str, float]:
    """Median microseconds a call of a loop until the device is done with it, and of the host's time in launches."""
    whole, inside = [], []
    with launch_clock() as spent:
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            spent[0], begin = 0.0, time.perf_counter()
            for i in range(ROTATION):
                call(i)
            torch.cuda.synchronize()
            whole.append((time.perf_counter() - begin) / ROTATION * 1e6)
            inside.append(spent[0] / ROTATION * 1e6)
    return {"host_us": statistics.median(whole[1:]), "launch_us": statistics.median(inside[1:])}


def measure(layer: MoELayer, name: str, tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each form, and one for the captured layer's own replay and call."""
    xs = [torch.randn(tokens, layer.spec.d_model, device="cuda").bfloat16() for _ in range(ROTATION)]
    want = [layer(x, "gemv").out for x in xs]
    for form, options in FORMS.items():

        def call(i: int, options: Options = options) -> Any:
            return layer(xs[i], "gemv", options=options)

        made = [call(i) for i in range(ROTATION)]
        ok = all(torch.equal(y.out, w) for y, w in zip(made, want, strict=True))
        row: dict[str, Any] = {"layer": name, "T": tokens, "form": form, "ok": ok, "launches": made[0].timing.launches}
        if ok:
            row |= loop_us(call)
            if options.routing == "device":
                timed = time_calls([lambda i=i: call(i).out for i in range(ROTATION)])
                row |= {"device_us": timed.us_p50, "method": timed.method}
        yield row
    for shared in ("main", "side", "fused"):
        graph = layer.capture(tokens, "gemv", options=Options(shared=shared))  # type: ignore[arg-type]
        ok = all(torch.equal(graph(x).out, w) for x, w in zip(xs, want, strict=True))
        row = {"layer": name, "T": tokens, "ok": ok, "launches": graph(xs[0]).timing.launches}

        def again(i: int, g: Any = graph) -> None:
            g.inputs.x.copy_(xs[i])
            g.replay()

        for what, run in (("call", lambda i, g=graph: g(xs[i])), ("replay", again)):
            yield {**row, "form": f"captured-{shared}-{what}", **(loop_us(run) if ok else {})}


def main() -> int:
    """Print a table, write device_routing_timings.csv; 1 if any form has other bits."""
    parser = argparse.ArgumentParser(description="Timings of a decode step as a whole layer.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", default="qwen3,deepseek")
    parser.add_argument("--tokens", default="1,8")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    about, right = measured_on(), True
    with open(args.out / "device_routing_timings.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for name in args.layers.split(","):
            layer = make_layer(name)
            for tokens in map(int, args.tokens.split(",")):
                for row in measure(layer, name, tokens):
                    right = right and row["ok"]
                    writer.writerow({**row, **about})
                    file.flush()
                    print(line(row), flush=True)
            del layer
    return int(not right)


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    numbers = "  ".join(f"{k} {row[k]:8.1f}" for k in ("device_us", "host_us", "launch_us") if k in row)
    return f"{row['layer']:9s} T={row['T']} {row['form']:22s} ok={row['ok']} n={row['launches']:3d}  {numbers}"


if __name__ == "__main__":
    sys.exit(main())
