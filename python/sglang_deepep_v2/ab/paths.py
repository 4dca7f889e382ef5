"""The prefill paths that an A/B compares, by name: which a2a backend, overlay and toggles a server gets for each."""

from __future__ import annotations

from dataclasses import dataclass, field

EXPAND = "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND"
PSUM = "SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE"
SYNC_FREE = "SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL"


@dataclass(frozen=True)
class ServePath:
    """One way to serve a checkpoint.

    Attributes:
        name: as given to `--paths`.
        summary: one line for `--help` and the tables.
        a2a: SGLang's `--moe-a2a-backend`.
        overlay: whether the patch tree is active (`SGLANG_OVERLAY`).
        env: the toggles, set on top of the caller's environment.
        pipeline: what each process must log as its prefill pipeline; None where nothing is logged.
        sync: what it must log as its synchronisation.
        min_ranks: fewest expert-parallel ranks that the path runs with.
        on_cpu: whether the embedded CPU reference can serve it.
    """

    name: str
    summary: str
    a2a: str = "deepep_v2"
    overlay: bool = True
    env: dict[str, str] = field(default_factory=dict)
    pipeline: str | None = None
    sync: str | None = None
    min_ranks: int = 1
    on_cpu: bool = True


PATHS: dict[str, ServePath] = {
    path.name: path
    for path in (
        ServePath(
            "nonexpanded",
            "this patch with the toggle off: SGLang's own scatter and gather kernels",
            env={EXPAND: "0"},
            pipeline="non-expanded",
            sync="cpu",
        ),
        ServePath(
            "labels",
            "this patch, labels pipeline: any DeepGEMM",
            env={EXPAND: "1", PSUM: "0", SYNC_FREE: "0"},
            pipeline="labels",
            sync="cpu",
        ),
        ServePath(
            "psum",
            "this patch, psum pipeline: the default",
            env={EXPAND: "1", PSUM: "1", SYNC_FREE: "0"},
            pipeline="psum",
            sync="cpu",
        ),
        ServePath(
            "psum_sync_free",
            "this patch, psum pipeline without a host synchronisation",
            env={EXPAND: "1", PSUM: "1", SYNC_FREE: "1"},
            pipeline="psum",
            sync="free",
        ),
        ServePath("none", "SGLang's MoE without an all-to-all backend", a2a="none", overlay=False),
        ServePath(
            "sglang_nonexpanded",
            "SGLang's own non-expanded prefill (patch off)",
            overlay=False,
            env={EXPAND: "0"},
            on_cpu=False,
        ),
        ServePath(
            "sglang_expanded",
            "SGLang's own expanded prefill (patch off)",
            overlay=False,
            env={EXPAND: "1"},
            on_cpu=False,
        ),
        ServePath(
            "deepep_v1",
            "DeepEP V1 in normal mode (patch off)",
            a2a="deepep",
            overlay=False,
            min_ranks=2,
            on_cpu=False,
        ),
    )
}


def select_paths(names: str, *, cpu: bool, ranks: int) -> list[ServePath]:
    """The paths named in a comma-separated list, in that order.

    Raises:
        ValueError: an unknown name, or a path that cannot run on this device or with this many ranks, with the reason.
    """
    selected = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in PATHS:
            raise ValueError(f"unknown path {name!r}; --paths takes {', '.join(PATHS)}")
        path = PATHS[name]
        if cpu and not path.on_cpu:
            raise ValueError(
                f"path {name} needs a GPU: plain SGLang imports deep_ep, which has no CPU build, and the reference "
                f"transport belongs to this patch; on CPU take {', '.join(p.name for p in PATHS.values() if p.on_cpu)}"
            )
        if ranks < path.min_ranks:
            raise ValueError(f"path {name} needs at least {path.min_ranks} ranks, --tp is {ranks}")
        if path in selected:
            raise ValueError(f"--paths names {name} twice; each path is served once")
        selected.append(path)
    if not selected:
        raise ValueError(f"--paths names no path; it takes {', '.join(PATHS)}")
    return selected
