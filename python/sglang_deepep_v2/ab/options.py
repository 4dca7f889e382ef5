"""The options of `ab` with their defaults filled in, and the checkpoints that they name; refusals name the value."""

from __future__ import annotations

import json
import shlex
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
_RANDOM_PREFIX = "random:"

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
    """One checkpoint of the A/B: where it is, and the paths to serve it with, the baseline first."""

    name: str
    model: str
    vocab: int
    paths: list[ServePath]
    with_reference: bool


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
    return tuple(map(int, parts))


def parse_words(server_args: str) -> list[str]:
    try:
        return shlex.split(server_args)
    except ValueError as exc:
        raise typer.BadParameter(f"--server-args {server_args!r} is no shell command line: {exc}") from exc


def parse_folder(pythonpath: Path) -> str:
    if not pythonpath.is_dir():
        raise typer.BadParameter(f"--server-pythonpath {pythonpath} is no folder")
    return str(pythonpath.resolve())


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
    from sglang_deepep_v2.ab.checkpoints import REALISTIC, TINY, ensure_checkpoint

    if options.model is None:
        found = []
        for name, default_paths in (_QUICK if quick else _DEMO_PATHS).items():
            selected = select_paths(default_paths if paths is None else paths, cpu=True, ranks=options.tp)
            _check_fits(TINY[name], options)
            directory = ensure_checkpoint(TINY[name], DEMO_DIR / "checkpoints").resolve()
            found.append(Checkpoint(name, str(directory), TINY[name].vocab, selected, supports(str(directory))))
        return found
    default_paths = _QUICK_MODEL_PATHS if quick or options.cpu else _MODEL_PATHS
    selected = select_paths(default_paths if paths is None else paths, cpu=options.cpu, ranks=options.tp)
    model = options.model
    if model.startswith(_RANDOM_PREFIX):
        name = "random-" + model.removeprefix(_RANDOM_PREFIX)
        if name not in REALISTIC:
            known = ", ".join(_RANDOM_PREFIX + key.removeprefix("random-") for key in REALISTIC)
            raise ValueError(f"--model {model} is unknown; generated ones are {known}")
        _check_fits(REALISTIC[name], options)
        device = "cpu" if options.cpu else "cuda"
        model = str(ensure_checkpoint(REALISTIC[name], DEMO_DIR / "checkpoints", device).resolve())
    return [Checkpoint(Path(model).name, model, _vocabulary(model), selected, False)]


def _check_fits(spec: CheckpointSpec, options: Options) -> None:
    """Refuse what no server of a generated checkpoint starts with. Raises ValueError."""
    if spec.experts % options.tp or spec.heads % options.tp:
        raise ValueError(
            f"--tp {options.tp} must divide the {spec.experts} experts and {spec.heads} attention heads of {spec.name}"
        )
    longest = longest_prompt(options.chunk) + options.new_tokens
    if longest > spec.max_positions:
        raise ValueError(
            f"--chunk {options.chunk} and --new-tokens {options.new_tokens} make sequences of up to {longest} tokens, "
            f"{spec.name} takes {spec.max_positions}"
        )


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _vocabulary(model: str) -> int:
    """The vocabulary of a checkpoint, from its config file or from transformers for a Hugging Face name."""
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
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if not isinstance(size, int) or size <= FIRST_TOKEN:
        raise ValueError(f"--model {model}: config.json must name a vocab_size above {FIRST_TOKEN}, got {size!r}")
    return size
