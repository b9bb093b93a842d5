"""What the families' GGUF files call things. Sources: the format's converters and loaders; tensor names are checked
against the `gguf` package's tables by a test.

The names are one vocabulary for all architectures; a row says which of them it may lack, and which keys it sets. An
architecture that two families share is told apart by a key (`When`).
"""

from dataclasses import replace
from typing import Any

from moe_lab.families.files import FileRow, FileSetting, SizeKeys, TensorNames, When, WhichLayers

_B = "blk.{layer}."
# Router biases and per-expert scales hang on the weight's name by their suffix.
GGUF_NAMES = TensorNames(
    router=_B + "ffn_gate_inp.weight",
    router_bias=_B + "ffn_gate_inp.bias",
    input_scale=_B + "ffn_gate_inp.scale",
    correction_bias=_B + "exp_probs_b.bias",
    hash_table=_B + "ffn_gate_tid2eid.weight",
    gate=_B + "ffn_gate_exps.weight",
    up=_B + "ffn_up_exps.weight",
    gate_up=_B + "ffn_gate_up_exps.weight",
    down=_B + "ffn_down_exps.weight",
    per_expert_scale=_B + "ffn_down_exps.scale",
    gate_bias=_B + "ffn_gate_exps.bias",
    up_bias=_B + "ffn_up_exps.bias",
    down_bias=_B + "ffn_down_exps.bias",
    shared_gate=_B + "ffn_gate_shexp.weight",
    shared_up=_B + "ffn_up_shexp.weight",
    shared_down=_B + "ffn_down_shexp.weight",
    shared_router=_B + "ffn_gate_inp_shexp.weight",
    latent_in=_B + "ffn_latent_down.weight",
    latent_out=_B + "ffn_latent_up.weight",
)
# Files from before experts were stacked: a tensor each.
_SINGLE_EXPERTS = replace(
    GGUF_NAMES,
    gate=_B + "ffn_gate.{expert}.weight",
    up=_B + "ffn_up.{expert}.weight",
    down=_B + "ffn_down.{expert}.weight",
    gate_up=None,
)
# The dense branch is an ordinary feed-forward, with norms around both branches.
_RESIDUAL = replace(
    GGUF_NAMES,
    shared_gate=_B + "ffn_gate.weight",
    shared_up=_B + "ffn_up.weight",
    shared_down=_B + "ffn_down.weight",
    norms={
        "shared_in": _B + "ffn_norm.weight",
        "routed_in": _B + "pre_ffw_norm_2.weight",
        "shared_out": _B + "post_ffw_norm_1.weight",
        "routed_out": _B + "post_ffw_norm_2.weight",
        "out": _B + "post_ffw_norm.weight",
        "layer_scalar": _B + "layer_output_scale.weight",
    },
)

_SIZES = SizeKeys(
    num_experts=("{arch}.expert_count",),
    top_k=("{arch}.expert_used_count",),
    d_model=("{arch}.embedding_length",),
    d_expert=("{arch}.expert_feed_forward_length",),
)
# Where loaders size the shared expert by its key. Elsewhere converters leave it out, or write another number into it
# (ernie4_5-moe divides by the number of heads), and only the shapes are to be believed.
_SHARED = replace(_SIZES, d_shared=("{arch}.expert_shared_feed_forward_length",))

# Converters count the layers that predict further tokens too, and say how many of the first are dense where some are.
LAYERS = WhichLayers(
    count=("{arch}.block_count",), first="{arch}.leading_dense_block_count", lead=True,
    step="{arch}.interleave_moe_layer_step", spare="{arch}.nextn_predict_layers", spare_counted=True,
)  # fmt: skip
_ALL = replace(LAYERS, lead=False)  # families without dense layers

GATING = "{arch}.expert_gating_func"
_NORM = FileSetting("router.normalize", "{arch}.expert_weights_norm", bool)
_SCALE = FileSetting("router.scale", "{arch}.expert_weights_scale", float, unset=0.0)
_GROUPS = (
    FileSetting("router.n_group", "{arch}.expert_group_count", int, unset=0),
    FileSetting("router.topk_group", "{arch}.expert_group_used_count", int, unset=0),
)
_LIMITS = (
    FileSetting("layer.limit", "{arch}.swiglu_clamp_exp", float, off=0.0),
    FileSetting("shared.limit", "{arch}.swiglu_clamp_shexp", float, off=0.0),
)
_EPS = FileSetting("layer.norm_eps", "{arch}.attention.layer_norm_rms_epsilon", float)


def _gating(codes: dict[int, str], field: str = "router.score") -> FileSetting:
    return FileSetting(field, GATING, int, codes=codes, unset=0)


SOFTMAX, SIGMOID = _gating({1: "softmax"}), _gating({2: "sigmoid"})
TOP_K_FIRST = _gating({3: "softmax_topk"}, "router.weights_from")


