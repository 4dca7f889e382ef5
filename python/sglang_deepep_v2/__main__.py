"""``python -m sglang_deepep_v2``: the command line where no console script is installed."""

from sglang_deepep_v2.cli import app

app(prog_name="sglang-deepep-v2")
