"""new: the buffer of DeepEP V2: its class, the environment that it reads, and the one instance of this process.

One adapter for the three classes that can stand behind the dispatcher: ``ElasticBuffer`` (DeepEP 2.0 and 2.1),
``EPBuffer`` (DeepEP 2.5) and the reference transport over ``torch.distributed``.
"""

import importlib
import inspect
import logging
import os
import re
import traceback
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_exec, get_parallel, get_resources

logger = logging.getLogger(__name__)

# The wheel of DeepEP 2.5 installs deep_ep_v25, so that both can be there; its own build is deep_ep.
_PACKAGES = ("deep_ep", "deep_ep_v25")
_CLASS_NAMES = ("ElasticBuffer", "EPBuffer")
_NCCL = {"deep_ep": "2.30.7", "deep_ep_v25": "2.32.3"}
# The word, not a part of PLUGIN or ENGINE.
_GIN = re.compile(r"(?<![A-Z])GIN(?![A-Z])")
_INFINIBAND = Path("/sys/class/infiniband")


class BufferClass(NamedTuple):
    """A usable buffer class, or why there is none.

    Attributes:
        cls: the class, None when it cannot be used.
        transport: ``deep_ep`` or ``reference``.
        error: what importing it raised, None when ``cls`` is set.
        package: the package that ``cls`` or ``error`` comes from.
    """

    cls: type | None
    transport: str
    error: BaseException | None
    package: str = "deep_ep"


def find_buffer_class() -> BufferClass:
    """The buffer class that the environment and the installed packages name; never raises."""
    if envs.SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT.get():
        try:
            from sglang_deepep_v2.cpu_reference.elastic_buffer import ReferenceElasticBuffer
        except Exception as error:
            return BufferClass(None, "reference", error)
        return BufferClass(ReferenceElasticBuffer, "reference", None)
    tried = []
    for package in _PACKAGES:
        tried.append(_import_buffer_class(package))
        if tried[-1].cls is not None:
            return tried[-1]
    # A package that is there and refuses says more than one that is missing.
    return next((found for found in tried if not _is_missing(found)), tried[0])


def _is_missing(found: BufferClass) -> bool:
    return isinstance(found.error, ModuleNotFoundError) and found.error.name == found.package


def _import_buffer_class(package: str) -> BufferClass:
    # DeepEP checks the host at import with bare asserts (NCCL that is loaded, CUDA toolkit), hence any exception.
    try:
        module = importlib.import_module(package)
    except Exception as error:
        return BufferClass(None, "deep_ep", error, package)
    name = next((name for name in _CLASS_NAMES if hasattr(module, name)), None)
    if name is None:
        version = getattr(module, "__version__", "unknown")
        text = f"{package} {version} has neither of {', '.join(_CLASS_NAMES)}; V2 needs >= 2.0"
        return BufferClass(None, "deep_ep", ImportError(text, name=package), package)
    cls = getattr(module, name)
    return BufferClass(_copying_ids(cls) if name == "EPBuffer" else cls, "deep_ep", None, package)


def _copying_ids(cls: type) -> type:
    """DeepEP 2.5's class with ``do_handle_copy`` as 2.1 has it: 2.5 refuses it, and its handle names the given ids."""

    class EPBuffer(cls):
        def dispatch(self, x, *, topk_idx, do_handle_copy=True, **options):
            return super().dispatch(x, topk_idx=topk_idx.clone() if do_handle_copy else topk_idx, **options)

    EPBuffer.__module__, EPBuffer.__qualname__ = cls.__module__, cls.__qualname__
    return EPBuffer


@cache
def buffer_class() -> BufferClass:
    """:func:`find_buffer_class`, settled at the first call."""
    return find_buffer_class()


