"""Text written by the model: one prompt for each kind of text it has read."""

from pathlib import Path

import torch
from torch import nn

from data.recipe.config import END_OF_DOCUMENT

PROMPTS = ("def read_lines(path):\n    ", "It was a truth which Emma could not", "The :func:`open` function returns ")


@torch.inference_mode()
def sample(
    model: nn.Module, ids: list[int], length: int, temperature: float, seed: int, context: int = 256
) -> list[int]:
    """`length` more tokens after `ids`: greedy at temperature 0, else drawn from the softened distribution."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = list(ids)
    for _ in range(length):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = (
                model(input_ids=torch.tensor([tokens[-context:]], device=device), use_cache=False).logits[0, -1].float()
            )
        if temperature == 0.0:
            following = int(logits.argmax())
        else:
            following = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if following == END_OF_DOCUMENT:
            break
        tokens.append(following)
    return tokens


def samples(model: nn.Module, tokenizer_path: Path, length: int = 90, seed: int = 1) -> list[dict[str, str]]:
    """Greedy and temperature-0.8 continuations of the three prompts: rows of prompt, how, text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    rows = []
    for prompt in PROMPTS:
        for how, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8)):
            tokens = sample(model, tokenizer.encode(prompt).ids, length, temperature, seed)
            rows.append({"prompt": prompt, "how": how, "text": tokenizer.decode(tokens)})
    return rows
