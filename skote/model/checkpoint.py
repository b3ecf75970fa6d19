"""The tensors of a model: read from a directory of safetensors, or drawn at random for a shape without weights.

Both arms of a run take their tensors from here, so that they multiply by the same numbers; `fingerprint` proves it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from skote.model.spec import DecoderSpec, read_json
from skote.types import CheckpointError

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_DRAWN_AT_ONCE = 1 << 22


def load_tensors(local_dir: Path, spec: DecoderSpec, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `spec` with its checkpoint name, one at a time, in `dtype` in host memory.

    Rows of added tokens are zeros.

    Raises:
        CheckpointError: no weights, an unreadable file, or a tensor that is missing, has another shape, or holds NaN or
            infinity.
    """
    shapes = spec.tensor_shapes()
    by_file = _files_of(local_dir, shapes)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    tensor = file.get_tensor(name)
                    if name in VOCABULARY and spec.added_tokens:
                        tensor = F.pad(tensor, (0, 0, 0, spec.added_tokens))
                    if tuple(tensor.shape) != shapes[name]:
                        raise CheckpointError(
                            f"{path} holds {name} as {tuple(tensor.shape)}, config.json asks for {shapes[name]}."
                        )
                    if not torch.isfinite(tensor).all():
                        raise CheckpointError(f"{path} holds {name} with values that are not finite: it is damaged.")
                    yield name, tensor.to(dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): it is damaged or incomplete.") from error


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


def _files_of(local_dir: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """Which file of a checkpoint directory holds which of `names`."""
    index_path, single = local_dir / "model.safetensors.index.json", local_dir / "model.safetensors"
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index_path} is not an index of safetensors files: it needs a weight_map of names.")
        located = {name: local_dir / file for name, file in weight_map.items()}
    elif single.is_file():
        try:
            with safe_open(single, framework="pt") as file:
                located = dict.fromkeys(file.keys(), single)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{single} cannot be read ({error}): it is damaged or incomplete.") from error
    else:
        raise CheckpointError(
            f"{local_dir} has no weights: expected model.safetensors, or model.safetensors.index.json and its files."
        )
    by_file: dict[Path, list[str]] = {}
    for name in names:
        if name not in located:
            raise CheckpointError(f"{local_dir} has no tensor {name}, which its config.json asks for.")
        by_file.setdefault(located[name], []).append(name)
    return by_file