def require(found: BufferClass) -> type:
    """``found.cls``.

    Raises:
        ImportError: there is none; the message carries the reason and the command that fixes it.
    """
    if found.cls is not None:
        return found.cls
    reason = _reason(found.error)
    if found.transport == "reference":
        fix = "pip install sglang-deepep-v2, or unset SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT"
    elif not isinstance(found.error, ModuleNotFoundError) and "nccl" in str(found.error).lower():
        version = _NCCL[found.package]
        fix = (
            f"pip install --force-reinstall --no-deps nvidia-nccl-cu13=={version}, the NCCL that {found.package} needs"
        )
    elif isinstance(found.error, ModuleNotFoundError) or getattr(found.error, "name", None) == found.package:
        # Missing, or too old.
        fix = "pip install sgl-deep-ep==0.1.2.post1"
    else:
        fix = f"{found.package} is installed and refuses this host; CUDA_HOME must name a CUDA 13 toolkit with nvcc"
    raise ImportError(
        f"--moe-a2a-backend deepep_v2 cannot load its buffer class: {reason}. Fix: {fix}. "
        "`sglang-deepep-v2 doctor` checks the whole stack; --moe-a2a-backend deepep does without it."
    ) from found.error


def _reason(error: BaseException) -> str:
    """Type and text of an error; where it has no text, as a bare assert, the line that raised it."""
    text = str(error)
    if not text and error.__traceback__:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.line} ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {text}"


def prepare_environment(num_nodes: int) -> None:
    """Set what DeepEP reads from the environment when a buffer is built, leaving what the user set.

    Args:
        num_nodes: nodes of the deployment. On one node without an RDMA device, NCCL's GPU-initiated networking
            cannot start and DeepEP would refuse more than one rank.
    """
    # Reusing torch's communicator needs a process group bound to its device, which SGLang's is not.
    os.environ.setdefault("EP_REUSE_NCCL_COMM", "0")
    if num_nodes == 1 and "EP_DISABLE_GIN" not in os.environ and not _has_rdma_device():
        os.environ["EP_DISABLE_GIN"] = "1"
        logger.info("DeepEP v2: no RDMA device on this one node, GIN is off (EP_DISABLE_GIN=1).")


def _has_rdma_device() -> bool:
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


@cache
def _accepted(cls: type) -> frozenset[str] | None:
    parameters = inspect.signature(cls.__init__).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


def build(cls: type, group: dist.ProcessGroup, required: dict[str, Any], optional: dict[str, Any]) -> Any:
    """``cls(group, ...)`` with the required keywords and those optional ones that this version of the class knows.

    Raises:
        TypeError: the class does not take a required keyword; the message names it and DeepEP's version.
        RuntimeError: NCCL's GPU-initiated networking could not start; the message names the variable.
    """
    accepted = _accepted(cls)
    if accepted is not None:
        missing = sorted(set(required) - accepted)
        if missing:
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__} does not take {', '.join(missing)}; "
                "this backend was written for deep_ep 2.0 to 2.5"
            )
        optional = {name: value for name, value in optional.items() if name in accepted}
    try:
        return cls(group, **required, **optional)
    except Exception as error:
        if not _GIN.search(str(error)):
            raise
        raise RuntimeError(
            f"DeepEP v2 could not start NCCL's GPU-initiated networking: {error}. On one node EP_DISABLE_GIN=1 does "
            "without it; across nodes the NICs and NCCL must support it (`sglang-deepep-v2 doctor`)."
        ) from error


def get_allow_hybrid_mode() -> bool:
    """Whether ranks of several nodes exchange tokens (``--deepep-v2-mode hybrid``); start-up refuses direct there."""
    return get_exec().moe.deepep_v2_mode == "hybrid"


