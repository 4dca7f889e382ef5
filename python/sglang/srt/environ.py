"""extends: the SGLANG_DEEPEP_V2_* variables of the expanded prefill."""

from sglang_upstream.srt.environ import EnvBool, EnvField, EnvInt, Envs

__overrides__ = ()

# SGLang closes its registry after the body of Envs.
EnvField._allow_set_name = True


class _DeepEPv2Envs:
    SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND = EnvBool(True)
    SGLANG_DEEPEP_V2_ENABLE_PSUM_PIPELINE = EnvBool(True)
    SGLANG_DEEPEP_V2_ENABLE_SYNC_FREE_PREFILL = EnvBool(False)
    SGLANG_DEEPEP_V2_SYNC_FREE_MAX_BYTES = EnvInt(None)
    SGLANG_DEEPEP_V2_USE_REFERENCE_TRANSPORT = EnvBool(False)


EnvField._allow_set_name = False
for _field in [field for field in vars(_DeepEPv2Envs).values() if isinstance(field, EnvField)]:
    setattr(Envs, _field.name, _field)
