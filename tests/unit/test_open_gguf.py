"""GGUF keys and names by hand, not through the rows: what a converter writes is what the spec says."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_lab as lab
from moe_lab.checkpoint.gguf_writer import write_gguf_tensors

gguf = pytest.importorskip("gguf")

E, D, F, K, V = 8, 32, 16, 3, 11


def tensors(layer: int, *more: str, experts: int = E, shared: bool = False) -> dict[str, torch.Tensor]:
    """A layer's tensors by their names in the format; `more` adds roles."""
    b = f"blk.{layer}."
    out = {b + "ffn_gate_inp.weight": (experts, D), b + "ffn_up_exps.weight": (experts, F, D),
           b + "ffn_down_exps.weight": (experts, D, F)}  # fmt: skip
    out |= {b + "ffn_gate_exps.weight": (experts, F, D)}
    if shared:
        out |= {b + f"ffn_{part}_shexp.weight": (40, D) for part in ("gate", "up")}
        out |= {b + "ffn_down_shexp.weight": (D, 40)}
    sizes = {
        "ffn_gate_inp.bias": (experts,), "ffn_gate_exps.bias": (experts, F), "ffn_up_exps.bias": (experts, F),
        "ffn_down_exps.bias": (experts, D), "exp_probs_b.bias": (experts,), "ffn_gate_inp_shexp.weight": (D,),
    }  # fmt: skip
    out |= {b + name: sizes[name] for name in more if name in sizes}
    made = {name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) for name, shape in out.items()}
    if "ffn_gate_tid2eid.weight" in more:
        made[b + "ffn_gate_tid2eid.weight"] = torch.arange(V * K).reshape(V, K).int() % experts
    return made


def write(path: Path, arch: str, held: dict[str, torch.Tensor], **keys: Any) -> Path:
    sizes = {"embedding_length": D, "expert_count": E, "expert_used_count": K, "expert_feed_forward_length": F}
    metadata = {f"{arch}.{key}": value for key, value in {**sizes, **keys}.items() if value is not None}
    return write_gguf_tensors(path, arch, held, metadata)


def spec_of(path: Path, arch: str, held: dict[str, torch.Tensor], layer: int = 0, **keys: Any) -> lab.MoESpec:
    with lab.open(write(path / "m.gguf", arch, held, **keys)) as ckpt:
        return ckpt.layer_spec(layer)


def test_deepseek_v3(tmp_path: Path) -> None:
    keys = {
        "expert_gating_func": 2, "expert_weights_norm": False, "expert_weights_scale": 2.5, "expert_group_count": 4,
        "expert_group_used_count": 2,
    }  # fmt: skip
    spec = spec_of(tmp_path, "deepseek2", tensors(0, "exp_probs_b.bias", shared=True), **keys)
    router = spec.router
    assert (spec.family, router.score, router.normalize, router.scale) == ("deepseek_v3", "sigmoid", False, 2.5)
    assert (router.n_group, router.topk_group, router.group_score) == (4, 2, "top2_sum")
    assert spec.correction_bias
    assert spec.shared is not None
    assert spec.shared.d_expert == 40


def test_deepseek_v2_has_no_correction_bias_and_its_groups_score_by_their_best(tmp_path: Path) -> None:
    keys = {"expert_weights_scale": 16.0, "expert_group_count": 4, "expert_group_used_count": 2}
    spec = spec_of(tmp_path, "deepseek2", tensors(0, shared=True), **keys)
    assert (spec.family, spec.router.score, spec.router.normalize) == ("deepseek_v2", "softmax", False)
    assert (spec.router.group_score, spec.router.n_group, spec.router.scale) == ("max", 4, 16.0)
    assert not spec.correction_bias


def test_a_sigmoid_router_without_its_bias_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "deepseek2", tensors(0, shared=True), expert_gating_func=2)
    with pytest.raises(lab.CheckpointError, match=r"exp_probs_b\.bias"):
        lab.open(path)


