"""The codec of the embedded HunyuanVideo: the one of the embedded Wan under the names that its pipeline reads."""

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from diffusers.models.modeling_utils import ModelMixin

PATCH = 4  # pixels a side that one latent pixel covers


class PatchCodec(ModelMixin, ConfigMixin):
    """Principal components of 4x4 pixel patches, every frame kept; latents are normalised."""

    temporal_compression_ratio = 1
    spatial_compression_ratio = PATCH

    @register_to_config
    def __init__(self, latent_channels: int = 16, scaling_factor: float = 1.0):
        super().__init__()
        self.basis = torch.nn.Parameter(torch.zeros(3 * PATCH**2, latent_channels))
        self.mean = torch.nn.Parameter(torch.zeros(latent_channels))
        self.std = torch.nn.Parameter(torch.ones(latent_channels))

    @torch.no_grad()
    def set(self, codec: dict[str, torch.Tensor]) -> "PatchCodec":
        """Take basis, mean and std of a fitted codec."""
        for name, value in codec.items():
            getattr(self, name).copy_(value)
        return self.eval()

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """[B, 3, T, H, W] in -1..1 -> latents [B, Z, T, H/4, W/4]."""
        z = torch.einsum("bcthw,cz->bzthw", patchify(video, PATCH), self.basis)
        return (z - self._wide(self.mean)) / self._wide(self.std)

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
        """Latents -> (video,); the pipeline asks for no dictionary."""
        z = latents * self._wide(self.std) + self._wide(self.mean)
        return (unpatchify(torch.einsum("bzthw,cz->bcthw", z, self.basis), PATCH),)

    @staticmethod
    def _wide(channels: torch.Tensor) -> torch.Tensor:
        return channels.view(1, -1, 1, 1, 1)