class DeepEPv2Buffer:
    """Facade of the one buffer of this process, kept in SGLang's runtime resources under its key."""

    _STATE_KEY = "deepep_v2_ep_state"

    @classmethod
    def _state(cls) -> SimpleNamespace:
        buffers = get_resources().buffers
        state = buffers.get(cls._STATE_KEY)
        if state is None:
            state = buffers[cls._STATE_KEY] = SimpleNamespace(buffer=None, key=None, live_handles=set())
        return state

    @staticmethod
    def make_key(
        group: dist.ProcessGroup,
        hidden_size: int,
        router_topk: int,
        num_max_dispatch_tokens_per_rank: int,
        use_fp8_dispatch: bool,
        allow_hybrid_mode: bool,
    ) -> tuple:
        """What a buffer is built for; layers with equal keys share it."""
        return (
            group,
            hidden_size,
            router_topk,
            num_max_dispatch_tokens_per_rank,
            use_fp8_dispatch,
            allow_hybrid_mode,
            dist.get_world_size(group),
        )

    @classmethod
    def find(cls, key: tuple):
        """The buffer of this key if it is the one that stands, else None."""
        state = cls._state()
        return state.buffer if state.buffer is not None and state.key == key else None

    @classmethod
    def get_buffer(
        cls,
        group: dist.ProcessGroup,
        hidden_size: int,
        router_topk: int,
        num_max_dispatch_tokens_per_rank: int,
        use_fp8_dispatch: bool,
        allow_hybrid_mode: bool | None = None,
    ):
        """The buffer of this key; building one is collective over ``group``.

        Args:
            group: ranks that exchange tokens.
            hidden_size: elements per token.
            router_topk: experts per token.
            num_max_dispatch_tokens_per_rank: tokens that one rank may dispatch at once, equal on every rank.
            use_fp8_dispatch: whether FP8 rows with scales travel.
            allow_hybrid_mode: RDMA between nodes; None takes ``--deepep-v2-mode``.

        Raises:
            ImportError: no buffer class can be loaded.
            RuntimeError: another key's buffer still has an unconsumed dispatch handle.
        """
        if allow_hybrid_mode is None:
            allow_hybrid_mode = get_allow_hybrid_mode()
        key = cls.make_key(
            group, hidden_size, router_topk, num_max_dispatch_tokens_per_rank, use_fp8_dispatch, allow_hybrid_mode
        )
        return cls.get_or_build(key)

    @classmethod
    def get_or_build(cls, key: tuple):
        """The buffer of a key of :meth:`make_key`; raises as :meth:`get_buffer` does."""
        buffer = cls.find(key)
        return buffer if buffer is not None else cls._build(key)

    @classmethod
    def _build(cls, key: tuple):
        cls_to_build = require(buffer_class())
        state = cls._state()
        if state.live_handles:
            raise RuntimeError(
                f"DeepEP v2 cannot rebuild its buffer for {key[1:]}: {len(state.live_handles)} dispatch handle(s) of "
                f"the buffer for {state.key[1:]} still wait for combine. All MoE layers of a process need one hidden "
                "size, topk, dtype and mode."
            )
        if state.buffer is not None:
            logger.warning(
                "DeepEP v2 buffer: the one for %s gives way to one for %s; captured graphs that use it break, and "
                "layers that alternate rebuild it every time.",
                state.key[1:],
                key[1:],
            )
        # The old buffer's memory must be free before the new one is registered.
        cls.destroy()
        group, hidden, topk, capacity, fp8, hybrid, world_size = key
        prepare_environment(get_parallel().nnodes)
        buffer = build(
            cls_to_build,
            group,
            required=dict(
                num_max_tokens_per_rank=capacity,
                hidden=hidden,
                num_topk=topk,
                use_fp8_dispatch=fp8,
                allow_hybrid_mode=hybrid,
            ),
            optional=dict(sl_idx=0, prefer_overlap_with_compute=False),
        )
        # Published only once every rank has constructed it.
        state.buffer, state.key = buffer, key
        logger.info(
            "DeepEP v2 buffer: transport=%s mode=%s ranks=%d capacity=%d hidden=%d topk=%d dtype=%s bytes=%s",
            buffer_class().transport,
            "hybrid" if hybrid else "direct",
            world_size,
            capacity,
            hidden,
            topk,
            "fp8" if fp8 else "bf16",
            buffer.num_bytes,
        )
        return buffer

    @classmethod
    def hold_handle(cls, handle) -> None:
        """Record a dispatch handle that waits for its combine."""
        cls._state().live_handles.add(id(handle))

    @classmethod
    def release_handle(cls, handle) -> None:
        """Forget a handle; one that outlived ``destroy`` is not known any more."""
        cls._state().live_handles.discard(id(handle))

    @classmethod
    def destroy(cls) -> None:
        """Drop the buffer; its memory goes back when its last reference does."""
        state = cls._state()
        state.buffer = state.key = None
        state.live_handles = set()
