"""Tiny models of families that only Transformers runs; replicas as processes, and as actors of a Ray of two nodes;
launchers without a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, biases": ("Qwen2Config", {}),
    "seed_oss, no adapter": ("SeedOssConfig", {"head_dim": 16}),
    "qwen3, norms of queries and keys": ("Qwen3Config", {"head_dim": 16}),
    "gpt2, learned positions": ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}),
    "phi3, fused projections": ("Phi3Config", {}),
    "olmo2, norms after": ("Olmo2Config", {}),
    "granite, a scale of its own": (
        "GraniteConfig",
        {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "gpt_neox, partial rotary": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "gemma, one more than the weight": ("GemmaConfig", {"head_dim": 16}),
    "mixtral, experts": ("MixtralConfig", {"num_local_experts": 4}),
    "stablelm": ("StableLmConfig", {}),
    "phi3, windows": ("Phi3Config", {"sliding_window": 8}),
    "qwen2, dynamic rope": (
        "Qwen2Config",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
}


@pytest.fixture(scope="session")
def make_module() -> Callable[..., Any]:
    """`make_module(name, **changes)`: a fresh module of `CONFIGS[name]` with weights from seed 0, vectors drawn too."""

    def make(name: str, **changes: Any) -> Any:
        import torch
        import transformers

        kind, own = CONFIGS[name]
        config = getattr(transformers, kind)(**SHAPE | own | changes)
        auto: Any = transformers.AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = auto.from_config(config, attn_implementation="sdpa").eval()
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.dim() == 1:
                        parameter.uniform_(0.5, 1.5)
        return module

    return make


@pytest.fixture(scope="session")
def module_directory(make_module: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model above that has no adapter; read only."""
    directory = tmp_path_factory.mktemp("module")
    make_module("seed_oss, no adapter").save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[Any]:
    """A Ray of a head without CPUs and two machines of eight, all of them on this one; this process is connected."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        for _ in range(2):
            cluster.add_node(num_cpus=8, **small)
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def ray_home(ray_nodes: Any) -> Iterator[Any]:
    """Room for three CPU replicas there."""
    from skote.runtime.ray_cluster import RayCluster

    with RayCluster(ray_nodes.address, ["cpu"] * 3) as cluster:
        yield cluster


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def new_replica(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`new_replica(spec, index=, device=, ...)`: a replica of either kind."""
    from skote.runtime.ray_replica import RayReplica
    from skote.runtime.replica import Replica

    return Replica if request.param == "process" else partial(RayReplica, request.getfixturevalue("ray_home"))


class Unlaunched:
    """In place of a kernel, whose launcher does no more than its checks."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., Any]]:
    """`door(launcher, reference, *names)`: `reference`, called with what the checks of `launcher` let pass.

    Of these the one for a CUDA device asks for a CPU; `names` are the keywords that the reference does not know.
    """
    from skote.kernels import launch

    def on_the_cpu(op: str, **tensors: Any) -> None:
        assert all(tensor.device.type == "cpu" for tensor in tensors.values()), op

    def make(launcher: Callable[..., object], reference: Callable[..., Any], *names: str) -> Callable[..., Any]:
        module = sys.modules[launcher.__module__]
        if hasattr(module, "check_cuda"):
            monkeypatch.setattr(module, "check_cuda", on_the_cpu)
        for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Unlaunched())

        def call(*tensors: Any, **options: Any) -> Any:
            launcher(*tensors, **options)
            return reference(*tensors, **{name: value for name, value in options.items() if name not in names})

        return call

    monkeypatch.setattr(launch, "check_cuda", on_the_cpu)
    return make
