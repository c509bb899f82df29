"""Cluster masks: densities by token pairs, sorted tokens, what is refused."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.errors import HeartError
from heart_attention.masks import ClusterMask, Text, count_labels

from .test_base import random_clusters

torch.set_num_threads(1)
some = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@some
@given(st.integers(0, 99), st.integers(1, 60), st.integers(1, 9), st.integers(1, 12))
def test_cluster_density_by_token_pairs(seed, n, q_clusters, k_clusters):
    mask = random_clusters(seed, n, q_clusters, k_clusters)
    want = mask.dense_tokens().double().mean((-2, -1))
    assert torch.allclose(mask.density(), want, atol=1e-12, rtol=0)
    q_sizes, k_sizes = mask.sizes()
    assert (q_sizes.sum(-1) == n).all() and (k_sizes.sum(-1) == n).all()
    assert torch.equal(count_labels(mask.k_labels, k_clusters), k_sizes)


def test_full_masks_keep_text_apart():
    """Clusters 0 and 1 of video, 2 the prompt, 3 unused slots."""
    labels = torch.tensor([[[0, 1, 0, 1, 2, 3]]], dtype=torch.int16)
    text = Text(4, 1, 1)
    full = ClusterMask(torch.zeros(1, 1, 4, 4, dtype=torch.bool), labels, labels, text=text).full_like(2, 3, text)
    assert full.q_labels[1, 2].tolist() == [0, 0, 1, 1, 2, 3] and full.text == text
    tokens = full.dense_tokens()[1, 2]
    assert tokens[:5, :5].all() and tokens[5, 5] and not tokens[5, :5].any() and not tokens[:5, 5].any()


ones = torch.ones(1, 1, 2, 2, dtype=torch.bool)
labels = torch.zeros(1, 1, 5, dtype=torch.int16)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ClusterMask(ones.float(), labels, labels), "give bool"),
        (lambda: ClusterMask(ones, labels[0], labels), "give"),
        (lambda: ClusterMask(ones, labels.expand(1, 2, 5), labels), "must agree"),
        (lambda: ClusterMask(ones, *[labels[..., :1].expand(1, 1, 100_000)] * 2).dense_tokens(), "too large"),
    ],
)
def test_bad_input_is_one_clear_sentence(make, message):
    with pytest.raises(HeartError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
