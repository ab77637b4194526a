"""FAMILIES.md: the families that equal one process, as the other tests of families find them.

`python -m tests.integrations.test_families` writes the page from their lists of models, each of
which they compare with one process or see refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import transformers

from symm_cp.integrations.transformers import families
from tests.integrations import decoders, encoders, test_recurrent, test_towers
from tests.integrations.common import Client
from tests.tensor_parallel import test_families as by_own_plan

PAGE = Path(families.__file__).with_name("FAMILIES.md")
HEAD = """# Families of transformers

These families, by `config.model_type`, have the loss and gradients of one process over several
ranks: with `context_parallel` (a sequence spread over ranks), and with `tensor_parallel.apply` by
the model's own plan (weights split, and activations with `sequence_parallel=True`). "-": refused by
name before the first op, as are all families that are not listed; encoders are not compared with
`apply`. [A test](../../../tests/integrations/test_families.py) writes this page.

| family | `context_parallel` | `apply` | `sequence_parallel=True` |
|---|---|---|---|
"""


def name_of(client: Client) -> str:
    name: str = getattr(transformers, client.name + client.config).model_type
    return name


def spread() -> Iterator[str]:
    """Yields the families that equal one process with `context_parallel`."""
    for clients in (decoders.CLIENTS, decoders.STRANGERS, test_recurrent.CLIENTS):
        yield from (
            name_of(client) for name, client in clients.items() if name not in decoders.REFUSED
        )
    for clients in (encoders.ENCODERS, encoders.SEQ2SEQ, {"whisper": encoders.WHISPER}):
        yield from map(name_of, clients.values())
    for client in test_towers.CLIENTS.values():
        config = getattr(transformers, client.name + client.config)(**client.options)
        yield from (config.model_type, config.get_text_config().model_type)


def split(refused: object) -> set[str]:
    """Returns the families that `apply` splits as in one process."""
    clients = by_own_plan.CLIENTS.items()
    return {name_of(client) for name, client in clients if name not in refused}  # type: ignore[operator]


def page() -> str:
    by_cp, by_tp = set(spread()), split(by_own_plan.REFUSED)
    by_sp = by_tp & split({**by_own_plan.REFUSED, **by_own_plan.WHOLE_ONLY})
    seen = by_cp | {name_of(client) for client in by_own_plan.CLIENTS.values()}
    rows = [
        f"| `{name}` | "
        + " | ".join("yes" if name in equal else "-" for equal in (by_cp, by_tp, by_sp))
        + " |"
        for name in sorted(seen)
    ]
    return HEAD + "\n".join(rows) + "\n"


def test_the_page_is_what_the_tests_find() -> None:
    assert PAGE.read_text() == page()


def test_others_are_refused() -> None:
    assert set(spread()) == families.FAMILIES


if __name__ == "__main__":
    PAGE.write_text(page())
