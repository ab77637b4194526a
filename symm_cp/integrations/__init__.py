"""Runs other libraries' models on symm_cp, through these libraries' own extension points.

Each module needs the library that it is named after, and is imported only on request. The module
for transformers is also imported together with transformers' models, so that contexts know them.
"""

from symm_cp import loading as _loading
from symm_cp.context_parallel import inspectors as _inspectors


def _inspect_transformers() -> None:
    from symm_cp.integrations import transformers  # noqa: F401


_inspectors.register("transformers.modeling_utils", _inspect_transformers)
_loading.when_imported("transformers.modeling_utils", _inspect_transformers)
