"""The pipeline of the embedded model: diffusers' own, but as many frames as were asked for."""

import functools
import inspect
import logging
from typing import Any

import diffusers

_SIGNATURE = inspect.signature(diffusers.WanPipeline.__call__)


class WanPipeline(diffusers.WanPipeline):
    """``diffusers.WanPipeline`` for a codec that keeps every frame; named as its parent, so that what it saves loads there.

    diffusers expects a codec that joins frames after the first: it wants num_frames - 1 divisible by how many, and
    adds a frame where it thinks otherwise. For a codec that joins none it always does, and says so.
    """

    @functools.wraps(diffusers.WanPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As diffusers' own, with exactly ``num_frames`` frames."""
        call = _SIGNATURE.bind(self, *args, **kwargs)
        call.apply_defaults()
        if self.vae_scale_factor_temporal == 1:
            call.arguments["num_frames"] -= 1
        return super().__call__(*call.args[1:], **call.kwargs)


def _is_true(record: logging.LogRecord) -> bool:
    """Every number is divisible by 1."""
    return "has to be divisible by 1." not in record.getMessage()


logging.getLogger("diffusers.pipelines.wan.pipeline_wan").addFilter(_is_true)
