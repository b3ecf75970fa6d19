"""What Hydra, OmegaConf and argparse say of a command line that they refuse, as one sentence that names the key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

_ASIDE = re.compile(
    r"\s*((full_key|object_type|reference_type)[:=]|See https|Set the environment variable|To append to|Key .* not in)"
)

_ENGINES = ("engine", "compare")


def sentence(text: str) -> str:
    """`text` as one line, without usage, hints about traces, and internals."""
    lines = text.rpartition(": error: ")[2].splitlines()
    lines = [line for line in lines if line.strip() and not _ASIDE.match(line)]
    if lines and lines[0].startswith("Traceback"):  # of the file system, when Hydra makes the run's directory
        lines = lines[-1:]
    said = ""
    for line in lines:
        if line.startswith("Config search path"):
            break
        listed = line.startswith("\t") and not said.endswith(":")
        ended = not said or said[-1] in ".:,;!?"
        said += (", " if listed else " " if ended else ". ") + line.strip()
    return said.strip() or "The command line could not be understood; see --help."


def refusal(said: str, error: BaseException, arguments: Sequence[str], schema: DictConfig) -> str:
    """Why Hydra ended with `error`, having `said` something, on the command line `arguments`.

    `schema` is the tree of all options with their defaults.
    """
    causes = list(_causes(error))
    neighbours = _neighbours(causes)
    if not neighbours and any(isinstance(cause, AssertionError | AttributeError) for cause in causes):
        # Hydra and OmegaConf take it for granted that what an override reaches into is there.
        within = next(filter(None, (_within_null(argument, schema) for argument in arguments)), None)
        if within is not None:
            return within
    return sentence(said) + neighbours + _way_out(said)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _within_null(argument: str, schema: DictConfig) -> str | None:
    """The sentence where an override sets a part of an option that is null as a whole, as its defaults say."""
    key, _, value = argument.lstrip("+~").partition("=")
    names = key.split(".")
    parents = [".".join(names[:length]) for length in range(1, len(names) + value.startswith("{"))]
    null = next((parent for parent in parents if OmegaConf.select(schema, parent, default="") is None), None)
    if null is None:
        return None
    return f"{argument} cannot be set, as {null} is null here: choose an option of conf/{names[0]}/ that fills it."


def _neighbours(causes: Sequence[BaseException]) -> str:
    """Where the error came from an option that is not there: a sentence with those that are."""
    for error in causes:
        if isinstance(error, ConfigKeyError | ConfigAttributeError) and isinstance(error.parent_node, DictConfig):
            place = (error.full_key or "").rpartition(".")[0] or "the top"
            free = " A keyword argument of its class that is not among them takes a + in front." * (place in _ENGINES)
            return f" There is no such option; {place} has {', '.join(map(str, error.parent_node))}.{free}"
    return ""


def _way_out(said: str) -> str:
    """What to do about a mistake of form, where what was `said` does not tell."""
    if "Cannot find primary config" in said:
        return " Experiments need their folder too: -cd experiments -cn NAME."
    unknown = said.rpartition("unrecognized arguments: ")[2].split() if "unrecognized arguments: " in said else []
    if unknown and all("=" in argument and not argument.startswith("-") for argument in unknown):
        return ". Options (KEY=VALUE) have to stand together: put all of them behind -cd, -cn and -m."
    return ""
