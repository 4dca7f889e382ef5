"""The options of `ab` with their defaults filled in, and the checkpoints that they name; refusals name the value."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sglang_deepep_v2.ab.accuracy import EvalSettings, check_data
from sglang_deepep_v2.ab.paths import ServePath, select_paths
from sglang_deepep_v2.ab.probe import FIRST_TOKEN, longest_prompt
from sglang_deepep_v2.ab.reference import supports
from sglang_deepep_v2.ab.servers import ServeSettings

if TYPE_CHECKING:
    from sglang_deepep_v2.ab.checkpoints import CheckpointSpec

DEMO_DIR = Path(".demo")
CHECKPOINTS = DEMO_DIR / "checkpoints"
_RANDOM_PREFIX = "random:"
_LOCK = ".ab.lock"

# Per embedded checkpoint, the baseline first.
_DEMO_PATHS = {
    "qwen3-moe-fp8": "nonexpanded,psum,labels",
    "qwen3-moe-bf16": "nonexpanded,psum,none",
    "mimo-v2-flash-fp8": "nonexpanded,psum",
}
_QUICK = {"qwen3-moe-fp8": "nonexpanded,psum"}
_MODEL_PATHS = "sglang_nonexpanded,sglang_expanded,nonexpanded,psum"
_QUICK_MODEL_PATHS = "nonexpanded,psum"


@dataclass
class Checkpoint:
    """One checkpoint of the A/B: where it is, and the paths to serve it with, the baseline first.

    `spec` is that of a generated checkpoint, which `write_checkpoint` writes.
    """

    name: str
    model: str
    vocab: int
    paths: list[ServePath]
    spec: CheckpointSpec | None = None
    with_reference: bool = False


@dataclass
class Options:
    """The command's options with their defaults filled in."""

    model: str | None
    cpu: bool
    tp: int
    chunk: int
    new_tokens: int
    bound: float
    outliers: float
    lengths: tuple[int, ...]
    extra_args: tuple[str, ...]
    pythonpath: tuple[str, ...]
    out: Path
    jobs: int
    resume: bool
    rounds: int
    tokens: int
    together: bool
    evaluation: EvalSettings | None

    def serve_settings(self, model: str) -> ServeSettings:
        return ServeSettings(model, self.tp, self.chunk, self.cpu, self.extra_args, self.pythonpath)


def parse_lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"--prompt-len takes positive token counts separated by commas, got {text!r}")
    lengths = tuple(map(int, parts))
    if repeated := [length for length in lengths if lengths.count(length) > 1]:
        raise typer.BadParameter(f"--prompt-len names {repeated[0]} twice; each length is measured once")
    return lengths


def parse_words(server_args: str) -> list[str]:
    try:
        return shlex.split(server_args)
    except ValueError as exc:
        raise typer.BadParameter(f"--server-args {server_args!r} is no shell command line: {exc}") from exc


def parse_folder(pythonpath: str) -> str:
    if not pythonpath or not Path(pythonpath).is_dir():
        raise typer.BadParameter(f"--server-pythonpath {pythonpath or repr(pythonpath)} is no folder")
    return str(Path(pythonpath).resolve())


def parse_evaluation(name, data_path, questions, shots, max_new_tokens) -> EvalSettings | None:
    if name is None:
        return None
    if name != "gsm8k":
        raise typer.BadParameter(f"--eval knows gsm8k, got {name!r}")
    if data_path is None or not data_path.is_file():
        raise typer.BadParameter(f"--eval gsm8k needs --data-path FILE, an existing JSONL file; got {data_path}")
    settings = EvalSettings(data_path, questions, shots, max_new_tokens)
    try:
        check_data(settings)
    except (ValueError, OSError) as exc:
        raise typer.BadParameter(str(exc)) from exc
    return settings


def find_checkpoints(options: Options, paths: str | None, quick: bool) -> list[Checkpoint]:
    """The checkpoints that the options name; a generated one is not written yet.

    Raises:
        ValueError: a path, a model or an option does not fit.
    """
    from sglang_deepep_v2.ab.checkpoints import REALISTIC, TINY

    if options.model is None:
        found = []
        for name, default_paths in (_QUICK if quick else _DEMO_PATHS).items():
            selected = select_paths(default_paths if paths is None else paths, cpu=True, ranks=options.tp)
            found.append(_generated(TINY[name], options, selected))
        return found
    default_paths = _QUICK_MODEL_PATHS if quick or options.cpu else _MODEL_PATHS
    selected = select_paths(default_paths if paths is None else paths, cpu=options.cpu, ranks=options.tp)
    model = options.model
    if model.startswith(_RANDOM_PREFIX):
        name = "random-" + model.removeprefix(_RANDOM_PREFIX)
        if name not in REALISTIC:
            known = ", ".join(_RANDOM_PREFIX + key.removeprefix("random-") for key in REALISTIC)
            raise ValueError(f"--model {model} is unknown; generated ones are {known}")
        return [_generated(REALISTIC[name], options, selected)]
    config = _read_config(model)
    # A folder may be named by `.` or a path that ends in `..`.
    name = Path(model).resolve().name if Path(model).exists() else Path(model).name
    vocabulary = _vocabulary(model, config)
    _check_lengths(f"--model {model}", _max_positions(config), options)
    return [Checkpoint(name, model, vocabulary, selected)]


