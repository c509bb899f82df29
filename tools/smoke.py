"""What a fresh install must be able to do: import, say what serves here, one tiny sparse generation, undone again."""

import torch

import heart_attention as heart
from heart_attention import kernels, tiny


def generate(pipe) -> torch.Tensor:
    """Latents of a few frames, the same at every call."""
    call = {**tiny.QUICK, "height": 64, "width": 64, "num_frames": 4, "num_inference_steps": 7}
    generator = torch.Generator().manual_seed(0)
    return pipe(tiny.prompts("demo")[0], generator=generator, output_type="latent", **call).frames


def main() -> None:
    """Raise if anything is amiss."""
    print(heart.__version__, {name: reasons[:1] for name, reasons in kernels.available().items()})
    pipe = tiny.load()
    dense = generate(pipe)
    with heart.enabled(pipe, "xattention", force_sparse=True):
        sparse = generate(pipe)
        print(heart.stats(pipe))
    if torch.equal(dense, sparse) or not torch.equal(dense, generate(pipe)):
        raise SystemExit("sparse attention changed nothing, or disabling did not undo it")


if __name__ == "__main__":
    main()