def test_deepseek_v4_layers_are_hashed_or_biased_and_have_clamps_of_their_own(tmp_path: Path) -> None:
    held = {**tensors(0, "ffn_gate_tid2eid.weight", shared=True), **tensors(1, "exp_probs_b.bias", shared=True)}
    keys = {"expert_gating_func": 4, "swiglu_clamp_exp": [10.0, 0.0], "swiglu_clamp_shexp": [7.0, 0.0]}
    with lab.open(write(tmp_path / "m.gguf", "deepseek4", held, **keys)) as ckpt:
        hashed, biased = (ckpt.layer_spec(n) for n in (0, 1))
        assert (hashed.router.hash_routing, hashed.correction_bias, hashed.limit) == (True, False, 10.0)
        assert (biased.router.hash_routing, biased.correction_bias, biased.limit) == (False, True, None)
        assert [s.shared.limit for s in (hashed, biased) if s.shared] == [7.0, None]
        assert hashed.router.score == "sqrt_softplus"
        ids = torch.tensor([0, 3, V - 1])
        picked = ckpt.layer(0)(torch.randn(3, D), token_ids=ids).routing.ids
        assert picked.tolist() == [[(int(t) * K + k) % E for k in range(K)] for t in ids]


def test_deepseek_v4_without_a_clamp_for_the_shared_expert_uses_the_routed_ones(tmp_path: Path) -> None:
    held = tensors(0, "exp_probs_b.bias", shared=True)
    spec = spec_of(tmp_path, "deepseek4", held, expert_gating_func=4, swiglu_clamp_exp=5.0)
    assert spec.shared is not None
    assert (spec.limit, spec.shared.limit) == (5.0, 5.0)


def test_a_layer_that_routes_by_nothing_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "deepseek4", tensors(0, shared=True), expert_gating_func=4)
    with pytest.raises(lab.CheckpointError, match="neither a correction bias nor a hash table"):
        lab.open(path)


def test_gpt_oss_biases(tmp_path: Path) -> None:
    roles = ("ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias")
    held = tensors(0, *roles)
    with lab.open(write(tmp_path / "m.gguf", "gpt-oss", held)) as ckpt:
        layer = ckpt.layer(0)
        assert (layer.spec.router_bias, layer.spec.expert_bias, layer.spec.limit_mode) == (True, True, "oai")
        assert (layer.spec.router.score, layer.spec.router.weights_from) == ("none", "softmax_topk")
        biases = layer.experts.stack.biases  # type: ignore[union-attr]
        assert torch.equal(biases.up, held["blk.0.ffn_up_exps.bias"])
        with lab.ExpertCache(slots=2) as cache:
            x = torch.randn(4, D)
            assert torch.equal(ckpt.layer(0, cache=cache)(x, "reference").out, layer(x, "reference").out)


@pytest.mark.parametrize(
    ("code", "weights_from"),
    [(None, "sigmoid_topk"), (0, "sigmoid_topk"), (2, "sigmoid_topk"), (3, "softmax_topk")],
    ids=["absent", "unset", "sigmoid", "softmax"],
)
def test_a_files_silence_may_mean_something_else_than_the_familys_default(
    code: int | None, weights_from: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, "cohere2moe", tensors(0), expert_gating_func=code)
    assert (spec.router.weights_from, spec.shared) == (weights_from, None)