def _generated(spec: CheckpointSpec, options: Options, paths: list[ServePath]) -> Checkpoint:
    _check_ranks(spec, options)
    _check_lengths(spec.name, spec.max_positions, options)
    return Checkpoint(spec.name, str((CHECKPOINTS / spec.name).absolute()), spec.vocab, paths, spec)


def write_checkpoint(checkpoint: Checkpoint, options: Options) -> None:
    """Write a generated checkpoint that is not there yet, and see who can answer for it.

    Raises:
        ValueError: its folder cannot be written to.
    """
    from sglang_deepep_v2.ab.checkpoints import ensure_checkpoint

    if checkpoint.spec is None:
        return
    try:
        ensure_checkpoint(checkpoint.spec, CHECKPOINTS, "cpu" if options.cpu else "cuda")
    except OSError as exc:
        raise ValueError(
            f"checkpoint {checkpoint.name} cannot be written into {CHECKPOINTS.absolute()}: {exc.strerror or exc}; "
            "run ab in a folder that can be written to"
        ) from exc
    checkpoint.with_reference = options.model is None and supports(checkpoint.model)


def _check_ranks(spec: CheckpointSpec, options: Options) -> None:
    """Refuse ranks that no server of a generated checkpoint starts with. Raises ValueError."""
    if spec.experts % options.tp or spec.heads % options.tp:
        raise ValueError(
            f"--tp {options.tp} must divide the {spec.experts} experts and {spec.heads} attention heads of {spec.name}"
        )


def _check_lengths(name: str, max_positions: int | None, options: Options) -> None:
    """Refuse sequences that a server would reject.

    Args:
        name: the checkpoint's, for the message.
        max_positions: most tokens of a sequence by its config; None where only the server knows.
        options: their `--context-length` for the servers goes before the config.

    Raises:
        ValueError: a prompt and what is generated after it are longer.
    """
    asked = _context_length(options.extra_args)
    limit, whose = (max_positions, name) if asked is None else (asked, "--server-args '--context-length'")
    if limit is None:
        return
    longest = longest_prompt(options.chunk) + options.new_tokens
    if longest > limit:
        raise ValueError(
            f"--chunk {options.chunk} and --new-tokens {options.new_tokens} make sequences of up to {longest} tokens, "
            f"{whose} takes {limit}"
        )
    # The measurement generates one token per prompt.
    if too_long := [length for length in options.lengths if length + 1 > limit]:
        raise ValueError(
            f"prompts of {too_long[0]} tokens and one generated token are longer than the {limit} tokens that {whose} "
            f"takes: give --prompt-len lengths of at most {limit - 1}, or '' for no throughput"
        )


def _context_length(words: tuple[str, ...]) -> int | None:
    """The last `--context-length` of a server's arguments; None without one or where it is no number."""
    found = None
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, _, value = word.partition("=")
        if name == "--context-length":
            value = value or following
            found = int(value) if value.isdecimal() else None
    return found


@contextlib.contextmanager
def locked_folder(option: str, folder: Path) -> Iterator[None]:
    """No other `ab` writes into the folder until the end of the block.

    Raises:
        typer.BadParameter: another one does.
    """
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise typer.BadParameter(
                f"{option} {folder} is in use by another ab: wait for its end or name another folder"
            ) from exc
        yield


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _read_config(model: str) -> dict:
    """A checkpoint's text configuration, from its config file or from transformers for a Hugging Face name."""
    config_file = Path(model) / "config.json"
    if config_file.is_file():
        try:
            config = json.loads(config_file.read_text())
        except ValueError as exc:
            raise ValueError(f"--model {model}: {config_file} is not JSON: {exc}") from exc
    elif Path(model).exists():
        raise ValueError(f"--model {model} is no checkpoint folder: it has no config.json")
    else:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=True).to_dict()
        except (ValueError, OSError) as exc:
            reason = str(exc).splitlines()[0]
            raise ValueError(f"--model {model} is no folder here, and as a Hugging Face name: {reason}") from exc
    if not isinstance(config, dict):
        raise ValueError(f"--model {model}: config.json holds no object")
    nested = config.get("text_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"--model {model}: text_config of config.json must be an object, got {nested!r}")
    return config | nested


def _vocabulary(model: str, config: dict) -> int:
    size = config.get("vocab_size")
    if not isinstance(size, int) or size <= FIRST_TOKEN:
        raise ValueError(f"--model {model}: config.json must name a vocab_size above {FIRST_TOKEN}, got {size!r}")
    return size


def _max_positions(config: dict) -> int | None:
    """Most tokens of a sequence; None where the config does not say it in one number, as with scaled positions."""
    limit = config.get("max_position_embeddings")
    rotary = [config.get(name) for name in ("rope_scaling", "rope_parameters")]
    scaled = any(isinstance(settings, dict) and "factor" in settings for settings in rotary)
    return limit if isinstance(limit, int) and not scaled else None
