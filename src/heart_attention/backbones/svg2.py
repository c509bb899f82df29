"""SVG2 (Sparse VideoGen 2): k-means of queries and of keys, a map between clusters chosen by top-p.

Everything is done head by head in fp32. A head's clusters depend only on its own tokens, its stored centroids
and a private generator keyed by (seed, layer, head, branch): a subset of heads gives what the whole gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..errors import HeartError
from ..kernels.ops.transfer import to_host
from ..masks import ClusterMask, GroupMask, Text, count_labels
from ..masks.group import cut_in_groups
from .base import (
    Backbone,
    Key,
    Shape,
    State,
    Thresholds,
    check_flag,
    check_positive,
    check_qk,
    check_seed,
    check_share,
    read_heads,
    read_text,
    read_thresholds,
    tokens,
)
from .cluster_rank import RANKS, by_mass, by_share, cluster_mass, cluster_stats, error_per_key, keep_by_error
from .cluster_walk import walk
from .kmeans import Clusters, lloyd_heads, random_tokens

PAPER_RATIO = 0.10  # the least share of key clusters, of the original
REFERENCE_TOKENS = 32760  # Wan2.1 at 480p, 81 frames: the size that the default cluster counts are meant for
BY_RANK = {  # what is not given: mass as in the paper; error as measured with the rest approximated (docs/rest.md)
    "mass": {"q_clusters": 300, "k_clusters": 1000, "init_iters": 50},
    "error": {"q_clusters": 1024, "k_clusters": 2048, "init_iters": 4},
}
_BY_RANK = cast(int, None)


class ClusterState(State):
    """Centroids of one (layer, branch) from the last refresh: the warm start of the next.

    They are read once a refresh, so those of a GPU wait in the computer's own memory: at 40 layers of 40 heads, 300 × 1,000
    clusters and two guidance branches they are 2.1 GB, more than everything else that is kept.
    """

    def __init__(self) -> None:
        self.centroids: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (item, head) -> [Cq, D], [Ck, D]

    def put(self, place: tuple[int, int], pair: Sequence[Tensor]) -> None:
        """Keep the centroids of a head's queries and keys."""
        self.centroids[place] = (to_host(pair[0]), to_host(pair[1]))

    def clear(self) -> None:
        """Forget everything: the next prediction starts from random tokens."""
        self.centroids.clear()

    def forget(self, heads: Sequence[int]) -> None:
        """These heads start from random tokens again."""
        for place in [place for place in self.centroids if place[1] in set(heads)]:
            del self.centroids[place]

    def copy(self) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """The centroids as they are."""
        return dict(self.centroids)

    def keep(self, before: Any, chosen: Tensor, heads: Sequence[int], first: int) -> None:
        """Old centroids where a head's new clusters were not taken; nobody waits for the choice."""
        for b in range(chosen.shape[0]):
            for h, head in enumerate(heads):
                place = (first + b, head)
                new, old = self.centroids.get(place), before.get(place)
                if new is None or old is None or new is old:
                    continue
                pairs = [[x.to(chosen.device, non_blocking=True) for x in pair] for pair in zip(new, old)]
                self.put(place, [torch.where(chosen[b, h], *pair) for pair in pairs])

    def nbytes(self) -> dict[str, int]:
        """Bytes of the centroids."""
        return {"centroids": sum(t.numel() * t.element_size() for pair in self.centroids.values() for t in pair)}