def test_fused_gate_and_up_give_the_layer_of_separate_ones(tmp_path: Path) -> None:
    held = tensors(0)
    gate, up = (held.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up"))
    with lab.open(write(tmp_path / "apart.gguf", "qwen3moe", tensors(0))) as ckpt:
        want = ckpt.layer(0)
    fused = {**held, "blk.0.ffn_gate_up_exps.weight": torch.cat([gate, up], dim=1)}
    x = torch.randn(5, D)
    with lab.open(write(tmp_path / "fused.gguf", "qwen3moe", fused)) as ckpt, lab.ExpertCache(slots=2) as cache:
        for layer in (ckpt.layer(0), ckpt.layer(0, cache=cache)):
            assert torch.equal(layer(x, "reference").out, want(x, "reference").out)


def test_mixtral_files_from_before_experts_were_stacked(tmp_path: Path) -> None:
    held = tensors(0)
    stacks = {part: held.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up", "down")}
    single = {f"blk.0.ffn_{part}.{e}.weight": w[e] for part, w in stacks.items() for e in range(E)}
    with lab.open(write(tmp_path / "m.gguf", "llama", {**held, **single})) as ckpt:
        assert (ckpt.spec.family if ckpt.spec else None) == "mixtral"
        assert torch.equal(ckpt.layer(0).experts.stack.down.dequantize(), stacks["down"])  # type: ignore[union-attr]


class TestSplit:
    def split(self, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
        """A model of two layers in parts of three tensors."""
        held = {**tensors(0), **tensors(1)}
        writer = gguf.GGUFWriter(folder / "m.gguf", "qwen3moe", split_max_tensors=3)
        for key, value in {"embedding_length": D, "expert_count": E, "expert_used_count": K}.items():
            writer.add_uint32(f"qwen3moe.{key}", value)
        for name, t in held.items():
            writer.add_tensor(name, t.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return sorted(folder.glob("*.gguf"))[0], held

    def test_layers_stream_from_all_parts(self, tmp_path: Path) -> None:
        first, held = self.split(tmp_path)
        with lab.open(first) as ckpt, lab.ExpertCache(slots=2) as cache:
            assert len({info.file for info in ckpt.tensors.values()}) == 3
            x = torch.randn(6, D)
            for number in ckpt.moe_layers:
                places = {file for part in ckpt.expert_slices(number) for file, _ in part.places}
                assert len(places) == 2
                resident = ckpt.layer(number)
                want = held[f"blk.{number}.ffn_down_exps.weight"]
                assert torch.equal(resident.experts.stack.down.dequantize(), want)  # type: ignore[union-attr]
                streamed = ckpt.layer(number, cache=cache)
                assert torch.equal(streamed(x, "reference").out, resident(x, "reference").out)

    def test_a_part_replaced_since_opening_is_noticed(self, tmp_path: Path) -> None:
        first, _ = self.split(tmp_path)
        last = sorted(tmp_path.glob("*.gguf"))[-1]
        with lab.open(first) as ckpt, lab.ExpertCache(slots=2) as cache:
            data = last.read_bytes()
            last.unlink()
            last.write_bytes(data)
            with pytest.raises(lab.CheckpointError) as caught:
                ckpt.layer(1, cache=cache)
        assert (caught.value.reason, Path(str(caught.value.file)).name) == ("changed", last.name)

    def test_a_missing_part_is_named(self, tmp_path: Path) -> None:
        first, _ = self.split(tmp_path)
        last = sorted(tmp_path.glob("*.gguf"))[-1]
        last.unlink()
        with pytest.raises(lab.CheckpointError, match=last.name) as caught:
            lab.open(first)
        assert caught.value.reason == "missing part"


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_factor_that_is_no_number_is_refused(scale: float, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen3moe", tensors(0), expert_weights_scale=scale)
    with pytest.raises(lab.CheckpointError, match=r"expert_weights_scale.*finite"):
        lab.open(path)


def test_a_hostile_count_of_experts_costs_nothing(tmp_path: Path) -> None:
    """With single experts every one is a name to look for."""
    held = {"blk.0.ffn_gate_inp.weight": torch.zeros(E, D), "blk.0.ffn_down.0.weight": torch.zeros(D, F)}
    path = write(tmp_path / "m.gguf", "llama", held, expert_count=2**31)
    with pytest.raises(lab.CheckpointError, match=r"expert_count.*2147483648.*65536") as caught:
        lab.open(path)
    assert caught.value.reason == "value"


@pytest.mark.parametrize("number", ["00", "٣", "-1", "1e1", "4294967296"])
def test_names_that_are_no_layer_numbers_are_other_tensors(number: str, tmp_path: Path) -> None:
    held = tensors(0) | {f"blk.{number}.ffn_down_exps.weight": torch.zeros(E, D, F)}
    with lab.open(write(tmp_path / "m.gguf", "qwen3moe", held)) as ckpt:
        assert ckpt.moe_layers == [0]


def test_k_quants_in_rows_that_are_no_whole_blocks_are_refused_with_the_numbers() -> None:
    with pytest.raises(lab.LabError, match=r"256.*704"):
        lab.quantize(torch.zeros(256, 704), "q4_k")
