"""What `skote-serve KEY=VALUE ...` takes: every key with its kind, its default and what it does."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skote.runtime.policies import POLICIES
from skote.types import UsageError


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Model(_Settings):
    """Which model is served."""

    path: Path = Field(description="a checkpoint directory with its tokenizer; must be given")
    name: str | None = Field(default=None, min_length=1, description="what clients call it; null: the directory's name")


class Engine(_Settings):
    """Options of the engine, as in conf/engine/skotergy.yaml."""

    max_batch: int = Field(
        default=1, ge=1, le=128, description="requests that a replica advances together; 1 is the fastest"
    )
    max_model_len: int | Literal["auto"] | None = Field(
        default=None,
        description="positions a request may take; auto: what memory holds; null: the model's, at most 8192",
    )
    prefill_chunk: int = Field(default=512, ge=1, description="tokens of prompts between two steps of a batch")
    prefix_cache: bool = Field(default=False, description="keep pages of prompts, on CUDA with max_batch above 1")
    warmup_buckets: list[int] | None = Field(
        default=None, description="prompt lengths that are captured at load; null: a ladder"
    )
    compile: bool = Field(default=True, description="compile or capture; false: plain ops")


class Routing(_Settings):
    """Options of the router, as in conf/router."""

    policy: str = Field(default="least_work", description=", ".join(POLICIES))
    max_restarts: int = Field(default=3, ge=0, description="how often a replica that ended is started again")
    hang_s: float | None = Field(
        default=300.0, gt=0, description="seconds without a token after which a busy replica is ended"
    )
    tpot_slo_ms: float | None = Field(
        default=None, gt=0, description="milliseconds between two tokens, for which others wait"
    )


class Limits(_Settings):
    """What no client may exceed."""

    body_bytes: int = Field(default=2**20, ge=1, description="bytes of a request's body; 413 beyond")
    prompt_tokens: int | None = Field(
        default=None, ge=1, description="tokens of a prompt; null: what the context holds"
    )
    output_tokens: int | None = Field(
        default=None, ge=1, description="tokens of an answer; null: what the context holds"
    )
    concurrent_requests: int = Field(
        default=256, ge=1, description="requests that run or wait, all together; 429 beyond"
    )
    connections: int = Field(default=512, ge=1, description="open connections; 503 beyond")
    queue_s: float = Field(default=60.0, gt=0, description="seconds that a request may wait for a replica; 503 then")
    stalled_s: float = Field(
        default=1.0, gt=0, description="seconds that a reader may take nothing of what waits for it"
    )
    upload_s: float = Field(default=10.0, gt=0, description="seconds for a request to arrive: its head, then its body")


class Settings(_Settings):
    """All keys."""

    model: Model
    devices: str | list[str] = Field(default="1", description="replicas: a number, all, cpu, cuda:1, [cuda:0,cuda:2]")
    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = Field(default="fp32", description="fp32, tf32, bf16 or fp16")
    host: str = Field(
        default="127.0.0.1", description="the address to listen at; beyond loopback api_key_file must be given"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free one; the log says which")
    api_key_file: Path | None = Field(
        default=None, description="a file with one key a line, any of which clients must send"
    )
    drain_s: float = Field(default=30.0, ge=0, description="seconds that running requests have to end after SIGTERM")
    log_prompts: bool = Field(default=False, description="write prompts and answers to the log")
    log_dir: Path | None = Field(default=None, description="a folder for one log a replica; null: stderr")
    engine: Engine = Engine()
    router: Routing = Routing()
    limits: Limits = Limits()

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.model.name or self.model.path.resolve().name

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Settings from KEY=VALUE arguments; null is no value, [a,b] a list, a later argument wins.

    Raises:
        UsageError: an argument is not KEY=VALUE, a key is unknown or missing, a value is of the wrong kind, or the
            server would be open to others without a key.
    """
    tree: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise UsageError(f"{argument!r} is not KEY=VALUE; see skote-serve --help.")
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise UsageError(f"{key}: {name} is no group of keys; see skote-serve --help.")
        node[last] = _value(key, value)
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as refused:
        raise UsageError(_sentence(refused)) from None
    if not settings.is_loopback and settings.api_key_file is None:
        raise UsageError(
            f"host={settings.host} can be reached by others: give api_key_file=FILE with a key, or listen at 127.0.0.1."
        )
    return settings


def keys() -> Iterator[tuple[str, str, str]]:
    """Every key, its default and its description, in the order in which they are documented."""

    def walk(kind: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
        for name, field in kind.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, _Settings):
                yield from walk(field.annotation, f"{prefix}{name}.")
            else:
                default = "" if field.is_required() else _text(field.default)
                yield f"{prefix}{name}", default, field.description or ""

    return walk(Settings, "")


def _value(key: str, value: str) -> object:
    if value == "null":
        return None
    if not value.startswith("["):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise UsageError(f"{key}={value} is not a list such as [a,b].") from None


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _sentence(refused: ValidationError) -> str:
    error = refused.errors(include_url=False)[0]
    key = ".".join(str(each) for each in error["loc"] if str(each) in _NAMES)
    if error["type"] == "missing":
        missing = "model.path=DIR" if key == "model" else key
        return f"{missing} is missing: skote-serve model.path=DIR; see skote-serve --help."
    if error["type"] == "extra_forbidden":
        return f"There is no key {'.'.join(map(str, error['loc']))}; see skote-serve --help."
    return f"{key}={error['input']}: {error['msg']}; see skote-serve --help."


_NAMES = {name for key, _, _ in keys() for name in key.split(".")}
"""Of keys and groups: what else stands in pydantic's places are alternatives of a union."""
