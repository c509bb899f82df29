"""Dense generations with somebody watching: how studies and tuning see q, k and v of a model at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..online.call import Handler

Visit = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class Watcher(Handler):
    """A handler that lets every call run dense and shows one guidance branch of it to `visit`."""

    def __init__(self, visit: Visit) -> None:
        self.visit, self.branch = visit, None

    def start_forward(self, call: Any) -> None:
        """Take the first branch seen as the one to watch (the conditional one in diffusers' pipelines)."""
        self.branch = self.branch or call.branch

    def attend(self, call: Any, q: Any, k: Any, v: Any, dense: Any) -> Any:
        """Run dense, then let the visitor look at q, k, v and the output, all [B, H, N, D]."""
        out = dense(q, k, v)
        if call.branch == self.branch:
            self.visit(call, q, k, v, out)
        return out


@torch.no_grad()
def watch(
    pipe: Any,
    watcher: Handler | Visit,
    prompts: Sequence[str],
    seed: int,
    call: dict[str, Any],
    output_type: str = "latent",
) -> list[Any]:
    """Generations in which a handler (or `visit(call, q, k, v, out)`) sees each attention call; the videos.

    All prompts start from the same `seed`; nothing is decoded unless `output_type` asks for it.
    """
    from ..models.attachment import attach_pipeline

    handler = watcher if isinstance(watcher, Handler) else Watcher(watcher)
    attached = attach_pipeline(pipe, handler)
    try:
        return [
            pipe(
                prompt=prompt, generator=torch.Generator("cpu").manual_seed(seed), output_type=output_type, **call
            ).frames
            for prompt in prompts
        ]
    finally:
        for one in attached:
            one.detach()
