"""Where text lies, and which tokens are what."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.errors import HeartError
from heart_attention.masks import Text

some = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@some
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
def test_text_says_which_tokens_are_video(start, prompt, unused, after):
    text = Text(start, prompt, unused)
    n = text.end + after
    video = text.video_index(n)
    assert video.tolist() == [t for t in range(n) if not start <= t < start + prompt + unused]
    assert text.video_count(n) == len(video)
    parts = [text.index(part, n).tolist() for part in ("prompt", "unused", "exact")]
    assert parts[0] + parts[1] == parts[2] == [t for t in range(n) if t not in video]
    assert text.index("unused", start + prompt).tolist() == []


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Text(-1, 3), "negative"),
        (lambda: Text(0, 8, 2).check(10), "does not leave any video in 10 tokens"),
        (lambda: Text(0, 8, 2).check(9), "does not leave any video in 9 tokens"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(HeartError, match=message):
        make()