@dataclass(frozen=True)
class SVG2(Backbone):
    """The SVG2 predictor.

    Args:
        q_clusters, k_clusters: clusters of queries and of keys, per head, for 32,760 tokens; None is 300 and 1,000 (the
            paper's), and 1,024 and 2,048 when ranked by error.
        min_ratio: at least this share of key clusters is kept for every query cluster; None is the paper's 0.10, and 0
            when the rest is approximated.
        init_iters: k-means iterations from random tokens, when there is no earlier clustering; None is the paper's 50,
            and 4 when ranked by error.
        step_iters: iterations from the stored centroids.
        seed: of the private generator that draws the random tokens.
        rank: "mass" keeps the heaviest clusters until they reach the share τ of the mass (the paper's rule); "error"
            keeps those whose approximation would cost most for each key, until they hold the share τ of all keys.
        warm_up: also cluster at the last dense step of the warm-up: the first sparse step goes on from those centroids by
            `step_iters`, or reuses the whole where drift allows.
        equal_groups: tokens sorted by cluster are cut into groups of so many, 64 or 128 for GPU kernels that take equal
            blocks, and masks are between these groups; None leaves clusters as they are.
    """

    q_clusters: int = _BY_RANK
    k_clusters: int = _BY_RANK
    min_ratio: float | None = None
    init_iters: int = _BY_RANK
    step_iters: int = 2
    seed: int = 0
    rank: str = "mass"
    warm_up: bool = False
    equal_groups: int | None = None

    name: ClassVar[str] = "svg2"
    default_delta: ClassVar[float] = 8.0  # the paper's, on Wan

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if not isinstance(self.rank, str) or self.rank not in RANKS:
            raise HeartError(f"{owner} got rank={str(self.rank)[:40]!r}: give one of {', '.join(RANKS)}")
        for name, value in BY_RANK[self.rank].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_positive(owner, q_clusters=self.q_clusters, k_clusters=self.k_clusters)
        check_positive(owner, init_iters=self.init_iters, step_iters=self.step_iters)
        if self.min_ratio is not None:
            check_share(owner, min_ratio=self.min_ratio)
        check_seed(owner, self.seed)
        check_flag(owner, warm_up=self.warm_up)
        if self.equal_groups is not None:
            check_positive(owner, equal_groups=self.equal_groups)
        if max(self.q_clusters, self.k_clusters) > torch.iinfo(torch.int16).max - 2:
            raise HeartError(
                f"{type(self).__name__} got {max(self.q_clusters, self.k_clusters)} clusters: labels are 16-bit, "
                f"give at most {torch.iinfo(torch.int16).max - 2}"
            )

    def new_state(self) -> ClusterState:
        """An empty store of centroids."""
        return ClusterState()

    def scaled_to(self, n_tokens: int) -> SVG2:
        """A copy with fewer clusters for a sequence shorter than the one the counts are meant for."""
        share = min(1.0, n_tokens / REFERENCE_TOKENS)
        counts = (max(1, round(c * share)) for c in (self.q_clusters, self.k_clusters))
        q_clusters, k_clusters = (min(c, max(1, n_tokens)) for c in counts)
        return replace(self, q_clusters=q_clusters, k_clusters=k_clusters)

    def usual(self) -> SVG2:
        """With the usual cluster counts: few clusters of a short sequence would tell nothing about costs."""
        usual = BY_RANK[self.rank]
        return replace(self, q_clusters=usual["q_clusters"], k_clusters=usual["k_clusters"])

    def seen_tokens(self, text: Text | None, n: int, device: Any = None) -> slice | Tensor | None:
        """Only video is clustered."""
        return None if text is None else text.video(n, device)

    def prediction_work(self, shape: Shape) -> float:
        """Tokens times clusters times iterations."""
        return tokens(shape) * (self.q_clusters + self.k_clusters) * self.step_iters

    @property
    def first_prediction_factor(self) -> float:
        """The first clustering starts from random tokens and takes more iterations."""
        return self.init_iters / self.step_iters

    @property
    def warms_up(self) -> bool:
        """As its setting says."""
        return self.warm_up

    @property
    def least_ratio(self) -> float:
        """The share of key clusters that every query cluster keeps."""
        return PAPER_RATIO if self.min_ratio is None else self.min_ratio

    def for_rest(self, rest: str) -> SVG2:
        """What is approximated needs no minimum of kept clusters, unless one was asked for."""
        return replace(self, min_ratio=0.0) if rest != "drop" and self.min_ratio is None else self

    @property
    def cost_name(self) -> str:
        """Ranking clusters at every call has costs of its own."""
        return f"{self.name}-error" if self.remaps else self.name

    @property
    def remaps(self) -> bool:
        """Clusters ranked by error are ranked anew at every call, on the labels of the last refresh."""
        return self.rank == "error"

    def least_density(self, n: int) -> float:
        """The share of clusters that is always kept."""
        one = 1 / self.k_clusters if self.equal_groups is None else self.equal_groups / n
        return self.least_ratio or min(1.0, one)

    def expected_cost(self, n: int, threshold: float) -> float:
        """Ranked by error, the threshold is the share that is computed; a mean of every cluster comes to it."""
        if self.rank != "error":
            return super().expected_cost(n, threshold)
        return min(1.0, max(threshold, self.least_density(n)) + min(self.k_clusters, n) / n)

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON; equal groups only where they are asked for."""
        settings = super().to_dict()
        return settings if self.equal_groups is not None else {k: v for k, v in settings.items() if k != "equal_groups"}

    @torch.no_grad()
    def predict(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Thresholds,
        state: ClusterState | None = None,
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
    ) -> ClusterMask:
        """The cluster pairs to compute (see `Backbone.predict`); clusters have no use for a token `order`.

        With text, video is clustered alone and two clusters are added: the prompt, linked with all video and
        itself, and the unused slots, linked only with themselves.
        """
        check_qk(q, k)
        batch, n_heads, n, _ = q.shape
        tau = read_thresholds(thresholds, batch, n_heads)
        names = read_heads(heads, n_heads)
        text = read_text(text, n)
        if text is not None and k.shape[2] != n:
            raise HeartError(f"joint text needs as many keys as queries, not {k.shape[2]} and {n}")
        layer, branch, first = key if key is not None else (0, "", 0)
        mask = self._empty(batch, n_heads, n, k.shape[2], text, q.device)
        centroids: list[list[Tensor]] = [[], []]
        places = [[(first + b, name) for name in names] for b in range(batch)]
        found = self._cluster_all(q, k, places, state, text, (layer, branch))
        for b in range(batch):
            for h, pair in enumerate(found[b]):
                self._label(mask, b, h, pair, text)
                for kept, clusters in zip(centroids, pair):
                    kept.append(clusters.centroids)
                if state is not None:
                    state.put(places[b][h], [clusters.centroids for clusters in pair])
        both = [torch.stack(kept).unflatten(0, (batch, n_heads)) for kept in centroids]
        if self.equal_groups is not None:
            mask = self._cut(mask, both, self.equal_groups)
        if bool((tau < 1).any()):
            self._choose(mask, self._rank(mask, q, k, v, both), tau)
        return mask

    def _cut(self, mask: ClusterMask, centroids: list[Tensor], group: int) -> GroupMask:
        """Tokens in the order of a walk through their clusters, cut into equal groups; the prompt comes last."""
        text, tail = mask.text, 0 if mask.text is None else mask.text.unused
        if text is not None and tail and text.end != mask.n_q:
            raise HeartError(
                f"unused text slots end at token {text.end} of {mask.n_q}: equal groups can leave them out only at the end"
            )
        labels = []
        for own, points in zip((mask.q_labels, mask.k_labels), centroids):
            own = own[..., : own.shape[-1] - tail].long()
            place = torch.nn.functional.pad(walk(points), (0, 1), value=points.shape[-2])  # and the prompt's
            labels.append(cut_in_groups(place.gather(-1, own), group))
        shape = (-(-x.shape[-1] // group) for x in labels)
        kept = torch.ones(*mask.shape, *shape, dtype=torch.bool, device=mask.device)
        return GroupMask(kept, labels[0], labels[1], text, group, tail)

    def _counts(self, mask: ClusterMask) -> tuple[int, int]:
        """Groups of queries and of keys that are chosen: clusters of video, or all equal groups."""
        if isinstance(mask, GroupMask):
            return mask.map.shape[2], mask.map.shape[3]
        return self.q_clusters, self.k_clusters

    def _write(self, mask: ClusterMask, kept: Tensor, tau: Tensor) -> None:
        """What is kept between groups of video; τ ≥ 1 keeps everything, and the prompt's groups are always linked."""
        rows, columns = self._counts(mask)
        mask.map[:, :, :rows, :columns] = kept | (tau >= 1).to(mask.device)[..., None, None]
        if isinstance(mask, GroupMask) and mask.text is not None:
            rows_with = mask._holding(mask.row_of(), rows, "prompt", mask.n_q)
            columns_with = mask._holding(mask.group_of(), columns, "prompt", mask.n_k)
            mask.map.logical_or_(rows_with.unsqueeze(-1) | columns_with.unsqueeze(-2))

    @torch.no_grad()
    def predict_many(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Sequence[float],
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
        **more: Any,
    ) -> tuple[list[ClusterMask], ClusterMask]:
        """A mask for each threshold and the full one, from one clustering from scratch."""
        state, first = self.new_state(), 0 if key is None else key[2]
        full = self.predict(q, k, 1.0, state, text, heads=heads, key=key)
        places = [(first, name) for name in read_heads(heads, q.shape[1])]
        stored = [[state.centroids[at][side].to(q.device) for at in places] for side in (0, 1)]
        centroids = [torch.stack(side)[None] for side in stored]  # [1, H, C, D]
        ranked = self._rank(full, q, k, v, centroids)
        masks = [replace(full, map=full.map.clone()) for _ in thresholds]
        for mask, tau in zip(masks, thresholds):
            self._choose(mask, ranked, torch.full(mask.shape, float(tau), dtype=torch.float64))
        return masks, full

    @torch.no_grad()
    def remap(
        self, mask: ClusterMask, q: Tensor, k: Tensor, v: Tensor | None, thresholds: Sequence[float]
    ) -> ClusterMask:
        """The mask [B, H] with its clusters ranked anew by the present q, k, v: of the old one only the labels are read."""
        fresh = replace(mask, map=mask.everything())
        tau = torch.tensor(list(thresholds), dtype=torch.float64).expand(mask.shape)
        if self.rank == "mass":
            self._choose(fresh, self._rank(mask, q, k, v), tau)
            return fresh
        counts, v = self._counts(mask), self._values(v)
        at_least = max(1, int(self.least_ratio * counts[1]))
        q, k, v = q[:, :, : mask.n_q], k[:, :, : mask.n_k], v[:, :, : mask.n_k]
        kept = keep_by_error(q, k, v, mask.q_labels, mask.k_labels, *counts, tau, at_least)
        self._write(fresh, kept, tau)
        return fresh

    def _values(self, v: Tensor | None) -> Tensor:
        if v is None:
            raise HeartError("SVG2(rank='error') ranks clusters by their values too: give v to predict")
        return v

    def _rank(
        self, mask: ClusterMask, q: Tensor, k: Tensor, v: Tensor | None, centroids: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """What clusters are ranked by, fp32 [B, H, Cq, Ck], and sizes of key clusters, [B, H, Ck].

        `centroids` are those of a fresh clustering; otherwise, for equal groups and for the spreads, the present tokens'
        own.
        """
        (rows, columns), cut = self._counts(mask), isinstance(mask, GroupMask)
        if centroids is not None and self.rank == "mass" and not cut:
            sizes = count_labels(mask.k_labels, mask.map.shape[3])[..., :columns]
            return cluster_mass(centroids[0], centroids[1], sizes), sizes
        queries = cluster_stats(q[:, :, : mask.n_q], mask.q_labels, rows)
        keys = cluster_stats(k[:, :, : mask.n_k], mask.k_labels, columns)
        means = [queries.mean, keys.mean] if cut or centroids is None else centroids
        mass = cluster_mass(means[0], means[1], keys.sizes)
        if self.rank == "mass":
            return mass, keys.sizes
        values = cluster_stats(self._values(v)[:, :, : mask.n_k], mask.k_labels, columns)
        return error_per_key(mass, queries, keys, values), keys.sizes

    def _choose(self, mask: ClusterMask, ranked: tuple[Tensor, Tensor], tau: Tensor) -> None:
        """Write what is kept at thresholds τ [B, H] into the mask's video clusters; τ ≥ 1 keeps everything."""
        scores, sizes = ranked
        at_least = int(self.least_ratio * self._counts(mask)[1])
        rule = by_mass(scores, tau, at_least) if self.rank == "mass" else by_share(scores, sizes, tau, at_least)
        self._write(mask, rule, tau)

    @torch.no_grad()
    def cluster(self, x: Tensor, init: Tensor, iters: int) -> tuple[Tensor, Tensor, Tensor]:
        """k-means of x [B, H, N, D] from centroids `init` [B, H, C, D].

        Returns labels int16 [B, H, N], centroids fp32 [B, H, C, D] and sizes int64 [B, H, C].
        """
        if x.dim() != 4 or init.dim() != 4 or x.shape[:2] != init.shape[:2] or x.shape[3] != init.shape[3]:
            raise HeartError(
                f"tokens of shape {tuple(x.shape)} and centroids of shape {tuple(init.shape)} do not "
                "match: give [B, H, N, D] and [B, H, C, D]"
            )
        check_positive("k-means", iters=iters)
        self._check_counts(x.shape[2], init.shape[2])
        batch, heads = x.shape[:2]
        every = [(b, h) for b in range(batch) for h in range(heads)]
        found = lloyd_heads([x[at] for at in every], [init[at] for at in every], iters)
        parts = zip(*(c[:3] for c in found))
        labels, centroids, sizes = (torch.stack(part).unflatten(0, (batch, heads)) for part in parts)
        return labels.to(torch.int16), centroids, sizes

    @torch.no_grad()
    def map(self, q_centroids: Tensor, k_centroids: Tensor, k_sizes: Tensor, thresholds: Thresholds) -> Tensor:
        """Which key clusters each query cluster attends to: [B, H, Cq, D], [B, H, Ck, D], [B, H, Ck] -> bool."""
        if q_centroids.dim() != 4 or k_centroids.dim() != 4 or k_centroids.shape[:3] != k_sizes.shape:
            raise HeartError(
                f"centroids of shapes {tuple(q_centroids.shape)}, {tuple(k_centroids.shape)} and sizes of "
                f"shape {tuple(k_sizes.shape)} do not match: give [B, H, Cq, D], [B, H, Ck, D] and "
                "[B, H, Ck]"
            )
        check_qk(q_centroids, k_centroids)
        batch, heads = q_centroids.shape[:2]
        tau = read_thresholds(thresholds, batch, heads)
        kept = by_mass(cluster_mass(q_centroids, k_centroids, k_sizes), tau, int(self.least_ratio * k_sizes.shape[-1]))
        return kept | (tau >= 1).to(kept.device)[..., None, None]

    def _cluster_all(
        self, q: Tensor, k: Tensor, places: list[list[tuple]], state: ClusterState | None, text: Text | None, key: tuple
    ) -> list[list[tuple[Clusters, Clusters]]]:
        """Clusters of every item's heads, queries and keys, [B, H, N, D] each: the video tokens alone, in one call."""
        x: list[Tensor] = []
        begins: list[tuple[Tensor, int]] = []
        for b, row in enumerate(places):
            for h, place in enumerate(row):
                for side, tokens_of_head in enumerate((q[b, h], k[b, h])):
                    x.append(tokens_of_head)
                    begins.append(self._begin(tokens_of_head, side, place, state, text, key))
        found = lloyd_heads(x, [start for start, _ in begins], [iters for _, iters in begins], text)
        pairs = iter(zip(found[::2], found[1::2]))
        return [[next(pairs) for _ in row] for row in places]

    def _begin(
        self, x: Tensor, side: int, place: tuple, state: ClusterState | None, text: Text | None, key: tuple
    ) -> tuple[Tensor, int]:
        """Where the centroids of one head's queries (side 0) or keys (side 1) begin, and the iterations from there."""
        count = (self.q_clusters, self.k_clusters)[side]
        self._check_counts(x.shape[0] if text is None else text.video_count(x.shape[0]), count)
        old = state.centroids.get(place, (None, None))[side] if state is not None else None
        if old is not None and old.shape == (count, x.shape[-1]):
            return old.to(x.device, non_blocking=True), self.step_iters
        return self._random_centroids(x, count, text, (*key, place[1], "qk"[side])), self.init_iters

    def _random_centroids(self, x: Tensor, count: int, text: Text | None, key: tuple) -> Tensor:
        """Random video tokens of one head [N, D] as centroids [C, D]; the batch item plays no part in the draw."""
        n = x.shape[0] if text is None else text.video_count(x.shape[0])
        chosen = random_tokens(n, count, self.seed, *key)
        if text is not None:
            chosen = text.place(chosen)
        return x.index_select(0, chosen.to(x.device))

    def _check_counts(self, tokens: int, clusters: int) -> None:
        if clusters > tokens:
            raise HeartError(
                f"{clusters} clusters for {tokens} tokens: give at most one a token "
                f"(SVG2(...).scaled_to({tokens}) suits the sequence)"
            )

    def _empty(self, batch: int, heads: int, n_q: int, n_k: int, text: Text | None, device: Any) -> ClusterMask:
        """A mask to be filled in."""
        extra = 0 if text is None else 2  # clusters of the prompt and of unused slots
        shape = (batch, heads, self.q_clusters + extra, self.k_clusters + extra)
        labels = [torch.empty(batch, heads, n, dtype=torch.int16, device=device) for n in (n_q, n_k)]
        return ClusterMask(torch.ones(shape, dtype=torch.bool, device=device), *labels, text=text)

    def _label(self, mask: ClusterMask, b: int, h: int, pair: tuple[Clusters, Clusters], text: Text | None) -> None:
        """Write the labels of one head, and the links of text, into the mask."""
        rows, cols = self.q_clusters, self.k_clusters
        for labels, clusters, count in ((mask.q_labels, pair[0], rows), (mask.k_labels, pair[1], cols)):
            labels[b, h] = _with_text(clusters.labels, count, text, labels.shape[-1])
        if text is not None:  # the prompt's row and column stay ones
            mask.map[b, h, rows + 1, : cols + 1] = False
            mask.map[b, h, : rows + 1, cols + 1] = False


def _with_text(labels: Tensor, count: int, text: Text | None, n: int) -> Tensor:
    """Video labels spread over all n tokens, the prompt as cluster `count`, unused slots as `count` + 1."""
    if text is None:
        return labels
    prompt = labels.new_full((text.prompt,), count)
    unused = labels.new_full((text.unused,), count + 1)
    return torch.cat([labels[: text.start], prompt, unused, labels[text.start :]])
