"""Speech models, of transformers: waveforms and spectrograms to labels, to text, or to their own hidden units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.entry import CLASSES, SAMPLES, Family, numbers, own_loss, tokens
from benchmarks.zoo.models.language import BART, SMALL, SPECIAL, Batches, from_transformers

SPEECH = Family("speech", "Speech and audio")

LETTERS = 32


def waves(targets: Callable[[int], Tensor], length: int = 1600) -> Batches:
    """Batches of waveforms, [samples, length], with their targets as labels."""

    def batch(step: int) -> dict[str, Tensor]:
        return {"input_values": torch.randn(SAMPLES, length, generator=numbers(step)), "labels": targets(step)}

    return lambda steps: [batch(step) for step in range(steps)]


def transcripts(step: int, length: int = 6) -> Tensor:
    """Ragged texts, [samples, length], -100 beyond their ends."""
    return tokens(length, LETTERS)(step + 1)[step]["labels"]


def classes(step: int) -> Tensor:
    """One label for each sample."""
    return torch.randint(0, CLASSES, (SAMPLES,), generator=numbers(1000 + step))


def spectrograms(bands: int, frames: int, *, bands_first: bool = False, masked: bool = False) -> Batches:
    """Batches of spectrograms with ragged transcripts as labels; ``masked``: of ragged lengths themselves."""

    def batch(step: int) -> dict[str, Tensor]:
        sizes = (bands, frames) if bands_first else (frames, bands)
        made = {"input_features": torch.randn(SAMPLES, *sizes, generator=numbers(step)), "labels": transcripts(step)}
        if masked:
            lengths = torch.randint(frames // 2, frames + 1, (SAMPLES, 1), generator=numbers(3000 + step))
            lengths[0] = frames
            made["attention_mask"] = (torch.arange(frames) < lengths).long()
        return made

    return lambda steps: [batch(step) for step in range(steps)]


def labelled_spectrograms(bands: int, frames: int) -> Batches:
    """Batches of spectrograms with one label each."""

    def batch(step: int) -> dict[str, Tensor]:
        return {"input_values": torch.randn(SAMPLES, frames, bands, generator=numbers(step)), "labels": classes(step)}

    return lambda steps: [batch(step) for step in range(steps)]


# Waveforms ------------------------------------------------------------------------------------------------------------

WAVES: dict[str, Any] = {
    **SMALL,
    **SPECIAL,
    "vocab_size": LETTERS,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def add_wave(name: str, model: str, config: str, targets: Callable[[int], Tensor], **how: Any) -> None:
    SPEECH.add(name, "transformers", from_transformers(model, config, **{**WAVES, **how}), own_loss, waves(targets))


add_wave("Wav2Vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", transcripts, layerdrop=0.0, mask_time_length=4)
add_wave("Wav2Vec2, layers dropped", "Wav2Vec2ForCTC", "Wav2Vec2Config", transcripts, mask_time_length=4)
add_wave(
    "HuBERT",
    "HubertForCTC",
    "HubertConfig",
    transcripts,
    layerdrop=0.0,
    apply_spec_augment=False,
    ctc_loss_reduction="mean",
)
add_wave(
    "WavLM",
    "WavLMForSequenceClassification",
    "WavLMConfig",
    classes,
    layerdrop=0.0,
    apply_spec_augment=False,
    num_labels=CLASSES,
)
add_wave(
    "SEW",
    "SEWForSequenceClassification",
    "SEWConfig",
    classes,
    layerdrop=0.0,
    apply_spec_augment=False,
    num_labels=CLASSES,
)

# Spectrograms ---------------------------------------------------------------------------------------------------------

SEQUENCES: dict[str, Any] = {name: size for name, size in BART.items() if name != "max_position_embeddings"}

SPEECH.add(
    "Whisper",
    "transformers",
    from_transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **SEQUENCES,
        **SPECIAL,
        vocab_size=LETTERS,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        begin_suppress_tokens=None,
    ),
    own_loss,
    spectrograms(8, 32, bands_first=True),
)
SPEECH.add(
    "Speech2Text",
    "transformers",
    from_transformers(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        **SEQUENCES,
        **SPECIAL,
        vocab_size=LETTERS,
        input_feat_per_channel=8,
        conv_channels=32,
        max_source_positions=64,
        max_target_positions=16,
    ),
    own_loss,
    spectrograms(8, 32, masked=True),
)
SPEECH.add(
    "AST",
    "transformers",
    from_transformers(
        "ASTForAudioClassification",
        "ASTConfig",
        **SMALL,
        num_mel_bins=16,
        max_length=24,
        patch_size=8,
        frequency_stride=6,
        time_stride=6,
        num_labels=CLASSES,
    ),
    own_loss,
    labelled_spectrograms(16, 24),
)
