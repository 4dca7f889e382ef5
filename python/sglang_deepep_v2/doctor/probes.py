"""Child programs of the doctor: `probes.py NAME [ARG ...]` does what may crash, and prints one JSON line."""

import json
import os
import sys

_MARK = "@doctor "


def _first(text, limit=600):
    return " ".join(str(text).split())[:limit]


def _failed(error):
    reply = {"error": _first(error) or type(error).__name__, "error_type": type(error).__name__}
    if isinstance(error, ModuleNotFoundError):
        reply["missing"] = error.name
    return reply


def _mapped_nccl():
    """Paths of the libnccl files mapped into this process, in order, and ncclGetVersion of the first."""
    import ctypes

    paths = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if os.path.basename(path).startswith("libnccl.so") and path not in paths:
                paths.append(path)
    number = ctypes.c_int(0)
    if paths:
        try:
            ctypes.CDLL(paths[0]).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            pass
    return paths, number.value


def overlay():
    """The loader's own verdict, and whether a fresh interpreter carries the finder."""
    active = "sglang_deepep_v2.boot" in sys.modules
    from sglang_deepep_v2 import overlay as loader

    kinds = [module.kind for module in loader.modules().values()]
    reply = {
        "active": active,
        "enabled": loader.enabled(),
        "base": loader.base_version(),
        "kinds": {kind: kinds.count(kind) for kind in ("new", "replaces", "extends")},
    }
    try:
        loader.verify()
    except loader.OverlayError as error:
        reply["problem"] = _first(error)
    return reply


def torch():
    """Version, CUDA build, visible devices, and the NCCL that importing torch maps."""
    import torch

    reply = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "available": bool(torch.cuda.is_available()),
        "devices": [],
    }
    if reply["available"]:
        for index in range(torch.cuda.device_count()):
            reply["devices"].append(
                {
                    "name": torch.cuda.get_device_name(index),
                    "capability": torch.cuda.get_device_capability(index),
                }
            )
    reply["nccl_files"], reply["nccl"] = _mapped_nccl()
    try:
        # torch.cuda.nccl.version() is a constant of torch's build, not of the library that is loaded.
        reply["nccl_built"] = list(torch.cuda.nccl.version())
    except Exception:
        reply["nccl_built"] = None
    return reply


def deep_ep():
    """The package that the dispatcher would take: version, wheel, and its elastic buffer's class name.

    As in the dispatcher, the first package with a buffer serves, else the first that is there says what is wrong.
    Importing one runs its host checks.
    """
    replies = []
    for package in ("deep_ep", "deep_ep_v25"):
        try:
            reply = _elastic_buffer(package)
        except Exception as error:
            reply = {**_failed(error), "package": package}
        if reply.get("buffer"):
            refused = [f"{other['package']}: {other.get('error', 'no buffer')}" for other in _there(replies)]
            return {**reply, "refused": refused, "nccl_files": _mapped_nccl()[0]}
        replies.append(reply)
    return {**(_there(replies) or replies)[0], "nccl_files": _mapped_nccl()[0]}


def _there(replies):
    return [reply for reply in replies if reply.get("missing") != reply["package"]]


def _elastic_buffer(package):
    import importlib
    from importlib.metadata import packages_distributions, version

    module = importlib.import_module(package)
    names = [name for name in ("ElasticBuffer", "EPBuffer") if hasattr(module, name)]
    return {
        "package": package,
        "version": str(getattr(module, "__version__", "unknown")),
        "wheels": {name: version(name) for name in packages_distributions().get(package, [])},
        "buffer": names[0] if names else None,
    }


def deep_gemm():
    """Version, whether the contiguous grouped GEMMs take the psum layout, and their row alignment."""
    import inspect

    import deep_gemm

    psum = {}
    for name in ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_contiguous"):
        function = getattr(deep_gemm, name, None)
        try:
            psum[name] = function is not None and "use_psum_layout" in inspect.signature(function).parameters
        except (TypeError, ValueError):
            # A compiled function without a signature says its arguments in its docstring.
            psum[name] = "use_psum_layout" in (function.__doc__ or "")
    ask = getattr(deep_gemm, "get_mk_alignment_for_contiguous_layout", None)
    alignment = None if ask is None else ask()
    # Some versions answer (rows, columns).
    alignment = alignment[0] if isinstance(alignment, tuple) else alignment
    return {
        "version": str(getattr(deep_gemm, "__version__", "unknown")),
        "psum": psum,
        "alignment": None if alignment is None else int(alignment),
    }


