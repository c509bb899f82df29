"""The Triton kernels as they are compiled ahead of time: types of arguments, constants, launch figures by target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One kernel to compile: its arguments' types, constants and launch figures for a target."""

    kernel: str
    what: str
    function: str
    d: int
    dtype: str
    types: dict[str, str]
    constants: dict[str, Any]
    launch: Callable[[str], dict[str, Any]]  # target -> num_warps, num_stages and other options
    per_target: Callable[[str], dict[str, Any]] = lambda target: {}  # constants that depend on the target
    types_of: Callable[[str], dict[str, str]] = lambda target: {}  # types that depend on the target
    module: str = "heart_attention.kernels.triton_code"


def cases(sizes: tuple[int, ...] = (64, 128)) -> Iterator[Case]:
    """Every kernel, bf16 inputs, at the head sizes that video models have; at 128 attention and scores in fp32 too."""
    for d in sizes:
        for name, block, gathered in (
            ("blocks", 128, False),
            ("blocks, token order", 128, True),
            ("clusters", 0, True),
        ):
            yield attention_case(d, "bf16", name, block, gathered)
            yield attention_case(d, "bf16", f"{name}, rest as means", block, gathered, rest=True)
        yield attention_case(d, "bf16", "blocks, rest with its mass", 128, False, rest=True, share=True)
        yield attention_case(d, "bf16", "clusters, rest with its mass", 0, True, rest=True, share=True)
        yield attention_case(d, "bf16", "blocks of 64", 64, False)
        yield attention_case(d, "bf16", "blocks, log-sums", 128, False, sums=True)
        yield attention_case(d, "bf16", "clusters, log-sums", 0, True, sums=True)
        if d == 128:
            yield attention_case(d, "fp32", "blocks", 128, False)
        yield from prediction_cases(d)


def attention_case(
    d: int, dtype: str, name: str, block: int, gathered: bool, sums: bool = False, rest: bool = False,
    share: bool = False,
) -> Case:  # fmt: skip
    """Attention over equal blocks (block > 0) or clusters; `sums`: with log-sums, as calibration runs it.

    `share`: with the rest's share of each query's mass, as the engine asks for it.
    """
    from heart_attention.kernels import triton_attention as attention

    def config(target: str) -> attention.Config:
        rows = attention.tile_rows(block or 109)  # 300 clusters over the 32,760 tokens of Wan2.1 at 480p
        return attention.config_for(target, d, 4 if dtype == "fp32" else 2, rows, gathered, block)

    pointers = {f"{x}_ptr": f"*{dtype}" for x in ("q", "k", "v", "k_mean", "v_mean")}
    pointers |= {"out_ptr": "*fp32" if sums else f"*{dtype}", "lse_ptr": "*fp32" if sums or share else "*i32"}
    lists = {f"{x}_ptr": "*i32" for x in ("work", "list", "q_perm", "k_perm", "rest")} | {"bias_ptr": "*fp32"}
    return Case(
        f"attention, {name}", "attention", "attention", d, dtype, {**pointers, **lists, "scale_log2": "fp32"},
        {"D": d, "D_PAD": d, "BLOCK": block, "RUN": attention.RUN, "PERM": gathered, "LSE": sums, "REST": rest, "SHARE": share,
         "PRECISION": attention.PRECISION},
        lambda target: attention.launch_options(config(target).warps, config(target).stages),
        lambda target: _tiles(config(target)), lambda target: _tile_types(config(target), d, dtype),
    )  # fmt: skip


def dense_case(d: int, dtype: str = "bf16") -> Case:
    """Dense attention at the launch figures of our sparse kernel over blocks of 128."""
    like = attention_case(d, dtype, "", 128, False)
    constants = {"D": d, "PRECISION": like.constants["PRECISION"]}
    return Case(
        "dense attention", "attention", "dense", d, dtype, like.types, constants, like.launch, like.per_target,
        like.types_of, "gpu_dense",
    )  # fmt: skip


