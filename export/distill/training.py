"""The training itself: steps, a falling learning rate, checkpoints, and the same bits whatever
happens in between.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.export.distill.copying import CopyHeads
from headrace.export.distill.decoder import Decoder
from headrace.export.distill.labels import Shelf
from headrace.export.distill.student import Batch, Head, Likeness, angle, divergence

BATCH = 2
"""Texts a step."""
WARMUP = 20
"""Steps until the learning rate is at its highest."""
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
ANGLE_WEIGHT = 1.0
"""Of the hidden states' part in the loss, beside the divergence in nats."""
COPY_WEIGHT = 0.1
"""Of the copying heads' part, in nats as well."""

SAVE_EVERY_S = 60.0
"""What an interruption loses."""
_EVALUATE_PARTS = 24
"""Looks at the held-out texts over a whole training."""


@dataclass(frozen=True)
class Progress:
    """A line of the training's log."""

    step: int
    tokens: int
    """That the student has learned from."""
    loss: float
    """Mean divergence since the line before, nats a token."""
    learning_rate: float
    overlap: float
    """Expected acceptance on held-out texts, of drawn tokens."""
    top1: float
    """The same of greedy ones."""
    seconds: float
    """Of training, all runs together."""


class Trainer:
    """One training. `save` writes all of its state, and another one that resumes goes on from it."""

    def __init__(
        self,
        student: Decoder,
        head: Head,
        shelf: Shelf,
        learned: list[int],
        held_out: list[Batch],
        copying: CopyHeads | None,
        *,
        steps: int,
        seed: int,
    ) -> None:
        """`learned` are the numbers of the shelf's texts to learn from; `copying`, if any, are the
        student's heads that go on learning where to look.
        """
        self.student, self.head, self.steps = student, head, steps
        self._copying = copying
        self._shelf, self._learned = shelf, learned
        self._held_out, self._seed = held_out, seed
        self._optimizer = torch.optim.AdamW(
            student.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0
        )
        self.step = 0
        self.log: list[Progress] = []
        self._losses: list[float] = []
        self._seconds = 0.0

    def resume(self, path: Path) -> None:
        """Takes over what `save` wrote; raises OSError and what torch raises on a damaged file."""
        state = torch.load(path, weights_only=True)
        self.student.load_state_dict(state["student"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self._losses, self._seconds = state["step"], state["losses"], state["seconds"]
        self.log = [Progress(**json.loads(line)) for line in state["log"]]

    def save(self, path: Path) -> None:
        """Whole or as it was before."""
        state = {
            "student": self.student.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "losses": self._losses,
            "seconds": self._seconds,
            "log": [json.dumps(asdict(line)) for line in self.log],
        }
        data = io.BytesIO()  # torch reports a full disk as an error of its own
        torch.save(state, data)
        partial = path.with_suffix(".partial")
        partial.write_bytes(data.getbuffer())
        partial.replace(path)

    def run(
        self, path: Path, tell: Callable[[Progress], None], on_step: Callable[[], None]
    ) -> None:
        """Trains to the end and saves. What interrupts it loses at most the last minute."""
        saved = time.monotonic()
        while self.step < self.steps:
            began = time.monotonic()
            self._step()
            if self._is_due():
                self.log.append(self._look(began))
                tell(self.log[-1])
            self._seconds += time.monotonic() - began
            on_step()
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.save(path)
                saved = time.monotonic()
        self.save(path)

    def _step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        batch = Batch.of(self._shelf.take(self._numbers(self.step)))
        *read, out = self.student.states(batch.ids)
        hidden = out.flatten(0, 1)  # [B * T, D]
        loss = divergence(hidden, self.head, batch)
        whole = loss + ANGLE_WEIGHT * angle(hidden, batch)
        if self._copying is not None:
            place = read[self._copying.layer]
            aside = self._copying.aside(self.student, place, batch.ids, batch.first)
            whole = whole + COPY_WEIGHT * aside
        whole.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.item())
        self.step += 1

    def _rate(self) -> float:
        """Rises linearly, then falls linearly to nothing."""
        return LEARNING_RATE * min((self.step + 1) / WARMUP, 1 - self.step / self.steps)

    def _numbers(self, step: int) -> list[int]:
        """The texts of a step: every text once in an epoch, each epoch in an order of its own."""
        return [self._number(step * BATCH + i) for i in range(BATCH)]

    def _number(self, place: int) -> int:
        epoch, index = divmod(place, len(self._learned))
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._learned))
        return self._learned[order[index]]

    def _is_due(self) -> bool:
        return self.step == self.steps or not self.step % max(1, self.steps // _EVALUATE_PARTS)

    def _look(self, began: float) -> Progress:
        alike = Likeness.of(self.student, self.head, self._held_out)
        loss = sum(self._losses) / len(self._losses)
        self._losses.clear()
        seconds = self._seconds + time.monotonic() - began
        tokens = self.step * BATCH * self._held_out[0].ids.shape[1]
        return Progress(self.step, tokens, loss, self._rate(), alike.overlap, alike.top1, seconds)