def gguf_file(arch: str, *settings: FileSetting, **more: Any) -> FileRow:
    """The row of an architecture with the standard names and keys; `more`: FileRow's fields, and `optional` roles."""
    names = more.pop("names", GGUF_NAMES)
    if optional := more.pop("optional", ()):
        names = replace(names, optional=frozenset(optional))
    types = (arch, *more.pop("also", ()))
    layouts = (names, *more.pop("other_names", ()))
    about = {"sizes": _SIZES, "layers": LAYERS, **more}
    return FileRow(types=types, names=layouts, settings=settings, **about)


_SOFTMAX = (SOFTMAX, _NORM, _SCALE)
_SIGMOID = (SIGMOID, _NORM, _SCALE)
_V3 = (*_SIGMOID, *_GROUPS)

# Family name -> its GGUF. A family that is not here has no architecture of its own: longcat_flash.
GGUF_FILES: dict[str, FileRow] = {
    "mixtral": gguf_file("llama", *_SOFTMAX, other_names=(_SINGLE_EXPERTS,), layers=_ALL),
    "qwen2_moe": gguf_file("qwen2moe", *_SOFTMAX, sizes=_SHARED, layers=_ALL),
    "qwen3_moe": gguf_file("qwen3moe", *_SOFTMAX, also=("qwen3vlmoe",), layers=_ALL),
    "qwen3_next": gguf_file("qwen3next", *_SOFTMAX, sizes=_SHARED, layers=_ALL),
    "olmoe": gguf_file("olmoe", *_SOFTMAX, layers=_ALL),
    "gpt_oss": gguf_file("gpt-oss", TOP_K_FIRST, _SCALE, layers=_ALL),
    # One architecture from V2 to Kimi-K2; the score's code tells them apart, and V2's files may lack it.
    "deepseek_v2": gguf_file("deepseek2", *_SOFTMAX, *_GROUPS, when=(When(GATING, (None, 0, 1)),)),
    "deepseek_v3": gguf_file("deepseek2", *_V3, when=(When(GATING, (2,)),)),
    "glm4_moe": gguf_file("glm4moe", *_V3),
    "kimi_linear": gguf_file("kimi-linear", *_V3),
    # Without a clamp of its own the shared expert has the routed ones'.
    "deepseek_v4": gguf_file(
        "deepseek4", _gating({4: "sqrt_softplus"}), _NORM, _SCALE, replace(_LIMITS[0], field="shared.limit"), *_LIMITS,
        optional=("correction_bias", "hash_table"), layers=_ALL,
    ),
    # The sigmoid of the picked logit: converters write its code, which elsewhere means a score for each expert.
    "llama4": gguf_file("llama4", _gating({2: "sigmoid_topk"}, "router.weights_from"), _SCALE, layers=_ALL),
    "gemma4": gguf_file("gemma4", *_SOFTMAX, _EPS, names=_RESIDUAL, layers=_ALL),
    "granitemoe": gguf_file(
        "granitemoe", TOP_K_FIRST, _SCALE, layers=_ALL,
        when=(When("{arch}.expert_shared_feed_forward_length", (None, 0)),),
    ),
    "granitemoeshared": gguf_file(
        "granitemoe", TOP_K_FIRST, _SCALE, sizes=_SHARED, also=("granitehybrid",), layers=_ALL,
        when=(When("{arch}.expert_shared_feed_forward_length"),),
    ),
    "phimoe": gguf_file("phimoe", _SCALE, layers=_ALL),
    "hunyuan_v1_moe": gguf_file("hunyuan-moe", *_SOFTMAX, layers=_ALL),
    "ernie4_5_moe": gguf_file("ernie4_5-moe", *_SOFTMAX, optional=("shared",)),
    "minimax_m2": gguf_file("minimax-m2", *_SIGMOID, layers=_ALL),
    "hy_v3": gguf_file("hy_v3", *_SIGMOID, sizes=_SHARED),
    "lfm2_moe": gguf_file("lfm2moe", *_SIGMOID, optional=("correction_bias",)),
    "nemotron_h": gguf_file(
        "nemotron_h_moe", *_V3, optional=("latent",), sizes=_SHARED, layers=WhichLayers(anywhere=True)
    ),
    # Files that say nothing about the score mean a sigmoid; a shared expert is always averaged.
    "cohere2_moe": gguf_file(
        "cohere2moe", _gating({2: "sigmoid_topk", 3: "softmax_topk"}, "router.weights_from"), _NORM, _SCALE,
        optional=("shared",), sizes=_SHARED, router={"weights_from": "sigmoid_topk"}, shared={"combine": "average"},
    ),
    "step3p7": gguf_file("step35", *_SIGMOID, *_LIMITS, sizes=_SHARED),
}  # fmt: skip