def _tiles(config: Any) -> dict[str, Any]:
    """Constants that follow from launch figures; without descriptors there is nothing in their place."""
    sizes = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "TILED": config.tiled}
    return sizes if config.tiled else sizes | {"k_tiles": None, "v_tiles": None}


def _tile_types(config: Any, d: int, dtype: str) -> dict[str, str]:
    """Types of the tensor descriptors."""
    return dict.fromkeys(("k_tiles", "v_tiles"), f"tensordesc<{dtype}[1, 1, {config.block_n}, {d}]>")


def prediction_cases(d: int) -> Iterator[Case]:
    """XAttention scoring, k-means and pooling, bf16 tokens."""
    from heart_attention.kernels.ops import triton_predict as predict
    from heart_attention.kernels.triton_attention import RUN, launch_options

    def case(
        name: str,
        function: str,
        types: dict,
        constants: dict,
        launch: dict,
        per_target: Any = None,
        dtype: str = "bf16",
    ) -> Case:
        floats = dict.fromkeys(("sum_ptr", "top_ptr", "c_ptr", "norm_ptr", "out_ptr"), "*fp32")
        ints = dict.fromkeys(("perm_ptr", "label_ptr", "start_ptr"), "*i32")
        return Case(
            name, "prediction", function, d, dtype, {**floats, **ints, **_tokens(dtype), **types}, constants,
            lambda target: launch, per_target or (lambda target: {}),
        )  # fmt: skip

    def precise(target: str) -> dict[str, str]:
        return {"PRECISION": "tf32x3" if target.startswith("sm_") else "ieee"}

    tile_m, tile_n = predict.SCORE_TILE
    head = {"D": d, "D_PAD": d}
    for dtype, size in (("bf16", 2), ("fp32", 4))[: 2 if d == 128 else 1]:
        yield case(
            "XAttention scores, tiles", "antidiagonal_sums", {"scale_log2": "fp32"} | _tokens(dtype),
            {"D": d, "D_STEP": predict.feature_step(size), "STRIDE": 16, "GROUPS": 8, "PERM": False,
             "BLOCK_M": tile_m, "BLOCK_N": tile_n},
            predict.score_launch(size), precise, dtype,
        )  # fmt: skip
    if d == 128:
        yield case(
            "XAttention scores, blocks", "antidiagonal_blocks", {}, {"GROUPS": 8, "PER_TILE": tile_n // 8, "BLOCK_N": 128},
            predict.reduce_launch(),
        )  # fmt: skip
    yield case(
        "k-means, assignment", "nearest_centroid", {"c_ptr": "*bf16"},
        {"D": d, "D_STEP": predict.feature_step(2), "PARTS": 2,
         "BLOCK_M": predict.ASSIGN_TILE[0], "BLOCK_N": predict.ASSIGN_TILE[1]},
        predict.assign_launch(), precise,
    )  # fmt: skip
    rows = {**head, "BLOCK_M": predict.SUM_ROWS}
    yield case("k-means, means", "cluster_means", {}, rows | {"PERM": True}, predict.reduce_launch())
    yield case(
        "means of key blocks", "cluster_means", {"c_ptr": "*bf16"}, rows | {"PERM": False}, predict.reduce_launch()
    )
    yield case("token means", "pooled_sums", {}, rows, predict.reduce_launch())
    if d == 128:
        lists = dict.fromkeys(("col_ptr", "count_ptr", "run_ptr", "found_ptr"), "*i32") | {"first_ptr": "*i64"}
        yield case("kept keys of clusters", "kept_runs", lists, {"RUN": RUN, "BLOCK": 2048}, launch_options(4, 1))


def _tokens(dtype: str) -> dict[str, str]:
    return dict.fromkeys(("q_ptr", "k_ptr", "x_ptr"), f"*{dtype}")
