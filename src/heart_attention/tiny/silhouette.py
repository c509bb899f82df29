"""What a silhouette shows: which of the four shapes, in how many pieces, with a hole or without, how large.

Everything is measured on the object's pixels frame by frame, by counting and by matching with drawn shapes; there is
no learned judge, and nothing beyond numpy.
"""

import numpy as np

SPECK = 16  # pixels; what is smaller than one latent pixel (4 x 4) is neither a piece nor a hole
HOLE = 0.04  # least area of a hole, of the silhouette with its holes filled; a drawn ring's is 0.18
SCALES = np.geomspace(0.75, 1.33, 9)  # of the radius at which a drawn shape has the silhouette's area
RELATIVE_AREA = {"circle": 3.142, "square": 3.098, "triangle": 1.724, "ring": 2.827}  # of radius 1, see ``distance``


def distance(shape: str, x: np.ndarray, y: np.ndarray, r: float | np.ndarray) -> np.ndarray:
    """Signed distance in pixels to the outline of a shape around the origin, negative inside; y points down."""
    if shape == "circle":
        return np.sqrt(x * x + y * y) - r
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.88 * r
    if shape == "triangle":  # upright, base below
        return np.maximum(0.894 * np.abs(x) - 0.447 * y - 0.45 * r, y - 0.85 * r)
    return np.abs(np.sqrt(x * x + y * y) - 0.75 * r) - 0.3 * r  # ring


def pieces(mask: np.ndarray) -> int:
    """Connected components of a frame's mask [H, W], corners touching, specks left out."""
    return sum(size >= SPECK for size, _ in _components(mask, corners=True))


def has_hole(mask: np.ndarray) -> bool:
    """Does the mask [H, W] enclose a piece of ground worth the name?"""
    holes = [size for size, at_edge in _components(~mask) if not at_edge]
    return max(holes, default=0) >= max(SPECK, HOLE * (int(mask.sum()) + sum(holes)))


def _components(mask: np.ndarray, corners: bool = False) -> list[tuple[int, bool]]:
    """Pixels in each connected component of a mask [H, W], and whether it reaches the edge of the frame."""
    height, width = mask.shape
    row = width + 2  # with a border of nothing, so that every pixel has all its neighbours
    left = bytearray(np.pad(mask, 1).astype(np.uint8).tobytes())
    near = (1, -1, row, -row) + ((row + 1, row - 1, 1 - row, -row - 1) if corners else ())
    found = []
    for start in np.flatnonzero(left).tolist():
        size, at_edge, todo = 0, False, [start] if left[start] else []
        left[start] = 0
        while todo:
            at = todo.pop()
            size += 1
            at_edge = at_edge or at < 2 * row or at >= height * row or at % row in (1, width)
            for step in near:
                if left[at + step]:
                    left[at + step] = 0
                    todo.append(at + step)
        if size:
            found.append((size, at_edge))
    return found


def inside(masks: np.ndarray) -> np.ndarray:
    """Which frames [T] of masks [T, H, W] have an object that touches no edge."""
    edge = masks[:, 0].any(1) | masks[:, -1].any(1) | masks[:, :, 0].any(1) | masks[:, :, -1].any(1)
    return np.asarray(~edge & masks.any((1, 2)))


def variation(masks: np.ndarray) -> float | None:
    """Standard deviation of the object's area over its mean, from the frame it enters to the one it leaves.

    Only frames where it touches no edge count; one in which it has vanished between others counts with area 0. None
    when it is never wholly inside.
    """
    present = masks.any((1, 2))
    if not inside(masks).any():
        return None
    first, last = np.flatnonzero(present)[[0, -1]]
    counted = (inside(masks) | ~present)[first : last + 1]
    areas = masks[first : last + 1][counted].sum((1, 2))
    return float(areas.std() / areas.mean())


def match(masks: np.ndarray, shapes: tuple[str, ...]) -> np.ndarray:
    """Best overlap [T, shapes] of masks [T, H, W] with each drawn shape, over all positions and nine scales.

    Overlap is intersection over union, within the canvas. Scales are about the one at which the drawn shape has the
    median area of the masks.
    """
    area = float(np.median(masks.sum((1, 2))))
    return np.stack([_match_one(masks, s, np.sqrt(area / RELATIVE_AREA[s])) for s in shapes], axis=1)


def _match_one(masks: np.ndarray, shape: str, radius: float) -> np.ndarray:
    """Best overlap [T] with one shape: all positions at once, as correlations by Fourier transform."""
    height, width = masks.shape[1:]
    margin = int(np.ceil(1.1 * radius * SCALES[-1]))  # so that nothing wraps around
    size = tuple(_easy_length(n + 2 * margin) for n in (height, width))
    fields = np.concatenate([masks, np.ones((1, height, width))]).astype(np.float32)  # the last: the whole canvas
    spectra = np.fft.rfft2(fields, size)
    best = np.zeros(len(masks))
    for scale in SCALES:
        drawn = np.fft.rfft2(_drawn(shape, radius * scale, margin), size)
        both = np.fft.irfft2(spectra * drawn.conj(), size)  # [T + 1, H', W'], by the drawn shape's place
        either = masks.sum((1, 2))[:, None, None] + both[-1] - both[:-1]
        best = np.maximum(best, (both[:-1] / np.maximum(either, 1.0)).max((1, 2)))
    return best


def _easy_length(n: int) -> int:
    """The least length from n on that has no prime factor above 5: transforms of such lengths are quick."""
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 1


def _drawn(shape: str, radius: float, margin: int) -> np.ndarray:
    """The shape as 0 and 1 in a square that holds it."""
    at = np.arange(-margin, margin + 1, dtype=np.float32)
    return (distance(shape, at[None], at[:, None], radius) < 0).astype(np.float32)
