"""A deliberate fault: with this folder on PYTHONPATH the expanded prefill forgets the router weight of every row."""

import importlib.util
import sys

_KERNELS = "sglang.srt.layers.moe.ep_moe.kernels"


class _Fault:
    """Finds the kernels' module as usual and spoils its activation once it has run."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _KERNELS:
            return None
        sys.meta_path.remove(_Fault)
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            weighted = module.swiglu_quant_expanded

            def unweighted(gateup, row_weights, *args, **kwargs):
                return weighted(gateup, None, *args, **kwargs)

            module.swiglu_quant_expanded = unweighted
            print("broken fold: swiglu_quant_expanded ignores the router weight", file=sys.stderr, flush=True)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Fault)
