"""The `sglang-deepep-v2` command. Imports neither torch nor SGLang; a command does so when it needs them."""

from importlib.util import find_spec

import typer

from sglang_deepep_v2.status import status

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def _cli() -> None:
    """Expanded DeepEP V2 prefill for SGLang."""


app.command()(status)

if find_spec("sglang_deepep_v2.doctor"):
    from sglang_deepep_v2.doctor import doctor

    app.command()(doctor)
if find_spec("sglang_deepep_v2.ab"):
    from sglang_deepep_v2.ab.command import ab

    app.command()(ab)
if find_spec("sglang_deepep_v2.bench"):
    from sglang_deepep_v2.bench import bench

    app.command()(bench)
if find_spec("sglang_deepep_v2.upstream"):
    from sglang_deepep_v2.upstream import upstream

    app.command()(upstream)
