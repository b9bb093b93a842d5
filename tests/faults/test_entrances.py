"""What a newcomer hands over by mistake: each public entrance names the argument, what came and what was wanted."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.activations import Activations
from moe_lab.cli import main
from moe_lab.errors import LabError, LabTypeError
from tests.support.tiny_gguf import write_tiny_qwen2moe
from tests.support.toy_moe import toy_model
from tests.support.traces import random_trace, trace_of

SPEC = lab.RouterSpec(8, 2)
MIXER = {"weights_from": "sparsemixer", "score": "none"}
LOGITS = torch.zeros(3, 8)
IDS, ONES = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("given")
    ckpt = lab.open(write_tiny_qwen2moe(folder / "tiny.gguf"))
    trace = random_trace(30, 2)
    rows = Activations(np.ones((2, 4, 256), np.float16), (0, 1))
    narrow = Activations(np.ones((2, 4, 64), np.float16), (0, 1))
    saved = trace.save(folder / "t.parquet")
    layer = ckpt.layer(0)
    toy = toy_model()
    return SimpleNamespace(ckpt=ckpt, trace=trace, rows=rows, narrow=narrow, saved=saved, layer=layer, toy=toy)


def refused(case: tuple[Callable[[Any], Any], str], given: SimpleNamespace, kind: type[LabError]) -> None:
    call, words = case
    with pytest.raises(kind) as error:
        call(given)
    assert words in str(error.value)
    assert str(error.value).count("\n") == 0


# Entrance -> (a call, what its error must say). LabTypeError: another type than the argument has.
WRONG_TYPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "route-numpy": (lambda g: lab.route(np.zeros((3, 8)), SPEC), "logits is a numpy.ndarray of shape [3, 8]"),
    "route-list": (lambda g: lab.route([[0.0] * 8], SPEC), "logits is a list"),
    "route-layer-spec": (lambda g: lab.route(LOGITS, g.ckpt.spec), "spec.router"),
    "route-bias": (lambda g: lab.route(LOGITS, SPEC, correction_bias=[0.0] * 8), "correction_bias is a list"),
    "spec-text": (lambda g: lab.RouterSpec("8", 2), "RouterSpec.num_experts is '8' (str)"),
    "spec-float": (lambda g: lab.RouterSpec(8.0, 2), "RouterSpec.num_experts is 8.0"),
    "spec-top-k": (lambda g: lab.RouterSpec(8, 2.0), "RouterSpec.top_k is 2.0"),
    "spec-scale": (lambda g: lab.RouterSpec(8, 2, scale="2"), "RouterSpec.scale is '2'"),
    "layer-spec": (lambda g: lab.MoESpec(8, 256, 256), "MoESpec.router is 8 (int)"),
    "plan-spec": (lambda g: lab.plan(lab.route(LOGITS, SPEC), SPEC), "num_experts is a moe_lab.RouterSpec"),
    "plan-pair": (lambda g: lab.plan((IDS, ONES), 8), "routing is a tuple"),
    "routing-lists": (lambda g: lab.Routing([[0]], [[1.0]]), "Routing.ids is a list"),
    "routing-numpy": (lambda g: lab.Routing(np.zeros((2, 2), int), np.ones((2, 2))), "Routing.ids is a numpy.ndarray"),
    "load-none": (lambda g: lab.RoutingTrace.load(None), "path is None"),
    "load-one-token": (lambda g: lab.RoutingTrace.load(g.saved, tokens=3), "tokens is 3 (int)"),
    "load-open-pair": (lambda g: lab.RoutingTrace.load(g.saved, tokens=(None, 1)), "start of tokens is None"),
    "load-range": (lambda g: lab.RoutingTrace.load(g.saved, tokens=range(0, 1)), "tokens is a range"),
    "load-experts": (lambda g: lab.RoutingTrace.load(g.saved, num_experts="8"), "num_experts is '8'"),
    "trace-layer-text": (lambda g: g.trace.layer("0"), "layer is '0' (str)"),
    "trace-layer-true": (lambda g: g.trace.layer(True), "layer is True"),
    "from-layers": (
        lambda g: lab.RoutingTrace.from_layers({0: [[1]]}, {0: [[1.0]]}, num_experts=8, width=8),
        "ids of layer 0 is a list",
    ),
    "union-path": (lambda g: lab.analysis.union("data/trace.parquet"), "union is 'data/trace.parquet'"),
    "load-of-none": (lambda g: lab.analysis.load(None), "is None; wanted a RoutingTrace"),
    "balance": (lambda g: lab.analysis.balance(g.ckpt), "is a moe_lab.Checkpoint"),
    "skew": (lambda g: lab.analysis.skew(3), "wanted a RoutingTrace"),
    "coactivation": (lambda g: lab.analysis.coactivation(None), "wanted a RoutingTrace"),
    "reuse": (lambda g: lab.analysis.reuse("t"), "wanted a RoutingTrace"),
    "one-layer": (lambda g: lab.analysis.load(g.trace, layers=3), "layers is 3 (int)"),
    "layers-text": (lambda g: lab.analysis.load(g.trace, layers="0"), "layers is '0' (str)"),
    "union-size": (lambda g: lab.analysis.union(g.trace, 8), "sizes is 8"),
    "union-half": (lambda g: lab.analysis.union(g.trace, [1.5]), "sizes[0] is 1.5"),
    "next-layer-path": (lambda g: lab.analysis.next_layer("m.gguf", g.rows), "next_layer is 'm.gguf'"),
    "next-layer-reads": (lambda g: lab.analysis.next_layer(g.ckpt, g.rows, 3), "reads is 3"),
    "flips-path": (lambda g: lab.analysis.router_flips("m.gguf", g.rows), "router_flips is 'm.gguf'"),
    "flips-numpy": (lambda g: lab.analysis.flips(np.zeros((3, 8)), LOGITS, SPEC), "a is a numpy.ndarray"),
    "flip-rate": (lambda g: lab.analysis.flip_rate(3), "df is 3"),
    "explore-load": (lambda g: lab.explore.load(None), "got None"),
    "explore-routing": (lambda g: lab.explore.routing(None), "routing is None"),
    "ribbon-path": (lambda g: lab.explore.ribbon("t.parquet", "x"), "ribbon is 't.parquet'"),
    "ribbon-text": (lambda g: lab.explore.ribbon(g.trace, None), "text is None"),
    "ribbon-start": (lambda g: lab.explore.ribbon(g.trace, ["a"], start=1.5), "start is 1.5"),
    "capture-layers": (lambda g: Activations.capture(g.toy, [1, 2], layers=1), "layers is 1"),
    "capture-tokens": (lambda g: Activations.capture(g.toy, [1, 2], max_tokens="1"), "max_tokens is '1'"),
    "capture-domains": (lambda g: Activations.capture(g.toy, [1, 2], domains=3), "domains is 3"),
    "capture-tokenizer": (lambda g: Activations.capture(g.toy, "a", tokenizer=3), "tokenizer is 3"),
    "record-tokenizer": (lambda g: lab.hf.record(g.toy, "a", tokenizer="data/t.json"), "Tokenizer.from_file(path)"),
    "layer-cache": (lambda g: g.ckpt.layer(0, cache=8), "cache is 8 (int)"),
    "read-none": (lambda g: g.ckpt.read(None), "name is None"),
    "open-none": (lambda g: lab.open(None), "path is None"),
    "open-bytes": (lambda g: lab.open(b"m.gguf"), "path is a bytes"),
    "quantize-numpy": (lambda g: lab.quantize(np.zeros((2, 256)), "q8_0"), "w is a numpy.ndarray"),
    "quantize-list": (lambda g: lab.quantize([[0.0]], "q8_0"), "w is a list"),
    "quantize-scalar": (lambda g: lab.quantize(torch.tensor(1.0), "q8_0"), "of shape []"),
    "quantize-complex": (lambda g: lab.quantize(torch.zeros(2, 32, dtype=torch.cfloat), "q8_0"), "complex64"),
    "quantize-again": (lambda g: lab.quantize(lab.quantize(torch.zeros(2, 32), "q8_0"), "q8_0"), "QuantTensor"),
    "quantize-meta": (lambda g: lab.quantize(torch.zeros(2, 32, device="meta"), "q8_0"), "meta device"),
    "bytes-numpy": (lambda g: lab.QuantTensor.from_bytes(np.zeros(34, np.uint8), "q8_0", (1, 32)), "numpy.ndarray"),
    "rows": (lambda g: g.layer.experts.stack.up.rows(3), "rows is 3 (int); wanted a slice"),
    "shape": (lambda g: lab.QuantTensor.from_bytes(torch.zeros(34).byte(), "q8_0", 32), "the shape is 32"),
    "gguf-list": (lambda g: lab.write_gguf("m.gguf", [g.layer]), "layers is a list"),
    "gguf-layer": (lambda g: lab.write_gguf("m.gguf", g.layer), "layers is a moe_lab.MoELayer"),
    "gguf-text-number": (lambda g: lab.write_gguf("m.gguf", {"0": g.layer}), "number is '0' (str)"),
    "png": (lambda g: lab.plot.png(3), "got int"),
}


@pytest.mark.parametrize("case", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_a_wrong_type_is_named(case: Any, given: SimpleNamespace) -> None:
    refused(case, given, LabTypeError)


WRONG_VALUES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "softcap-inf": (lambda g: lab.RouterSpec(8, 2, softcap=math.inf), "softcap is inf"),
    "norm-eps-nan": (lambda g: lab.RouterSpec(8, 2, norm_eps=math.nan), "norm_eps is nan"),
    "norm-eps-negative": (lambda g: lab.RouterSpec(8, 2, norm_eps=-1.0), "norm_eps is -1.0"),
    "scale-nan": (lambda g: lab.RouterSpec(8, 2, scale=math.nan), "scale is nan"),
    "temperature-inf": (lambda g: lab.RouterSpec(8, 2, temperature=math.inf), "temperature is inf"),
    "group-fill-nan": (lambda g: lab.RouterSpec(8, 2, group_fill=math.nan), "group_fill is nan"),
    "mixer-groups": (lambda g: lab.RouterSpec(8, 2, n_group=2, **MIXER), "n_group=2 would do nothing"),
    "mixer-hash": (lambda g: lab.RouterSpec(8, 2, hash_routing=True, **MIXER), "hash_routing=True would do nothing"),
    "mixer-bias": (
        lambda g: lab.route(LOGITS, lab.RouterSpec(8, 2, **MIXER), correction_bias=torch.zeros(8)),
        "correction_bias would do nothing",
    ),
    "mixer-layer-bias": (
        lambda g: lab.MoESpec(lab.RouterSpec(8, 2, **MIXER), 64, 64, correction_bias=True),
        "correction bias would do nothing",
    ),
    "plan-too-few": (lambda g: lab.plan(lab.route(LOGITS, SPEC), 4), "are of a router of E=8"),
    "plan-too-many": (lambda g: lab.plan(lab.Routing(IDS, ONES, width=4), 8), "are of a router of R=4"),
    "plan-huge": (lambda g: lab.plan(lab.Routing(IDS, ONES), 10**12), "num_experts is 1000000000000"),
    "ids-int-min": (lambda g: lab.Routing(torch.tensor([[-(2**63)]]), ONES), "beyond 32 bits"),
    "load-experts": (lambda g: lab.RoutingTrace.load(g.saved, num_experts=10**12), "num_experts is 1000000000000"),
    "load-experts-negative": (lambda g: lab.RoutingTrace.load(g.saved, num_experts=-3), "num_experts is -3"),
    "load-experts-zero": (lambda g: lab.RoutingTrace.load(g.saved, num_experts=0), "num_experts is 0"),
    "load-from-the-end": (lambda g: lab.RoutingTrace.load(g.saved, tokens=slice(-1, None)), "slice(-1, None, None)"),
    "from-layers": (
        lambda g: lab.RoutingTrace.from_layers({0: np.ones((1, 1), int)}, {}, num_experts=8, width=8),
        "layer 0 has ids but no weights",
    ),
    "seed": (lambda g: lab.analysis.reuse(g.trace, seed=-1), "seed is -1"),
    "variants": (lambda g: lab.analysis.router_flips(g.ckpt, g.rows, {}), "variants is empty"),
    "another-models-rows": (lambda g: lab.analysis.router_flips(g.ckpt, g.narrow), "rows of D=64"),
    "another-models-rows-next": (lambda g: lab.analysis.next_layer(g.ckpt, g.narrow), "rows of D=64"),
    "no-model-layer": (lambda g: lab.analysis.router_flips({}, g.rows), "no MoE layer"),
    "capture-meta": (lambda g: Activations.capture(toy_model().to("meta"), [1, 2]), "meta device"),
    "capture-part": (lambda g: Activations.capture(g.toy.layers[1].mlp, [1, 2]), "MixtralSparseMoeBlock takes rows"),
    "capture-family": (lambda g: Activations.capture(g.toy, [1, 2], family="qwen3_moe"), "blocks are of mixtral"),
    "open-empty": (lambda g: lab.open(""), "path is empty"),
    "open-address": (lambda g: lab.open("https://h/m"), "'https://h/m', an address"),
    "fallback": (lambda g: lab.quantize(torch.zeros(2, 256), "q8_0", fallback="zzz"), "'zzz'"),
    "nvfp4-saturates": (lambda g: lab.quantize(torch.full((1, 64), 5000.0), "nvfp4"), "hold 2688 at most"),
    "float64-overflows": (lambda g: lab.quantize(torch.full((1, 32), 1e300, dtype=torch.float64), "f32"), "infinite"),
    "gguf-name-twice": (
        lambda g: lab.write_gguf(
            "/nowhere/m.gguf", {0: g.layer}, tensors={"blk.0.ffn_gate_inp.weight": torch.zeros(8, 256)}
        ),
        "blk.0.ffn_gate_inp.weight, which the layers write themselves",
    ),
    "gguf-no-folder": (lambda g: lab.write_gguf("/nowhere/m.gguf", {0: g.layer}), "cannot write /nowhere/m.gguf: No"),
    "gguf-long-name": (
        lambda g: lab.write_gguf("/nowhere/m.gguf", {0: g.layer}, tensors={"a" * 64: torch.zeros(1)}),
        "has 64 bytes; readers take 1..63",
    ),
    "activations-nan": (lambda g: Activations(np.full((1, 2, 4), np.nan, np.float16), (0,)), "not finite (token 0)"),
    "activations-float64": (lambda g: Activations(np.full((1, 2, 4), 1e300), (0,)), "not finite"),
    "activations-layers": (lambda g: Activations(np.ones((2, 2, 4), np.float16), (0, 0)), "2 different numbers"),
}


@pytest.mark.parametrize("case", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_value_that_cannot_be_is_named(case: Any, given: SimpleNamespace) -> None:
    refused(case, given, LabError)


class TestQuantTensor:
    q = lab.quantize(torch.randn(3, 4, 256, generator=torch.Generator().manual_seed(0)), "q2_k")

    @pytest.mark.parametrize("index", [slice(0, 2), [0, 1], True, (0, 1), torch.tensor(0), None], ids=str)
    def test_only_one_whole_number_indexes(self, index: Any) -> None:
        with pytest.raises(LabTypeError, match="one whole number at a time"):
            _ = self.q[index]

    @pytest.mark.parametrize("index", [3, -4, 10**20])
    def test_an_index_beyond_the_axis_is_an_error_of_ours(self, index: int) -> None:
        with pytest.raises(LabError, match="axis of 3"):
            _ = self.q[index]

    def test_numbers_count_from_either_end_and_iteration_stops(self) -> None:
        whole = self.q.dequantize()
        for index in (0, 2, -1, np.int64(1)):
            assert torch.equal(self.q[index].dequantize(), whole[index])
        assert [torch.equal(q.dequantize(), w) for q, w in zip(self.q, whole, strict=True)] == [True] * 3

    @pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
    def test_a_device_that_is_not_there(self) -> None:
        with pytest.raises(LabError, match="0 CUDA devices"):
            self.q.to("cuda")

    @pytest.mark.parametrize("name", ["nvfp4_modelopt", "nvfp4_ct", "fp8_block"])
    def test_no_rows_are_no_weights(self, name: str) -> None:
        assert lab.quantize(torch.zeros(0, 256), name).dequantize().shape == (0, 256)

    def test_names_of_formats_in_any_case(self) -> None:
        assert lab.quantize(torch.ones(2, 256), "Q2_K").format == "q2_k"


def test_the_layers_own_count_of_experts_stays_with_its_picks(given: SimpleNamespace) -> None:
    spec = lab.RouterSpec(6, 2, zero_experts=2)
    routing = lab.route(torch.randn(5, 8), spec)
    assert (routing.num_experts, routing.width) == (6, 8)
    assert lab.plan(routing, 6).counts.shape == (6,)
    with pytest.raises(LabError, match="E=6"):
        lab.plan(routing, 8)


def test_weights_whose_sum_is_negative_are_normalised_as_written() -> None:
    spec = lab.RouterSpec(4, 2, score="none", normalize=True, norm_kind="max")
    assert lab.route(torch.tensor([[-1.0, -2.0, -3.0, -4.0]]), spec).weights.tolist() == [[0.0, 0.0]]


def test_all_tokens_are_captured_unless_told_otherwise(given: SimpleNamespace) -> None:
    text = torch.arange(5000) % 50
    assert Activations.capture(given.toy, text, layers=[1]).tokens == 5000
    assert Activations.capture(given.toy, text, layers=[1], max_tokens=7).tokens == 7


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, given: SimpleNamespace) -> None:
    monkeypatch.setenv("HOME", str(given.ckpt.path.parent))
    assert lab.open("~/tiny.gguf").moe_layers == [0, 1]


def test_a_tensor_larger_than_memory_is_an_error_of_ours(given: SimpleNamespace, monkeypatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("moe_lab.checkpoint.tensor_file.torch.empty", refuse)
    with pytest.raises(LabError, match="no memory for its"):
        given.ckpt.raw("blk.0.ffn_gate_inp.weight")


def test_a_disk_that_cuts_numpy_short_is_full(tmp_path: Path) -> None:
    from moe_lab.system.files import replace_file

    def fill(part: Path) -> None:
        raise OSError("65536 requested and 39968 written")

    with pytest.raises(LabError, match=r"x\.gguf: No space left on device"):
        replace_file(tmp_path / "x.gguf", fill)


def test_a_gguf_that_says_too_little_is_refused_by_its_own_name(tmp_path: Path, given: SimpleNamespace) -> None:
    with pytest.raises(LabError) as error:
        lab.write_gguf(tmp_path / "x.gguf", {0: given.layer}, metadata={"qwen2moe.expert_count": 99})
    assert str(tmp_path / "x.gguf") in str(error.value)
    assert ".part" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_figure_by_its_axes_and_layers_without_a_skew(given: SimpleNamespace) -> None:
    assert lab.plot.png(lab.plot.load(given.trace)).startswith(b"\x89PNG")
    skipped = trace_of([[[-1, -1]]] * 4, 8)
    assert lab.plot.skew(lab.analysis.skew(skipped)).get_title(loc="left").startswith("No layer picks")
    assert "∅ is a token without text" in lab.explore.ribbon(given.trace, ["", "b"], stop=2).html


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("moe-lab ")


def test_a_trace_shows_its_sizes_not_its_arrays(given: SimpleNamespace) -> None:
    assert repr(given.trace) == "RoutingTrace(T=30, L=2, K=2, E=8, R=8, layers 0, 1, with weights)"
