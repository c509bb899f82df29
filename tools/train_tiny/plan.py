"""What is trained when: phases with their canvases, clips, noise levels and learning rates."""

from dataclasses import dataclass

from heart_attention.tiny import scene

from . import data, model, words

Canvas = tuple[int, int, int, int]  # clips in the batch, then tokens in time, height, width (8 x 8 pixels each)


@dataclass(frozen=True)
class Phase:
    """A stretch of training: up to which step, the learning rate from its begin to its end, canvases with weights."""

    until: int
    lr: tuple[float, float]
    mix: tuple[tuple[float, Canvas], ...]
    world: data.World = data.LIT
    shifts: tuple[float, ...] = (model.FLOW_SHIFT,)  # of the noise levels, sample by sample in turn
    teach: words.Lesson | None = None  # before it begins
    focus: float = 0.0  # how much more the loss near the object counts, at no noise
    text: tuple[int, ...] = (64, 512)  # prompt lengths that captions are padded to, one of them in each step
    guided: bool = False  # HunyuanVideo learns what guidance does, see hunyuan.py
    alike: bool = False  # batches that have room for it hold each clip with all four shapes, under the same noise


# Small canvases teach what things look like; long and wide ones teach the rotary positions that small canvases
# never reach, at a fraction of the cost of the native size, which only comes at the end.
SMALL, CUBE, LONG, WIDE = (8, 4, 8, 8), (4, 8, 8, 8), (2, 16, 8, 8), (2, 4, 16, 16)
SIX, MIDDLE, ROW, FIELD, LARGE = (4, 6, 10, 10), (2, 8, 12, 12), (2, 12, 8, 8), (1, 4, 20, 20), (1, 12, 20, 20)
NATIVE = (1, 16, 16, 16)
DECAY_MIX = ((0.1, SMALL), (0.35, SIX), (0.35, MIDDLE), (0.08, FIELD), (0.12, LARGE))
TEN, SIXTEEN = (8, 4, 10, 10), (2, 8, 16, 16)
HIGH_NOISE = (model.FLOW_SHIFT, 9.0)  # what moves where is decided early in sampling
MIDDLE_NOISE = (model.FLOW_SHIFT, 1.3)
ALL_NOISE = (model.FLOW_SHIFT, 1.3, 9.0)
LIT_MIX = ((0.15, SMALL), (0.1, CUBE), (0.4, SIX), (0.35, MIDDLE))
GROWN_MIX = ((0.2, SMALL), (0.15, CUBE), (0.3, SIX), (0.3, MIDDLE), (0.05, FIELD))
LAST_MIX = ((0.2, SMALL), (0.2, CUBE), (0.25, SIX), (0.27, MIDDLE), (0.08, NATIVE))
# The first 3,600 steps knew slow shapes without afterglow: colours were learned there, directions were not.
PLAN = (
    Phase(100, (0.0, 3e-3), ((1.0, SMALL),), data.SLOW),
    Phase(2500, (3e-3, 3e-3), ((0.74, SMALL), (0.14, CUBE), (0.06, LONG), (0.06, WIDE)), data.SLOW),
    Phase(3600, (3e-3, 2.5e-3), ((0.3, SMALL), (0.4, CUBE), (0.12, LONG), (0.08, WIDE), (0.1, MIDDLE)), data.SLOW),
    Phase(4500, (2.5e-3, 2.2e-3), ((0.55, SMALL), (0.25, MIDDLE), (0.1, ROW), (0.1, FIELD)), data.FAST),
    Phase(4690, (2.2e-3, 1.98e-3), ((0.3, SMALL), (0.46, MIDDLE), (0.1, ROW), (0.1, FIELD), (0.04, LARGE)), data.FAST),
    Phase(5123, (1.84e-3, 1.01e-3), DECAY_MIX, data.CENTRED),
    # Grounds that move with the shape taught shapes, but no directions either.
    Phase(7195, (2e-3, 2e-3), ((0.6, SMALL), (0.25, MIDDLE), (0.1, CUBE), (0.05, FIELD)), data.BELT, HIGH_NOISE),
    Phase(7835, (2.5e-3, 2.5e-3), ((0.85, TEN), (0.15, SIXTEEN)), data.FAST_BELT, HIGH_NOISE),
    Phase(7892, (2.5e-3, 2.5e-3), ((0.85, TEN), (0.15, SIXTEEN)), data.COARSE_BELT, (1.3,)),
    Phase(8642, (2.5e-3, 2.5e-3), ((0.95, SMALL), (0.05, MIDDLE)), data.COARSE_BELT, (1.3,)),
    # Sharp heads and a clean ground.
    Phase(
        10400, (2.5e-3, 2.5e-3), ((0.5, SMALL), (0.3, CUBE), (0.17, MIDDLE), (0.03, FIELD)), data.STILL, MIDDLE_NOISE
    ),
    Phase(11200, (2.5e-3, 1e-4), ((0.35, SMALL), (0.3, CUBE), (0.25, MIDDLE), (0.1, LARGE)), data.STILL, MIDDLE_NOISE),
    # Light, by which every token knows where and when it is; then the words that had not been heard so far.
    Phase(11920, (2.5e-3, 2.5e-3), ((0.45, SMALL), (0.25, CUBE), (0.15, SIX), (0.15, MIDDLE)), data.LIT_SHORT),
    Phase(12238, (2.5e-3, 2.5e-3), LIT_MIX, data.LIT_WIDE),
    Phase(12659, (2.5e-3, 2.5e-3), LIT_MIX, data.LIT_NARROW, HIGH_NOISE),
    Phase(12950, (2.5e-3, 2.5e-3), LIT_MIX, data.LIT, HIGH_NOISE, teach=words.Lesson(tuple(scene.MOTIONS))),
    Phase(14150, (2.5e-3, 2.5e-3), GROWN_MIX, data.LIT, ALL_NOISE),
    Phase(14750, (2.5e-3, 1e-4), LAST_MIX, data.LIT, ALL_NOISE),
)
# From the packaged weights, deepened (grow.py): larger shapes on a calmer ground, at and near the native size. Given up.
HALF, BRIEF, PAIR = (1, 8, 16, 16), (4, 4, 12, 12), (8, 2, 12, 12)
NATIVE_MIX = ((0.3, WIDE), (0.3, MIDDLE), (0.2, HALF), (0.2, NATIVE))
BROAD_MIX = ((0.35, BRIEF), (0.25, WIDE), (0.2, MIDDLE), (0.12, HALF), (0.08, NATIVE))
MANY_MIX = ((0.4, PAIR), (0.2, BRIEF), (0.2, WIDE), (0.2, MIDDLE))  # many clips: words are learned by comparing
ALIKE_MIX = ((0.5, PAIR), (0.35, BRIEF), (0.15, MIDDLE))
LATE_MIX = ((0.3, PAIR), (0.3, BRIEF), (0.15, WIDE), (0.15, MIDDLE), (0.1, NATIVE))
SHAPE_LESSON = words.Lesson(scene.SHAPES, MIDDLE_NOISE, BRIEF, focus=5.0)
DEEP_PLAN = (
    *PLAN,
    Phase(14800, (0.0, 1.5e-3), NATIVE_MIX, data.CALM, MIDDLE_NOISE, focus=5.0),
    Phase(14900, (1.5e-3, 1.5e-3), NATIVE_MIX, data.CALM, MIDDLE_NOISE, focus=5.0),
    Phase(15100, (1.5e-3, 1.5e-3), BROAD_MIX, data.CALM, MIDDLE_NOISE, focus=5.0),
    # Circle, square and ring had one embedding between them.
    Phase(15146, (1.5e-3, 1.5e-3), BROAD_MIX, data.CALM, MIDDLE_NOISE, SHAPE_LESSON, focus=5.0),
    Phase(15640, (2.5e-3, 2.5e-3), MANY_MIX, data.CALM, MIDDLE_NOISE, focus=10.0),
    # What tells the shapes apart is what is left when all else is the same.
    Phase(20000, (2.5e-3, 2.5e-3), ALIKE_MIX, data.CALM, MIDDLE_NOISE, focus=10.0, alike=True),  # run to 16,182
    Phase(23000, (2.5e-3, 1e-3), LATE_MIX, data.CALM, MIDDLE_NOISE, focus=10.0, alike=True),
    Phase(25000, (1e-3, 1e-4), NATIVE_MIX, data.CALM, MIDDLE_NOISE, focus=5.0),
)
# From scratch, words as they are spelled (model.spell_words): pictures first, without the padding that drowns words at
# the start, then stretches of clips, then whole ones.
PICTURE, SKETCH, STRETCH, QUICK = (16, 1, 16, 16), (28, 1, 12, 12), (4, 4, 16, 16), (4, 8, 12, 12)
BARE, FEW, SOME = (model.CAPTION_TOKENS,), (model.CAPTION_TOKENS, 40), (32, 128)
CUT_MIX = ((0.3, PICTURE), (0.4, STRETCH), (0.3, QUICK))
WHOLE_MIX = ((0.15, PICTURE), (0.3, STRETCH), (0.2, QUICK), (0.35, NATIVE))
MOST_NOISE = (model.FLOW_SHIFT, 1.3, 6.0)  # in a whole clip an object is seen through more noise than in a picture
FRESH_PLAN = (
    Phase(100, (0.0, 3e-3), ((1.0, PICTURE),), data.CUT, MIDDLE_NOISE, text=BARE),
    Phase(800, (3e-3, 3e-3), ((0.6, PICTURE), (0.4, SKETCH)), data.CUT, MIDDLE_NOISE, focus=3.0, text=BARE),
    Phase(1200, (3e-3, 3e-3), ((0.6, PICTURE), (0.4, SKETCH)), data.CUT, MIDDLE_NOISE, focus=3.0, text=FEW),
    Phase(1600, (3e-3, 3e-3), ((0.6, PICTURE), (0.4, SKETCH)), data.CUT, MIDDLE_NOISE, focus=3.0, text=SOME),
    Phase(2400, (3e-3, 3e-3), ((0.8, PICTURE), (0.2, STRETCH)), data.CUT, MIDDLE_NOISE, focus=3.0),
    Phase(2900, (3e-3, 3e-3), CUT_MIX, data.CUT, MIDDLE_NOISE, focus=3.0),
    Phase(7000, (3e-3, 3e-3), CUT_MIX, data.CUT, MIDDLE_NOISE, focus=8.0),
    Phase(12000, (3e-3, 1e-4), WHOLE_MIX, data.CUT, MOST_NOISE, focus=8.0),
)
# By name: the phases, the number of layers, and whether words are spelled.
PLANS = {"shipped": (PLAN, 6, False), "deep": (DEEP_PLAN, 9, False), "fresh": (FRESH_PLAN, 9, True)}
# HunyuanVideo's from scratch, in the same order; its text needs no padding in training (hunyuan.velocity).
HUNYUAN_PLAN = (
    Phase(100, (0.0, 3e-3), ((1.0, PICTURE),), data.CUT, MIDDLE_NOISE),
    Phase(3600, (3e-3, 3e-3), ((0.6, PICTURE), (0.4, SKETCH)), data.CUT, MIDDLE_NOISE, focus=3.0),
    Phase(5000, (3e-3, 3e-3), CUT_MIX, data.CUT, MIDDLE_NOISE, focus=8.0),
    Phase(7000, (3e-3, 1e-3), WHOLE_MIX, data.CUT, MOST_NOISE, focus=8.0),
    Phase(7700, (1e-3, 1e-4), WHOLE_MIX, data.CUT, MOST_NOISE, focus=8.0, guided=True),
)
TINY_CANVAS = (2, 4, 4, 4)
SMOKE_PLAN = (Phase(4, (0.0, 1e-3), ((1.0, TINY_CANVAS),)), Phase(12, (1e-3, 1e-4), ((1.0, TINY_CANVAS),)))


def phase_at(plan: tuple[Phase, ...], step: int) -> tuple[Phase, float, float]:
    """The phase a step belongs to, the learning rate there, and how much of the phase is over (0 at its begin)."""
    begin = 0
    for phase in plan:
        if step < phase.until:
            part = (step - begin) / (phase.until - begin)
            return phase, phase.lr[0] + part * (phase.lr[1] - phase.lr[0]), part
        begin = phase.until
    raise ValueError(f"step {step} lies beyond the plan, which ends at {begin}")
