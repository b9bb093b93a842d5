"""Public models by name: the sizes of their MoE layers, as their published configurations give them.

`lab.models.MODELS["deepseek-v3"].spec()` is one layer as a MoESpec of its family; the byte counts follow from it. Only
sizes live here; formulas are the family's. A layer of zero experts counts them in R, not in the bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_lab.families import get_family
from moe_lab.spec import MoESpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """`layers`: all decoder layers, `moe_layers`: those with routed experts. D, F, E, K and the shared expert's width
    (None: no shared expert). `router`, `layer`, `shared`: what the configuration sets beside the family's row.
    """

    name: str
    family: str
    layers: int
    moe_layers: int
    d_model: int
    d_expert: int
    num_experts: int
    top_k: int
    d_shared: int | None = None
    router: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)

    def spec(self) -> MoESpec:
        """One MoE layer of this model."""
        return get_family(self.family).spec(
            num_experts=self.num_experts,
            top_k=self.top_k,
            d_model=self.d_model,
            d_expert=self.d_expert,
            d_shared=self.d_shared,
            settings=self.router,
            layer_settings=self.layer,
            shared_settings=self.shared,
        )

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert: gate (where the family has one), up and down."""
        spec = self.spec()
        return (3 if spec.gated else 2) * spec.d_expert * spec.d_routed

    @property
    def routed_weights(self) -> int:
        """Weights of all routed experts of all layers."""
        return self.moe_layers * self.num_experts * self.expert_weights


def _model(name: str, family: str, layers: tuple[int, int], sizes: tuple[int, int, int, int], **more: Any) -> ModelDims:
    """layers: (all, MoE); sizes: (D, F, E, K)."""
    d_model, d_expert, num_experts, top_k = sizes
    return ModelDims(
        name=name, family=family, layers=layers[0], moe_layers=layers[1], d_model=d_model, d_expert=d_expert,
        num_experts=num_experts, top_k=top_k, **more,
    )  # fmt: skip


# DeepSeek's node-limited routing: 8 groups of experts.
_V2_GROUPS = {"n_group": 8, "topk_group": 3, "scale": 16.0}
_V3_GROUPS = {"n_group": 8, "topk_group": 4, "scale": 2.5}

_MODELS = (
    _model("mixtral-8x7b", "mixtral", (32, 32), (4096, 14336, 8, 2)),
    _model("mixtral-8x22b", "mixtral", (56, 56), (6144, 16384, 8, 2)),
    _model("qwen1.5-moe-a2.7b", "qwen2_moe", (24, 24), (2048, 1408, 60, 4), d_shared=5632),
    _model("qwen2-57b-a14b", "qwen2_moe", (28, 28), (3584, 2560, 64, 8), d_shared=20480),
    _model("qwen3-30b-a3b", "qwen3_moe", (48, 48), (2048, 768, 128, 8)),
    _model("qwen3-235b-a22b", "qwen3_moe", (94, 94), (4096, 1536, 128, 8)),
    _model("qwen3-next-80b-a3b", "qwen3_next", (48, 48), (2048, 512, 512, 10), d_shared=512),
    _model("olmoe-1b-7b", "olmoe", (16, 16), (2048, 1024, 64, 8)),
    _model("gpt-oss-20b", "gpt_oss", (24, 24), (2880, 2880, 32, 4)),
    _model("gpt-oss-120b", "gpt_oss", (36, 36), (2880, 2880, 128, 4)),
    _model("deepseek-v2-lite", "deepseek_v2", (27, 26), (2048, 1408, 64, 6), d_shared=2816),
    _model("deepseek-v2", "deepseek_v2", (60, 59), (5120, 1536, 160, 6), d_shared=3072, router=_V2_GROUPS),
    _model("deepseek-v3", "deepseek_v3", (61, 58), (7168, 2048, 256, 8), d_shared=2048, router=_V3_GROUPS),
    _model("kimi-k2", "deepseek_v3", (61, 60), (7168, 2048, 384, 8), d_shared=2048, router={"scale": 2.827}),
    _model("deepseek-v4-flash", "deepseek_v4", (43, 43), (4096, 2048, 256, 6), d_shared=2048),
    _model("deepseek-v4.1-flash", "deepseek_v4", (40, 40), (5120, 2304, 384, 6), d_shared=2304),
    _model("glm-4.5-air", "glm4_moe", (46, 45), (4096, 1408, 128, 8), d_shared=1408),
    _model("glm-4.5", "glm4_moe", (92, 89), (5120, 1536, 160, 8), d_shared=1536, router={"scale": 2.5}),
    _model("kimi-linear-48b-a3b", "kimi_linear", (27, 26), (2304, 1024, 256, 8), d_shared=1024,
           router={"scale": 2.446}),
    _model("longcat-flash", "longcat_flash", (28, 28), (6144, 2048, 512, 12), router={"zero_experts": 256}),
    _model("llama-4-scout", "llama4", (48, 48), (5120, 8192, 16, 1), d_shared=8192),
    _model("llama-4-maverick", "llama4", (48, 24), (5120, 8192, 128, 1), d_shared=8192),
    _model("gemma-4-26b-a4b", "gemma4", (30, 30), (2816, 704, 128, 8), d_shared=2112),
    _model("granite-3.0-1b-a400m", "granitemoe", (24, 24), (1024, 512, 32, 8)),
    _model("granite-3.0-3b-a800m", "granitemoe", (32, 32), (1536, 512, 40, 8)),
    _model("phi-3.5-moe", "phimoe", (32, 32), (4096, 6400, 16, 2)),
    _model("hunyuan-a13b", "hunyuan_v1_moe", (32, 32), (4096, 3072, 64, 8), d_shared=3072),
    _model("ernie-4.5-21b-a3b", "ernie4_5_moe", (28, 27), (2560, 1536, 64, 6), d_shared=3072),
    _model("minimax-m2", "minimax_m2", (62, 62), (3072, 1536, 256, 8)),
    _model("hy-v3", "hy_v3", (80, 79), (4096, 1536, 192, 8), d_shared=1536, router={"scale": 2.826}),
    _model("lfm2-8b-a1b", "lfm2_moe", (24, 22), (2048, 1792, 32, 4)),
    _model("nemotron-3-nano-30b-a3b", "nemotron_h", (52, 23), (2688, 1856, 128, 6), d_shared=3712,
           router={"scale": 2.5}),
)  # fmt: skip

MODELS: dict[str, ModelDims] = {m.name: m for m in _MODELS}
