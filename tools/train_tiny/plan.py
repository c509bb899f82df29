"""What is trained when: phases with their canvases, clips, noise levels and learning rates."""

from dataclasses import dataclass

from . import data, model

Canvas = tuple[int, int, int, int]  # clips in the batch, then tokens in time, height, width (8 x 8 pixels each)


@dataclass(frozen=True)
class Phase:
    """A stretch of training: up to which step, the learning rate from its begin to its end, canvases with weights."""

    until: int
    lr: tuple[float, float]
    mix: tuple[tuple[float, Canvas], ...]
    shifts: tuple[float, ...] = (model.FLOW_SHIFT,)  # of the noise levels, sample by sample in turn
    world: data.World = data.CUT
    focus: float = 0.0  # how much more the loss near the object counts, at no noise
    text: tuple[int, ...] = (64, 512)  # prompt lengths that captions are padded to, one of them in each step
    guided: bool = False  # HunyuanVideo learns what guidance does, see hunyuan.py


# Words are spelled (model.spell_words) from the begin. Pictures come first, cut out of clips and without the padding that
# drowns words at the start, then stretches of clips, then whole ones.
PICTURE, SKETCH, STRETCH, QUICK = (16, 1, 16, 16), (28, 1, 12, 12), (4, 4, 16, 16), (4, 8, 12, 12)
NATIVE = (1, 16, 16, 16)
BARE, FEW, SOME = (model.CAPTION_TOKENS,), (model.CAPTION_TOKENS, 40), (32, 128)
SINGLE_MIX = ((0.6, PICTURE), (0.4, SKETCH))
CUT_MIX = ((0.3, PICTURE), (0.4, STRETCH), (0.3, QUICK))
WAY_MIX = ((0.5, PICTURE), (0.3, STRETCH), (0.2, QUICK))
ENDS_MIX = ((0.4, PICTURE), (0.6, QUICK))
WHOLE_MIX = ((0.15, PICTURE), (0.3, STRETCH), (0.2, QUICK), (0.35, NATIVE))
SHAPES_MIX = ((0.35, PICTURE), (0.25, STRETCH), (0.2, QUICK), (0.2, NATIVE))
MIDDLE_NOISE = (model.FLOW_SHIFT, 1.3)
HIGH_NOISE = (model.FLOW_SHIFT, 9.0)  # what moves where is decided early in sampling
MOST_NOISE = (model.FLOW_SHIFT, 1.3, 6.0)  # in a whole clip an object is seen through more noise than in a picture
ALL_NOISE = (model.FLOW_SHIFT, 1.3, 9.0)
PLAN = (
    Phase(100, (0.0, 3e-3), ((1.0, PICTURE),), MIDDLE_NOISE, text=BARE),
    Phase(800, (3e-3, 3e-3), SINGLE_MIX, MIDDLE_NOISE, focus=3.0, text=BARE),
    Phase(1200, (3e-3, 3e-3), SINGLE_MIX, MIDDLE_NOISE, focus=3.0, text=FEW),
    Phase(1600, (3e-3, 3e-3), SINGLE_MIX, MIDDLE_NOISE, focus=3.0, text=SOME),
    Phase(2400, (3e-3, 3e-3), ((0.8, PICTURE), (0.2, STRETCH)), MIDDLE_NOISE, focus=3.0),
    Phase(2900, (3e-3, 3e-3), CUT_MIX, MIDDLE_NOISE, focus=3.0),
    Phase(7000, (3e-3, 3e-3), CUT_MIX, MIDDLE_NOISE, focus=8.0),
    Phase(9200, (3e-3, 1.7e-3), WHOLE_MIX, MOST_NOISE, focus=8.0),
    # No direction had been heard: over a whole clip it moves a shape nowhere on average. At the end of the clip it is a place:
    # learned within 300 steps, once no padding drowned the word, and lost again when clips began everywhere at once. Whole
    # clips beside late pictures kept it.
    Phase(9450, (2.5e-3, 2.5e-3), ((0.8, PICTURE), (0.2, STRETCH)), HIGH_NOISE, data.LATE_CUT, focus=3.0),
    Phase(9650, (2.5e-3, 2.5e-3), WAY_MIX, HIGH_NOISE, focus=3.0),
    Phase(10000, (3e-3, 3e-3), ((1.0, PICTURE),), HIGH_NOISE, data.LATE_CUT, focus=3.0, text=BARE),
    Phase(10300, (2.5e-3, 2.5e-3), WAY_MIX, HIGH_NOISE, focus=3.0, text=FEW),
    Phase(10500, (3e-3, 3e-3), ((1.0, PICTURE),), HIGH_NOISE, data.LATE_CUT, focus=3.0, text=BARE),
    Phase(10950, (3e-3, 3e-3), ENDS_MIX, HIGH_NOISE, data.LATE_CUT, focus=3.0, text=BARE),
    Phase(11100, (3e-3, 3e-3), ENDS_MIX, HIGH_NOISE, data.LATE_CUT, focus=3.0, text=FEW),
    Phase(13200, (3e-3, 1e-4), WHOLE_MIX, ALL_NOISE, data.LATE_CUT, focus=8.0),
)
# HunyuanVideo's from scratch, in the same order; its text needs no padding in training (hunyuan.velocity).
HUNYUAN_PLAN = (
    Phase(100, (0.0, 3e-3), ((1.0, PICTURE),), MIDDLE_NOISE),
    Phase(3600, (3e-3, 3e-3), SINGLE_MIX, MIDDLE_NOISE, focus=3.0),
    Phase(5000, (3e-3, 3e-3), CUT_MIX, MIDDLE_NOISE, focus=8.0),
    Phase(5400, (3e-3, 3e-3), WHOLE_MIX, MOST_NOISE, focus=8.0),
    Phase(5650, (3e-3, 3e-3), ((0.8, PICTURE), (0.2, STRETCH)), HIGH_NOISE, data.LATE_CUT, focus=3.0),
    Phase(6050, (3e-3, 3e-3), WAY_MIX, HIGH_NOISE, focus=3.0),
    Phase(7200, (3e-3, 1.5e-3), WHOLE_MIX, ALL_NOISE, focus=8.0),
    Phase(7900, (1.5e-3, 1e-4), WHOLE_MIX, ALL_NOISE, focus=8.0, guided=True),
    # Squares came out as circles and rings filled: shapes wanted more clips.
    Phase(8000, (1e-4, 3e-3), SHAPES_MIX, ALL_NOISE, focus=8.0),
    Phase(11200, (3e-3, 3e-3), SHAPES_MIX, ALL_NOISE, focus=8.0),
    Phase(11900, (3e-3, 1e-3), SHAPES_MIX, ALL_NOISE, focus=8.0),
    Phase(12600, (1e-3, 1e-4), WHOLE_MIX, ALL_NOISE, focus=8.0, guided=True),
)
TINY_CANVAS = (2, 4, 4, 4)
SMOKE_PLAN = (Phase(4, (0.0, 1e-3), ((1.0, TINY_CANVAS),)), Phase(12, (1e-3, 1e-4), ((1.0, TINY_CANVAS),)))


def phase_at(plan: tuple[Phase, ...], step: int) -> tuple[Phase, float]:
    """The phase a step belongs to, and the learning rate there."""
    begin = 0
    for phase in plan:
        if step < phase.until:
            part = (step - begin) / (phase.until - begin)
            return phase, phase.lr[0] + part * (phase.lr[1] - phase.lr[0])
        begin = phase.until
    raise ValueError(f"step {step} lies beyond the plan, which ends at {begin}")
