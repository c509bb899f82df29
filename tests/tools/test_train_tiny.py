"""The recipe of the embedded model: data, codec, text padding, resume, density."""

import numpy as np
import pytest
import torch
from tools.train_tiny import costs, data, density, export, model, plan, train
from tools.train_tiny.muon import orthogonalise

from heart_attention import tiny
from heart_attention.tiny import scene


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors here are too small for more; on a busy machine waiting threads cost far more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow  # tests/tiny/test_silhouette.py reads as many clips of two worlds in `make test`
def test_check_reads_rendered_clips():
    clips = data.batch(seed=5, step=0, size=48, frames=8, pixels=(96, 96))
    frames = (clips.video.permute(0, 2, 3, 4, 1) * 0.5 + 0.5).numpy()
    found = [tiny.check(f, c) for f, c in zip(frames, clips.captions, strict=True)]
    for key in ("background", "colour", "motion"):
        assert np.mean([f[key] for f in found]) >= 0.97


def test_check_reads_every_colour_on_every_ground():
    pairs = [(colour, ground) for colour in scene.OBJECT_COLOURS for ground in scene.BACKGROUND_COLOURS]
    shapes, motions = list(scene.SHAPES), list(scene.MOTIONS)
    combos = [(c, shapes[i % 4], motions[i // 4 % 4], g) for i, (c, g) in enumerate(pairs)]
    video = data.render(combos, 8, (96, 96), torch.Generator().manual_seed(8))
    frames = (video.permute(0, 2, 3, 4, 1) * 0.5 + 0.5).numpy()
    for combo, clip in zip(combos, frames, strict=True):
        found = tiny.check(clip, scene.caption(combo))
        assert found["background"] and found["colour"] and found["motion"], (combo, found["seen"])


def test_batches_are_a_function_of_seed_and_step():
    one, two, other = (data.batch(1, s, 2, 4, (32, 32)) for s in (9, 9, 10))
    assert torch.equal(one.video, two.video) and one.captions == two.captions
    assert not torch.equal(one.video, other.video)


def test_training_never_shows_held_out_combinations():
    splits = scene.splits()
    assert set(data.TRAIN).isdisjoint(splits["heldout"] + splits["demo"])


def test_a_picture_is_a_moment_of_a_whole_clip():
    combo, rng = data.TRAIN[0], torch.Generator
    whole = data.render([combo], 16, (64, 64), rng().manual_seed(1), data.CALM)
    for seed in range(3):
        moment = data.render([combo], 1, (64, 64), rng().manual_seed(seed), data.CUT)
        light = moment[0, :, 0].mean()  # the light grows with time
        assert whole[0, :, 0].mean() - 0.1 <= light <= whole[0, :, -1].mean() + 0.1
    times = data._moments(64, 4, data.CUT, rng().manual_seed(2))
    assert torch.allclose(times.diff(dim=1), torch.tensor(2 / 15)) and times.min() == -1 and times.max() == 1
    assert torch.equal(data._moments(1, 8, data.CUT, rng()), torch.linspace(-1, 1, 8)[None])


def test_spelled_words_are_at_right_angles_whatever_stands_beside_them():
    tokenizer = model.build_tokenizer()
    encoder = model.build_text_encoder(len(tokenizer)).eval()
    ids = tokenizer(["a circle moves left", "on a red square", "ring up"], padding=True, return_tensors="pt")
    with torch.no_grad():
        seen = encoder(ids.input_ids, ids.attention_mask).last_hidden_state[ids.attention_mask.bool()]
    unit = torch.nn.functional.normalize(seen, dim=-1)
    same = ids.input_ids[ids.attention_mask.bool()]
    assert torch.allclose(unit @ unit.T, (same[:, None] == same[None]).float(), atol=0.05)
    assert not any(p.requires_grad for p in encoder.parameters())


def test_codec_is_a_matmul_and_faithful():
    codec = model.fit_codec()
    vae = model.build_vae(codec)
    video = data.batch(3, 0, 4, 5, (64, 64)).video
    with torch.no_grad():
        z = vae.encode(video).latent_dist.mode()
        back = vae.decode(z).sample
    shape = (1, -1, 1, 1, 1)
    normalised = (z - codec["mean"].view(shape)) / codec["std"].view(shape)
    assert torch.allclose(normalised, model.encode(video, codec), atol=1e-4)
    psnr = 10 * torch.log10(4 / (back - video).square().mean())
    assert psnr >= 33


def test_packaged_codec_is_the_one_trained_on():
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(tiny.path(), subfolder="vae")
    assert torch.allclose(torch.tensor(vae.config.latents_std), model.fit_codec()["std"], rtol=1e-3)


def test_tokenizer_knows_every_caption_word():
    tokenizer = model.build_tokenizer()
    for c in data.batch(0, 0, 50, 1, (8, 8)).captions:
        ids = tokenizer(c).input_ids
        assert len(ids) < model.CAPTION_TOKENS and ids[-1] == 1 and 2 not in ids
    assert tokenizer("").input_ids == [1]


@pytest.mark.parametrize("total", (64, 512))
def test_padding_bias_equals_real_padding(total):
    transformer, _, _ = model.initialise()
    x, t = torch.randn(2, model.Z_DIM, 1, 4, 4), torch.tensor([500.0, 100.0])
    lengths = torch.tensor([9, 1])
    text = torch.randn(2, total, model.TEXT_DIM) * (torch.arange(total)[None] < lengths[:, None])[..., None]
    with torch.no_grad():
        full = transformer(x, t, text, return_dict=False)[0]
        cross = train.PaddedTextAttention()
        cross.bias = train.padding_bias(lengths, total, model.CAPTION_TOKENS)
        for block in transformer.blocks:
            block.attn2.set_processor(cross)
        short = transformer(x, t, text[:, : model.CAPTION_TOKENS], return_dict=False)[0]
    assert torch.allclose(full, short, atol=1e-4)


def test_resume_is_exact(tmp_path):
    straight = train.Trainer(plan.SMOKE_PLAN)
    for _ in range(4):
        straight.train_step()
    first = train.Trainer(plan.SMOKE_PLAN)
    for _ in range(2):
        first.train_step()
    train.save(first, tmp_path)
    second = train.Trainer(plan.SMOKE_PLAN)
    second.restore(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    for _ in range(2):
        second.train_step()
    for (name, a), (_, b) in zip(straight.named, second.named, strict=True):
        assert torch.equal(a, b), name
    assert all(torch.equal(straight.ema[n], second.ema[n]) for n in straight.ema)


def test_focus_counts_what_is_near_the_object_more():
    trainer = train.Trainer(plan.SMOKE_PLAN)
    clips = data.batch(0, 0, 2, 2, (32, 32), data.CALM)
    assert 0.1 < clips.near.mean() < 0.6 and set(clips.near.unique().tolist()) >= {0.0, 1.0}

    def loss(focus: float, near: torch.Tensor) -> float:
        batch = data.Batch(clips.video, clips.captions, clips.combos, near)
        with torch.no_grad():
            rng = torch.Generator().manual_seed(1)
            return trainer.flow_loss(batch, torch.tensor([1.0, 1.0]), rng, focus=focus).item()

    plain = loss(0.0, clips.near)
    assert loss(5.0, torch.zeros_like(clips.near)) == pytest.approx(plain)
    assert plain < loss(5.0, clips.near) < loss(5.0, torch.ones_like(clips.near))


def test_training_goes_on_from_a_thin_checkpoint(tmp_path):
    trainer = train.Trainer(plan.SMOKE_PLAN)
    trainer.train_step()
    train.save(trainer, tmp_path)
    thin = export.thin(tmp_path, tmp_path / "thin") / "checkpoint.pt"
    assert thin.stat().st_size < 0.3 * (tmp_path / "checkpoint.pt").stat().st_size
    again = train.Trainer(plan.SMOKE_PLAN)
    again.restore(torch.load(thin, weights_only=True))
    assert again.step == 1 and all(torch.allclose(again.ema[n], w, rtol=1e-2) for n, w in trainer.ema.items())
    again.train_step()
    assert all(w.dtype == torch.float32 for w in again.ema.values())


def test_training_goes_on_from_packaged_weights(tmp_path):
    state = torch.load(export.unpack("model", 3, tmp_path) / "checkpoint.pt", weights_only=True)
    trainer = train.Trainer(plan.SMOKE_PLAN)
    trainer.restore(state)
    own = tiny.load().transformer.state_dict()
    assert trainer.step == 3
    assert all(torch.equal(p, own[n]) for n, p in trainer.transformer.named_parameters())


def test_restore_refuses_another_seed():
    trainer = train.Trainer(plan.SMOKE_PLAN)
    with pytest.raises(ValueError, match="seed"):
        trainer.restore({"seed": 1})


@pytest.mark.parametrize("phases", (plan.PLAN, plan.HUNYUAN_PLAN), ids=("wan", "hunyuan"))
def test_plan_goes_forward_and_ends(phases):
    begin = 0
    for phase in phases:
        assert phase.until > begin
        assert sum(w for w, _ in phase.mix) == pytest.approx(1.0)
        begin = phase.until
    with pytest.raises(ValueError, match="beyond"):
        plan.phase_at(phases, phases[-1].until)


def test_random_control_is_where_training_starts():
    transformer, text_encoder, _ = model.initialise(0)
    control = tiny.load_random(0)
    assert all(torch.equal(p, control.transformer.state_dict()[n]) for n, p in transformer.state_dict().items())
    # Both models' words are spelled alike; training's last stretch went on from weights in half precision.
    said, spelled = (encoder.shared.weight for encoder in (control.text_encoder, text_encoder))
    assert torch.allclose(said, spelled, atol=2e-3 * model.LOUD)


def test_orthogonalise_flattens_singular_values():
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 64, 256)))
    assert 0.5 < values.min() and values.max() < 1.3


def test_density_against_a_plain_loop():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 256, 8).unbind(0)
    s, b = density.STRIDE, density.BLOCK
    logits = torch.zeros(2, 32, 32)
    for i in range(32):
        for j in range(32):
            for r in range(s):
                logits[:, i, j] += (q[0, :, i * s + s - 1 - r] * k[0, :, j * s + r]).sum(-1)
    weights = (logits / (s * 8**0.5)).softmax(-1)
    g = b // s
    expected = []
    for head in weights:
        kept = 0
        for row in range(4):
            mass = [head[row * g : (row + 1) * g, c * g : (c + 1) * g].sum().item() / g for c in range(4)]
            order = sorted(range(4), key=lambda c: -mass[c])
            chosen, total = {0}, 0.0
            for c in order:
                if total >= 0.9:
                    break
                chosen.add(c)
                total += mass[c]
            kept += len(chosen)
        expected.append(kept / 16)
    assert density.density(density.block_mass(q, k))[0].tolist() == pytest.approx(expected)


def test_a_shape_called_by_another_name_costs_loss():
    rise = costs.wrong_shape_costs(tiny.load(), clips=8, frames=2, side=64)["rise"]["0.7"]
    assert set(rise) <= {f"{a} as {b}" for a in scene.SHAPES for b in scene.SHAPES if a != b}
    assert rise["circle as triangle"] > 0.05


@pytest.mark.slow
def test_smoke():
    from tools.train_tiny.__main__ import smoke

    result = smoke()
    assert result["steps"] == plan.SMOKE_PLAN[-1].until
    assert result["shape"] == [4, 32, 32, 3]
    assert 25 < result["noise"] < 100
