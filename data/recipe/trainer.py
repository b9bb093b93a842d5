"""The training loop: schedule, the two phases (plain, then quantisation-aware) and the control of the balance."""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.recipe.batches import Batches
from data.recipe.config import TrainConfig
from data.recipe.heldout import HeldOut, Windows, evaluate
from data.recipe.qat import ExpertQuantiser
from data.recipe.routers import BalanceControl, balance_loss, lookahead_recall, tap_routers
from data.recipe.trainlog import TrainLog

LOG_EVERY = 20


class Trainer:
    """Owns model, optimizer and controls. `run` trains until the deadline and returns what happened on the way."""

    def __init__(
        self, model: Any, config: TrainConfig, tokens: Tensor, windows: Windows, device: torch.device, log: Path
    ) -> None:
        from transformers import Qwen2MoeForCausalLM

        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        self.config, self.windows, self.device = config, windows, device
        self.experts = model.num_experts
        self.model: Any = Qwen2MoeForCausalLM(model)
        self.model.to(device)
        self.model.set_experts_implementation("grouped_mm")
        self.taps = tap_routers(self.model)
        self.quantiser = ExpertQuantiser(self.model, torch.bfloat16)
        self.optimizer = self._optimizer()
        self.balance = BalanceControl(len(self.taps), config.balance_start)
        self.batches = Batches(tokens, config, device)
        self.counts = torch.zeros(len(self.taps), self.experts, dtype=torch.int64, device=device)
        self.log = TrainLog(log, config.sequences_per_step * config.context)
        self.planned: int | None = None
        self.qat_from = math.inf
        self.plain_step_s = 0.0
        self.history: dict[str, Any] = {"controls": []}

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def run(self, deadline: float, steps: int | None) -> dict[str, Any]:
        """Train `steps` steps, or (None) as many as end before `deadline` (perf_counter seconds) minus the reserve.

        A run that comes too close to the deadline stops early and says so: its schedule has not ended then.
        """
        quantise_s, step, mark = self.quantiser.measure(), 0, self._clock()
        self.history["full_quantise_ms"] = quantise_s * 1e3
        first, last = self.config.probe_steps
        self.planned = steps
        self.log.start(mark)
        while self.planned is None or step < self.planned:
            if step == first:
                mark = self._clock()
            if step == last:
                self.plain_step_s = (self._clock() - mark) / (last - first)
                self._plan(quantise_s, step, deadline)
            if step >= self.qat_from:
                if not self.quantiser.enabled:
                    self._begin_qat()
                self.quantiser.refresh_within(self.config.qat_time_share * self.plain_step_s)
            loss, balance = self._step(step)
            step += 1
            if step % LOG_EVERY == 0 or step == self.planned:
                self._write(step, loss, balance)
            if time.perf_counter() > deadline - self.config.reserve_s / 2:
                self.history["stopped_early_at"] = step
                print(f"OUT OF TIME at step {step} of {self.planned}: the schedule did not end", flush=True)
                break
        self.log.close()
        return self.history | {"steps_done": step, "balance_weights": self.balance.weights}

    def _optimizer(self) -> torch.optim.Optimizer:
        config, parameters = self.config, list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, fused=self.device.type == "cuda")

    def _plan(self, quantise_s: float, done: int, deadline: float) -> None:
        """Fix the number of steps, if it is still open, and where QAT begins (its steps cost `qat_time_share` more)."""
        config = self.config
        if self.planned is None:
            extra = min(quantise_s, config.qat_time_share * self.plain_step_s)
            left = deadline - config.reserve_s - time.perf_counter()
            self.planned = done + int(0.97 * left / (self.plain_step_s + config.qat_share * extra))
        self.qat_from = round(self.planned * (1 - config.qat_share))
        self.history |= {"plain_step_ms": self.plain_step_s * 1e3, "steps": self.planned, "qat_from": self.qat_from}
        print(
            f"plain step {self.plain_step_s * 1e3:.1f} ms, full quantise {quantise_s * 1e3:.1f} ms, "
            f"{self.planned} steps, QAT from {self.qat_from}",
            flush=True,
        )

    def _begin_qat(self) -> None:
        """Switch to the quantised forward pass; the losses before and after are what plain rounding costs here."""
        before = self.held_out(self.windows, quantised=False).mean_loss
        after = self.held_out(self.windows, quantised=True).mean_loss
        self.quantiser.enable(True)
        self.history |= {"loss_at_qat_start": before, "loss_plainly_rounded": after}
        print(f"QAT begins: held-out {before:.4f}, plainly rounded {after:.4f}", flush=True)

    def _step(self, step: int) -> tuple[Tensor, Tensor]:
        """One optimizer step; the loss 0-d and the balance loss of each layer [L]."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        tokens = self.batches.next()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        balance = torch.stack([balance_loss(tap) for tap in self.taps])
        weights = torch.tensor(self.balance.weights, device=self.device)
        (loss + (weights * balance).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for layer, tap in enumerate(self.taps):
            self.counts[layer] += tap.counts(self.experts)
        return loss.detach(), balance.detach()

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine from the peak to its `final_lr_share` at the last planned step."""
        config = self.config
        if step < config.warmup_steps:
            return config.peak_lr * (step + 1) / config.warmup_steps
        if self.planned is None:
            return config.peak_lr
        progress = (step - config.warmup_steps) / max(1, self.planned - config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return config.peak_lr * (config.final_lr_share + (1 - config.final_lr_share) * cosine)

    def _write(self, step: int, loss: Tensor, balance: Tensor) -> None:
        in_qat = step > self.qat_from
        row = {"phase": "qat" if in_qat else "plain", "loss": f"{loss.item():.4f}"}
        row |= {"balance": f"{balance.mean().item():.4f}", "lr": f"{self.lr(step - 1):.3e}"}
        if step % self.config.evaluate_every == 0 and step != self.planned:
            row["held_out"] = f"{self.held_out(self.windows, quantised=in_qat).mean_loss:.4f}"
        if step % self.config.control_every == 0:
            row |= self._control(step)
        self.log.write(step, self._clock(), row)

    def _control(self, step: int) -> dict[str, str]:
        """Steer the balance weights by the counts since the last time; recall of the last pair on the last batch."""
        share = (self.counts.double() / self.counts.sum(1, keepdim=True)).min(1).values.tolist()
        self.counts.zero_()
        recall = lookahead_recall(self.taps[-2], self.taps[-1]).item()
        self.balance.update(share)
        turn = {"step": step, "min_share": share, "balance": list(self.balance.weights), "recall": recall}
        self.history["controls"].append(turn)
        return {"min_share": f"{min(share):.4f}", "recall": f"{recall:.3f}"}

    def held_out(self, windows: Windows, *, quantised: bool) -> HeldOut:
        """Evaluate in bf16; `quantised` uses freshly quantised experts. Leaves the quantiser's switch as it was."""
        was_on = self.quantiser.enabled
        if quantised:
            self.quantiser.refresh_all()
        self.quantiser.enable(quantised)
        result = evaluate(self.model, self.taps, windows, autocast=True)
        self.quantiser.enable(was_on)
        return result

    @torch.no_grad()
    def round_to_bf16(self) -> None:
        """What is evaluated at the end is what is saved."""
        for parameter in self.model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
