"""What all masks share: token rows, groups, blocks that are not square, exact tokens, costs, joining and cutting."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.errors import HeartError
from heart_attention.masks import BlockMask, ClusterMask, Mask, Text

torch.set_num_threads(1)
some = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_blocks(seed, n, block, block_k=None, tail=0, ordered="no", text=None, density=0.5):
    g = generator(seed)
    m_q, m_k = -(-n // block), -(-n // (block_k or block))
    orders = {"no": None, "one": torch.randperm(n, generator=g)}
    own = None
    if ordered == "own":
        orders["own"] = torch.stack([torch.randperm(n, generator=g) for _ in range(2)])
        own = torch.randint(2, (2, 3), generator=g).to(torch.int8)
    kept = torch.rand(2, 3, m_q, m_k, generator=g) < density
    return BlockMask(kept, block, n, n, orders[ordered], tail, own, block_k, text)


def random_clusters(seed, n, rows=5, columns=7, text=None, density=0.5):
    g = generator(seed)
    labels = [torch.randint(c, (2, 3, n), generator=g).to(torch.int16) for c in (rows, columns)]
    kept = torch.rand(2, 3, rows, columns, generator=g) < density
    return ClusterMask(kept, *labels, text=text)


blocks = st.builds(
    random_blocks, st.integers(0, 99), st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.integers(0, 4),
    st.sampled_from(["no", "one", "own"]),
)  # fmt: skip
masks = st.one_of(blocks, st.builds(random_clusters, st.integers(0, 99), st.integers(1, 60)))


def twin(mask, b, h):
    """Token by token, by the words of the docstrings."""
    n = mask.n_q + mask.tail
    row, group = (x.expand(2, 3, -1)[b, h].tolist() for x in (mask.row_of(), mask.group_of()))
    inside = lambda i: i < mask.n_q  # noqa: E731
    seen = lambda i, j: bool(mask.flags[b, h, row[i], group[j]]) if inside(i) and inside(j) else inside(i) == inside(j)  # noqa: E731
    return [[seen(i, j) for j in range(n)] for i in range(n)]


@some
@given(masks)
def test_token_rows(mask):
    n = mask.n_q + mask.tail
    whole = mask.dense_tokens()
    assert whole.shape == (2, 3, n, n)
    assert whole[1, 2].tolist() == twin(mask, 1, 2)
    some = torch.randperm(n)[: n // 2 + 1]
    assert torch.equal(mask.rows(some, some.flip(0)), whole[:, :, some][..., some.flip(0)])
    assert torch.allclose(mask.density(), whole[..., : mask.n_q, : mask.n_k].double().mean((-2, -1)))


@some
@given(blocks)
def test_blocks_hold_the_tokens_of_their_order(mask):
    order = mask.orders()
    order = torch.arange(mask.n_q) if order is None else order.expand(2, 3, -1)[0, 1]
    for groups, block in ((mask.row_of(), mask.block_q), (mask.group_of(), mask.block_k)):
        groups = groups.expand(2, 3, -1)[0, 1]
        for i, tokens in enumerate(order.split(block)):
            assert groups[tokens].tolist() == [i] * len(tokens)


@some
@given(masks)
def test_sizes_count_tokens(mask):
    for sizes, groups in zip(mask.sizes(), (mask.row_of(), mask.group_of())):
        assert sizes[1, 1].tolist() == torch.bincount(groups.expand(2, 3, -1)[1, 1], minlength=sizes.shape[-1]).tolist()
    rows, columns = (sizes > 0 for sizes in mask.sizes())
    assert torch.equal(mask.kept(), mask.flags & rows[..., None] & columns[:, :, None])


@some
@given(masks, st.data())
def test_what_is_beyond_another_mask(mask, data):
    lower = mask.with_flags(mask.flags & (torch.rand(mask.flags.shape) < 0.5))
    beyond = mask.minus(lower)
    assert torch.equal(beyond.flags | lower.flags, mask.flags) and not (beyond.flags & lower.flags).any()
    if (~mask.flags).any():
        assert mask.minus(mask.with_flags(torch.ones_like(mask.flags))) is None


@some
@given(masks)
def test_join_and_split(mask):
    flat = Mask.join([mask.item(0), mask.item(1)])
    assert flat.shape == (1, 6)
    again = flat.split_batch(2)
    assert torch.equal(again.dense_tokens(), mask.dense_tokens())
    full = mask.full_like(4, 2, None)
    assert full.shape == (4, 2) and full.flags.all() and full.flags.shape[2:] == mask.flags.shape[2:]


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in one._per_head)


@pytest.mark.parametrize("mask", [random_blocks(0, 50, 16), random_clusters(0, 50)], ids=["block", "cluster"])
def test_heads_items_and_putting_back(mask):
    other = type(mask)(**{**vars(mask), **{name: getattr(mask, name).flip(0, 1) for name in mask._per_head}})
    assert mask.heads([2, 0]).shape == (2, 2)
    assert same(mask.heads([2, 0]).heads([1]), mask.heads([0]))
    assert same(mask.heads(torch.tensor([True, False, True])), mask.heads([0, 2]))
    assert same(mask.item(1).heads([2]), mask.heads([2]).item(1))
    index = torch.tensor([[True, False, True], [False, True, False]])
    merged = mask.put(index, other)
    for b in range(2):
        for h in range(3):
            assert same(merged.item(b).heads([h]), (other if index[b, h] else mask).item(b).heads([h]))
    chosen = mask.map_heads(lambda x: torch.cat([x[0, 0:1], x[0, 2:3], x[1, 1:2]])[None])  # [1, 3] in row-major order
    assert same(other.put(index, chosen), other.put(index, mask))
    assert same(mask.put([2, 1], other.heads([2, 1])), mask.put([1, 2], other))
    assert same(mask.put(torch.zeros(2, 3, dtype=torch.bool), other), mask)
    with pytest.raises(HeartError, match="all heads or exactly the replaced ones"):
        mask.put(index, other.heads([0]))


# ---------------------------------------- the rest


def test_a_block_with_text_is_exact():
    text = Text(start=5, prompt=2, unused=3)
    mask = BlockMask(torch.eye(4, dtype=torch.bool)[None, None], 2, 7, 7, tail=3, text=text)
    assert mask.exact_groups().tolist() == [[[False, False, True, True]]]  # tokens 5 and 6 lie in blocks 2 and 3
    assert mask.for_rest("drop") is mask
    kept = mask.for_rest("mean")
    assert kept.flags[0, 0].tolist() == [[i == j or j >= 2 for j in range(4)] for i in range(4)]
    assert torch.equal(mask.approximated(), ~kept.flags)
    # 7 × 7 pairs: kept 2·(2 + 3) + 2·(2 + 3) + 2·3 + 1·3 of them, approximated groups: 1, 1, 2, 2 for each query
    assert float(mask.cost("mean")) == pytest.approx((10 + 10 + 6 + 3 + 2 + 2 + 4 + 2) / 49)
    assert float(mask.cost()) == float(mask.density())


def test_an_order_may_put_text_anywhere():
    mask = BlockMask(
        torch.zeros(1, 1, 2, 2, dtype=torch.bool), 2, 4, 4, torch.tensor([3, 0, 1, 2]), text=Text(start=3, prompt=1)
    )
    assert mask.exact_groups().tolist() == [[[True, False]]]


def test_clusters_of_text_and_of_unused_slots():
    """Clusters 0, 1 of video, 2 the prompt, 3 unused slots: these see only themselves and are seen by nobody."""
    labels = torch.tensor([[[0, 1, 0, 2, 3, 3]]])
    kept = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]]).bool()[None, None]
    mask = ClusterMask(kept, labels, labels, text=Text(start=3, prompt=1, unused=2))
    assert mask.for_rest("mean").flags.equal(kept)
    assert mask.approximated()[0, 0].int().tolist() == [[0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


@some
@given(masks)
def test_cost_counts_one_key_for_each_group_left_out(mask):
    rows, columns = mask.sizes()
    whole = torch.zeros(2, 3, dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            for i, n in enumerate(rows[b, h].tolist()):
                for j, m in enumerate(columns[b, h].tolist()):
                    whole[b, h] += n * (m if mask.flags[b, h, i, j] else min(m, 1))
    assert torch.allclose(mask.cost("mean"), whole / (mask.n_q * mask.n_k))
    assert (mask.cost("mean") >= mask.density() - 1e-12).all()


def test_refusals():
    mask = random_blocks(0, 20, 4)
    with pytest.raises(HeartError, match="rest is 'zero': give one of drop, mean"):
        mask.cost("zero")
    with pytest.raises(HeartError, match=r"20 × 20 tokens in blocks of 4 × 8: give bool \[B, H, 5, 3\]"):
        BlockMask(mask.blocks, 4, 20, 20, block_k=8)
    with pytest.raises(HeartError, match="a block mask of block 4 × 0"):
        BlockMask(mask.blocks, 4, 20, 20, block_k=0)
