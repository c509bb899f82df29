"""Muon: momentum whose matrix updates are orthogonalised, in float32 unless told otherwise (torch's own: bfloat16)."""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the quintic of Jordan et al., steep at zero


def orthogonalise(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest semi-orthogonal matrices of a stack [M, r, c], roughly (singular values in about 0.7..1.2)."""
    a, b, c = COEFFICIENTS
    wide = g.shape[-2] > g.shape[-1]
    x = g.transpose(-1, -2) if wide else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(-1, -2) if wide else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; the update has the RMS of an AdamW update, so both share one learning rate."""

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ):
        self.dtype = dtype  # of the orthogonalisation
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        """One update; matrices of one shape are orthogonalised together."""
        for group in self.param_groups:
            stacks: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                stacks.setdefault(p.shape, []).append(p)
            for shape, params in stacks.items():
                self._step_stack(params, shape, group)

    def _step_stack(self, params: list[torch.Tensor], shape: torch.Size, group: dict) -> None:
        momentum = group["momentum"]
        directions = []
        for p in params:
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - momentum)
            directions.append(p.grad.lerp(buffer, momentum))
        scale = 0.2 * max(shape) ** 0.5 * group["lr"]
        for p, update in zip(params, orthogonalise(torch.stack(directions).to(self.dtype)), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.to(p.dtype), alpha=scale)
