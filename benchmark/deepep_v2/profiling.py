"""From a profiler's device activities to one layer's kernels: names, shares, and what stands before combine."""

from __future__ import annotations

import re

_LIBRARY_PREFIX = re.compile(
    r"^(void|float|int|auto)\s+|\b(at::native|at|deep_ep|deep_gemm|elastic|c10|cuda|\(anonymous namespace\))::"
)


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces and arguments; PyTorch's elementwise ones keep their functor."""
    plain = name
    while (cleaned := _LIBRARY_PREFIX.sub("", plain)) != plain:
        plain = cleaned
    base = re.split(r"[<(]", plain, maxsplit=1)[0].strip() or plain[:60]
    functor = re.search(r"(\w*Functor\w*|\w*_kernel_cuda\w*|\w*copy_kernel\w*)", plain[len(base) :])
    if "elementwise" in base and functor:
        return f"{base}[{functor[1]}]"
    return base.split("::")[-1][:80]


def is_gemm(name: str) -> bool:
    lowered = name.lower()
    return "gemm" in lowered and "mega" not in lowered


def category(kernel: str) -> str:
    """Which part of the layer a kernel label (of ``label_layer``) belongs to."""
    lowered = kernel.lower()
    if lowered.startswith("w13 "):
        return "GEMM w13"
    if lowered.startswith("w2 "):
        return "GEMM w2"
    for part, words in (
        ("mega MoE", ("mega",)),
        ("dispatch", ("dispatch",)),
        ("combine", ("combine",)),
        ("activation", ("swiglu", "silu", "act_and_mul")),
        ("quantise", ("quant",)),
        ("row moves", ("scatter", "gather", "permute")),
        ("scales and labels", ("align", "scale", "m_indices", "fill", "transpose")),
        ("copies and fills", ("memcpy", "memset", "elementwise", "copy")),
    ):
        if any(word in lowered for word in words):
            return part
    return "other"


def label_layer(names: list[str]) -> list[str]:
    """Labels of one layer's kernels in time order: short names, the two grouped GEMMs marked w13 and w2."""
    labels, gemms = [], 0
    for name in names:
        label = short_name(name)
        if is_gemm(name):
            gemms += 1
            label = f"{'w13' if gemms == 1 else 'w2'} {label}" if gemms <= 2 else label
        labels.append(label)
    return labels


def between(names: list[str]) -> int | None:
    """How many activities stand between the last dispatch kernel and the first combine kernel; None without both."""
    lowered = [name.lower() for name in names]
    combines = [i for i, name in enumerate(lowered) if "combine" in name]
    if not combines:
        return None
    dispatches = [i for i, name in enumerate(lowered[: combines[0]]) if "dispatch" in name]
    if not dispatches:
        return None
    return sum("barrier" not in name for name in lowered[dispatches[-1] + 1 : combines[0]])


def summarise(events: list[dict], layers: int) -> dict:
    """One layer of ``layers`` identical ones.

    ``events``: device activities in time order (name, ts, dur in us). Returns ``busy_us`` (sum of durations per layer),
    ``kernels`` ([{kernel, us, count}] per layer, in order of first appearance), ``launches`` per layer, ``between``
    (activities between dispatch and combine), and ``timeline`` ([{kernel, start_us, us}] of a middle layer).
    """
    total = len(events)
    regular = layers > 0 and total > 0 and total % layers == 0
    size = total // layers if regular else total
    chunks = [events[i : i + size] for i in range(0, total, size)] if total else []
    repeats = len(chunks) if regular else layers
    kernels: dict[str, list[float]] = {}
    for chunk in chunks:
        for label, event in zip(label_layer([e["name"] for e in chunk]), chunk):
            entry = kernels.setdefault(label, [0.0, 0])
            entry[0] += event["dur"]
            entry[1] += 1
    middle = chunks[len(chunks) // 2] if regular else (events[: max(1, total // max(1, layers))] if total else [])
    names = [event["name"] for event in middle]
    origin = middle[0]["ts"] if middle else 0.0
    return {
        "busy_us": sum(event["dur"] for event in events) / max(1, layers),
        "kernels": [
            {"kernel": k, "us": us / max(1, repeats), "count": n / max(1, repeats)} for k, (us, n) in kernels.items()
        ],
        "launches": total / max(1, layers),
        "between": between(names),
        "timeline": [
            {"kernel": label, "start_us": event["ts"] - origin, "us": event["dur"]}
            for label, event in zip(label_layer(names), middle)
        ],
    }
