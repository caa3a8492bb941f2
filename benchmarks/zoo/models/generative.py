"""Generative models: diffusion U-Nets and transformers, autoencoders, normalizing flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import CLASSES, SAMPLES, Family, images, numbers

GENERATIVE = Family("generative", "Generative models: diffusion, autoencoders, flows")


def from_diffusers(name: str, **how: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        import diffusers

        made: nn.Module = getattr(diffusers, name)(**how)
        return made

    return model


# Diffusion ------------------------------------------------------------------------------------------------------------


class NoisePrediction:
    """The noise that was added to images, as diffusers' example of training without conditions draws it."""

    def __init__(self) -> None:
        from diffusers import DDPMScheduler

        self.scheduler = DDPMScheduler(num_train_timesteps=50)

    def __call__(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        clean = batch[0]
        noise = torch.randn_like(clean)
        steps = torch.randint(0, self.scheduler.config.num_train_timesteps, (clean.shape[0],), device=clean.device)
        noisy = self.scheduler.add_noise(clean, noise, steps)
        return F.mse_loss(model(noisy, steps).sample, noise)


def predict_noise(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return NoisePrediction()(model, batch)


def conditioned(steps: int) -> list[dict[str, Tensor]]:
    """Batches of latents, their noise and timesteps, an encoded text, [samples, 5, 16], and labels."""

    def batch(step: int) -> dict[str, Tensor]:
        draw = numbers(step)
        return {
            "latents": torch.randn(SAMPLES, 4, 8, 8, generator=draw),
            "noise": torch.randn(SAMPLES, 4, 8, 8, generator=draw),
            "timesteps": torch.randint(0, 50, (SAMPLES,), generator=draw),
            "text": torch.randn(SAMPLES, 5, 16, generator=draw),
            "pooled": torch.randn(SAMPLES, 16, generator=draw),
            "labels": torch.randint(0, CLASSES, (SAMPLES,), generator=draw),
        }

    return [batch(step) for step in range(steps)]


def add_noise(batch: dict[str, Tensor]) -> Tensor:
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(num_train_timesteps=50)
    noisy: Tensor = scheduler.add_noise(batch["latents"], batch["noise"], batch["timesteps"])
    return noisy


def predict_by_text(model: Any, batch: dict[str, Tensor]) -> Tensor:
    predicted = model(add_noise(batch), batch["timesteps"], encoder_hidden_states=batch["text"]).sample
    return F.mse_loss(predicted, batch["noise"])


def predict_by_class(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """DiT also predicts a variance, in the second half of its channels, which is not trained by this loss."""
    predicted = model(add_noise(batch), timestep=batch["timesteps"], class_labels=batch["labels"]).sample
    return F.mse_loss(predicted.chunk(2, dim=1)[0], batch["noise"])


def predict_pixart(model: Any, batch: dict[str, Tensor]) -> Tensor:
    predicted = model(
        add_noise(batch),
        encoder_hidden_states=batch["text"],
        timestep=batch["timesteps"],
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample
    return F.mse_loss(predicted.chunk(2, dim=1)[0], batch["noise"])


def match_flow(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Flow matching with times from a logit-normal distribution, as diffusers' scripts for Stable Diffusion 3 do it."""
    latents, noise = batch["latents"], batch["noise"]
    sigmas = torch.sigmoid(torch.randn(latents.shape[0], device=latents.device))
    spread = sigmas.view(-1, 1, 1, 1)
    predicted = model(
        hidden_states=(1 - spread) * latents + spread * noise,
        timestep=sigmas * 1000,
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
        return_dict=False,
    )[0]
    weighting = torch.ones_like(sigmas).view(-1, 1, 1, 1)
    error = weighting.float() * (predicted.float() - (noise - latents).float()) ** 2
    return error.reshape(latents.shape[0], -1).mean(1).mean()


def gaussian_diffusion() -> nn.Module:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    unet = Unet(dim=8, dim_mults=(1, 2), attn_heads=2, attn_dim_head=8)
    model: nn.Module = GaussianDiffusion(unet, image_size=8, timesteps=50)
    return model


GENERATIVE.add(
    "UNet2DModel",
    "diffusers",
    from_diffusers(
        "UNet2DModel",
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    predict_noise,
    images(16),
)
GENERATIVE.add(
    "UNet2DConditionModel",
    "diffusers",
    from_diffusers(
        "UNet2DConditionModel",
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    predict_by_text,
    conditioned,
)
GENERATIVE.add(
    "DiTTransformer2DModel",
    "diffusers",
    from_diffusers(
        "DiTTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        in_channels=4,
        out_channels=8,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
    ),
    predict_by_class,
    conditioned,
)
GENERATIVE.add(
    "PixArtTransformer2DModel",
    "diffusers",
    from_diffusers(
        "PixArtTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        in_channels=4,
        out_channels=8,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=16,
        caption_channels=16,
        use_additional_conditions=False,
    ),
    predict_pixart,
    conditioned,
)
GENERATIVE.add(
    "SD3Transformer2DModel",
    "diffusers",
    from_diffusers(
        "SD3Transformer2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    ),
    match_flow,
    conditioned,
)
GENERATIVE.add(
    "GaussianDiffusion (U-Net)",
    "denoising-diffusion-pytorch",
    gaussian_diffusion,
    lambda model, batch: model(batch[0]),
    images(8),
)


# Autoencoders ---------------------------------------------------------------------------------------------------------


def variational(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Reconstruction and KL divergence, with a latent drawn from the posterior."""
    posterior = model.encode(batch[0]).latent_dist
    rebuilt = model.decode(posterior.sample()).sample
    return F.mse_loss(rebuilt, batch[0]) + 1e-3 * posterior.kl().mean()


def quantized(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Reconstruction and the codebook's loss, with the latents quantized."""
    latents = model.encode(batch[0]).latents
    latents, codebook_loss, _ = model.quantize(model.quant_conv(latents))
    rebuilt = model.decode(latents, force_not_quantize=True).sample
    return F.mse_loss(rebuilt, batch[0]) + codebook_loss


class VariationalAutoencoder(nn.Module):
    """The variational autoencoder of pytorch/examples, for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc21 = nn.Linear(32, 4)
        self.fc22 = nn.Linear(32, 4)
        self.fc3 = nn.Linear(4, 32)
        self.fc4 = nn.Linear(32, 64)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z: Tensor) -> Tensor:
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def evidence(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of pytorch/examples, a sum over the batch, divided by its samples."""
    data = torch.sigmoid(batch[0])
    rebuilt, mu, logvar = model(data)
    bce = F.binary_cross_entropy(rebuilt, data.view(-1, 64), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (bce + kld) / len(data)


class QuantizedAutoencoder(nn.Module):
    """The autoencoder of vector-quantize-pytorch's examples: an encoder, a quantizer, a decoder."""

    def __init__(self) -> None:
        from vector_quantize_pytorch import VectorQuantize

        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(1, 8, kernel_size=3, stride=1, padding=1),
                nn.MaxPool2d(kernel_size=2, stride=2),
                nn.GELU(),
                nn.Conv2d(8, 16, kernel_size=3, stride=1, padding=1),
                nn.MaxPool2d(kernel_size=2, stride=2),
                VectorQuantize(dim=16, codebook_size=16, accept_image_fmap=True),
                nn.Upsample(scale_factor=2, mode="nearest"),
                nn.Conv2d(16, 8, kernel_size=3, stride=1, padding=1),
                nn.GELU(),
                nn.Upsample(scale_factor=2, mode="nearest"),
                nn.Conv2d(8, 1, kernel_size=3, stride=1, padding=1),
            ]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from vector_quantize_pytorch import VectorQuantize

        for layer in self.layers:
            if isinstance(layer, VectorQuantize):
                x, indices, commit_loss = layer(x)
            else:
                x = layer(x)
        return x.clamp(-1, 1), indices, commit_loss


def committed(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    rebuilt, _, commit_loss = model(batch[0])
    return (rebuilt - batch[0]).abs().mean() + 10 * commit_loss.sum()


GENERATIVE.add(
    "AutoencoderKL",
    "diffusers",
    from_diffusers(
        "AutoencoderKL",
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=4,
        latent_channels=4,
    ),
    variational,
    images(16),
)
GENERATIVE.add(
    "VQModel",
    "diffusers",
    from_diffusers(
        "VQModel",
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=4,
        latent_channels=3,
        num_vq_embeddings=16,
    ),
    quantized,
    images(16),
)
GENERATIVE.add("VAE", "pytorch/examples", VariationalAutoencoder, evidence, images(8, channels=1))
GENERATIVE.add("VectorQuantize", "vector-quantize-pytorch", QuantizedAutoencoder, committed, images(8, channels=1))


# Normalizing flows ----------------------------------------------------------------------------------------------------


def points(steps: int) -> list[Tensor]:
    """Batches of points, [samples, 4]."""
    return [torch.randn(SAMPLES, 4, generator=numbers(step)) for step in range(steps)]


def from_zuko(name: str, **how: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        import zuko

        made: nn.Module = getattr(zuko.flows, name)(features=4, hidden_features=(16, 16), **how)
        return made

    return model


def real_nvp() -> nn.Module:
    import normflows

    flows: list[nn.Module] = []
    for _ in range(4):
        flows.append(normflows.flows.AffineCouplingBlock(normflows.nets.MLP([2, 16, 16, 4], init_zeros=True)))
        flows.append(normflows.flows.Permute(4, mode="swap"))
    model: nn.Module = normflows.NormalizingFlow(normflows.distributions.base.DiagGaussian(4), flows)
    return model


GENERATIVE.add(
    "Neural spline flow",
    "zuko",
    from_zuko("NSF", transforms=2, bins=4),
    lambda model, batch: -model().log_prob(batch).mean(),
    points,
)
GENERATIVE.add(
    "Masked autoregressive flow",
    "zuko",
    from_zuko("MAF", transforms=3),
    lambda model, batch: -model().log_prob(batch).mean(),
    points,
)
GENERATIVE.add("RealNVP", "normflows", real_nvp, lambda model, batch: model.forward_kld(batch), points)
