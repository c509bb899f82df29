"""A small generation, and a transformer spread over ranks, for tests of several processes."""

import tiny_models as tiny
import torch

STEPS = 6


def inputs(step):
    still, moving = tiny.wan_inputs(900.0), tiny.wan_inputs(900.0, seed=1)["hidden_states"]
    shift = [0, 0, 0.01, 0.3, 0.31, 0.9][step]  # some steps drift little, some much
    return {**still, "timestep": torch.tensor([900.0 - step]), "hidden_states": still["hidden_states"] + shift * moving}


def generate(transformer):
    outputs = []
    for step in range(STEPS):
        with transformer.cache_context("cond", step_index=step):
            outputs.append(tiny.run(transformer, inputs(step)))
    transformer._reset_stateful_cache()
    return torch.stack(outputs)


def parallel(transformer, cp_plan=None, **degrees):
    """diffusers' own way in; it asks for an accelerator's index even on the CPU."""
    from diffusers import ContextParallelConfig

    torch.accelerator.device_count = lambda: 1
    transformer.enable_parallelism(config=ContextParallelConfig(**degrees), cp_plan=cp_plan)
    return transformer
