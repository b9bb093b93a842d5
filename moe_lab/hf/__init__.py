"""Hugging Face's transformers: its MoE modules as layers of ours, and routing recorded from its models in one line."""

from moe_lab.hf.module import from_module, router_from_module
from moe_lab.hf.record import record, record_to

__all__ = ["from_module", "record", "record_to", "router_from_module"]
