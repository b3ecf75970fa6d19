"""The tensors of a model: read from a checkpoint directory, or drawn at random for a shape without weights.

Both arms of a run take their tensors from here, so that they multiply by the same numbers; `fingerprint` proves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from skote.model.spec import DecoderSpec
from skote.model.weight_files import located, read_file
from skote.types import CheckpointError

_DRAWN_AT_ONCE = 1 << 22


def load_tensors(
    local_dir: Path,
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `shapes`, one at a time, with its name there and in `dtype` on `device`.

    Files are opened one after another, and hold no host memory once they are through. Rows of added tokens are zeros.

    Raises:
        CheckpointError: no weights, an unreadable file, or a tensor that is missing, has another shape, or holds NaN or
            infinity.
    """
    for path, names in located(local_dir, {name: in_files(spec, name) for name in shapes}).items():
        for name, tensor in read_file(path, names):
            moved = tensor.to(device)
            if added := added_rows(spec, name):
                moved = F.pad(moved, (0, 0, 0, added))
            if tuple(moved.shape) != shapes[name]:
                raise CheckpointError(
                    f"{path} holds {name} as {tuple(moved.shape)}, config.json asks for {shapes[name]}."
                )
            if not torch.isfinite(moved).all():
                raise CheckpointError(f"{path} holds {name} with values that are not finite: it is damaged.")
            yield name, moved.to(dtype)


def added_rows(spec: DecoderSpec, name: str) -> int:
    """The rows of the tensor `name` that the checkpoint does not hold."""
    vocabulary = (f"{spec.names.embed}.weight", f"{spec.names.lm_head}.weight")
    return spec.added_tokens if name in vocabulary else 0


def in_files(spec: DecoderSpec, name: str) -> tuple[str, ...]:
    """What a checkpoint's files may call the tensor `name`: a file of the model without its head has no first part."""
    spelled = spec.names.in_files(name)
    return spelled + tuple(each.partition(".")[2] for each in spelled)


def fill_random(place: torch.Tensor, name: str, seed: int) -> None:
    """Fill `place`, contiguous, with the tensor that (seed, name) stands for on this kind of device.

    A matrix is normal with standard deviation 1 / sqrt(columns), a bias with 0.02; other vectors, the weights of norms,
    are ones. So every layer adds about as much to the residual stream as it holds (LeCun et al., Efficient BackProp,
    1998), and greedy texts vary: where the embedding outweighs the layers, a model with tied embeddings repeats its
    last token for ever, and equal tokens would show nothing. Drawn in fp32 and rounded part by part, so that no copy of
    a large matrix is ever held.
    """
    if place.ndim == 1 and not name.endswith("bias"):
        place.fill_(1.0)
        return
    generator = torch.Generator(device=place.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little"))
    deviation = 0.02 if place.ndim == 1 else place.shape[-1] ** -0.5
    for part in torch.split(place.view(-1), _DRAWN_AT_ONCE):
        part.copy_(torch.empty(part.shape, device=place.device).normal_(0.0, deviation, generator=generator))
