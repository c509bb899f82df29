"""Tokens moved behind the video and back: nothing changes but the order in which a handler sees them."""

import torch
import torch.nn.functional as F

from heart_attention.models.moved_tokens import attend, move
from heart_attention.online.call import CallContext, Handler

FRONT, VIDEO, N = 3, 5, 10


def tensors():
    return torch.randn(3, 1, 2, N, 4, generator=torch.Generator().manual_seed(0)).unbind(0)


def test_moving_and_moving_back():
    x = torch.arange(N).view(1, 1, N, 1)
    moved = move(x, FRONT, VIDEO)
    assert moved.flatten().tolist() == [3, 4, 5, 6, 7, 0, 1, 2, 8, 9]
    assert torch.equal(move(moved, VIDEO, FRONT), x)


def test_a_dense_answer_is_the_models_own_to_the_bit():
    q, k, v = tensors()
    bias = torch.arange(N) < 9  # a mask of keys, in the model's order

    def dense(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.view(1, 1, 1, N))

    assert torch.equal(attend(Handler(), CallContext(), q, k, v, dense, FRONT, VIDEO), dense(q, k, v))


def test_a_handler_sees_video_first_and_may_ask_for_some_heads():
    q, k, v = tensors()

    class ByHead(Handler):
        def attend(self, call, q, k, v, dense):
            self.seen = q
            return torch.cat([dense(*(x[:, h : h + 1] for x in (q, k, v))) for h in range(2)], dim=1)

    handler, plain = ByHead(), F.scaled_dot_product_attention
    out = attend(handler, CallContext(), q, k, v, lambda *qkv: plain(*qkv), FRONT, VIDEO)
    torch.testing.assert_close(out, plain(q, k, v), rtol=0, atol=1e-6)
    assert torch.equal(handler.seen[:, :, :VIDEO], q[:, :, FRONT : FRONT + VIDEO])
