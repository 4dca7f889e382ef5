"""The `sglang-deepep-v2` command. Imports neither torch nor SGLang; a command does so when it needs them."""

import sys

import typer
from typer.core import TyperCommand

from sglang_deepep_v2.ab.command import ab
from sglang_deepep_v2.bench import bench
from sglang_deepep_v2.console import watched_output
from sglang_deepep_v2.doctor import doctor
from sglang_deepep_v2.status import status
from sglang_deepep_v2.upstream import upstream

# Typer's own copy of click, or click itself, by Typer's version.
_UsageError = typer.BadParameter.__base__


class Command(TyperCommand):
    """A command whose refusals name the refused value, which Typer's own leave out; doctor's say where options go."""

    def parse_args(self, ctx, args):
        try:
            return super().parse_args(ctx, args)
        except _UsageError as refusal:
            # Of pydantic, where the installed Typer checks values with it.
            problems = getattr(refusal.__cause__, "errors", list)()
            if problems:
                refusal.message += f", got {problems[0]['input']}"
            if self.name == "doctor" and hasattr(refusal, "option_name"):
                refusal.message += ". A launch command goes after `--`: doctor -- sglang serve MODEL --tp 8"
            raise


class App(typer.Typer):
    """The whole command line; lost output ends it as ``watched_output`` says, whichever command wrote it."""

    def __call__(self, *args, **kwargs):
        with watched_output():
            return super().__call__(*args, **kwargs)


# Typer's frames cut text into 80 columns where there is no terminal to ask.
_FRAMED = sys.stderr.isatty()
app = App(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich" if _FRAMED else None,
    context_settings={} if _FRAMED else {"terminal_width": 240},
)


@app.callback()
def _cli() -> None:
    """Expanded DeepEP V2 prefill for SGLang."""


for command in (status, doctor, ab, bench, upstream):
    app.command(cls=Command)(command)
