"""Turn a checkpoint into the pipeline folder that the package carries."""

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from heart_attention import tiny

from . import hunyuan, model

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "heart_attention" / "tiny"


def pipeline_from(state: dict, averaged: bool = True):
    """The pipeline of a training state, with averaged weights unless told otherwise."""
    weights = state["ema" if averaged else "weights"]
    if any(n.startswith("transformer.single_transformer_blocks.") for n in weights):
        parts = hunyuan.build_parts(state["seed"])
        _take(parts, weights)
        return hunyuan.build_pipeline(*parts.values(), model.fit_codec(state["seed"]))
    transformer, text_encoder, tokenizer = model.initialise(state["seed"])
    _take({"transformer": transformer, "text_encoder": text_encoder}, weights)
    return model.build_pipeline(transformer, text_encoder, tokenizer, model.fit_codec(state["seed"]))


def _take(parts: dict[str, torch.nn.Module], weights: dict[str, torch.Tensor]) -> None:
    """Give each part the weights that begin with its name."""
    for name, module in parts.items():
        own = {n.removeprefix(f"{name}."): w for n, w in weights.items() if n.startswith(f"{name}.")}
        missing, unexpected = module.load_state_dict(own, strict=False)
        # Buffers and tied copies are not parameters; anything else missing is a mistake.
        if unexpected or set(missing) & {n for n, _ in module.named_parameters()}:
            raise ValueError(f"checkpoint does not fit the model: missing {missing}, unexpected {unexpected}")


def _name_tokenizers(out: Path) -> None:
    """Name the tokenizers' class as both transformers 4 and 5 know it; 5 would write a name that 4 lacks."""
    index = out / "model_index.json"
    parts = json.loads(index.read_text())
    for name in [n for n in parts if n.startswith("tokenizer")]:
        config = out / name / "tokenizer_config.json"
        settings = json.loads(config.read_text())
        parts[name] = ["transformers", "PreTrainedTokenizerFast"]
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings.pop("extra_special_tokens", None)  # an empty list, where 4 wants a dict
        config.write_text(json.dumps(settings, indent=2) + "\n")
    index.write_text(json.dumps(parts, indent=2) + "\n")


def _narrow(path: Path) -> None:
    """Keep each tensor of a file in bfloat16 where that changes no number: most of the codec's are zeros and ones."""
    with safe_open(path, "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}
        about = file.metadata()
    save_file(
        {n: w.bfloat16() if torch.equal(w.bfloat16().to(w.dtype), w) else w for n, w in kept.items()}, path, about
    )
    path.chmod(0o644)


def load_run(run: Path, averaged: bool = True):
    """The pipeline of ``run/checkpoint.pt``, silent."""
    pipe = pipeline_from(torch.load(run / "checkpoint.pt", weights_only=True), averaged)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def export(run: Path, out: Path) -> Path:
    """Write ``out`` (a diffusers folder, safetensors, the transformer in bfloat16) from ``run/checkpoint.pt``."""
    pipe = load_run(run)
    pipe.transformer.to(torch.bfloat16)
    pipe.save_pretrained(out)
    _narrow(next((out / "vae").glob("*.safetensors")))
    _name_tokenizers(out)
    return out


def thin(run: Path, out: Path) -> Path:
    """Write what training can go on from in a fifth of the bytes: averaged weights in bfloat16, no optimisers."""
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    weights = {n: w.bfloat16() for n, w in state["ema"].items()}
    return _light(weights, state["step"], state["seed"], out)


def unpack(name: str, step: int, out: Path) -> Path:
    """Write what training can go on from at this step of its plan, of packaged weights: they are averaged ones too."""
    pipe = tiny.load(name)
    parts = {n: getattr(pipe, n, None) for n in ("transformer", "text_encoder", "text_encoder_2")}
    named = {f"{n}.{m}": p for n, part in parts.items() if part is not None for m, p in part.named_parameters()}
    return _light({n: p.detach().bfloat16() for n, p in named.items()}, step, 0, out)


def _light(weights: dict[str, torch.Tensor], step: int, seed: int, out: Path) -> Path:
    """A checkpoint of averaged weights alone."""
    out.mkdir(parents=True, exist_ok=True)
    light = {"step": step, "seed": seed, "weights": weights, "ema": weights, "optimisers": None}
    torch.save(light, out / "checkpoint.pt")
    return out


def main(argv: list[str] | None = None) -> None:
    """Run ``python -m tools.train_tiny.export --run runs/tiny [--thin runs/handed-on]``; or the way back with --unpack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--out", type=Path, default=PACKAGE / "weights")
    parser.add_argument("--thin", type=Path, help="write a small checkpoint into this folder instead")
    parser.add_argument("--unpack", choices=("model", "hunyuan"), help="packaged weights into --run, to train on from")
    parser.add_argument("--step", type=int, help="with --unpack: of the plan, where training goes on")
    args = parser.parse_args(argv)
    if (args.unpack is None) != (args.step is None):
        parser.error("--unpack and --step go together: which weights, and where in their plan")
    if args.unpack:
        unpack(args.unpack, args.step, args.run)
    elif args.thin:
        thin(args.run, args.thin)
    else:
        export(args.run, args.out)


if __name__ == "__main__":
    main()
