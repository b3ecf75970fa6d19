"""A model as Transformers' own module: built from a checkpoint directory, or from its config.json and chance.

The baseline arm and our tiers 2 and 3 load here, so that they multiply by the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from skote.model.checkpoint import fill_random
from skote.model.config_file import read_config
from skote.types import CheckpointError


@torch.no_grad()
def load_module(
    local_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    random_seed: int | None,
    layers: int | None,
    attention: str | None = None,
) -> Any:  # noqa: ANN401 (Transformers' models are untyped)
    """The directory's causal language model in `dtype` on `device`, ready for inference; `layers` cuts it.

    `attention` is Transformers' attn_implementation; None for its own choice, sdpa where the model has it and it does
    all that the model asks for.
    With `random_seed` only config.json is read: each parameter is filled by `fill_random` of its name.

    Raises:
        CheckpointError: Transformers cannot load the directory, or would fill a tensor that it lacks with chance.
    """
    # Its bar would come between our own lines on a user's terminal.
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = _config(local_dir, layers)
    attention = attention or _exact_attention(config)
    auto: Any = transformers.AutoModelForCausalLM
    with _named(local_dir):
        if random_seed is not None:
            with device:
                module = load_causal_lm(auto.from_config, config, dtype, attn_implementation=attention)
            for name, parameter in module.named_parameters():
                fill_random(parameter.data, name, random_seed)
            return module.eval()
        module, loading = load_causal_lm(
            auto.from_pretrained,
            str(local_dir),
            dtype,
            config=config,
            attn_implementation=attention,
            ignore_mismatched_sizes=True,  # they are told apart below
            output_loading_info=True,
        )
        _check_complete(local_dir, loading)
        return module.to(device).eval()


def _exact_attention(config: Any) -> str | None:  # noqa: ANN401
    """eager where scores are capped: sdpa leaves the cap out, and Transformers 5.17 takes it for Gemma 2 still."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def empty_module(local_dir: Path, layers: int | None) -> Any:  # noqa: ANN401
    """The module without memory for its weights, on the meta device.

    Raises:
        CheckpointError: Transformers does not know the model.
    """
    config = _config(local_dir, layers)
    auto: Any = transformers.AutoModelForCausalLM
    with _named(local_dir), torch.device("meta"):
        return auto.from_config(config)


@torch.no_grad()
def module_over(
    local_dir: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, device: torch.device, layers: int | None
) -> Any:  # noqa: ANN401
    """The directory's model, ready for eager inference, over `tensors` by the names of its parameters, uncopied.

    Raises:
        CheckpointError: Transformers does not know the model, or it has other parameters.
    """
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    given = dict(tensors)
    dtype = next(iter(given.values())).dtype
    config = _config(local_dir, layers)
    auto: Any = transformers.AutoModelForCausalLM
    with _named(local_dir):
        with torch.device("meta"):
            kind = type(auto.from_config(config))
        # Loading one repeated number takes no room, and computes what is no parameter: frequencies, scales.
        empty = {name: torch.zeros((), dtype=dtype).expand(tensor.shape) for name, tensor in given.items()}
        module = load_causal_lm(
            kind.from_pretrained,
            None,
            dtype,
            config=config,
            state_dict=empty,
            attn_implementation="eager",
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if set(names.values()) != set(given):
        other = ", ".join(sorted(set(names.values()) ^ set(given))[:3])
        raise CheckpointError(f"{local_dir} is a model with other parameters in Transformers: {other}.")
    own = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in given.items()}
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[leaf] = own[names[id(parameter)]]
    return module.to(device).eval()


def add_token(module: Any, token_id: int) -> bool:  # noqa: ANN401
    """Give the module embedding rows of zeros up to `token_id`; whether it lacked any."""
    rows = module.get_input_embeddings().weight.shape[0]
    if token_id < rows:
        return False
    module.resize_token_embeddings(token_id + 1, mean_resizing=False)
    for embeddings in (module.get_input_embeddings(), module.get_output_embeddings()):
        embeddings.weight[rows:] = 0.0
    return True


def load_causal_lm(load: Callable[..., Any], source: Any, dtype: torch.dtype, **options: Any) -> Any:  # noqa: ANN401
    """`load(source, dtype=dtype)`, or with `torch_dtype=` where this Transformers does not know `dtype` yet."""
    try:
        return load(source, dtype=dtype, **options)
    except TypeError as error:
        if "'dtype'" not in str(error):
            raise
        return load(source, torch_dtype=dtype, **options)


def _config(local_dir: Path, layers: int | None) -> Any:  # noqa: ANN401
    read_config(local_dir)  # a name that is no directory would be looked up on the hub
    with _named(local_dir):
        config = transformers.AutoConfig.from_pretrained(str(local_dir))
    if layers is None:
        return config
    if not 1 <= layers <= config.num_hidden_layers:
        raise CheckpointError(f"layers must lie between 1 and {config.num_hidden_layers}, got {layers}.")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    return config


@contextmanager
def _named(local_dir: Path) -> Iterator[None]:
    """Turn what Transformers raises over a directory into one sentence that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"Transformers cannot load {local_dir}: {reason}") from error


def _check_complete(local_dir: Path, loading: dict[str, Any]) -> None:
    for name in sorted(loading["missing_keys"]):
        raise CheckpointError(f"{local_dir} has no tensor {name}, which its config.json asks for.")
    for name, found, wanted in sorted(loading["mismatched_keys"]):
        raise CheckpointError(f"{local_dir} holds {name} as {tuple(found)}, config.json asks for {tuple(wanted)}.")
