"""A user's own weight format, model family and eviction policy: taken wherever a name is, refused in one sentence."""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.bench.cell import Settings
from moe_lab.bench.weights import make_layer
from moe_lab.bench.workloads import LayerShape
from moe_lab.families import FAMILIES, Family
from moe_lab.formats import BlockFormat
from moe_lab.inspect import inspect_checkpoint
from tests.support.tiny_gguf import D_MODEL, EXPERTS, write_tiny_qwen2moe
from tests.support.toy_moe import MixtralSparseMoeBlock

E, K, D, F = 4, 2, 32, 64


class MyInt8(BlockFormat):
    """Blocks of 32: an fp32 scale, then 32 signed bytes."""

    name, block, block_bytes = "my_int8", 32, 36

    def quantize(self, w):
        blocks = w.unflatten(-1, (-1, 32))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        codes = (blocks / scale).round().to(torch.int8)
        return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], -1).flatten(-2)

    def dequantize(self, raw):
        scale, codes = self.blocks(raw).split([4, 32], -1)
        return (scale.contiguous().view(torch.float32) * codes.view(torch.int8)).flatten(-2)


class Duck:
    """The same without a base class."""

    name, block, block_bytes, ggml_type = "duck", 32, 36, None

    def row_bytes(self, kd):
        return kd // 32 * 36

    def quantize(self, w):
        return MyInt8().quantize(w)

    def dequantize(self, raw):
        return MyInt8().dequantize(raw)

    def integer_form(self, raw):
        return None


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("format", [MyInt8(), Duck()], ids=lambda f: f.name)
def test_a_format_serves_weights_layers_and_comparisons(format: object) -> None:
    w = normal(E, F, D)
    q = lab.quantize(w, format)
    assert (q.format, q.shape, q.nbytes) == (format.name, (E, F, D), E * F * D // 32 * 36)
    assert (q.dequantize() - w).abs().max() <= w.abs().max() / 254
    assert lab.QuantTensor.from_bytes(q.data, format, q.shape).dequantize().equal(q.dequantize())
    assert f"QuantTensor({format.name}, shape=(4, 64, 32), 9 bits a weight" in repr(q)
    spec = lab.MoESpec(lab.RouterSpec(E, K), D, F)
    down = lab.quantize(normal(E, D, F), format)
    layer = lab.MoELayer.from_tensors(spec, router=normal(E, D), gate=q, up=q, down=down)
    assert f"{format.name}/{format.name}/{format.name}" in repr(layer)
    plain = {part: t.dequantize() for part, t in layer.experts.stack.parts.items()}
    dense = lab.MoELayer.from_tensors(spec, router=layer.router, **plain)
    x = normal(5, D)
    assert layer(x, "auto").arm == "reference"
    assert layer(x, "auto").out.equal(dense(x, "reference").out)
    checks = lab.compare(layer, x, ["reference", "gemv"]).checks.set_index("arm")
    assert list(checks.status) == ["PASSED", "UNSUPPORTED"]
    assert f"not {format.name}" in checks.reason["gemv"]


@pytest.mark.wrong_types
def test_a_format_is_benchmarked_by_shape_and_by_layer() -> None:
    shape, quick = LayerShape("small", D, F, E, K), Settings(cell_ms=1, least=1, most=2, states=("warm",))
    table = lab.bench(shape, arms=["reference", "gemv"], formats=[MyInt8(), "q8_0"], tokens=2, settings=quick)
    status = {(one.format, one.arm): one.status for one in table.itertuples()}
    assert status == {("my_int8", "reference"): "PASSED", ("my_int8", "gemv"): "UNSUPPORTED",
                      ("q8_0", "reference"): "PASSED", ("q8_0", "gemv"): "PASSED"}  # fmt: skip
    assert list(lab.bench(make_layer(shape, MyInt8()), arms=["auto"], tokens=1, settings=quick).format) == ["my_int8"]
    for bad in (NoDecoder(), MyInt8, [3]):
        with pytest.raises(lab.LabTypeError, match="weight format"):
            lab.bench(shape, formats=bad, tokens=1, settings=quick)


class NoDecoder(BlockFormat):
    name, block, block_bytes = "no_decoder", 32, 36

    def quantize(self, w):
        return w


class WrongSize(MyInt8):
    name, block_bytes = "wrong_size", 34


class HalfValues(MyInt8):
    name = "half_values"

    def dequantize(self, raw):
        return super().dequantize(raw).half()


class Empty(MyInt8):
    name, block = "empty", 0


class Taken(MyInt8):
    name = "q8_0"


BAD_FORMATS = {
    "no-decoder": (NoDecoder(), "weight format 'no_decoder' (NoDecoder) lacks dequantize(raw)"),
    "class": (MyInt8, "weight format MyInt8 is a class; pass an object of it, MyInt8()"),
    "number": (8, "weight format of type int lacks name, block, block_bytes, ggml_type, row_bytes(kd), dequant"),
    "wrong-size": (WrongSize(), "weight format 'wrong_size' (WrongSize): quantize gave torch.uint8 (4, 36); wanted"),
    "half-values": (HalfValues(), "weight format 'half_values' (HalfValues): dequantize gave torch.float16 (4, 32); w"),
    "empty": (Empty(), "has block 0 and block_bytes 36; wanted at least one value and one byte"),
    "taken": (Taken(), "weight format 'q8_0' is the lab's own; give yours another name, such as 'my_q8_0'"),
}  # fmt: skip


@pytest.mark.wrong_types
@pytest.mark.parametrize("case", BAD_FORMATS)
def test_a_half_made_format_is_refused(case: str) -> None:
    format, says = BAD_FORMATS[case]
    with pytest.raises(lab.LabError) as caught:
        lab.quantize(normal(4, 32), format).dequantize()
    assert says in str(caught.value)
    assert isinstance(caught.value, lab.LabTypeError) == (case not in ("empty", "taken"))
    if "lacks" in says:
        assert "moe_lab.formats.WeightFormat" in str(caught.value)
        assert "moe_lab.formats.BlockFormat as a base class brings ggml_type, row_bytes" in str(caught.value)
        with pytest.raises(lab.LabTypeError, match="lacks"):
            lab.QuantTensor.from_bytes(torch.zeros(4, 36, dtype=torch.uint8), format, (4, 32))


def test_the_labs_own_format_objects_pass() -> None:
    assert lab.quantize(normal(4, 32), lab.FORMATS["q8_0"]).format == "q8_0"


class LentFamily:
    """No subclass of Family: lends the members of a row."""

    def __init__(self, row: Family) -> None:
        self._row = row

    def __getattr__(self, member):
        return getattr(self._row, member)


MINE = replace(FAMILIES["qwen2_moe"], name="mine", router={"normalize": True})


@pytest.mark.wrong_types
@pytest.mark.parametrize("family", [MINE, LentFamily(MINE)], ids=["row", "duck"])
def test_a_family_opens_files_and_names_layers(family: object, tmp_path: Path) -> None:
    ckpt = lab.open(write_tiny_qwen2moe(tmp_path / "tiny.gguf"), family=family)
    assert (ckpt.spec.family, ckpt.spec.router.normalize) == ("mine", True)
    assert "normalised" in inspect_checkpoint(ckpt).router.iloc[0]
    layer = ckpt.layer(ckpt.moe_layers[0])
    assert "mine layer" in repr(layer)
    assert layer(normal(3, D_MODEL)).routing.weights.sum(-1).sub(1).abs().max() <= lab.tolerances.tol(
        "route/transformers"
    )


@pytest.mark.wrong_types
def test_a_family_reads_a_module_and_builds_a_spec() -> None:
    mine = replace(FAMILIES["mixtral"], name="my_mixtral")
    assert lab.hf.from_module(MixtralSparseMoeBlock(), family=mine).spec.family == "my_mixtral"
    spec = mine.spec(num_experts=E, top_k=K, d_model=D, d_expert=F)
    assert spec == lab.MoESpec(lab.RouterSpec(E, K, normalize=spec.router.normalize), D, F, family=mine)
    weights = {"gate": normal(E, F, D), "up": normal(E, F, D), "down": normal(E, D, F)}
    assert "my_mixtral" in repr(lab.MoELayer.from_tensors(spec, router=normal(E, D), **weights))


def test_a_subclass_of_family_stays_one_without_its_shared_expert() -> None:
    class Own(Family):
        pass

    row = FAMILIES["qwen2_moe"]
    own = Own(name="own", layer=row.layer, shared=row.shared, shared_layer=row.shared_layer)
    assert isinstance(own.without_shared(), Own)
    assert own.without_shared().shared == "none"


@pytest.mark.wrong_types
@pytest.mark.parametrize(("family", "says"), [
    (3, "family of type int lacks name, router, layer"), (Family, "family Family is a class"),
    (object(), "members of moe_lab.families.Family"),
], ids=["number", "class", "object"])  # fmt: skip
def test_a_half_made_family_is_refused(family: object, says: str, tmp_path: Path) -> None:
    path = write_tiny_qwen2moe(tmp_path / "tiny.gguf")
    for door in (
        lambda: lab.open(path, family=family),
        lambda: lab.hf.from_module(MixtralSparseMoeBlock(), family=family),
    ):
        with pytest.raises(lab.LabTypeError) as caught:
            door()
        assert says in str(caught.value)


@pytest.mark.wrong_types
@pytest.mark.parametrize(("setting", "says"), [
    ({"name": 3}, "name = 3, which is no str"), ({"router": 3}, "router = 3, which is no Mapping"),
    ({"gguf": "qwen"}, "gguf = 'qwen', which is no FileRow or None"), ({"shared": "some"}, "shared = 'some', which"),
])  # fmt: skip
def test_a_row_of_wrong_types_is_refused_when_it_is_made(setting: dict, says: str) -> None:
    with pytest.raises(lab.LabTypeError) as caught:
        Family(**{"name": "mine", **setting})
    assert says in str(caught.value)


@pytest.mark.wrong_types
def test_a_spec_wants_its_family_by_name_or_as_a_row() -> None:
    with pytest.raises(lab.LabTypeError, match=r"MoESpec.family is a int; wanted a name or a moe_lab.families.Family"):
        lab.MoESpec(lab.RouterSpec(E, K), D, F, family=3)


class LeastAsked(Counter):
    """Ten lines: the key asked for least often leaves."""

    name = "least_asked"

    def on_hit(self, key):
        self[key] += 1

    on_insert = on_hit

    def on_evict(self, key):
        pass

    def victim(self, candidates):
        return min(candidates, key=self.get)


@pytest.mark.parametrize(
    "policy", [LeastAsked(), LeastAsked, lambda: LeastAsked()], ids=["object", "class", "function"]
)
def test_a_policy_counts_alike_in_the_live_cache_and_the_simulator(policy: object, tmp_path: Path) -> None:
    ckpt = lab.open(write_tiny_qwen2moe(tmp_path / "tiny.gguf"))
    slots = EXPERTS // 2
    fresh = deepcopy(policy)  # an object keeps what it has seen, and a simulation starts from there
    with lab.ExpertCache(slots=slots, policy=fresh) as cache, lab.record() as live:
        layers = {n: ckpt.layer(n, cache=cache) for n in ckpt.moe_layers}
        for t in range(12):
            for layer in layers.values():
                layer(normal(12, D_MODEL)[t : t + 1], "reference")
    table = lab.simulate(live.trace, slots, ["lru", policy, "belady"]).groupby("policy")[["hits", "misses"]].sum()
    label = "<lambda>" if callable(policy) and not isinstance(policy, type) else "least_asked"
    assert tuple(table.loc[label]) == (cache.hits, cache.misses)
    assert table.misses["belady"] <= table.misses[label]


class NoVictim:
    def on_hit(self, key): ...
    def on_insert(self, key): ...
    def on_evict(self, key): ...


class OldHook(LeastAsked):
    name = "old_hook"

    def victim(self):
        return None


class Needs(LeastAsked):
    def __init__(self, size):
        super().__init__()


BAD_POLICIES = {
    "object": (NoVictim(), "eviction policy of type NoVictim lacks victim(candidates); wanted a name (lru"),
    "class": (NoVictim, "eviction policy of type NoVictim lacks victim(candidates)"),
    "signature": (OldHook(), "has victim(), which cannot be called as victim(candidates)"),
    "arguments": (Needs, "'least_asked' cannot be made by calling it without arguments"),
    "number": (3, "eviction policy of type int lacks on_hit(key)"),
}


@pytest.mark.parametrize("case", BAD_POLICIES)
def test_a_half_made_policy_is_refused_before_any_work(case: str) -> None:
    policy, says = BAD_POLICIES[case]
    trace = torch.zeros(3, 1, 2, dtype=torch.int64).numpy()
    for door in (lambda: lab.ExpertCache(slots=2, policy=policy), lambda: lab.simulate(trace, 2, [policy])):
        with pytest.raises(lab.LabTypeError) as caught:
            door()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("label", "told"),
    [
        ("lru", "eviction policy 'lru' is the lab's own; give yours another name"),
        ("belady", "two eviction policies are called 'belady'; give yours a `name`"),
    ],
)
def test_two_policies_of_one_name_are_told_apart_or_refused(label: str, told: str) -> None:
    trace = torch.zeros(3, 1, 2, dtype=torch.int64).numpy()
    mine = type("Mine", (LeastAsked,), {"name": label})
    with pytest.raises(lab.LabError, match=told):
        lab.simulate(trace, 2, ["lru", mine])