def launch(*argv):
    """SGLang's own parsing and resolution of a launch command; no process is started."""
    import contextlib
    import io
    import logging

    logging.disable(logging.ERROR)
    errors = io.StringIO()
    reply = {"stage": "import"}
    try:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        reply["stage"] = "parse"
        with contextlib.redirect_stderr(errors):
            args = prepare_server_args(list(argv))
        reply.update(stage="given", model=args.model_path)
        _check_given(args)
        reply["stage"] = "resolve"
        args.resolve_once()
        reply.update(_resolved(args), stage="done")
    except SystemExit as stop:
        lines = errors.getvalue().strip().splitlines()
        reply.update(error=_first(lines[-1] if lines else f"exit status {stop.code}"), error_type="SystemExit")
    except Exception as error:
        reply.update(error=_first(error, 2000) or type(error).__name__, error_type=type(error).__name__)
        # Hugging Face's "not in the cache, and offline" errors are OSErrors; so is a local config that is no JSON.
        reply["absent"] = isinstance(error, OSError) and not os.path.exists(reply.get("model", ""))
    return reply


_COUNTS = (
    "tp_size", "pp_size", "dp_size", "ep_size", "attn_dp_size", "attn_cp_size", "nnodes", "page_size",
    "context_length", "max_prefill_tokens", "max_total_tokens", "max_running_requests",
)  # fmt: skip


def _check_given(args):
    """Refuses in words what SGLang takes as it is, or fails on without naming it."""
    import re

    for name in _COUNTS:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} is below 1")
    if args.node_rank not in range(args.nnodes):
        raise ValueError(
            f"--node-rank {args.node_rank} is not between 0 and {args.nnodes - 1} (--nnodes {args.nnodes})"
        )
    model = args.model_path
    named = re.fullmatch(r"[\w-][\w.-]*(/[\w.:@-]+)?", model) or "://" in model
    if not named and not os.path.exists(model):
        raise ValueError(f"--model-path {model}: there is no such file or folder")


def _resolved(args):
    """The resolved fields that bear on this backend. Budgets are tokens of one rank."""
    from sglang.srt.arg_groups import moe_hook
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.environ import envs

    view = resolved_view(args)
    reply = {
        "backend": view.moe_a2a_backend,
        "tp": view.tp_size,
        "nnodes": view.nnodes,
        "pp": view.pp_size,
        "mode": view.deepep_v2_mode,
        "role": view.disaggregation_mode,
        "device": view.device,
    }
    if reply["backend"] == "deepep_v2":
        reply["capacity"] = envs.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
        if reply["role"] != "decode":
            reply["required"] = moe_hook.required_deepep_v2_prefill_tokens_per_rank(args)
            reply["sync_free"] = _sync_free(args, view, reply["capacity"])
    return reply


def _sync_free(args, view, capacity):
    """Bytes per layer that prefill without a host sync needs, against the limit; None where no limit is asked for."""
    from sglang.srt.arg_groups import moe_hook
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.environ import envs

    switches = ("ENABLE_SYNC_FREE_PREFILL", "ENABLE_PSUM_PIPELINE", "ENABLE_PREFILL_EXPAND")
    # Plain SGLang declares none of these variables.
    declared = getattr(envs, "SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES", None)
    limit = None if declared is None else declared.get()
    if limit is None or not all(getattr(envs, f"SGLANG_DEEPEP_V2_{name}").get() for name in switches):
        return None
    from sglang.srt.layers.moe.token_dispatcher import sync_free

    model = model_config_of(args)

    def first(*names):
        values = (getattr(model.hf_text_config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    hidden = first("routed_expert_hidden_size", "hidden_size")
    width = first("moe_intermediate_size", "intermediate_size")
    topk, experts = first("num_experts_per_tok"), first(*moe_hook._NUM_EXPERTS_FIELDS)
    if None in (hidden, width, topk, experts):
        return {"limit": limit, "needed": None}
    local = (experts + view.ep_num_redundant_experts) // view.ep_size
    rows = sync_free.capacity_rows(view.tp_size, capacity, topk, local, 128)
    return {
        "limit": limit,
        "needed": sync_free.layer_bytes(rows, hidden, width, bool(model.quantization)),
        "rows": rows,
    }


def main(name, *args):
    probes = {probe.__name__: probe for probe in (overlay, torch, deep_ep, deep_gemm, launch)}
    try:
        reply = probes[name](*args)
    except BaseException as error:
        reply = _failed(error)
    print("\n" + _MARK + json.dumps(reply), flush=True)
    sys.stderr.flush()
    # Skips destructors of half-initialised libraries, which may hang or crash after the answer.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
