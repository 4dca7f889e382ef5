"""The `sglang-deepep-v2` command. Imports neither torch nor SGLang; a command does so when it needs them."""

from importlib import import_module

import typer

from sglang_deepep_v2.status import status

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def _cli() -> None:
    """Expanded DeepEP V2 prefill for SGLang."""


app.command()(status)

for name, path in {
    "doctor": "sglang_deepep_v2.doctor",
    "ab": "sglang_deepep_v2.ab.command",
    "bench": "sglang_deepep_v2.bench",
    "upstream": "sglang_deepep_v2.upstream",
}.items():
    try:
        app.command()(getattr(import_module(path), name))
    except (ImportError, AttributeError):
        continue
