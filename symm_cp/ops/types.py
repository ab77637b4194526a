"""What an op does to the mesh axis of its group, as Meta's `spmd_types` writes it.

On an axis a tensor is R (equal on all ranks), V (different), P (a term of the sum over ranks) or
S(d) (a shard along dimension d). An op declares a `Rule`, a function of `Described` or of
`symm_cp.ops.spmd.Checked` and the op's arguments: the same calls check types under
`spmd_types.checker.typecheck`, name the op's collectives to torch's modes for debugging, and write
a line of the entry point's docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

#: Takes a `Described`, or an object with its methods, and the arguments of an op by name. Returns
#: what each method returned for the op's results.
Rule: TypeAlias = Callable[..., Any]


def no_types(reason: str) -> Rule:
    """Returns the rule of an op that has no types."""

    def rule(t: Any, **arguments: Any) -> Any:
        t.refuse(reason)

    return rule


class Described:
    """Writes an op as text, and lists the collectives of its unfused definition."""

    def __init__(self) -> None:
        self.collectives: list[str] = []

    def all_gather(self, x: Any, dim: Any) -> Any:
        """Concatenates shards along a dimension."""
        self.collectives.append("all_gather_into_tensor")
        return f"all_gather({x}: S({dim}) -> R)"

    def reduce_scatter(self, x: Any, dim: Any, reduce_op: str = "sum") -> Any:
        """Sums terms; each rank gets a shard."""
        self.collectives.append("reduce_scatter_tensor")
        return f"reduce_scatter({x}: P -> S({dim}))"

    def all_reduce(self, x: Any, reduce_op: str = "sum") -> Any:
        """Sums terms."""
        self.collectives.append("all_reduce")
        return f"all_reduce({x}: P -> R)"

    def all_to_all(self, x: Any, source: int, to: int) -> Any:
        """Exchanges shards along a dimension for shards along another."""
        self.collectives.append("all_to_all_single")
        return f"all_to_all({x}: S({source}) -> S({to}))"

    def shard(self, x: Any, dim: int) -> Any:
        """Takes a shard along a dimension."""
        return f"{x}: S({dim})"

    def part(self, x: Any, dim: int) -> Any:
        """Takes this rank's part of a tensor that all have."""
        return f"{x}: R -> S({dim})"

    def from_shards(self, text: str, equation: str, query: Any, *shards: Any, dim: int) -> Any:
        """Computes with all shards along a dimension, which stay where they are."""
        self.collectives.append("all_gather_into_tensor")
        return text.format(query, *(self.shard(x, dim) for x in shards))

    def local(self, text: str, equation: str, *xs: Any, linear_in: Any = ()) -> Any:
        """Computes on each rank by itself; `equation` is as for `spmd_types.rules.einsum`."""
        return text.format(*xs)

    def varying(self, text: str, equation: str, x: Any, collective: str) -> Any:
        """Exchanges values that are no shards of one tensor: of a rank's neighbours, or routed."""
        self.collectives.append(collective)
        return f"{text.format(x)}: V -> V"

    def refuse(self, reason: str) -> None:
        """Says why a call has no types."""

    def ignore(self, *xs: Any) -> None:
        """Leaves arguments unchecked."""

    def matmul(self, a: Any, b: Any) -> Any:
        """Multiplies with a matrix."""
        return self.local("{} @ {}", "...k,kn->...n", a, b, linear_in=(0, 1))

    def add(self, x: Any, bias: Any) -> Any:
        """Adds a bias of the last dimension, if there is one."""
        if bias is None:
            return x
        return self.local("{} + {}", "...n,n->...n", x, bias, linear_in=((0, 1),))


def sum_of_products(t: Any, lefts: Any, rights: Any, addend: Any) -> Any:
    """Describes the sum of matrix products, and of a tensor if there is one."""
    terms = [t.matmul(a, b) for a, b in zip(lefts, rights, strict=True)]
    total, *others = terms if addend is None else [addend, *terms]
    for term in others:
        total = t.local("{} + {}", "...,...->...", total, term, linear_in=((0, 1),))
    return total


def products_of_gathered(
    t: Any, A: Any, Bs: Any, gather_dim: Any, return_A: Any = True, **_: Any
) -> Any:
    """Describes products of a gathered tensor, and that tensor if it is returned."""
    gathered = t.all_gather(A, gather_dim)
    return gathered if return_A is True else None, [t.matmul(gathered, B) for B in Bs]


def described(rule: Rule, kinds: Mapping[str, str], words: Mapping[str, str], **fixed: Any) -> str:
    """Returns a rule as text; `kinds` has the schema's type of each argument.

    Optional arguments are left out. `words` replace names of arguments, `fixed` are arguments.
    """
    named: dict[str, Any] = {}
    for name, kind in kinds.items():
        word = words.get(name, name)
        named[name] = None if kind.startswith("Optional") else word
        if kind.startswith("List"):
            named[name] = [None if "Optional" in kind else word]
    texts = _texts(rule(Described(), **named | fixed))
    parts = [text for text in texts if not any(text in other for other in texts if other != text)]
    return ", ".join(dict.fromkeys(parts))


def _texts(result: Any) -> list[str]:
    if isinstance(result, list | tuple):
        return [text for each in result for text in _texts(each)]
    return [result] if isinstance(result, str) and result else []


def collectives(rule: Rule, arguments: Mapping[str, Any]) -> list[str]:
    """Returns the collectives of `_c10d_functional` in a call's unfused definition."""
    counting = Described()
    rule(counting, **arguments)
    return counting.collectives
