"""The rest as a part of its own against the definition, and merged."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention import kernels
from heart_attention.kernels.ops import rest_part
from heart_attention.masks import BlockMask

torch.set_num_threads(1)


@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 999), st.integers(1, 80), st.floats(0, 1), st.booleans(), st.sampled_from([1, 1 << 24]))
def test_it_is_the_definitions_part(seed, n, density, ordered, floats):
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=g) if ordered else None
    mask = BlockMask(torch.rand(1, 2, -(-n // 16), -(-n // 4), generator=g) < density, 16, n, n, order, block_k=4)
    q, k, v = (torch.randn(1, 2, n, 8, generator=g) for _ in range(3))
    eager, plan = kernels.get("eager"), kernels.make_plan(mask, rest="mean")
    before, rest_part.SCORE_FLOATS = rest_part.SCORE_FLOATS, floats
    try:
        out, lse = rest_part.rest_part(plan, q, k, v, 8**-0.5)
    finally:
        rest_part.SCORE_FLOATS = before
    want, want_lse = eager.run_part(mask, q, k, v, "only")
    torch.testing.assert_close(out, want, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=0)
    whole, _ = rest_part.merge(*eager.run_part(mask, q, k, v), out, lse)
    assert (whole - eager.run(plan, q, k, v)).abs().max() <= 2e-6
