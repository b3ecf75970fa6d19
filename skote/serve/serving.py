"""A server from its settings to its end: the router is loaded, the socket opened, and all closed again."""

from __future__ import annotations

from skote.model.facts import load_facts
from skote.runtime.router import Router
from skote.runtime.router_command import SKOTERGY, parse_devices
from skote.runtime.text import TextCodec, load_tokenizer
from skote.serve.app import build_app
from skote.serve.door import read_keys
from skote.serve.metrics import Metrics
from skote.serve.server import Server, bind, sigterm_ends_a_server
from skote.serve.service import LOG, Served, Service
from skote.serve.settings import Settings
from skote.types import EngineSpec, ExitCode, RecordError


def serve(settings: Settings) -> ExitCode:
    """Load the model, and serve it until SIGTERM or Ctrl-C.

    Raises:
        UsageError: the address cannot be had, or the keys not be read; further errors are `Router`'s.
        CheckpointError: the directory holds no model or tokenizer that can be loaded.
        RecordError: the folder for logs cannot be made.
        KeyboardInterrupt: after Ctrl-C, when all has ended.
    """
    keys = [] if settings.api_key_file is None else read_keys(settings.api_key_file)
    facts = load_facts(settings.model.path)
    _make_folder(settings)
    codec = load_tokenizer(settings.model.path)
    codec.encode("a")  # the first call drops a truncation that was stored with it, which no other thread must meet
    with bind(settings.host, settings.port) as listener, open_router(settings, codec) as router:
        described = router.describe()
        served = Served(settings.name, min(each["max_model_len"] for each in described), facts.vocab)
        metrics = Metrics(router)
        service = Service(router, codec, served, settings.limits, metrics, log_prompts=settings.log_prompts)
        server = Server(build_app(service, keys=keys), service, drain_s=settings.drain_s)
        for index, each in enumerate(described):
            LOG.info("Replica %d: tier %s, %d positions a request", index, each["tier"], each["max_model_len"])
            for note in each["notes"]:
                LOG.info("Replica %d: %s", index, note)
        with sigterm_ends_a_server():
            server.run([listener])
    LOG.info("%s has ended.", settings.name)
    return ExitCode.DONE


def open_router(settings: Settings, codec: TextCodec) -> Router:
    """The router that the settings ask for; errors as those of `Router`."""
    devices = settings.devices
    batch = settings.engine.max_batch
    return Router(
        settings.model.path,
        parse_devices(devices) if isinstance(devices, str) else devices,
        settings.dtype,
        settings.router.policy,
        batch,
        max_restarts=settings.router.max_restarts,
        hang_s=settings.router.hang_s,
        tpot_slo_ms=settings.router.tpot_slo_ms,
        engine=EngineSpec(SKOTERGY, settings.engine.model_dump()),
        codec=codec,
        log_dir=settings.log_dir,
    )


def _make_folder(settings: Settings) -> None:
    if settings.log_dir is not None:
        try:
            settings.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            raise RecordError(f"log_dir={settings.log_dir} cannot be made a folder ({refused.strerror}).") from refused
