"""A dense generation with a watcher: sees every call of one branch, changes nothing, leaves nothing behind."""

import torch

from heart_attention.evaluation.watch import watch
from heart_attention.models.attachment import attachment_of

PROMPT = "a red circle moves right on a blue background"


def test_every_call_of_the_first_branch_is_seen(tiny_pipe, small_call):
    seen = []
    call = {**small_call, "num_inference_steps": 2}
    watch(tiny_pipe, lambda at, q, k, v, out: seen.append((at.step, at.layer, at.branch, q.shape)), [PROMPT], 0, call)
    layers = tiny_pipe.transformer.config.num_layers
    assert [(s, i) for s, i, _, _ in seen] == [(s, i) for s in range(2) for i in range(layers)]
    assert len({b for _, _, b, _ in seen}) == 1 and seen[0][3] == torch.Size((1, 4, 256, 32))
    assert attachment_of(tiny_pipe.transformer) is None


def test_an_error_in_the_visit_still_detaches(tiny_pipe, small_call):
    def visit(*call):
        raise ValueError("seen enough")

    try:
        watch(tiny_pipe, visit, [PROMPT], 0, {**small_call, "num_inference_steps": 2})
    except ValueError:
        pass
    assert attachment_of(tiny_pipe.transformer) is None
