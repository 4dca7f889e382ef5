"""SGLang's own scatter of non-expanded prefill and its decode slab, as this patch relies on them."""

import pytest
import torch
from sglang.kernels.ops.moe.ep_moe_kernels import ep_scatter_from_psum, expand_to_masked_slab
from sglang.srt.plugins import load_plugins

from kernel_cases import ALIGNMENT, COUNTS, DEVICE, make_psum, valid_rows


@pytest.fixture(scope="module", autouse=True)
def platform():
    load_plugins()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_k9_scatter_without_optional_arguments(fp8):
    """Three tokens over three local experts, one of them empty, one route dropped: equal to a plain scatter."""
    tokens, hidden, block = 3, 256, 128
    x = torch.arange(tokens * hidden, device=DEVICE).view(tokens, hidden).remainder(13).bfloat16()
    scale = None
    if fp8:
        x = x.to(torch.float8_e4m3fn)
        scale = torch.arange(tokens * 2, dtype=torch.float32, device=DEVICE).view(tokens, 2) + 1
    routes = torch.tensor([[0, 2], [2, -1], [0, 2]], device=DEVICE)
    # Two rows, none, three rows, each expert's end rounded up to the block.
    psum = torch.tensor([block, block, 2 * block], dtype=torch.int32, device=DEVICE)
    rows = 2 * block
    starts = torch.empty_like(psum)
    labels = torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(rows, hidden, dtype=x.dtype, device=DEVICE)
    out_scale = None if scale is None else torch.zeros(rows, hidden // block, device=DEVICE)
    index = torch.full_like(routes, -1)

    ep_scatter_from_psum(x, scale, routes, psum, starts, out, out_scale, labels, index)

    assert labels.tolist() == [0] * block + [2] * block
    placed = set()
    for token in range(tokens):
        for slot in range(2):
            expert, row = routes[token, slot].item(), index[token, slot].item()
            if expert < 0:
                continue
            assert labels[row] == expert
            assert torch.equal(out[row].float(), x[token].float())
            assert scale is None or torch.equal(out_scale[row], scale[token])
            placed.add(row)
    # Rows of an expert fill its segment from the start, in any order.
    assert placed == {0, 1, block, block + 1, block + 2}


@pytest.mark.parametrize("counts", COUNTS)
def test_k1_k2_slab_counts_equal_the_psum(counts):
    """Decode: the psum becomes one count per expert, and each expert's rows fill its slab from the start."""
    psum, rows = make_psum(counts)
    x = torch.arange(rows, device=DEVICE)[:, None].expand(rows, 256).bfloat16()
    height = max(ALIGNMENT, *counts)
    slab, scale, masked_m = expand_to_masked_slab(x, None, psum, len(counts), height, ALIGNMENT)
    assert masked_m.tolist() == list(counts) and scale is None
    taken = [slab.view(len(counts), height, 256)[expert, :count] for expert, count in enumerate(counts)]
    assert torch.equal(torch.cat(taken), x[valid_rows(counts, rows)])
